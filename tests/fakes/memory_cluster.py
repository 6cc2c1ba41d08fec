"""A Kubernetes API in memory with the contract of `ports.Cluster`.

It knows what the steps rely on: names, namespaces, uids, resourceVersion, metadata.generation, labels, preconditions,
finalizers, owners, and status that only its controller writes. Controllers are functions that a test appends to
`controllers`. tests/contract/kubernetes runs the same cases on it and on a real API server.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from tasks.adapters.kinds import KINDS
from tasks.core.errors import ConflictError, InputError
from tasks.core.permissions import Right, rights_error
from tasks.ports import Mirror, Object

Controller = Callable[[str, Object], None]
Key = tuple[str, str]
NAMESPACE = "k2"
IDENTITY = f"system:serviceaccount:{NAMESPACE}:k2-pipeline"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LONG_AGO = "2026-11-30T00:00:00Z"
_SYSTEM_FIELDS = ("uid", "generation", "resourceVersion", "deletionTimestamp")
# One for all of them: a lock of its own could not be copied with its cluster.
_ONE_WRITER = threading.RLock()


class MemoryCluster:
    """Keeps objects by kind and name. `writes` are the calls that changed something, in order, as `verb Kind/name`.

    The name of an object of another namespace than the site's is `namespace/name` here. Our identity has every right
    but those in `removed_rights`.
    """

    silent_s = 0.0

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.logs: dict[Key, str] = {}
        self.writes: list[str] = []
        self.controllers: list[Controller] = []
        self.removed_rights: set[Right] = set()
        self._version = 0
        self._applied: dict[Key, Object] = {}

    @property
    def impatient(self) -> MemoryCluster:
        return self

    def get(self, kind: str, name: str) -> Object | None:
        self._authorize("get", kind, name)
        return _copy(self.objects.get((_known(kind), name)))

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> list[Object]:
        self._authorize("list", kind, everywhere=everywhere)
        wanted = dict(labels or {}).items()
        found = [obj for key, obj in list(self.objects.items()) if key[0] == kind and (everywhere or _is_ours(obj))]
        return _copy(sorted((o for o in found if wanted <= (o["metadata"].get("labels") or {}).items()), key=_path))

    def mirror(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> AbstractContextManager[Mirror]:
        self._authorize("watch", kind, everywhere=everywhere)
        return nullcontext(_Mirror(lambda: self.list_objects(kind, labels, everywhere=everywhere)))

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        key, obj = self._place(obj), _without_status(obj)
        self._authorize("patch", *key)
        with _ONE_WRITER:
            if key not in self.objects:
                self._authorize("create", *key)
            kept = _without(self.objects.get(key, {}), self._applied.get(key, {}), obj)
            if dry_run:
                return self._as_stored(key, _merged(kept, obj))
            self._applied[key] = _copy(obj)
            return self._store("apply", key, _merged(kept, obj))

    def create(self, obj: Object) -> tuple[Object, bool]:
        key = self._place(obj)
        self._authorize("create", *key)
        with _ONE_WRITER:
            if key in self.objects:
                return _copy(self.objects[key]), False
            return self._store("create", key, _without_status(obj)), True

    def replace(self, obj: Object) -> Object:
        key = self._place(obj)
        if not obj["metadata"].get("resourceVersion"):
            raise InputError("K2-INP-008", "A replacement needs the resourceVersion it was decided on.", where=key[1])
        self._authorize("update", *key)
        with _ONE_WRITER:
            self._check_version(key, obj)
            return self._store("replace", key, self._with_status_there(key, obj))

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        key = (_known(kind), name)
        self._authorize("patch", *key)
        with _ONE_WRITER:
            self._check_version(key, patch)
            return self._store("patch", key, self._with_status_there(key, _patched(self.objects[key], patch)))

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        key = (_known(kind), name)
        self._authorize("delete", *key)
        with _ONE_WRITER:
            there = self.objects.get(key)
            if there is None or uid not in ("", there["metadata"]["uid"]):
                return
            if not there["metadata"].get("finalizers"):
                self._remove(key)
            elif "deletionTimestamp" not in there["metadata"]:
                self._version += 1
                there["metadata"] |= {"deletionTimestamp": _LONG_AGO, "resourceVersion": str(self._version)}
                self.writes.append(f"delete {kind}/{name}")

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        self._authorize("get", "Pod", f"{pod} container {container}", subresource="/log")
        spec = self.objects.get(("Pod", pod), {}).get("spec", {})
        waits = "nodeName" not in spec and container in [each["name"] for each in spec.get("containers", ())]
        text = self.logs.get((pod, container), "") if waits else self.logs[pod, container]
        return "".join(text.splitlines(keepends=True)[-tail_lines:])

    def missing_rights(self, rights: Iterable[Right]) -> list[Right]:
        return [right for right in rights if right in self.removed_rights]

    def identity(self) -> str:
        return IDENTITY

    def set_status(self, kind: str, name: str, status: Object) -> None:
        """Write an object's status, as its controller does."""
        obj = self.objects[kind, name]
        if obj.get("status") != status:
            self._version += 1
            obj["status"] = _copy(status)
            obj["metadata"]["resourceVersion"] = str(self._version)

    def edit(self, kind: str, name: str, change: Callable[[Object], None]) -> None:
        """Change an object behind the pipeline's back: a human hand, or another controller."""
        obj = _copy(self.objects[kind, name])
        change(obj)
        self._store("edit", (kind, name), obj)

    def _authorize(
        self, verb: str, kind: str, name: str = "", *, everywhere: bool = False, subresource: str = ""
    ) -> None:
        """Raise RightsError if the right to a call was taken away."""
        known = KINDS[_known(kind)]
        group, slash, _ = known.api_version.partition("/")
        scope = NAMESPACE if known.namespaced and not everywhere else ""
        right = Right(group if slash else "", known.plural + subresource, verb, scope)
        named = replace(right, name=name)
        if right in self.removed_rights or named in self.removed_rights:
            right = right if right in self.removed_rights else named
            raise rights_error(IDENTITY, [right], f"{kind}/{name}" if name else kind)

    def _place(self, obj: Object) -> Key:
        """Return the key of an object that is to be written; InputError if the cluster has no place for it."""
        kind, metadata = str(obj.get("kind", "")), obj.get("metadata") or {}
        known, name = KINDS[_known(kind)], str(metadata.get("name", ""))
        if obj.get("apiVersion") != known.api_version or not _NAME.fullmatch(name):
            raise _refused(f"{kind}/{name}", f"Expected apiVersion {known.api_version} and a name.")
        namespace = metadata.get("namespace") or NAMESPACE
        if not known.namespaced or namespace == NAMESPACE:
            return kind, name
        if ("Namespace", namespace) not in self.objects:
            raise _refused(f"{kind}/{name}", f"There is no namespace {namespace}.")
        return kind, f"{namespace}/{name}"

    def _check_version(self, key: Key, obj: Object) -> None:
        """Raise KeyError if there is no such object, ConflictError if another version of it is meant."""
        there = self.objects[key]["metadata"]["resourceVersion"]
        wanted = obj.get("metadata", {}).get("resourceVersion", there)
        if wanted != there:
            raise ConflictError("K2-CON-002", "The object has been modified.", where=key[1], got=there, expected=wanted)

    def _with_status_there(self, key: Key, obj: Object) -> Object:
        status = self.objects[key].get("status")
        return {**_without_status(obj), **({"status": status} if status is not None else {})}

    def _as_stored(self, key: Key, wanted: Object) -> Object:
        """Return an object with what the server says of it; one that is not changed keeps its resourceVersion."""
        there, wanted = self.objects.get(key), _copy(wanted)
        kept: Object = there["metadata"] if there else {"uid": f"uid-{self._version + 1}", "generation": 0}
        metadata = wanted["metadata"]
        for name in _SYSTEM_FIELDS:
            metadata.pop(name, None)
        for name in ("labels", "annotations", "finalizers", "ownerReferences"):
            if not metadata.get(name):
                metadata.pop(name, None)
        metadata |= {name: kept[name] for name in _SYSTEM_FIELDS if name in kept}
        if KINDS[key[0]].namespaced:
            metadata.setdefault("namespace", NAMESPACE)
        if wanted == there:
            return wanted
        metadata["generation"] += there is None or _content(there) != _content(wanted)
        metadata["resourceVersion"] = str(self._version + 1)
        return wanted

    def _store(self, verb: str, key: Key, wanted: Object) -> Object:
        """Keep an object; one that is not changed keeps its resourceVersion."""
        wanted = self._as_stored(key, wanted)
        if wanted == self.objects.get(key):
            return wanted
        self._version += 1
        self.objects[key] = wanted
        self.writes.append(f"{verb} {key[0]}/{key[1]}")
        if "deletionTimestamp" in wanted["metadata"] and not wanted["metadata"].get("finalizers"):
            self._remove(key)
            return _copy(wanted)
        self._tell(verb, wanted)
        return _copy(self.objects.get(key, wanted))

    def _remove(self, key: Key) -> None:
        """Take an object away, and what it owns."""
        gone = self.objects.pop(key)
        self._applied.pop(key, None)
        self.writes.append(f"delete {key[0]}/{key[1]}")
        self._tell("delete", gone)
        uid = gone["metadata"]["uid"]
        owned = [k for k, o in self.objects.items() if uid in _owners(o)]
        for kind, name in owned:
            self.delete(kind, name)

    def _tell(self, verb: str, obj: Object) -> None:
        for controller in self.controllers:
            controller(verb, _copy(obj))


@dataclass(frozen=True)
class _Mirror:
    """What a watch shows of a cluster that answers at once."""

    objects: Callable[[], list[Object]]

    def unconfirmed_s(self) -> float:
        return 0.0


T = TypeVar("T")


def _copy(value: T) -> T:
    """Return a copy of plain data; several times as fast as copy.deepcopy, which decides how long these tests take."""
    return cast(T, pickle.loads(pickle.dumps(value, -1)))


def _refused(where: str, message: str) -> InputError:
    return InputError("K2-INP-008", message, where=where)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise _refused(kind, "This tool does not handle objects of that kind.")
    return kind


def _is_ours(obj: Object) -> bool:
    """Return whether an object is of the site's namespace or of none."""
    return bool(obj["metadata"].get("namespace", NAMESPACE) == NAMESPACE)


def _path(obj: Object) -> str:
    """Return what a list is ordered by."""
    return f"{obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def _owners(obj: Object) -> list[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]


def _content(obj: Object) -> Object:
    """Return what metadata.generation counts the changes of."""
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _without_status(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key != "status"}


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
