"""What of the weights on the nodes may go: decided from what is there and from everything that may need it (I10).

Pure. What is not known is kept: a directory goes to the trash only if no release, no set, no pod and no process speaks
for it, and out of the trash only after its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import IntegrityError
from tasks.core.ledger import FINISHED, Record
from tasks.core.mounts import Use
from tasks.core.units import format_duration

KEEP, TRASH, DELETE = "keep", "move to the trash", "delete"
CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*--[A-Za-z0-9._-]+/[0-9a-f]{40}")


@dataclass(frozen=True)
class Claim:
    """A release that may still need the files of a lock, and why."""

    lock_digest: str
    release: str
    why: str

    def __str__(self) -> str:
        return f"{self.release}: {self.why}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's directory as its node lists it.

    `token` changes with whatever is done there: what was decided on one state is not carried out on another.
    `lock_digest` is the marker's, empty without one; `held` says that somebody works there, `in_use` who has it open.
    """

    path: str
    size_bytes: int
    files: int
    lock_digest: str
    token: str
    held: bool = False
    in_use: str = ""


@dataclass(frozen=True)
class Trashed:
    """A directory in a node's trash; its age by the clock that moved it and by the node's own."""

    name: str
    path: str
    size_bytes: int
    moved_at: float
    node_age_s: float
    in_use: str = ""

    def age_s(self, now: float) -> float:
        """Return the smaller one of its two ages: a clock that has jumped makes nothing older."""
        return min(now - self.moved_at, self.node_age_s)


@dataclass(frozen=True)
class Inventory:
    """What stands below a node's directory for weights. `others` are names that are not ours and stay."""

    node: str
    checkpoints: tuple[Checkpoint, ...]
    trash: tuple[Trashed, ...]
    others: tuple[str, ...]
    free_bytes: int
    total_bytes: int


def inventory_from_data(data: Mapping[str, Any]) -> Inventory:
    """Return the inventory that a node has written; IntegrityError if it is not one."""
    try:
        return Inventory(
            node=str(data["node"]),
            checkpoints=tuple(Checkpoint(**row) for row in data["checkpoints"]),
            trash=tuple(Trashed(**row) for row in data["trash"]),
            others=tuple(map(str, data["others"])),
            free_bytes=int(data["free_bytes"]),
            total_bytes=int(data["total_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError("K2-INT-003", f"A node's inventory is not well formed: {error!r}.") from error


@dataclass(frozen=True)
class Decision:
    """What is to be done with one directory of a node, and why."""

    node: str
    path: str
    size_bytes: int
    action: str
    why: str
    token: str = ""
    name: str = ""


def unfinished_claims(release: str, records: Iterable[Record]) -> list[Claim]:
    """Return the claims of a release that is not over: locked, and since then neither promoted nor retired.

    What failed may be run again, so it goes on claiming. Whoever gives it up says so by `k2ctl retire`.
    """
    claimed: dict[str, str] = {}
    for record in records:
        if record.event == FINISHED and record.step in ("promote", "retire"):
            claimed.clear()
            continue
        digest = locked_by(record)
        if digest:
            claimed[digest] = ""
        if claimed:
            last = f"{record.step} {record.event}"
            claimed = dict.fromkeys(claimed, last)
    return [
        Claim(digest, release, f"not promoted ({last}); if it is given up: k2ctl retire {release} -y")
        for digest, last in claimed.items()
    ]


def locks_of(records: Iterable[Record]) -> list[str]:
    """Return every lock digest that a release has had, the last one last."""
    return list(dict.fromkeys(digest for record in records if (digest := locked_by(record))))


def locked_by(record: Record) -> str:
    """Return the lock digest that a record says its release is made of; empty if it says none."""
    if record.step == "lock" and record.event == FINISHED:
        return str(record.data.get("lock_digest", ""))
    plan = record.data.get("plan")
    return str(plan.get("lock_digest", "")) if record.step == "plan" and isinstance(plan, Mapping) else ""


@dataclass(frozen=True)
class Needs:
    """Everything that may still need weights: claims by checkpoint path, and what pods and groups use."""

    claims: Mapping[str, Sequence[Claim]]
    uses: Sequence[Use]

    def why(self, node: str, path: str) -> str:
        """Return who needs a checkpoint on a node; empty if nobody does."""
        claims = self.claims.get(path, ())
        if claims:
            return str(claims[0]) + (f", and {len(claims) - 1} more" if len(claims) > 1 else "")
        for use in self.uses:
            if use.node in ("", node) and use.covers(path):
                everything = " mounts the directory for weights" if use.is_everything else " uses it"
                return use.who + everything
        return ""

    def of(self, node: str, paths: Iterable[str]) -> list[str]:
        """Return those of the paths that are needed on a node."""
        return sorted(path for path in paths if self.why(node, path))


def decide(inventory: Inventory, needs: Needs, trash_age_s: float, now: float) -> list[Decision]:
    """Return what is to be done with each directory of a node, in the order of paths; trash last."""
    return [
        *(_decide_checkpoint(inventory.node, found, needs) for found in inventory.checkpoints),
        *(_decide_trash(inventory.node, found, needs, trash_age_s, now) for found in inventory.trash),
    ]


def _decide_checkpoint(node: str, found: Checkpoint, needs: Needs) -> Decision:
    why = needs.why(node, found.path)
    if not why and found.held:
        why = "a stager or a scrub works there"
    if not why and found.in_use:
        why = found.in_use
    if not why and not CHECKPOINT.fullmatch(found.path):
        why = "not a checkpoint's name"
    action = KEEP if why else TRASH
    return Decision(node, found.path, found.size_bytes, action, why or "nothing needs it", found.token)


def _decide_trash(node: str, found: Trashed, needs: Needs, trash_age_s: float, now: float) -> Decision:
    needed, left_s = needs.why(node, found.path), trash_age_s - found.age_s(now)
    if needed:
        why = f"needed again ({needed})"
    elif found.in_use:
        why = found.in_use
    elif left_s > 0:
        why = f"can be taken back for another {format_duration(left_s)}"
    else:
        why = ""
    return Decision(
        node, found.path, found.size_bytes, KEEP if why else DELETE, why or "its time is over", name=found.name
    )
