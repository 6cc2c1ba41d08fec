"""Reads every file of a checkpoint on this node again and compares it with the lock: the proof behind a receipt.

Unlike the marker check this reads all bytes, so it also finds a byte that changed on the medium. It writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import After, IntegrityError, UnavailableError
from tasks.core.file_verdicts import MISSING, UNREADABLE, FileVerdict, Findings
from tasks.core.lock import Lock
from tasks.node.checkout import read_checkout
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.program import ProgressLines, Stop, run, say
from tasks.node.stored_lock import read_lock
from tasks.node.workers import attempt

_TRIES = 4
_NAMED, _ROOM_BYTES = 10, 2500
_NAMED_IN_HINT = 3


def verify_directory(
    directory: Path, lock: Lock, node: str, threads: int, stop: Stop, progress: ProgressLines | None = None
) -> int:
    """Return the bytes that were read and found right; every file that is not is named on standard error.

    Raises:
        IntegrityError: a file of the lock is missing or differs; the first is named, further ones are in `details`.
        UnavailableError: the disk failed.
    """
    findings = read_checkout(directory, lock, links=False, threads=threads, stop=stop, tally=progress)
    if progress is not None:
        progress.finish()
    for problem in findings.problems:
        say(f"{problem.verdict}: {problem.path}; got: {problem.got}, expected: {problem.expected}")
    if findings.differs:
        raise _difference(node, findings, lock)
    if findings.problems:
        raise _unreadable(node, findings)
    return findings.read_bytes


def _difference(node: str, findings: Findings, lock: Lock) -> IntegrityError:
    problems = findings.problems
    first = next(problem for problem in problems if problem.verdict != UNREADABLE)
    there = [problem.path for problem in problems if problem.verdict != MISSING]
    return IntegrityError(
        "K2-INT-002",
        f"{len(problems)} of {len(lock.files)} files are missing or differ from the lock.",
        where=f"{node}: {first.path}",
        got=first.got,
        expected=first.expected,
        hint=_hint(node, there),
        details=_details(node, problems),
    )


def _unreadable(node: str, findings: Findings) -> UnavailableError:
    first = findings.problems[0]
    return UnavailableError(
        "K2-UNA-001",
        f"{len(findings.problems)} files cannot be read.",
        where=f"{node}: {first.path}",
        got=first.got,
        hint="Check the disk (dmesg, mount options), then run the same command again.",
        retry=After(5.0),
        details=_details(node, findings.problems),
    )


def _details(node: str, problems: Sequence[FileVerdict]) -> dict[str, Any]:
    """Return the first problems, as many as a termination message has room for, and their count; the log has all."""
    named: list[dict[str, str]] = []
    for p in problems[:_NAMED]:
        row = {"path": p.path, "got": p.got, "expected": p.expected, "verdict": p.verdict}
        if len(json.dumps([*named, row])) > _ROOM_BYTES:
            break
        named.append(row)
    return {"node": node, "problems": named, "count": len(problems)}


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
