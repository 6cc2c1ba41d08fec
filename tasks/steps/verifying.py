"""Every byte of a lock on every node that says it holds it, by the verify Jobs; one bad node hides no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import InputError, IntegrityError, K2Error
from tasks.core.lock import Lock
from tasks.core.render import staged_label
from tasks.core.worker_jobs import render_verify_job
from tasks.steps.context import Ports
from tasks.steps.documents import find_receipt, get_live
from tasks.steps.jobs import JobResult, follow_jobs

_DEADLINE_S = 2 * 3600.0


@dataclass(frozen=True)
class NodeFindings:
    """What a node's verify Job said: how many files it found right, or its error."""

    node: str
    files: int
    read_bytes: int
    error: K2Error | None = None

    @property
    def problems(self) -> list[dict[str, Any]]:
        """The files that its error names: as many as its message has room for."""
        return list(self.error.details.get("problems", ())) if self.error else []

    @property
    def count(self) -> int:
        """How many files are not right; 0 for a node that has not said anything of a file."""
        return int(self.error.details.get("count", len(self.problems))) if self.error else 0


def staged_nodes(ports: Ports, lock: Lock) -> list[str]:
    """Return the nodes that carry the staged label of a lock, by name; InputError if there is none."""
    label = staged_label(lock.digest)
    found = sorted(node["metadata"]["name"] for node in ports.cluster.list_objects("Node", {label: "true"}))
    if not found:
        # Nothing that was looked at is nothing that was proved.
        raise InputError(
            "K2-INP-001",
            "No node holds this lock: there is nothing to verify.",
            where=f"nodes with the label {label}=true",
            got="none",
            expected="at least one",
            hint=f"was it staged on this site? kubectl get nodes -l {label}=true",
        )
    return found


def live_tool_image(ports: Ports) -> str:
    """Return the tool image of the live release, for Jobs that belong to no release; InputError if nothing is live."""
    live, _ = get_live(ports.store)
    receipt = find_receipt(ports.store, live["release"]) if live else None
    if receipt is None:
        raise InputError(
            "K2-INP-001",
            "Which image of this tool should the verify Jobs run? Nothing is live here.",
            where="LOCK",
            got="a lock",
            expected="a release, whose tool image is used",
            hint="k2ctl verify RELEASE --nodes",
        )
    return str(receipt["release"]["images"]["tool"])


def verify_nodes(ports: Ports, lock: Lock, tool_image: str, nodes: Sequence[str], at_once: int) -> list[NodeFindings]:
    """Run a verify Job on each node, at most `at_once` at a time, and return what each said, in order of the nodes."""
    found: list[NodeFindings] = []
    for first in range(0, len(nodes), at_once):
        some = nodes[first : first + at_once]
        jobs = [render_verify_job(lock, ports.site, ports.templates, tool_image, node) for node in some]
        step = f"verify, nodes {first + 1} to {first + len(some)} of {len(nodes)}"
        ended = follow_jobs(ports, step, jobs, lock.total_bytes * len(jobs), _DEADLINE_S, stop_at_failure=False)
        found += [_said(lock, node, result) for node, result in zip(some, ended, strict=True)]
    return found


def _said(lock: Lock, node: str, result: JobResult | K2Error) -> NodeFindings:
    if isinstance(result, K2Error):
        found = NodeFindings(node, 0, 0, result)
        return NodeFindings(node, max(0, len(lock.files) - found.count) if found.count else 0, 0, result)
    checked = int(result.message.get("checked", 0))
    if checked == len(lock.files):
        return NodeFindings(node, checked, lock.total_bytes)
    return NodeFindings(
        node,
        checked,
        0,
        IntegrityError(
            "K2-INT-002",
            "A node has looked at other files than the lock has.",
            where=node,
            got=f"{checked} files",
            expected=f"{len(lock.files)} files",
            hint="its tool image may be of another version: the release names it",
        ),
    )


def gravest(found: Sequence[NodeFindings]) -> K2Error | None:
    """Return the error to end with: wrong bytes before no answer; None if every node is right."""
    errors = [one.error for one in found if one.error]
    return next((error for error in errors if isinstance(error, IntegrityError)), errors[0] if errors else None)
