"""Who brings which shard of an exchange onto the nodes, and whom to ask for it. Pure: every node computes the same.

Each blob of a lock has one owner among the nodes. If the owner is lost, the turn goes to the next node in rotation;
who believes it to be its own turn pulls. Nodes may believe different things for a while: then two of them pull the same
blob, which costs time; nobody waits for a node that does not come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tasks.core.lock import LockedFile


def deal(files: Iterable[LockedFile], nodes: Sequence[str]) -> dict[str, str]:
    """Return sha256 -> owner: the blobs largest first, each to the node with the least bytes so far."""
    sizes = {file.sha256: file.size_bytes for file in files}
    loads = [(0, 0, index) for index in range(len(nodes))]
    owners = {}
    for sha256 in sorted(sizes, key=lambda sha256: (-sizes[sha256], sha256)):
        # Blobs without bytes are dealt round too.
        load, count, index = min(loads)
        loads[index] = (load + sizes[sha256], count + 1, index)
        owners[sha256] = nodes[index]
    return owners


def turns(nodes: Sequence[str], owner: str, me: str) -> tuple[str, ...]:
    """Return the nodes in the order in which they have to pull an owner's blob: the owner first, then in rotation.

    A node that owns nothing, because it is not among `nodes`, has its own turn last: it pulls if nobody else is left.
    """
    first = nodes.index(owner)
    rotated = (*nodes[first:], *nodes[:first])
    return rotated if me in rotated else (*rotated, me)


def whose_turn(order: Sequence[str], out: Collection[str]) -> str | None:
    """Return the first node that is not out; None if all are."""
    return next((node for node in order if node not in out), None)


def in_rotation(
    files: Iterable[LockedFile], owners: Mapping[str, str], nodes: Sequence[str], me: str
) -> list[LockedFile]:
    """Return the files in the order in which a node gets them: its own, then those of the next node, and so on.

    No two nodes begin with the same owner, so each is read by one node at a time. Of one owner the largest come first.
    """
    # A node that owns nothing begins somewhere too, and two of them not at the same place.
    begin = nodes.index(me) if me in nodes else sum(me.encode()) % len(nodes)

    def distance(file: LockedFile) -> int:
        return (nodes.index(owners[file.sha256]) - begin) % len(nodes)

    return sorted(files, key=lambda file: (distance(file), -file.size_bytes, file.path))
