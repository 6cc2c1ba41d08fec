"""Reads every staged byte again from the medium, slowly, holds it against the lock, and puts right what has rotted.

Files are read past the page cache, so that the medium is what is tested and nothing is pushed out that a serving engine
has there. A file that is wrong, gone or unreadable is fetched again, from the store or else from the Hub, verified as
it is written, and only then swapped in; the wrong one goes to the quarantine. The marker is taken away before that and
a new one is written after it, so no engine starts on the node in between. An engine that has the wrong file open keeps
it until it is restarted: the report says so.

Cut off, it goes on behind the last file that it had read. It stands back while a stager works on the node.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.identity import canonical_bytes
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import FileStat, Marker, StagedFile
from tasks.node import directory_lock
from tasks.node.environment import ENVIRONMENT_HELP, hub_from_environment, store_from_environment
from tasks.node.io_priority import be_idle
from tasks.node.medium import MediumError, read_medium
from tasks.node.open_files import ignore_lease_breaks
from tasks.node.program import ProgressLines, Stop, run, say
from tasks.node.rate_limit import RateLimit
from tasks.node.repair import Place, Repairer
from tasks.node.rot import NO_FILE, Rot
from tasks.node.scrub_record import ScrubRecord
from tasks.node.sources import HubSource, StoreSource
from tasks.node.staged_directory import refuse_links
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import Writing, disk_error
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Source, Store

_TRIES = 4
_ROUNDS = 3
_STAND_BACK_EVERY_S = 2.0
_POLL_S = 1.0
_NAMED = 6


@dataclass(frozen=True)
class Pace:
    """How fast: limits in bytes per second of reading and of writing files anew, 0 for none, and what stays free."""

    read_bytes_per_s: float = 0
    repair_bytes_per_s: float = 0
    reserve_bytes: int = 0
    lock_wait_s: float = 3600.0


@dataclass
class Findings:
    """What one run has seen and done."""

    files_read: int = 0
    bytes_read: int = 0
    how: set[str] = field(default_factory=set)
    rotten: list[Rot] = field(default_factory=list)

    @property
    def left(self) -> list[Rot]:
        """What could not be put right."""
        return [rot for rot in self.rotten if not rot.repaired]


class Scrubber:
    """Scrubs the checkpoint of a lock on one node; see the module for the order of things.

    Args:
        place: what is scrubbed.
        sources: where a wrong file is fetched from: the first that has it.
        store: takes the marker's copy and the report.
        pace: how fast.
        stop: set by signals.
    """

    def __init__(self, place: Place, sources: Sequence[Source], store: Store, pace: Pace, stop: Stop) -> None:
        self._place = place
        self._store = store
        self._stop = stop
        limits = (pace.read_bytes_per_s, pace.repair_bytes_per_s)
        self._limit, writing = (RateLimit(limit, stop.sleep) if limit else None for limit in limits)
        self._repairer = Repairer(
            place, sources, store, Writing("drop", writing), pace.reserve_bytes, pace.lock_wait_s, stop
        )
        self._found = Findings()
        self._looked_at = 0.0
        self._progress = ProgressLines(place.lock.total_bytes, len(place.lock.files))

    def scrub(self) -> dict[str, Any]:
        """Return what was found, with every file right and the marker true.

        Raises:
            IntegrityError: something is wrong and could not be put right; no marker says otherwise.
            UnavailableError: not everything could be read; run again, it goes on.
        """
        place = self._place
        if not place.directory.is_dir():
            raise IntegrityError(
                "K2-INT-002",
                "The checkpoint's directory is not there.",
                where=f"{place.node}: {place.directory}",
                got="no such directory",
                expected=f"the files of lock {place.lock.digest}",
                hint=f"start no engine on {place.node}: the next release of these weights stages it",
                details={"node": place.node},
            )
        refuse_links(place.root, place.directory)
        try:
            with directory_lock.hold_scrub(place.root, place.lock.revision, self._stop):
                return self._scrub_alone()
        except OSError as error:
            raise disk_error(error, place.directory) from error
        finally:
            self._progress.finish()

    def _scrub_alone(self) -> dict[str, Any]:
        place = self._place
        place.marker()  # one of another lock ends it here
        record = ScrubRecord(place.root, place.lock.digest)
        self._say_resumed(record)
        for _ in range(_ROUNDS):
            todo = [file for file in place.lock.files if not self._is_done(record, file)]
            for file in todo:
                self._scrub_file(record, file)
            if not todo:
                break
        marked = None if self._found.left else self._mark(record)
        outcome = self._outcome(record, marked)
        self._report(outcome)
        if self._found.left:
            raise self._not_put_right(outcome)
        record.finish()
        return outcome

    def _say_resumed(self, record: ScrubRecord) -> None:
        read = [file for file in self._place.lock.files if self._is_done(record, file)]
        if read:
            say(f"{self._place.node}: going on; {len(read)} files were read already")
        for file in read:
            self._progress.advance(file.size_bytes)
            self._progress.file_done()

    def _is_done(self, record: ScrubRecord, file: LockedFile) -> bool:
        given_up = any(rot.path == file.path for rot in self._found.left)
        return given_up or record.holds(file, self._place.stat(file.path))

    def _scrub_file(self, record: ScrubRecord, file: LockedFile) -> None:
        """Read one file; note it if it is right, repair it if not. One that changes meanwhile is left for later."""
        self._stand_back()
        before = self._place.stat(file.path)
        try:
            rot = self._examine(file, before)
        except FileNotFoundError:
            return  # it was replaced: looked at again
        if rot is not None:
            self._put_right(record, file, before, rot)
        elif before is not None and before == self._place.stat(file.path):
            record.note(StagedFile(file.path, before.size_bytes, file.sha256, before.mtime_ns, before.inode))
            self._progress.file_done()

    def _examine(self, file: LockedFile, before: FileStat | None) -> Rot | None:
        """Return what is wrong with a file, None if nothing is."""
        path, expected = self._place.directory / file.path, f"sha256 {file.sha256}"
        if before is None:
            return Rot(file.path, NO_FILE if path.exists() or path.is_symlink() else "missing", "", expected)
        if before.size_bytes != file.size_bytes:
            return Rot(file.path, "size", f"{before.size_bytes} bytes", f"{file.size_bytes} bytes")
        try:
            reading = read_medium(path, self._take)
        except MediumError as error:
            return Rot(file.path, "unreadable", str(error), expected)
        self._found.how.add(reading.how)
        self._found.files_read += 1
        if (reading.size_bytes, reading.sha256) == (file.size_bytes, file.sha256):
            return None
        return Rot(file.path, "content", f"sha256 {reading.sha256}", expected)

    def _take(self, count_bytes: int) -> None:
        """Wait until so many bytes may be read."""
        self._stop.check()
        if time.monotonic() - self._looked_at >= _STAND_BACK_EVERY_S:
            self._stand_back()
        if self._limit is not None:
            self._limit.take(count_bytes)
        self._found.bytes_read += count_bytes
        self._progress.advance(count_bytes)

    def _stand_back(self) -> None:
        """Wait while somebody stages on this node."""
        place, told = self._place, False
        while directory_lock.node_is_held(place.root) or directory_lock.is_held(place.root, place.lock.revision):
            if not told:
                say(f"{place.node}: a stager works on this node: waiting for it")
                told = True
            self._stop.sleep(_POLL_S)
        self._looked_at = time.monotonic()

    def _put_right(self, record: ScrubRecord, file: LockedFile, before: FileStat | None, rot: Rot) -> None:
        node = self._place.node
        say(f"{node}: {file.path}: {rot.problem}: {rot.got or 'nothing that can be read'}, expected {rot.expected}")
        staged = self._repairer.repair(file, before, rot)
        if rot.is_gone:
            return
        self._found.rotten.append(rot)
        if staged is not None:
            record.note(staged)
            self._progress.file_done()
            say(f"{node}: {file.path} is right again, from {rot.source}")

    def _mark(self, record: ScrubRecord) -> tuple[Marker, bool]:
        """Make the marker say what was read, if it does not already."""
        place = self._place
        with self._repairer.alone():
            changed = [file.path for file in place.lock.files if not record.holds(file, place.stat(file.path))]
            if changed:
                raise UnavailableError(
                    "K2-UNA-001",
                    "Files are changed while they are read.",
                    where=f"{place.node}: {changed[0]}",
                    got=f"{len(changed)} files changed",
                    expected="nobody else writes there",
                    hint=f"find out who writes to {place.directory} on the node, then scrub again",
                )
            return self._repairer.mark(record.of(place.lock.files))

    def _outcome(self, record: ScrubRecord, marked: tuple[Marker, bool] | None) -> dict[str, Any]:
        place, found = self._place, self._found
        return {
            "node": place.node,
            "lock_digest": place.lock.digest,
            "marker": "none" if marked is None else "written anew" if marked[1] else "kept",
            "marker_sha256": marked[0].digest if marked is not None else "",
            "files": len(place.lock.files),
            "files_read": found.files_read,
            "files_read_before": record.resumed_files,
            "bytes_read": found.bytes_read,
            "how": "+".join(sorted(found.how)),
            "rotten": len(found.rotten),
            "unrepaired": len(found.left),
            "problems": [rot.as_row() for rot in found.rotten],
        }

    def _report(self, outcome: Mapping[str, Any]) -> None:
        """Keep the whole report in the store; one that is away keeps nothing back, as the Job's own message says it."""
        key = f"scrubs/{self._place.node}/{self._place.lock.digest}.json"
        data = canonical_bytes({"version": 1, "at": time.time(), **outcome})
        with contextlib.suppress(UnavailableError):
            attempt(partial(self._store.put, key, data), self._stop, integrity_tries=1, tries=2)

    def _not_put_right(self, outcome: Mapping[str, Any]) -> IntegrityError:
        left, node = self._found.left, self._place.node
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return IntegrityError(
            "K2-INT-002",
            f"{len(left)} of {len(self._place.lock.files)} files have rotted and could not be put right.",
            where=f"{node}: {left[0].path}{more}",
            got=left[0].got or left[0].problem,
            expected=left[0].expected,
            hint=f"start no engine on {node}. It could not be fetched again: {left[0].why_not}. "
            f"When it can: k2ctl scrub --node {node}",
            details={key: outcome[key] for key in ("node", "lock_digest", "rotten", "unrepaired")}
            | {"problems": [rot.as_row() for rot in left][:_NAMED]},
        )


