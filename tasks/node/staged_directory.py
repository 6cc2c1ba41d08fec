"""What stands in a checkpoint's directory on a node: the marker, files that it covers, orphans, room on the disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from tasks.core.errors import IntegrityError, NotReadyError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE, FileStat, Marker, marker_from_data
from tasks.core.staging import Room
from tasks.node.verified_file import PARTIAL_DIR, file_stat, fsync_directory, not_regular

_CACHE = ".cache"  # of huggingface_hub, in a directory that somebody has filled with it; no engine reads there


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


def refuse_other_disks(root: Path, directory: Path, node: str) -> None:
    """Raise NotReadyError unless the directory and all below it are on the root's file system.

    A file gets its name by a rename, which does not lead from one file system to another.
    """
    device = root.stat().st_dev
    for base, _, _ in os.walk(directory):
        if Path(base).stat().st_dev != device:
            raise NotReadyError(
                "K2-RDY-002",
                "A part of the checkpoint's directory is another file system.",
                where=f"{node}: {base}",
                got=f"device {Path(base).stat().st_dev}",
                expected=f"device {device}, as {root}",
                hint=f"unmount what is mounted at {base}, then run the release again",
            )


def open_for_writing(directory: Path) -> None:
    """Let the owner of a checkpoint's directory write there again."""
    _set_modes(directory, 0o755)


def close_for_writing(directory: Path) -> None:
    """Let nobody make, replace or remove files of a checkpoint, its owner neither, until it is opened again.

    Root may all the same where it has the capability; the node's Jobs and the engine have none.
    """
    _set_modes(directory, 0o555)


def _set_modes(directory: Path, mode: int) -> None:
    for base, _, _ in os.walk(directory):
        if stat.S_IMODE(Path(base).lstat().st_mode) != mode:
            Path(base).chmod(mode)


def unlisted_files(directory: Path, lock: Lock) -> list[str]:
    """Return the files that are not of the lock, our own (`.k2-...`) and a downloader's notes (`.cache`) left out."""
    listed, found = {file.path for file in lock.files}, []
    for base, directories, files in os.walk(directory):
        if Path(base) == directory:
            directories[:] = [name for name in directories if not _is_own(name) and name != _CACHE]
            files = [name for name in files if not _is_own(name)]
        found += [str(Path(base, name).relative_to(directory)) for name in files]
    return sorted(path for path in found if path not in listed)


def _is_own(name: str) -> bool:
    return name.startswith(".k2-")


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


def orphans_bytes(directory: Path) -> int:
    """Return the bytes of the temps in a checkpoint's directory: swept by the next stager, or files soon."""
    partial = directory / PARTIAL_DIR
    return sum(temp.lstat().st_size for temp in partial.iterdir()) if partial.is_dir() else 0


def read_stats(directory: Path, lock: Lock) -> dict[str, FileStat]:
    """Return the stats of the lock's files that stand in a directory, by path."""
    stats = ((file.path, file_stat(directory, file.path)) for file in lock.files)
    return {path: stat for path, stat in stats if stat is not None}


def read_room(directory: Path, reclaimable_bytes: int = 0) -> Room:
    """Return what the disk of a directory has left, and what of ours there gives way."""
    disk = os.statvfs(directory)
    # File systems that make inodes as needed report none at all.
    return Room(disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else None, reclaimable_bytes)
