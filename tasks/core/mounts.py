"""Which checkpoints pods use, by what the Kubernetes API says of them: whose weights may not be taken away.

A pod of ours names the checkpoint in its arguments. Of anybody else's pod that mounts the directory for weights nobody
knows what it reads: everything on its node counts as used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tasks.core.render import ROLE_LABEL

Object = Mapping[str, Any]

ENDED = ("Succeeded", "Failed")
_MANAGED_BY, _OURS = "app.kubernetes.io/managed-by", "k2-release"
_ONLY_LOOK = ("probe", "collect")
"""Roles of our Jobs that open no file of a checkpoint."""
_CHECKPOINT = re.compile(r"[^/\s]+--[^/\s]+/[0-9a-f]{40}(?![0-9a-f])")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Use:
    """One use of weights: on a node (empty: on whichever), of a path below the root, or of a lock's files.

    An empty path without a lock digest is everything there.
    """

    node: str
    path: str
    lock_digest: str
    who: str

    @property
    def is_everything(self) -> bool:
        """Whether it says of no checkpoint that it is not used."""
        return not self.path and not self.lock_digest

    def covers(self, path: str) -> bool:
        """Return whether a checkpoint's path is used by this, as far as paths tell."""
        return self.is_everything or (bool(self.path) and _overlap(self.path, path))


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def resolved(uses: Iterable[Use], paths: Mapping[str, str]) -> list[Use]:
    """Return uses with each lock digest replaced by its checkpoint's path; a lock that nobody knows is everything."""
    return [replace(use, path=use.path or paths.get(use.lock_digest, ""), lock_digest="") for use in uses]


def uses_of_pods(pods: Iterable[Object], root: str, namespace: str) -> list[Use]:
    """Return what pods use below the nodes' directory for weights; pods that have ended use nothing."""
    return [
        use for pod in pods if pod.get("status", {}).get("phase") not in ENDED for use in uses_of(pod, root, namespace)
    ]


def uses_of_groups(groups: Iterable[Object], root: str, namespace: str) -> list[Use]:
    """Return what groups use, also those whose pods are not there at the moment: on whichever node they come to be."""
    found = []
    for group in groups:
        template = group["spec"]["leaderWorkerTemplate"]
        for kind in ("leaderTemplate", "workerTemplate"):
            if kind in template:
                metadata = {**(template[kind].get("metadata") or {}), "name": group["metadata"]["name"]}
                found += uses_of({"metadata": metadata, "spec": template[kind]["spec"]}, root, namespace)
    return found


def uses_of(pod: Object, root: str, namespace: str) -> list[Use]:
    """Return what one pod uses below the directory `root` of its node.

    A pod that mounts a directory above it (the host's whole disk, as monitors do) is not taken for a user of weights.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    labels = metadata.get("labels") or {}
    where = metadata.get("namespace", namespace)
    node, who = str(spec.get("nodeName") or ""), f"pod {where}/{metadata['name']}"
    mounted = {
        volume["name"]: path for volume in spec.get("volumes") or () if (path := _below(volume, root)) is not None
    }
    ours = labels.get(_MANAGED_BY) == _OURS and where == namespace
    if not ours:
        return [Use(node, path, "", who) for path in mounted.values()]
    if labels.get(ROLE_LABEL) in _ONLY_LOOK:
        return []
    return [use for container in _containers(spec) for use in _named(container, mounted, node, who)]


def _below(volume: Object, root: str) -> str | None:
    """Return where in the root a volume is: empty for the root itself, None for elsewhere."""
    host = (volume.get("hostPath") or {}).get("path")
    if host is None:
        return None
    path, top = _parts(host), _parts(root)
    return "/".join(path[len(top) :]) if path[: len(top)] == top else None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _containers(spec: Object) -> list[Object]:
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def _named(container: Object, mounted: Mapping[str, str], node: str, who: str) -> Iterator[Use]:
    """Yield the checkpoints that a container of ours names; everything it mounts where it names none."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    words += [str(variable.get("value") or "") for variable in container.get("env") or ()]
    for mount in container.get("volumeMounts") or ():
        path = mounted.get(mount["name"])
        if path is None:
            continue
        if path:
            yield Use(node, path, "", who)
            continue
        place = str(mount["mountPath"]).rstrip("/") + "/"
        paths = {found for word in words for found in _checkpoints(word, place)}
        digests = {word for option, word in pairwise(words) if option == "--lock-digest"}
        yield from (Use(node, found, "", who) for found in sorted(paths))
        yield from (Use(node, "", digest, who) for digest in sorted(digests) if _DIGEST.fullmatch(digest))
        if not paths and not digests:
            yield Use(node, "", "", who)


def _checkpoints(word: str, place: str) -> list[str]:
    return [found.group() for part in word.split(place)[1:] if (found := _CHECKPOINT.match(part))]
