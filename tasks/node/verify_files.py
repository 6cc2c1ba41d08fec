"""Reads every file of a checkpoint on this node again and compares it with the lock: the proof behind a receipt.

Unlike the marker check this reads all bytes, so it also finds a byte that changed on the medium. It writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import IntegrityError
from tasks.core.lock import Lock, LockedFile
from tasks.core.verify import Mismatch, ObservedFile, compare
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.program import ProgressLines, Stop, run
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import disk_error, hash_file
from tasks.node.workers import attempt, run_all

_TRIES = 4
_NAMED = 10
_MISSING = "no such file"
_NAMED_IN_HINT = 3


def verify_directory(
    directory: Path, lock: Lock, node: str, threads: int, stop: Stop, progress: ProgressLines | None = None
) -> int:
    """Return the bytes that were read and found right.

    Raises:
        IntegrityError: a file of the lock is missing or differs; the first is named, further ones are in `details`.
        UnavailableError: the disk failed.
    """
    largest_first = sorted(lock.files, key=lambda file: (-file.size_bytes, file.path))
    observe = partial(_observe, directory, node, progress)
    observed = run_all(largest_first, observe, threads, stop, lambda: None)
    if progress is not None:
        progress.finish()
    result = compare(lock, (file for file in observed if file is not None))
    if not result.ok:
        raise _difference(node, [*result.mismatched, *(Mismatch(path, _MISSING, "") for path in result.missing)], lock)
    return lock.total_bytes


def _observe(
    directory: Path, node: str, progress: ProgressLines | None, file: LockedFile, stop: Stop
) -> ObservedFile | None:
    def advance(count_bytes: int) -> None:
        stop.check()
        if progress is not None:
            progress.advance(count_bytes)

    try:
        size_bytes, sha256 = hash_file(directory / file.path, advance)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        failure = disk_error(error, directory / file.path)
        failure.where = f"{node}: {file.path}"
        raise failure from error
    except IntegrityError as error:
        return ObservedFile(file.path, file.size_bytes, error.got)
    if progress is not None:
        progress.file_done()
    return ObservedFile(file.path, size_bytes, sha256)


def _difference(node: str, problems: list[Mismatch], lock: Lock) -> IntegrityError:
    first = problems[0]
    there = [problem.path for problem in problems if problem.got != _MISSING]
    return IntegrityError(
        "K2-INT-002",
        f"{len(problems)} of {len(lock.files)} files are missing or differ from the lock.",
        where=f"{node}: {first.path}",
        got=first.got,
        expected=first.expected or lock.file(first.path).sha256,
        hint=_hint(node, there),
        details={
            "node": node,
            "problems": [
                {"path": p.path, "got": p.got, "expected": p.expected or lock.file(p.path).sha256}
                for p in problems[:_NAMED]
            ],
        },
    )


def _hint(node: str, wrong: list[str]) -> str:
    """Return what puts it right. A wrong file has to go: its time may say that it is the one that was verified."""
    if not wrong:
        return f"start no engine on {node}: the next release of these weights stages what is missing"
    more = f" and {len(wrong) - _NAMED_IN_HINT} more" if len(wrong) > _NAMED_IN_HINT else ""
    files = ", ".join(wrong[:_NAMED_IN_HINT]) + more
    return f"Delete {files} on {node}, start no engine there: the next release of these weights stages it."


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    store = store_from_environment(stall_s=30.0)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    progress = ProgressLines(lock.total_bytes, len(lock.files))
    checked_bytes = verify_directory(arguments.dir, lock, arguments.node, arguments.threads, stop, progress)
    return {"node": arguments.node, "checked": len(lock.files), "bytes": checked_bytes}


def main(argv: list[str] | None = None) -> int:
    """Verify a checkpoint on this node and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.verify_files",
        description=__doc__,
        epilog=ENVIRONMENT_HELP + "\nexit codes: 0 every byte is right, 5 a file differs or is missing (it is named)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, required=True, help="/models/<org>--<name>/<revision>")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--node", required=True, help="name of the node, for the report")
    parser.add_argument("--threads", type=int, default=4, help="files at once (default: 4)")
    arguments = parser.parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
