"""Looks at a node before anything moves: room and inodes for what is missing of a lock, and what kind of disk it is.

Runs as a Job on each chosen node in preflight. Writes nothing but a directory that is not there yet.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import K2Error, NotReadyError
from tasks.core.lock import Lock
from tasks.core.staging import plan_staging, require_room
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.file_system import file_system_of, is_shared, note_on
from tasks.node.program import Stop, run
from tasks.node.quarantine import Quarantine
from tasks.node.staged_directory import orphans_bytes, read_room, read_stats, refuse_links, refuse_other_disks
from tasks.node.stored_lock import read_lock
from tasks.node.workers import attempt

_TRIES = 4
_TRASH_DIR = ".k2-trash"


def _require_writable(root: Path) -> None:
    """Raise OSError unless this user may make files here; asked of the kernel, as the probe writes nothing."""
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        owner = root.stat()
        got = f"owner {owner.st_uid}:{owner.st_gid}, mode {owner.st_mode & 0o7777:o}, user {os.geteuid()}"
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{root} ({got})")


def _require_own_disk(root: Path, node: str) -> str:
    """Return the type of the file system; NotReadyError if other nodes share it."""
    kind = file_system_of(root)
    if is_shared(kind):
        raise NotReadyError(
            "K2-RDY-004",
            "The directory for weights is on a file system that nodes share.",
            where=f"{node}: {root}",
            got=kind,
            expected="a disk of the node's own (ext4, xfs)",
            hint="set nvme_path in the site file to a directory on each node's own NVMe",
        )
    return kind


def probe(root: Path, lock: Lock, node: str, reserve_bytes: int) -> dict[str, Any]:
    """Return what the node's disk has and what the lock needs of it.

    What a stager finds first gives way to what it writes, so it counts as room: temps that dead stagers left, and the
    quarantine. The trash does not: what is in it can be taken back until it is old enough.

    Raises:
        CapacityError: no room for the files that are missing, or no inodes.
        NotReadyError: no disk of the node's own, or a part of the checkpoint is on another one.
        IntegrityError: a link stands in the checkpoint.
        OSError: the disk failed.
    """
    kind = _require_own_disk(root, node)
    directory = root / lock.model_dir
    refuse_links(root, directory)
    refuse_other_disks(root, directory, node)
    # Without a marker: whether what stands there is right is the stager's business.
    plan = plan_staging(lock, None, read_stats(directory, lock), node, "")
    reclaimable_bytes = orphans_bytes(directory) + Quarantine(directory).size_bytes
    room = read_room(root, reclaimable_bytes)
    missing = plan.to_write
    require_room(len(missing), plan.bytes_to_write, room, reserve_bytes, f"{node}: {root}")
    return {
        "node": node,
        "free_bytes": room.free_bytes,
        "reclaimable_bytes": reclaimable_bytes,
        "trash_bytes": _bytes_below(root / _TRASH_DIR),
        "needed_bytes": plan.bytes_to_write + (reserve_bytes if missing else 0),
        "free_inodes": room.inodes or 0,  # 0 too where the file system makes them as needed
        "staged_bytes": lock.total_bytes - plan.bytes_to_write,
        "file_system": kind,
        "note": note_on(kind),
    }


def _bytes_below(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _work(arguments: argparse.Namespace) -> Mapping[str, Any]:
    root: Path = arguments.root
    stop = Stop()
    stop.install()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _require_writable(root)
        store = store_from_environment(arguments.source_stall_s)
        lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
        return probe(root, lock, arguments.node, arguments.reserve_bytes)
    except OSError as error:
        raise K2Error(
            "K2-RDY-004",
            f"The directory for weights cannot be used: {error.strerror}.",
            where=f"{arguments.node}: {root}",
            got=str(error),
            expected="a writable directory",
            hint="the Job runs as root without capabilities: on the node, chown root:root and chmod 755 the directory",
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Probe the node and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.probe",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """
exit codes: 0 there is room, 5 a link stands in the checkpoint, 6 the disk cannot be used, 8 it is too full,
11 the store does not answer
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="directory for checkpoints on the node's NVMe")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--node", required=True, help="the node's name, for messages")
    parser.add_argument("--source-stall-s", type=float, default=30.0, help="no answer of the store for so long (30)")
    return run(partial(_work, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
