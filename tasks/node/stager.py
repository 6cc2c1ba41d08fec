"""The stager: puts every file of a lock on a node's disk, verified, in an order that a death at any point may cut.

A marker does not grow old: files whose size, time and inode are as they were verified are not read again. Whether the
medium still holds them is what the scheduled scrub reads for, at its own rate; a release need not wait for it, and a
clock that jumps makes no site read everything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import CapacityError, InputError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import MARKER_FILE, FileStat, Marker, StagedFile
from tasks.core.staging import StagingPlan, check_room, plan_staging
from tasks.core.units import format_bytes
from tasks.node import directory_lock
from tasks.node.arrivals import Arrivals, FileQueue
from tasks.node.program import ProgressLines, Stop, StoppedError, say
from tasks.node.quarantine import Quarantine
from tasks.node.rate_limit import RateLimit
from tasks.node.staged_directory import (
    close_for_writing,
    open_for_writing,
    read_marker,
    read_room,
    read_stats,
    refuse_links,
    refuse_other_disks,
    remove_marker,
    sweep_orphans,
    unlisted_files,
)
from tasks.node.staging_result import Node, Staged, staging_result
from tasks.node.verified_file import (
    PLAIN,
    Writing,
    disk_error,
    fsync_directory,
    hash_file,
    make_directory,
    staged_file,
    write_document,
    write_verified,
)
from tasks.node.workers import attempt, run_all

if TYPE_CHECKING:
    from tasks.ports import Block, Source, Store

_TRIES = 4


class Stager:
    """Stages one lock on one node; see the module for the order of things.

    Args:
        source: where the bytes come from; it is not trusted.
        store: where the lock's markers are kept.
        root: the node's directory for weights.
        lock: what is staged.
        node: the node.
        reserve_bytes: what must stay free.
        stop: set by signals.
        writing: what stays in the page cache, and how fast bytes are read and written.
        arrivals: says what the source has, where it is still being filled; None if it has everything.
        source_wait_s: how long nothing new may come from it.
    """

    def __init__(
        self,
        source: Source,
        store: Store,
        root: Path,
        lock: Lock,
        node: Node,
        reserve_bytes: int,
        stop: Stop,
        *,
        writing: Writing = PLAIN,
        arrivals: Arrivals | None = None,
        source_wait_s: float = 0.0,
    ) -> None:
        self._source = source
        self._store = store
        self._root = root
        self._lock = lock
        self._node = node
        self._reserve_bytes = reserve_bytes
        self._stop = stop
        self._writing = writing
        self._arrivals = arrivals
        self._source_wait_s = source_wait_s
        self._directory = root / lock.model_dir
        self._quarantine = Quarantine(self._directory)
        self._emptied = 0
        self._moved: list[dict[str, str]] = []

    def stage(self, threads: int, lock_wait_s: float) -> dict[str, Any]:
        """Return the outcome, with every file verified and the marker written; raise K2Error and leave no marker."""
        if not self._root.is_dir():
            # Made here, it would be on the disk of the system and not on the one that was meant to be mounted.
            raise InputError(
                "K2-INP-001", "The staging root is no directory.", where=f"{self._node.name}: {self._root}"
            )
        # The directories on the way are looked at before they are made or entered.
        refuse_links(self._root, self._directory)
        began = time.monotonic()
        try:
            # Another lock's stager first: both would count the same free bytes as theirs.
            with (
                directory_lock.hold_node(self._root, self._lock.digest, lock_wait_s, self._stop),
                directory_lock.hold(
                    self._root, self._lock.revision, lock_wait_s - (time.monotonic() - began), self._stop
                ),
            ):
                return self._stage_alone(threads)
        except OSError as error:
            raise disk_error(error, self._directory) from error

    def _stage_alone(self, threads: int) -> dict[str, Any]:
        began = time.monotonic()
        make_directory(self._directory)
        refuse_links(self._root, self._directory)
        refuse_other_disks(self._root, self._directory, self._node.name)
        open_for_writing(self._directory)
        if swept_bytes := sweep_orphans(self._directory):
            say(f"swept {format_bytes(swept_bytes)} that a dead stager left")
        self._quarantine.sweep()
        marker = self._old_marker()
        stats = read_stats(self._directory, self._lock)
        plan = plan_staging(self._lock, marker, stats, self._node.name, self._node.uid)
        if plan.to_hash or plan.to_write or marker is None or marker.lock_digest != self._lock.digest:
            remove_marker(self._directory)
            marker = None
        self._move_away(plan, stats)
        self._check_room(plan)
        say(
            f"{self._node.name}: {len(plan.kept)} files kept, {len(plan.to_hash)} to hash, "
            f"{len(plan.to_write)} to write ({format_bytes(plan.bytes_to_write)})"
        )
        done = self._work(plan, threads)
        if marker is None:
            marker = self._leave_marker((*plan.kept, *(staged.file for staged in done)))
        close_for_writing(self._directory)
        self._publish(marker)
        return staging_result(self._node, self._lock, marker, done, self._moved, time.monotonic() - began)

    def _old_marker(self) -> Marker | None:
        try:
            return read_marker(self._directory)
        except IntegrityError as error:
            say(f"the marker that is there does not count: {error}")
            return None

    def _move_away(self, plan: StagingPlan, stats: Mapping[str, FileStat]) -> None:
        """Move files of another size, and files that are not of the lock: an engine would read them all the same."""
        for file in plan.to_write:
            if file.path in stats:
                got = f"{stats[file.path].size_bytes} bytes"
                self._quarantined(file.path, got, f"{got} instead of {file.size_bytes}", expected=file.sha256)
        for path in unlisted_files(self._directory, self._lock):
            self._quarantined(path, "not in the lock", "not in the lock")

    def _quarantined(self, path: str, got: str, reason: str, sha256: str = "", expected: str = "") -> None:
        self._quarantine.take(path, reason, sha256, expected)
        self._moved.append({"path": path, "got": got})
        say(f"{self._node.name}: {path} is moved to the quarantine: {reason}")

    def _check_room(self, plan: StagingPlan) -> None:
        room = read_room(self._directory, self._quarantine.size_bytes)
        if check_room(plan, room, self._reserve_bytes, f"{self._node.name}: {self._directory}"):
            self._empty_quarantine()

    def _empty_quarantine(self) -> int:
        if freed_bytes := self._quarantine.sweep(keep=0):
            self._emptied += 1
            say(f"{self._node.name}: {format_bytes(freed_bytes)} of the quarantine give way to the weights")
        return freed_bytes

    def _work(self, plan: StagingPlan, threads: int) -> list[Staged]:
        jobs = (*plan.to_write, *plan.to_hash)
        progress = ProgressLines(sum(file.size_bytes for file in jobs), len(jobs))
        queue = FileQueue(plan.to_hash, plan.to_write, self._arrivals, self._source_wait_s, self._node.name)
        try:
            work = partial(self._stage_next, queue, progress)
            return run_all(range(len(jobs)), work, threads, self._stop, self._abandon_temps)
        finally:
            progress.finish()

    def _stage_next(self, queue: FileQueue, progress: ProgressLines, _: int, stop: Stop) -> Staged:
        while True:
            file, here = queue.take(stop)
            if staged := self._keep_if_right(progress, file, stop) if here else self._bring(progress, file, stop):
                progress.file_done()
                return staged
            queue.fetch_instead(file)

    def _keep_if_right(self, progress: ProgressLines, file: LockedFile, stop: Stop) -> Staged | None:
        """Return the file that is there if its bytes are right; else None, and it is out of the way."""
        path, began = self._directory / file.path, time.monotonic()
        hashed = _Counted(progress, stop, self._writing.limit)
        try:
            size_bytes, sha256 = hash_file(path, hashed)
        except FileNotFoundError:
            return None
        if (size_bytes, sha256) != (file.size_bytes, file.sha256):
            hashed.take_back()
            self._quarantined(file.path, f"sha256 {sha256}", "wrong bytes", sha256, file.sha256)
            return None
        # It may have been copied in without either.
        path.chmod(0o444)
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
            if self._writing.cache_mode == "drop":
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        fsync_directory(path.parent)
        return Staged(staged_file(self._directory, file.path, file.sha256), False, time.monotonic() - began, 1, "disk")

    def _bring(self, progress: ProgressLines, file: LockedFile, stop: Stop) -> Staged:
        """Fetch a file, and once more if the bytes are wrong; what a broken stream brought is fetched again, too."""
        began, wrong, tries = time.monotonic(), list[str](), list[None]()

        def fetch() -> StagedFile:
            tries.append(None)
            return self._fetch(progress, file, stop, wrong)

        staged = attempt(fetch, stop, integrity_tries=2, tries=_TRIES)
        return Staged(staged, True, time.monotonic() - began, len(tries), self._source.name)

    def _fetch(self, progress: ProgressLines, file: LockedFile, stop: Stop, wrong: list[str]) -> StagedFile:
        while True:
            written, emptied = _Counted(progress, stop), self._emptied
            blocks = _stoppable(self._source.open(file), stop)
            try:
                with contextlib.closing(blocks):
                    return write_verified(self._directory, file.path, file, blocks, written, self._writing)
            except StoppedError:
                raise
            except K2Error as error:
                written.take_back()
                if isinstance(error, CapacityError) and (self._empty_quarantine() or self._emptied > emptied):
                    continue  # there is room now; another thread may have made it
                if isinstance(error, IntegrityError):
                    wrong.append(error.got)
                raise self._named(error, file, wrong) from error

    def _named(self, error: K2Error, file: LockedFile, wrong: list[str]) -> K2Error:
        """Return the error with the node and the file in its place, which the one who wrote it did not know."""
        where = f"{self._node.name}: {file.path}"
        hint, details = error.hint, dict(error.details)
        if isinstance(error, IntegrityError):
            details |= {"tries": wrong, "source": self._source.name}
            hint = (
                f"Nothing unverified was kept on {self._node.name}. If it comes again, the copy at "
                f"{self._source.name} is wrong: delete blobs/{file.sha256} and its .ok from the store, then run the "
                "release again."
            )
        elif isinstance(error, UnavailableError):
            where += f" ({error.where})" if error.where else ""
        return type(error)(error.code, error.summary, where, error.got, error.expected, hint, error.retry, details)

    def _abandon_temps(self) -> None:
        with contextlib.suppress(OSError):
            sweep_orphans(self._directory)

    def _leave_marker(self, files: tuple[StagedFile, ...]) -> Marker:
        marker = Marker(
            lock_digest=self._lock.digest,
            repo=self._lock.repo,
            revision=self._lock.revision,
            node=self._node.name,
            node_uid=self._node.uid,
            files=tuple(sorted(files, key=lambda file: file.path)),
            verified_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            tool=_tool(),
        )
        self._stop.check()
        write_document(self._directory / MARKER_FILE, marker.to_bytes())
        return marker

    def _publish(self, marker: Marker) -> None:
        """Put a copy of the marker into the store, where the flow and audits read it."""
        key = f"markers/{self._node.name}/{self._lock.digest}.json"
        attempt(partial(self._store.put, key, marker.to_bytes()), self._stop, integrity_tries=1, tries=_TRIES)


class _Counted:
    """Counts what one attempt adds to the progress, so that it can be taken back when the attempt fails."""

    def __init__(self, progress: ProgressLines, stop: Stop, limit: RateLimit | None = None) -> None:
        self._progress = progress
        self._stop = stop
        self._limit = limit
        self.count_bytes = 0

    def __call__(self, count_bytes: int) -> None:
        self._stop.check()
        if self._limit is not None:
            self._limit.take(count_bytes)
        self.count_bytes += count_bytes
        self._progress.advance(count_bytes)

    def take_back(self) -> None:
        self._progress.advance(-self.count_bytes)
        self.count_bytes = 0


def _tool() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"k2-release {version('k2-release')}"
    except PackageNotFoundError:  # run from a plain copy of the source
        return "k2-release"


def _stoppable(blocks: Iterator[Block], stop: Stop) -> Generator[Block, None, None]:
    for block in blocks:
        stop.check()
        yield block
