"""A Kubernetes API in memory with the contract of `ports.Cluster`.

It knows what the steps rely on: names, uids, resourceVersion, metadata.generation, labels, preconditions and status
that a replace does not touch. Controllers are functions that a test appends to `controllers`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

from tasks.core.errors import ConflictError, InputError
from tasks.ports import Mirror, Object

Controller = Callable[[str, Object], None]
NAMESPACE = "k2"


class MemoryCluster:
    """Keeps objects by kind and name. `writes` are the calls that changed something, in order, as `verb Kind/name`."""

    silent_s = 0.0

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[tuple[str, str], str] = {}
        self.writes: list[str] = []
        self.controllers: list[Controller] = []
        self._version = 0
        self._applied: dict[tuple[str, str], Object] = {}

    def get(self, kind: str, name: str) -> Object | None:
        return _copy(self.objects.get((kind, name)))

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> list[Object]:
        wanted = dict(labels or {}).items()
        found = [obj for (of, _), obj in sorted(self.objects.items()) if of == kind and (everywhere or _is_ours(obj))]
        return _copy([o for o in found if wanted <= (o["metadata"].get("labels") or {}).items()])

    def mirror(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> AbstractContextManager[Mirror]:
        return nullcontext(_Mirror(lambda: self.list_objects(kind, labels, everywhere=everywhere)))

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        key = _key(obj)
        kept = _without(self.objects.get(key, {}), self._applied.get(key, {}), obj)
        wanted = _merged(kept, {k: v for k, v in obj.items() if k != "status"})
        if dry_run:
            return wanted
        self._applied[key] = _copy(obj)
        return self._store("apply", key, wanted)

    def create(self, obj: Object) -> tuple[Object, bool]:
        key = _key(obj)
        if key in self.objects:
            return _copy(self.objects[key]), False
        return self._store("create", key, obj), True

    def replace(self, obj: Object) -> Object:
        key = _key(obj)
        if not obj["metadata"].get("resourceVersion"):
            raise InputError("K2-INP-008", "A replacement needs the resourceVersion it was decided on.", where=key[1])
        self._check_version(key, obj)
        status = self.objects[key].get("status")
        return self._store("replace", key, {**obj, **({"status": status} if status is not None else {})})

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        key = (kind, name)
        self._check_version(key, patch)
        return self._store("patch", key, _patched(self.objects[key], patch))

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        there = self.objects.get((kind, name))
        if there is not None and uid in ("", there["metadata"]["uid"]):
            del self.objects[kind, name]
            self._applied.pop((kind, name), None)
            self.writes.append(f"delete {kind}/{name}")
            self._tell("delete", there)

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        return "\n".join(self.logs[pod, container].splitlines()[-tail_lines:])

    def set_status(self, kind: str, name: str, status: Object) -> None:
        """Write an object's status, as its controller does."""
        self._version += 1
        obj = self.objects[kind, name]
        obj["status"] = _copy(status)
        obj["metadata"]["resourceVersion"] = str(self._version)

    def edit(self, kind: str, name: str, change: Callable[[Object], None]) -> None:
        """Change an object behind the pipeline's back: a human hand, or another controller."""
        obj = _copy(self.objects[kind, name])
        change(obj)
        self._store("edit", (kind, name), obj)

    def _check_version(self, key: tuple[str, str], obj: Object) -> None:
        """Raise KeyError if there is no such object, ConflictError if another version of it is meant."""
        there = self.objects[key]["metadata"]["resourceVersion"]
        wanted = obj.get("metadata", {}).get("resourceVersion", there)
        if wanted != there:
            raise ConflictError("K2-CON-002", "The object has been modified.", where=key[1], got=there, expected=wanted)

    def _store(self, verb: str, key: tuple[str, str], wanted: Object) -> Object:
        """Keep an object; one that is not changed keeps its resourceVersion."""
        there, wanted = self.objects.get(key), _copy(wanted)
        kept: Object = there["metadata"] if there else {"uid": f"uid-{self._version + 1}", "generation": 0}
        wanted["metadata"] |= {name: kept[name] for name in ("uid", "generation", "resourceVersion") if name in kept}
        if wanted == there:
            return _copy(wanted)
        self._version += 1
        same_spec = there is not None and there.get("spec") == wanted.get("spec")
        wanted["metadata"]["generation"] = kept["generation"] + (0 if same_spec else 1)
        wanted["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = wanted
        self.writes.append(f"{verb} {key[0]}/{key[1]}")
        self._tell(verb, wanted)
        return _copy(self.objects.get(key, wanted))

    def _tell(self, verb: str, obj: Object) -> None:
        for controller in self.controllers:
            controller(verb, _copy(obj))


@dataclass(frozen=True)
class _Mirror:
    """What a watch shows of a cluster that answers at once."""

    objects: Callable[[], list[Object]]

    def unconfirmed_s(self) -> float:
        return 0.0


def _is_ours(obj: Object) -> bool:
    """Return whether an object is of the site's namespace or of none."""
    return bool(obj["metadata"].get("namespace", NAMESPACE) == NAMESPACE)


T = TypeVar("T")


def _copy(value: T) -> T:
    """Return a copy of plain data; several times as fast as copy.deepcopy, which decides how long these tests take."""
    return cast(T, pickle.loads(pickle.dumps(value, -1)))


def _key(obj: Object) -> tuple[str, str]:
    if not obj.get("apiVersion") or not obj.get("kind") or not obj.get("metadata", {}).get("name"):
        raise InputError("K2-INP-008", "An object needs apiVersion, kind and a name.", where=str(obj)[:80])
    return obj["kind"], obj["metadata"]["name"]


def _without(there: Object, before: Object, now: Object) -> Object:
    """Return an object without the fields that we applied before and do not apply any more."""
    result = dict(_copy(there))
    for key, value in before.items():
        if key not in now:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(now[key], dict) and isinstance(result.get(key), dict):
            result[key] = _without(result[key], value, now[key])
    return result


def _merged(base: Object, over: Object) -> Object:
    """Return what server-side apply makes of fields that are ours alone: maps merged, lists replaced."""
    result = dict(_copy(base))
    for key, value in over.items():
        there = result.get(key)
        both = isinstance(value, dict) and isinstance(there, dict)
        result[key] = _merged(there, value) if both else _copy(value)  # type: ignore[arg-type]
    return result


def _patched(base: Object, patch: Object) -> Object:
    """Return a JSON merge patch's result (RFC 7386): null takes a key away."""
    result = dict(_copy(base))
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            there = result.get(key)
            result[key] = _patched(there if isinstance(there, dict) else {}, value)
        else:
            result[key] = _copy(value)
    return result
