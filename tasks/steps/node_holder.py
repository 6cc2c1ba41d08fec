"""The right to write weights to nodes: a Lease for each, held in the name of a lock and renewed while its Jobs run.

Jobs have no rights on the API, so the flow holds the Leases for them. Two runs of one lock share them, as they share
the Jobs. A Lease alone does not say that nobody writes: a flow that died leaves its Jobs at work, so these are looked
for as well. The last word is the node's own: its kernel lets one stager in at a time (`tasks.node.directory_lock`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.core.errors import After, ConflictError, K2Error
from tasks.core.lease import LeaseState, lease_spec, read_lease, released, take
from tasks.core.render import RELEASE_ANNOTATION
from tasks.core.worker_jobs import LOCK_LABEL, WRITES_LABEL
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import Watch, has_ended, pinned_to, unwatched
from tasks.steps.patience import Deadline

DURATION_S = 30.0
"""For how long a Lease that nobody renews keeps others out; the Jobs of a flow that died do for longer."""
_POLL_S = 1.0
_SAY_EVERY_S = 30.0


def node_lease_name(node: str) -> str:
    """Return the name of a node's Lease."""
    return f"k2-stage-{node}"


class NodeHolder:
    """Holds the Leases of nodes in the name of the lock that is staged on them.

    Args:
        ports: of the site.
        subject: the release; its lock is the holder.
        step: what waits are told under.
    """

    def __init__(self, ports: Ports, subject: Subject, step: str = "stage") -> None:
        self._ports = ports
        self._lock_digest = subject.lock.digest
        self._release = subject.release.id
        self._step = step
        self._held: dict[str, LeaseState] = {}
        self._seen: dict[str, tuple[LeaseState, float]] = {}
        self._told = ""
        self._told_at = 0.0

    @contextlib.contextmanager
    def holding(self, nodes: Sequence[str], wait_s: float, watch: Watch = unwatched) -> Iterator[None]:
        """Hold the Leases of nodes while the block runs, and give them back however it ends."""
        try:
            self.acquire(nodes, wait_s, watch)
            yield
        finally:
            self.release()

    def acquire(self, nodes: Sequence[str], wait_s: float, watch: Watch = unwatched) -> None:
        """Take the Leases, and wait until no Job of another lock writes to these nodes.

        Args:
            nodes: names; the Leases are taken in their order, so that two flows do not wait for each other.
            wait_s: how long to wait in all for another lock.
            watch: called while it waits; what it raises ends the waiting.

        Raises:
            ConflictError: another lock is staged on one of the nodes for longer (K2-CON-008).
        """
        deadline = Deadline(self._ports, wait_s)
        for node in sorted(nodes):
            while (who := self._take_or_who(node)) or (who := self._writer(node)):
                if deadline.left_s <= 0:
                    raise self._busy(node, who, deadline.elapsed_s)
                self._tell(node, who, deadline)
                watch()
                self._ports.clock.sleep(min(_POLL_S, deadline.left_s))
                self.keep()

    def keep(self) -> None:
        """Renew what is due. One that another lock has taken over is let go: whoever has it waits for our Jobs."""
        for node, state in list(self._held.items()):
            if self._ports.clock.now() < state.renewed_at + DURATION_S / 3:
                continue
            if who := self._take_or_who(node):
                self._held.pop(node, None)
                self._ports.progress.say(f"{self._step}: the lease of {node} went to {who}, which waits for our Job")

    def release(self) -> None:
        """Give the Leases back; what cannot be written runs out by itself."""
        for node in list(self._held):
            with contextlib.suppress(K2Error, KeyError):
                obj = self._ports.cluster.get("Lease", node_lease_name(node))
                if obj is not None and read_lease(obj).holder == self._lock_digest:
                    obj["spec"] = lease_spec(released(read_lease(obj)))
                    self._ports.cluster.replace(obj)
            self._held.pop(node, None)

    def _take_or_who(self, node: str) -> str:
        """Take or renew a node's Lease; return who has it if that is another lock."""
        obj = self._ports.cluster.get("Lease", node_lease_name(node))
        now = self._ports.clock.now()
        before = read_lease(obj) if obj else LeaseState("", 0, 0.0, DURATION_S)
        try:
            after = take(before, self._lock_digest, now, DURATION_S, self._unchanged_s(node, before))
        except ConflictError as error:
            return self._described(node, obj or {}, error)
        try:
            self._write(node, obj, after)
        except (ConflictError, KeyError):
            # Somebody wrote it since it was read: another run of this lock, or another lock that was faster.
            obj = self._ports.cluster.get("Lease", node_lease_name(node))
            there = read_lease(obj) if obj else before
            if there.holder != self._lock_digest:
                return f"lock {there.holder[:12] or 'unknown'}"
            after = there
        self._held[node] = after
        return ""

    def _write(self, node: str, obj: dict[str, Any] | None, state: LeaseState) -> None:
        annotations = {RELEASE_ANNOTATION: self._release}
        if obj is not None:
            obj["spec"] = lease_spec(state)
            obj["metadata"]["annotations"] = {**(obj["metadata"].get("annotations") or {}), **annotations}
            self._ports.cluster.replace(obj)
            return
        metadata = {"name": node_lease_name(node), "namespace": self._ports.site.namespace, "annotations": annotations}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        _, created = self._ports.cluster.create({**lease, "spec": lease_spec(state)})
        if not created:
            raise ConflictError("K2-CON-008", "Another holder was faster.", where=node)

    def _unchanged_s(self, node: str, state: LeaseState) -> float:
        """Return for how long a Lease was seen as it is; time in which the API was away does not count."""
        now = self._ports.clock.now() - self._ports.cluster.silent_s
        if node not in self._seen or self._seen[node][0] != state:
            self._seen[node] = (state, now)
        return now - self._seen[node][1]

    def _described(self, node: str, obj: dict[str, Any], error: ConflictError) -> str:
        release = (obj.get("metadata", {}).get("annotations") or {}).get(RELEASE_ANNOTATION, "")
        left = f", free in {error.retry.seconds:.0f} s if it has died" if isinstance(error.retry, After) else ""
        return f"lock {error.got[:12]}" + (f" of release {release}" if release else "") + left

    def _writer(self, node: str) -> str:
        """Return the Job of another lock that writes to a node, or nothing."""
        for job in self._ports.cluster.list_objects("Job"):
            labels = job["metadata"].get("labels") or {}
            ours = labels.get(LOCK_LABEL) == self._lock_digest[:12]
            if WRITES_LABEL in labels and not ours and pinned_to(job) == node and not has_ended(job):
                return f"Job {job['metadata']['name']} of lock {labels.get(LOCK_LABEL, 'unknown')}"
        return ""

    def _tell(self, node: str, who: str, deadline: Deadline) -> None:
        now = self._ports.clock.now()
        if node != self._told or now - self._told_at >= _SAY_EVERY_S:
            self._told, self._told_at = node, now
            self._ports.progress.say(
                f"{self._step}: {node} is being staged with {who}; waiting, gives up in {deadline.left_s:.0f} s"
            )

    def _busy(self, node: str, who: str, waited_s: float) -> ConflictError:
        namespace = self._ports.site.namespace
        hint = (
            f"wait for it, or, if nobody follows that release any more: kubectl -n {namespace} delete {who.split()[0]}"
            f" {who.split()[1]}"
            if who.startswith("Job ")
            else f"wait for it or end it: kubectl -n {namespace} get lease {node_lease_name(node)} -o yaml names it"
        )
        return ConflictError(
            "K2-CON-008",
            "The weights of another release are being staged on a node"
            + (f" and still are after {waited_s:.0f} s." if waited_s >= 1 else "."),
            where=node,
            got=who,
            expected=f"lock {self._lock_digest[:12]}, or nobody",
            hint=hint,
        )
