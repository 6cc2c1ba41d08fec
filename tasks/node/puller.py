"""One puller's share of a lock: what of it is missing in the store is brought there, several blobs at once.

The blobs of the lock (each content once, however many paths have it) are dealt to the pullers largest first, each to
the puller with the least bytes so far: every puller computes the same deal. A blob that is in the store with its size
and its `.ok` statement is not fetched again. See tasks.node.transfer for how a blob moves and how a killed one resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tasks.core.lock import Lock, LockedFile
from tasks.core.units import format_bytes
from tasks.node.meter import Reports
from tasks.node.orphans import Sweep, sweep
from tasks.node.program import Stop, say
from tasks.node.transfer import Route, is_present, move_blob, part_size_bytes, take_up
from tasks.node.workers import attempt, run_all

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


def pull(
    route: Route,
    files: Sequence[LockedFile],
    threads: int,
    stop: Stop,
    reports: Reports,
    sweeping: Sweep | None = None,
) -> dict[str, Any]:
    """Bring the files that the store does not hold yet; return what came, for the result.

    Args:
        route: where from and where to.
        files: what to bring, in this order.
        threads: files at once.
        stop: set by signals.
        reports: told how far each file is.
        sweeping: which uploads of dead pulls are ended; None leaves them alone.
    """
    there = run_all(files, partial(_look, route), threads, stop, lambda: None)
    missing = [file for file, present in zip(files, there, strict=True) if not present]
    missing_bytes = sum(file.size_bytes for file in missing)
    say(f"{len(files)} blobs, {len(files) - len(missing)} are there, {format_bytes(missing_bytes)} to fetch")
    reports.tell({"plan": {"files": len(files), "missing": len(missing), "missing_bytes": missing_bytes}})
    orphans = _sweep(route, missing, stop, sweeping) if sweeping else {"uploads": 0, "bytes": 0}
    fetched = run_all(missing, partial(_move, route, reports), threads, stop, lambda: None)
    return {"verified_anew": fetched.count(False), "orphans": orphans}


def _look(route: Route, file: LockedFile, stop: Stop) -> bool:
    return attempt(lambda: is_present(route.store, file), stop, integrity_tries=1, tries=_TRIES)


def _sweep(route: Route, missing: Sequence[LockedFile], stop: Stop, how: Sweep) -> dict[str, Any]:
    taken_up = set()
    for file in missing:
        part_bytes = part_size_bytes(file, route.part_bytes)
        left = attempt(partial(take_up, route.store, file, part_bytes), stop, integrity_tries=1, tries=_TRIES)
        taken_up |= {left[0]} if left else set()
    return sweep(route.store, how, taken_up, {f"blobs/{file.sha256}" for file in missing})


def concerns(lock: Lock, puller: int, pullers: int) -> Callable[[str], bool]:
    """Return which blobs' uploads a puller looks after: those of its share, and the first one all of other locks."""
    mine = {f"blobs/{file.sha256}" for file in share(lock, puller, pullers)}
    of_lock = {f"blobs/{file.sha256}" for file in lock.files}
    return lambda key: key in mine or (puller == 0 and key not in of_lock)


def _move(route: Route, reports: Reports, file: LockedFile, stop: Stop) -> bool:
    with reports.meter(file) as meter:
        return move_blob(route, file, meter, stop)