def _fitting(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome with as many problems as a termination message has room for; the report has them all."""
    return {**outcome, "problems": outcome["problems"][:_NAMED]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.scrub",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """  HF_ENDPOINT, HF_TOKEN                      where files come from that the store does not have (optional)

example:
  python -m tasks.node.scrub --root /models --lock-digest 3f0c...e1 --node node-1 --node-uid 7b1e-... \\
    --limit-bytes-per-s 500000000

exit codes: 0 every byte is right (again), 5 a file is wrong and stays so (it is named), 11 not all was read: run again
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="the node's NVMe directory for weights (/models)")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--node", required=True, help="name of the node; stands in the marker")
    parser.add_argument("--node-uid", required=True, help="uid of the Node object")
    parser.add_argument("--limit-bytes-per-s", type=float, default=0.0, help="of reading (default 0: none)")
    parser.add_argument("--repair-bytes-per-s", type=float, default=0.0, help="of writing anew (default 0: none)")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--source-stall-s", type=float, default=30.0, help="no byte for so long is a stall (30)")
    parser.add_argument("--lock-wait-s", type=float, default=3600.0, help="how long to wait for a stager (3600)")
    return parser


def _sources(lock: Lock, store: Store, stall_s: float) -> list[Source]:
    """Return the store, and the Hub where the environment names one."""
    sources: list[Source] = [StoreSource(store)]
    with contextlib.suppress(InputError):
        sources.append(HubSource(hub_from_environment(stall_s), lock))
    return sources


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    ignore_lease_breaks()
    if not be_idle():
        say("the kernel has no idle class for this program: the rate limit alone keeps it back")
    store = store_from_environment(arguments.source_stall_s)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    place = Place(arguments.root, lock, arguments.node, arguments.node_uid)
    pace = Pace(
        arguments.limit_bytes_per_s, arguments.repair_bytes_per_s, arguments.reserve_bytes, arguments.lock_wait_s
    )
    sources = _sources(lock, store, arguments.source_stall_s)
    return _fitting(Scrubber(place, sources, store, pace, stop).scrub())


def main(argv: list[str] | None = None) -> int:
    """Scrub a lock on this node and return the exit code."""
    arguments = _parser().parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
