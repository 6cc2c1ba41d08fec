"""A stand-in for the LeaderWorkerSet manager: groups of pods that live and die together.

It serves the real CRD (leaderworkerset.x-k8s.io/v1) and gives pods the names, labels, annotations and environment that
the LeaderWorkerSet project v0.9.0 gives them. What it does differently, on purpose: it makes the pods itself instead
of through StatefulSets; it recreates a group as soon as a node of it is lost, and then deletes the lost pods by force;
it waits longer from one recreation to the next. Not there: exclusive topology, subgroups, volume claim templates,
surge.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from infra.rehearsal.groupsets import (
    GROUP_INDEX_LABEL,
    NAME_LABEL,
    WORKER_INDEX_LABEL,
    GroupSet,
    breakage,
    group_pod,
    group_ready,
    headless_service,
    outdated_groups,
    pod_ready,
    set_status,
)
from infra.rehearsal.kubeclient import EventType, JsonObject, KubeClient, KubeError, PatchKind
from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.kuberesources import LEADER_WORKER_SETS, NODES, PODS, SERVICES, Resource

_LOST_AFTER_S = 4.0
_RESYNC_S = 2.0
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 10.0

log = logging.getLogger(__name__)

SetKey = tuple[str, str]


@dataclass
class _GroupMemory:
    """What the controller remembers of a group. All of it may be lost: a restarted controller adopts what it finds."""

    whole: bool = False
    ending: bool = False
    failures: int = 0
    not_before: float = 0.0


@dataclass
class _World:
    """What the watches have told so far."""

    sets: dict[SetKey, JsonObject] = field(default_factory=dict)
    pods: dict[SetKey, dict[str, JsonObject]] = field(default_factory=lambda: defaultdict(dict))
    unreachable_since: dict[str, float] = field(default_factory=dict)

    def lost_nodes(self, now: float) -> set[str]:
        """Return the nodes that have been unreachable for longer than a restarting node agent needs."""
        return {node for node, since in self.unreachable_since.items() if now - since >= _LOST_AFTER_S}


class GroupController:
    """Keeps every LeaderWorkerSet's groups as they shall be."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._world = _World()
        self._memory: dict[tuple[SetKey, str, int], _GroupMemory] = defaultdict(_GroupMemory)
        self._named: set[tuple[str, str]] = set()
        self._due: set[SetKey] = set()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Watch and act until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_sets())
            group.create_task(self._watch_pods())
            group.create_task(self._watch_nodes())
            group.create_task(self._work())

    # -- watching

    async def _watch_sets(self) -> None:
        async for event in self._client.watch(LEADER_WORKER_SETS):
            if event.type is EventType.SYNCED:
                continue
            key = (event.object["metadata"]["namespace"], event.object["metadata"]["name"])
            if event.type is EventType.DELETED:
                self._world.sets.pop(key, None)
                self._memory = defaultdict(_GroupMemory, {k: v for k, v in self._memory.items() if k[0] != key})
            else:
                self._world.sets[key] = event.object
            self._mark(key)

    async def _watch_pods(self) -> None:
        async for event in self._client.watch(PODS, label_selector=NAME_LABEL):
            if event.type is EventType.SYNCED:
                continue
            metadata = event.object["metadata"]
            key = (metadata["namespace"], metadata["labels"][NAME_LABEL])
            if event.type is EventType.DELETED:
                self._world.pods[key].pop(metadata["uid"], None)
            else:
                self._world.pods[key][metadata["uid"]] = event.object
            self._mark(key)

    async def _watch_nodes(self) -> None:
        async for event in self._client.watch(NODES):
            if event.type is EventType.SYNCED:
                continue
            name = event.object["metadata"]["name"]
            conditions = event.object.get("status", {}).get("conditions") or []
            silent = any(entry["type"] == "Ready" and entry["status"] == "Unknown" for entry in conditions)
            if event.type is EventType.DELETED or silent:
                self._world.unreachable_since.setdefault(name, time.monotonic())
            else:
                self._world.unreachable_since.pop(name, None)

    def _mark(self, key: SetKey) -> None:
        self._due.add(key)
        self._wake.set()

    # -- acting

    async def _work(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), _RESYNC_S)
            except TimeoutError:
                # Waits (back-off, a node's grace) end without an event; a look at the caches costs nothing.
                self._due |= set(self._world.sets)
            # One burst of events makes one look.
            await asyncio.sleep(0.05)
            self._wake.clear()
            due, self._due = self._due, set()
            for key in sorted(due):
                await self._tolerate(f"{key[0]}/{key[1]}", self._reconcile(key))

    async def _reconcile(self, key: SetKey) -> None:
        raw = self._world.sets.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return
        group_set = GroupSet(raw)
        groups = self._groups(group_set)
        await self._name(group_set)
        renewed = set(outdated_groups(group_set, groups))
        for index in sorted({*groups, *range(group_set.replicas)}):
            await self._reconcile_group(group_set, index, groups.get(index, {}), outdated=index in renewed)
        await self._write_status(group_set, groups)

    def _groups(self, group_set: GroupSet) -> dict[int, dict[int, JsonObject]]:
        groups: dict[int, dict[int, JsonObject]] = defaultdict(dict)
        uid = group_set.raw["metadata"]["uid"]
        for pod in self._world.pods[(group_set.namespace, group_set.name)].values():
            owners = pod["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                labels = pod["metadata"]["labels"]
                groups[int(labels[GROUP_INDEX_LABEL])][int(labels[WORKER_INDEX_LABEL])] = pod
        return groups

    async def _reconcile_group(
        self, group_set: GroupSet, index: int, pods: Mapping[int, JsonObject], *, outdated: bool
    ) -> None:
        memory = self._memory[((group_set.namespace, group_set.name), group_set.raw["metadata"]["uid"], index)]
        lost = self._world.lost_nodes(time.monotonic())
        surplus = index >= group_set.replicas
        broken = None if surplus or outdated else breakage(group_set, pods, lost, was_whole=memory.whole)
        if memory.ending or surplus or outdated or broken:
            if broken and not memory.ending:
                log.info("%s group %d is made anew: %s", group_set.name, index, broken)
                memory.failures += 1
            memory.ending, memory.whole = True, False
            await self._end_group(pods, lost)
            if pods:
                return
            memory.ending = False
            delay_s = min(_FIRST_BACKOFF_S * 2 ** (memory.failures - 1), _MAX_BACKOFF_S) if memory.failures else 0.0
            memory.not_before = time.monotonic() + delay_s
        if surplus or time.monotonic() < memory.not_before:
            return
        memory.whole = len(pods) == group_set.size
        if group_ready(group_set, pods):
            memory.failures = 0
        await self._fill_group(group_set, index, pods)

    async def _end_group(self, pods: Mapping[int, JsonObject], lost: set[str]) -> None:
        for pod in pods.values():
            metadata = pod["metadata"]
            force = pod["spec"].get("nodeName") in lost
            if force or "deletionTimestamp" not in metadata:
                grace_s = 0 if force else None
                await self._client.delete(
                    PODS, metadata["name"], metadata["namespace"], grace_s=grace_s, uid=metadata["uid"]
                )

    async def _fill_group(self, group_set: GroupSet, index: int, pods: Mapping[int, JsonObject]) -> None:
        leader = pods.get(0)
        workers_may_start = not group_set.leader_first or (leader is not None and pod_ready(leader))
        for worker in range(group_set.size):
            if worker not in pods and (worker == 0 or workers_may_start):
                await self._create(PODS, group_pod(group_set, index, worker))

    async def _name(self, group_set: GroupSet) -> None:
        uid = group_set.raw["metadata"]["uid"]
        indexes: list[int | None] = [*range(group_set.replicas)] if group_set.unique_subdomains else [None]
        for index in indexes:
            service = headless_service(group_set, index)
            name = (uid, service["metadata"]["name"])
            if name not in self._named:
                await self._create(SERVICES, service)
                self._named.add(name)

    async def _create(self, resource: Resource, body: JsonObject) -> None:
        try:
            await self._client.create(resource, body)
        except KubeError as error:
            # It is there already: our watch is behind, or an older object of that name is not gone yet.
            if not error.conflict:
                raise

    async def _write_status(self, group_set: GroupSet, groups: Mapping[int, Mapping[int, JsonObject]]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = set_status(group_set, groups, now)
        stored = group_set.raw.get("status") or {}
        if all(stored.get(key, 0) == value for key, value in status.items()):
            return
        await self._client.patch(
            LEADER_WORKER_SETS,
            group_set.name,
            {"status": status},
            group_set.namespace,
            kind=PatchKind.MERGE,
            subresource="status",
        )

    async def _tolerate(self, what: str, action: Coroutine[Any, Any, None]) -> None:
        try:
            await action
        except (KubeError, aiohttp.ClientError, TimeoutError) as error:
            # The next look, two seconds from now at the latest, tries again.
            log.warning("%s: %s", what, error or type(error).__name__)


async def _serve(kubeconfig: Path) -> None:
    async with KubeClient(Connection.from_kubeconfig(kubeconfig), user_agent="k2-groups") as client:
        await GroupController(client).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller alone, until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m infra.rehearsal.groups", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(_serve(options.kubeconfig))
    return 0


if __name__ == "__main__":
    sys.exit(main())
