"""Checks, without reading content, that a checkpoint is the one that was verified on this node (the gate of I2).

Runs as the init container of every engine pod. The marker must be of the given lock, and every file must still have the
size, mtime and inode that it had when it was hashed: a file that was replaced, cut or touched since then stops the
engine here. Takes well under 0.1 s, as it runs before every engine start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import IntegrityError
from tasks.core.marker import MARKER_FILE, FileStat, Marker, check_marker_against_disk
from tasks.node.program import run
from tasks.node.staged_directory import read_marker
from tasks.node.verified_file import file_stat


def check_directory(directory: Path, lock_digest: str) -> Marker:
    """Return the marker of a directory that still is what was verified; raise IntegrityError otherwise."""
    marker = read_marker(directory)
    if marker is None:
        raise IntegrityError(
            "K2-INT-004",
            "There is no staging marker.",
            where=str(directory / MARKER_FILE),
            got="no such file",
            expected=f"a marker of lock {lock_digest}",
        )
    check_marker_against_disk(marker, lock_digest, _stats(directory, marker))
    return marker


def _stats(directory: Path, marker: Marker) -> Iterator[FileStat]:
    for file in marker.files:
        stat = file_stat(directory, file.path)
        if stat is not None:
            yield stat


def _work(arguments: argparse.Namespace) -> Mapping[str, Any]:
    marker = check_directory(arguments.dir, arguments.lock_digest)
    return {"node": marker.node, "lock_digest": marker.lock_digest, "files": len(marker.files)}


def main(argv: list[str] | None = None) -> int:
    """Check a directory and return the exit code: 0, or 5 when the engine must not start."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.marker_check",
        description=__doc__,
        epilog="exit codes: 0 the engine may start, 5 it must not (the reason is printed)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, required=True, help="/models/<org>--<name>/<revision>")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock that the release is made of")
    return run(partial(_work, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
