"""Fetches this puller's share of a lock from the Hub into the object store, verified in the same pass.

The blobs of the lock (each content once, however many paths have it) are dealt to the pullers largest first, each to
the puller with the least bytes so far: every puller computes the same deal. A blob that is in the store with its size
and its `.ok` marker is not fetched again. See tasks.node.transfer for how a blob moves and how a killed one resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tasks.core.errors import InputError
from tasks.core.lock import Lock, LockedFile
from tasks.core.units import format_bytes
from tasks.node.environment import ENVIRONMENT_HELP, hub_from_environment, required, store_from_environment
from tasks.node.program import ProgressLines, Stop, run, say
from tasks.node.stored_lock import read_lock
from tasks.node.transfer import MIN_PART_BYTES, Route, is_present, move_blob
from tasks.node.workers import attempt, run_all

if TYPE_CHECKING:
    from tasks.ports import Store

DEFAULT_PART_BYTES = 64 * 1024 * 1024
_TRIES = 4


def share(lock: Lock, puller: int, pullers: int) -> list[LockedFile]:
    """Return one file for each blob that a puller has to bring, largest first."""
    blobs = {file.sha256: file for file in reversed(lock.files)}
    loads = [(0, index) for index in range(pullers)]
    mine = []
    for file in sorted(blobs.values(), key=lambda file: (-file.size_bytes, file.sha256)):
        load, index = min(loads)
        loads[index] = (load + file.size_bytes, index)
        if index == puller:
            mine.append(file)
    return mine


def pull(route: Route, files: list[LockedFile], threads: int, stop: Stop) -> dict[str, int]:
    """Bring the files that the store does not hold yet; return the counts for the termination message."""
    there = run_all(files, partial(_look, route.store), threads, stop, lambda: None)
    missing = [file for file, present in zip(files, there, strict=True) if not present]
    missing_bytes = sum(file.size_bytes for file in missing)
    say(f"{len(files)} blobs, {len(files) - len(missing)} are there, {format_bytes(missing_bytes)} to fetch")
    progress = ProgressLines(missing_bytes, len(missing))
    try:
        fetched = run_all(missing, partial(_move, route, progress), threads, stop, lambda: None)
    finally:
        progress.finish()
    return {"files": len(files), "bytes_fetched": sum(fetched), "files_present": len(files) - len(missing)}


def _look(store: Store, file: LockedFile, stop: Stop) -> bool:
    return attempt(lambda: is_present(store, file), stop, integrity_tries=1, tries=_TRIES)


def _move(route: Route, progress: ProgressLines, file: LockedFile, stop: Stop) -> int:
    fetched_bytes = move_blob(route, file, stop, progress.advance)
    progress.file_done()
    return fetched_bytes


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    puller, pullers = arguments.puller, arguments.of
    if not 0 <= puller < pullers:
        raise InputError("K2-INP-001", "--puller must be from 0 to --of less 1.", where="--puller", got=str(puller))
    if arguments.part_bytes < MIN_PART_BYTES:
        raise InputError(
            "K2-INP-001",
            "S3 takes no smaller parts.",
            where="--part-bytes",
            got=str(arguments.part_bytes),
            expected=f"at least {MIN_PART_BYTES}",
        )
    store = store_from_environment(arguments.stall_s)
    hub = hub_from_environment(arguments.stall_s)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    route = Route(hub, store, lock, required("HF_ENDPOINT"), arguments.part_bytes)
    return {"puller": puller, "of": pullers, **pull(route, share(lock, puller, pullers), arguments.threads, stop)}


def main(argv: list[str] | None = None) -> int:
    """Pull a share of a lock and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.pull",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """  HF_ENDPOINT, HF_TOKEN                      the Hub or a mirror of it, and a token if it needs one

exit codes: 0 the share is in the store, 2 wrong input, 5 the Hub serves other bytes than the lock says,
11 Hub or store: try again
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--puller", type=int, required=True, help="number of this puller, from 0")
    parser.add_argument("--of", type=int, required=True, help="count of pullers")
    parser.add_argument("--part-bytes", type=int, default=DEFAULT_PART_BYTES, help="size of an upload part (64 MiB)")
    parser.add_argument(
        "--threads", type=int, default=3, help="blobs at once (3); each holds up to two parts in memory"
    )
    parser.add_argument("--stall-s", type=float, default=30.0, help="no byte for so long is a stall (30)")
    arguments = parser.parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
