"""Fields of plain objects, by path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def contains(obj: Any, part: Any) -> bool:
    """Return whether an object says everything that a part says: maps may hold more, all else is equal.

    In a list of maps each element may hold more than the part's, as a server fills in defaults. None says that there
    is nothing, as in a merge patch.
    """
    if isinstance(part, Mapping):
        return isinstance(obj, Mapping) and all(contains(obj.get(key), value) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(obj, list) and len(obj) == len(part) and all(map(contains, obj, part))
    return bool(obj == part)


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
