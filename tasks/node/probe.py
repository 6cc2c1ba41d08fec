"""Looks at a node before anything moves: room and inodes for the weights, counting what is staged there already.

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

from tasks.core.errors import K2Error
from tasks.core.staging import require_room
from tasks.node.program import run
from tasks.node.staged_directory import read_room

_FILES = 1000  # more than any checkpoint has; which of them are missing is the stager's business


def _staged_bytes(directory: Path) -> int:
    """Return the bytes of the files that stand in the model's directory: what need not be written again."""
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _require_writable(root: Path) -> None:
    """Raise OSError unless this user may make files here; asked of the kernel, as the probe writes nothing."""
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(root))
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        owner = root.stat()
        got = f"owner {owner.st_uid}:{owner.st_gid}, mode {owner.st_mode & 0o7777:o}, user {os.geteuid()}"
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{root} ({got})")


def _work(arguments: argparse.Namespace) -> Mapping[str, Any]:
    root: Path = arguments.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        _require_writable(root)
        room = read_room(root)
        staged = _staged_bytes(root / arguments.model_dir)
    except OSError as error:
        raise K2Error(
            "K2-RDY-004",
            f"The directory for weights cannot be used: {error.strerror}.",
            where=f"{arguments.node}: {root}",
            got=str(error),
            expected="a writable directory",
            hint="the Job runs as root without capabilities: on the node, chown root:root and chmod 755 the directory",
        ) from error
    missing = max(0, arguments.total_bytes - staged)
    require_room(_FILES if missing else 0, missing, room, arguments.reserve_bytes, f"{arguments.node}: {root}")
    return {
        "node": arguments.node,
        "free_bytes": room.free_bytes,
        "needed_bytes": missing + (arguments.reserve_bytes if missing else 0),
        "free_inodes": room.inodes or 0,  # 0 too where the file system makes them as needed
        "staged_bytes": staged,
    }


def main(argv: list[str] | None = None) -> int:
    """Probe the node and return the exit code: 0, 6 when its disk cannot be used, 8 when it is too full."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="directory for checkpoints on the node's NVMe")
    parser.add_argument("--model-dir", required=True, help="<org>--<name>/<revision> below it")
    parser.add_argument("--total-bytes", type=int, required=True, help="size of the whole checkpoint")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--node", required=True, help="the node's name, for messages")
    return run(partial(_work, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
