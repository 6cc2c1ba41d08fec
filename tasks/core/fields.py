"""Fields of plain objects, by path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Object = dict[str, Any]


def at(obj: Any, path: Sequence[str]) -> Any:
    """Return what stands at a path; KeyError if a part of it is missing."""
    for part in path:
        obj = obj[part]
    return obj


def set_field(obj: Object, path: Sequence[str], value: Any) -> None:
    """Set a field that is there already; KeyError if it is not: a template and its renderer have drifted apart."""
    parent = at(obj, path[:-1])
    if path[-1] not in parent:
        raise KeyError(".".join(path))
    parent[path[-1]] = value


def container_of(spec: Object, kind: str, name: str) -> Object:
    """Return a container (`containers` or `initContainers`) by name; KeyError if there is none."""
    return _named(spec[kind], name)


def volume_of(spec: Object, name: str) -> Object:
    """Return a volume by name; KeyError if there is none."""
    return _named(spec["volumes"], name)


def _named(items: Iterable[Object], name: str) -> Object:
    for item in items:
        if item["name"] == name:
            return item
    raise KeyError(name)
