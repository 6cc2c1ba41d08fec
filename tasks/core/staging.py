"""The staging plan of one node: what to keep, what to hash again and what to write. Pure: stats in, plan out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.core.errors import CapacityError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import FileStat, Marker, StagedFile
from tasks.core.units import format_bytes

# Files under way in one program, each hashed by a thread of its own: of a node's, and of a puller.
FILES_AT_ONCE, PULLS_AT_ONCE = 3, 8
_SPARE_INODES = 64


@dataclass(frozen=True)
class StagingPlan:
    """The files of a lock on one node, by what has to be done with each.

    `kept` are covered by the node's own marker with the same identity and are not read again; `to_hash` have the right
    size, but nobody vouches for their bytes; `to_write` are missing or of another size.
    """

    kept: tuple[StagedFile, ...]
    to_hash: tuple[LockedFile, ...]
    to_write: tuple[LockedFile, ...]

    @property
    def bytes_to_write(self) -> int:
        """The size of what has to be written."""
        return sum(file.size_bytes for file in self.to_write)


def plan_staging(
    lock: Lock, marker: Marker | None, stats: Mapping[str, FileStat], node: str, node_uid: str
) -> StagingPlan:
    """Return what has to be done for each file of a lock, from the marker and the stats of what is there.

    A marker of another machine of the same name vouches for nothing: its disk is another disk.
    """
    own = marker is not None and (marker.node, marker.node_uid) == (node, node_uid)
    covered = {file.path: file for file in marker.files} if marker is not None and own else {}
    kept, to_hash, to_write = [], [], []
    for file in lock.files:
        stat, entry = stats.get(file.path), covered.get(file.path)
        if stat is None or stat.size_bytes != file.size_bytes:
            to_write.append(file)
        elif entry is not None and entry.sha256 == file.sha256 and _same(entry, stat):
            kept.append(entry)
        else:
            to_hash.append(file)
    return StagingPlan(tuple(kept), tuple(to_hash), tuple(to_write))


def _same(entry: StagedFile, stat: FileStat) -> bool:
    return (entry.size_bytes, entry.mtime_ns, entry.inode) == (stat.size_bytes, stat.mtime_ns, stat.inode)


@dataclass(frozen=True)
class Room:
    """What a disk has left. `inodes` is None where the file system makes them as needed.

    `reclaimable_bytes` is what stands there of ours and gives way: temps that dead stagers left, the quarantine.
    """

    free_bytes: int
    inodes: int | None
    reclaimable_bytes: int = 0


def check_room(plan: StagingPlan, room: Room, reserve_bytes: int, where: str) -> int:
    """Return the bytes that must be reclaimed so that there is room for what is to be written, and a reserve.

    Raises:
        CapacityError: there is not enough, that included.
    """
    return require_room(len(plan.to_write), plan.bytes_to_write, room, reserve_bytes, where)


def require_room(files: int, bytes_to_write: int, room: Room, reserve_bytes: int, where: str) -> int:
    """Return the bytes that must be reclaimed for so many files and bytes, and a reserve if there are any.

    Nothing is added for temps: they are what is to be written, and get their names by a rename, so at no moment does
    the disk hold more than the files and what was wrong in their place; and that is in the quarantine, which gives way.

    Raises:
        CapacityError: there is not enough, that included.
    """
    needed_bytes = bytes_to_write + (reserve_bytes if files else 0)
    if needed_bytes > room.free_bytes + room.reclaimable_bytes:
        ours = f" and {format_bytes(room.reclaimable_bytes)} that give way" if room.reclaimable_bytes else ""
        raise CapacityError(
            "K2-CAP-002",
            "Not enough free space on the node's disk.",
            where=where,
            got=f"{format_bytes(room.free_bytes)} free{ours}",
            expected=f"{format_bytes(needed_bytes)}: {format_bytes(bytes_to_write)} to write and the reserve",
            details={
                "free_bytes": room.free_bytes,
                "reclaimable_bytes": room.reclaimable_bytes,
                "needed_bytes": needed_bytes,
            },
        )
    needed_inodes = files + _SPARE_INODES
    if files and room.inodes is not None and needed_inodes > room.inodes:
        raise CapacityError(
            "K2-CAP-002",
            "Not enough free inodes on the node's disk.",
            where=where,
            got=f"{room.inodes} free",
            expected=f"{needed_inodes}",
            details={"free_inodes": room.inodes, "needed_inodes": needed_inodes},
        )
    return max(0, needed_bytes - room.free_bytes) if files else 0
