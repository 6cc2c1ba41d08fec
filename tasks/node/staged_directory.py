"""What stands in a checkpoint's directory on a node: the marker, files that it covers, orphans, room on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import CapacityError, IntegrityError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import MARKER_FILE, FileStat, Marker, StagedFile, marker_from_data
from tasks.core.units import format_bytes
from tasks.node.verified_file import PARTIAL_DIR, file_stat, fsync_directory, not_regular

_SPARE_INODES = 64


@dataclass(frozen=True)
class Findings:
    """The files of a lock in one directory, by what has to be done with each."""

    kept: tuple[StagedFile, ...]
    """Covered by the node's own marker with the same identity: not read again."""
    to_hash: tuple[LockedFile, ...]
    """There with the right size, but nobody vouches for the bytes."""
    to_write: tuple[LockedFile, ...]
    """Missing, or of another size."""


def read_marker(directory: Path) -> Marker | None:
    """Return the marker of a directory; None if there is none; IntegrityError if it cannot be read as one."""
    path = directory / MARKER_FILE
    stat = file_stat(directory, MARKER_FILE)
    if stat is None:
        return None
    try:
        return marker_from_data(json.loads(path.read_bytes()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise IntegrityError("K2-INT-004", "The marker is not JSON.", where=str(path)) from error


def remove_marker(directory: Path) -> None:
    """Take back the statement that the directory is verified, durably, before anything in it is touched."""
    path = directory / MARKER_FILE
    if path.exists() or path.is_symlink():
        path.unlink()
        fsync_directory(directory)


def refuse_links(root: Path, directory: Path) -> None:
    """Raise IntegrityError for a symlink on the way to the directory or in it: it could lead anywhere."""
    step = root
    for part in directory.relative_to(root).parts:
        step = step / part
        if step.is_symlink():
            raise not_regular(step)
    for base, directories, files in os.walk(directory):
        for name in (*directories, *files):
            if Path(base, name).is_symlink():
                raise not_regular(Path(base, name))


def sweep_orphans(directory: Path) -> int:
    """Remove temps that dead stagers left and return their bytes. The caller holds the directory's lock."""
    partial, swept_bytes = directory / PARTIAL_DIR, 0
    if not partial.is_dir():
        return 0
    for temp in partial.iterdir():
        swept_bytes += temp.lstat().st_size
        temp.unlink()
    for temp in directory.glob(f"{MARKER_FILE}.*.tmp"):
        temp.unlink()
    return swept_bytes


def examine(directory: Path, lock: Lock, marker: Marker | None, node: str, node_uid: str) -> Findings:
    """Return what has to be done for each file of the lock, by stats alone."""
    own = marker is not None and (marker.node, marker.node_uid) == (node, node_uid)
    covered = {file.path: file for file in marker.files} if marker is not None and own else {}
    kept, to_hash, to_write = [], [], []
    for file in lock.files:
        stat = file_stat(directory, file.path)
        entry = covered.get(file.path)
        if stat is None or stat.size_bytes != file.size_bytes:
            to_write.append(file)
        elif entry is not None and entry.sha256 == file.sha256 and _same(entry, stat):
            kept.append(entry)
        else:
            to_hash.append(file)
    return Findings(tuple(kept), tuple(to_hash), tuple(to_write))


def _same(entry: StagedFile, stat: FileStat) -> bool:
    return (entry.size_bytes, entry.mtime_ns, entry.inode) == (stat.size_bytes, stat.mtime_ns, stat.inode)


def check_room(directory: Path, node: str, files: Iterable[LockedFile], reserve_bytes: int) -> None:
    """Raise CapacityError unless the disk has room for files beside everything that is there, and a reserve."""
    wanted = list(files)
    needed_bytes = sum(file.size_bytes for file in wanted)
    needed_bytes += reserve_bytes if needed_bytes else 0
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    where = f"{node}: {directory}"
    if needed_bytes > free_bytes:
        raise CapacityError(
            "K2-CAP-002",
            "Not enough free space on the node's disk.",
            where=where,
            got=f"{format_bytes(free_bytes)} free",
            expected=f"{format_bytes(needed_bytes)}: {len(wanted)} files and {format_bytes(reserve_bytes)} reserve",
            details={"free_bytes": free_bytes, "needed_bytes": needed_bytes},
        )
    needed_inodes = len(wanted) + _SPARE_INODES
    # File systems that make inodes as needed report none at all.
    if wanted and disk.f_files and needed_inodes > disk.f_favail:
        raise CapacityError(
            "K2-CAP-002",
            "Not enough free inodes on the node's disk.",
            where=where,
            got=f"{disk.f_favail} free",
            expected=f"{needed_inodes}",
            details={"free_inodes": disk.f_favail, "needed_inodes": needed_inodes},
        )
