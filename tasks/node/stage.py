"""Puts every file of a lock on this node's disk, verified in the pass that writes it, and leaves a marker last.

Duties, in this order: one stager at a time in the directory; no symlinks; orphans of dead stagers swept; room checked
before the first byte; each missing file streamed from the store to a temp that gets its name only with the right
sha256; files that no marker vouches for hashed in place and replaced if wrong; the marker. A run that fails leaves no
marker. Run again, it keeps what was verified and fetches only the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import InputError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import MARKER_FILE, Marker, StagedFile
from tasks.core.staging import check_room, plan_staging
from tasks.core.units import format_bytes
from tasks.node import directory_lock
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.program import ProgressLines, Stop, StoppedError, run, say
from tasks.node.sources import StoreSource
from tasks.node.staged_directory import (
    read_marker,
    read_room,
    read_stats,
    refuse_links,
    remove_marker,
    sweep_orphans,
)
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import (
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


@dataclass(frozen=True)
class Node:
    """The node that is staged: its name and the uid of its Node object."""

    name: str
    uid: str


@dataclass(frozen=True)
class Staged:
    """One file as it stands verified on the node, and whether its bytes had to be written."""

    file: StagedFile
    written: bool


class Stager:
    """Stages one lock on one node; see the module for the order of things."""

    def __init__(
        self, source: Source, store: Store, root: Path, lock: Lock, node: Node, reserve_bytes: int, stop: Stop
    ) -> None:
        self._source = source
        self._store = store
        self._root = root
        self._lock = lock
        self._node = node
        self._reserve_bytes = reserve_bytes
        self._stop = stop
        self._directory = root / lock.model_dir

    def stage(self, threads: int, lock_wait_s: float) -> dict[str, Any]:
        """Return the outcome, with every file verified and the marker written; raise K2Error and leave no marker."""
        if not self._root.is_dir():
            # Made here, it would be on the disk of the system and not on the one that was meant to be mounted.
            raise InputError(
                "K2-INP-001", "The staging root is no directory.", where=f"{self._node.name}: {self._root}"
            )
        # The directories on the way are looked at before they are made or entered.
        refuse_links(self._root, self._directory)
        with directory_lock.hold(self._root, self._lock.revision, lock_wait_s, self._stop):
            try:
                return self._stage_alone(threads)
            except OSError as error:
                raise disk_error(error, self._directory) from error

    def _stage_alone(self, threads: int) -> dict[str, Any]:
        make_directory(self._directory)
        refuse_links(self._root, self._directory)
        if swept_bytes := sweep_orphans(self._directory):
            say(f"swept {format_bytes(swept_bytes)} that a dead stager left")
        marker = self._old_marker()
        stats = read_stats(self._directory, self._lock)
        plan = plan_staging(self._lock, marker, stats, self._node.name, self._node.uid)
        jobs = (*plan.to_write, *plan.to_hash)
        if jobs or marker is None or marker.lock_digest != self._lock.digest:
            remove_marker(self._directory)
            marker = None
        check_room(plan, read_room(self._directory), self._reserve_bytes, f"{self._node.name}: {self._directory}")
        say(
            f"{self._node.name}: {len(plan.kept)} files kept, {len(plan.to_hash)} to hash, "
            f"{len(plan.to_write)} to write ({format_bytes(plan.bytes_to_write)})"
        )
        done = self._work(jobs, threads)
        written = [staged.file for staged in done if staged.written]
        if marker is None:
            marker = self._leave_marker((*plan.kept, *(staged.file for staged in done)))
        self._publish(marker)
        return {
            "node": self._node.name,
            "lock_digest": self._lock.digest,
            "marker_sha256": marker.digest,
            "files": len(self._lock.files),
            "bytes_written": sum(file.size_bytes for file in written),
            "files_kept": len(self._lock.files) - len(written),
        }

    def _old_marker(self) -> Marker | None:
        try:
            return read_marker(self._directory)
        except IntegrityError as error:
            say(f"the marker that is there does not count: {error}")
            return None

    def _work(self, jobs: tuple[LockedFile, ...], threads: int) -> list[Staged]:
        progress = ProgressLines(sum(file.size_bytes for file in jobs), len(jobs))
        largest_first = sorted(jobs, key=lambda file: (-file.size_bytes, file.path))
        try:
            return run_all(largest_first, partial(self._stage_file, progress), threads, self._stop, self._abandon_temps)
        finally:
            progress.finish()

    def _stage_file(self, progress: ProgressLines, file: LockedFile, stop: Stop) -> Staged:
        staged = self._keep_if_right(progress, file) or attempt(
            partial(self._fetch, progress, file, stop), stop, integrity_tries=2, tries=_TRIES
        )
        progress.file_done()
        return staged

    def _keep_if_right(self, progress: ProgressLines, file: LockedFile) -> Staged | None:
        """Return the file that is there if its bytes are right, else None; it stays until a right one replaces it."""
        path = self._directory / file.path
        if not path.exists() or path.stat().st_size != file.size_bytes:
            return None
        hashed = _Counted(progress)
        size_bytes, sha256 = hash_file(path, hashed)
        if (size_bytes, sha256) != (file.size_bytes, file.sha256):
            say(f"{self._node.name}: {file.path} has wrong bytes (sha256 {sha256}): replacing it")
            hashed.take_back()
            return None
        # It may have been copied in without either.
        path.chmod(0o444)
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
        fsync_directory(path.parent)
        return Staged(staged_file(self._directory, file.path, file.sha256), written=False)

    def _fetch(self, progress: ProgressLines, file: LockedFile, stop: Stop) -> Staged:
        written = _Counted(progress)
        blocks = _stoppable(self._source.open(file), stop)
        try:
            with contextlib.closing(blocks):
                staged = write_verified(self._directory, file.path, file, blocks, written)
        except StoppedError:
            raise
        except K2Error as error:
            written.take_back()
            raise self._named(error, file) from error
        return Staged(staged, written=True)

    def _named(self, error: K2Error, file: LockedFile) -> K2Error:
        """Return the error with the node and the file in its place, which the one who wrote it did not know."""
        where = f"{self._node.name}: {file.path}"
        hint = error.hint
        if isinstance(error, IntegrityError):
            hint = (
                f"Nothing unverified was kept on {self._node.name}. If it comes again, the store's copy is wrong: "
                f"delete blobs/{file.sha256} and its .ok from the store, then run the release again."
            )
        elif isinstance(error, UnavailableError):
            where += f" ({error.where})" if error.where else ""
        return type(error)(
            error.code, error.summary, where, error.got, error.expected, hint, error.retry, dict(error.details)
        )

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

    def __init__(self, progress: ProgressLines) -> None:
        self._progress = progress
        self.count_bytes = 0

    def __call__(self, count_bytes: int) -> None:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.stage",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """
example:
  python -m tasks.node.stage --root /models --lock-digest 3f0c...e1 --node node-1 --node-uid 7b1e-...

exit codes: 0 staged and marked, 2 wrong input, 5 bytes differ from the lock, 8 no room, 11 store or disk: try again
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="the node's NVMe directory for weights (/models)")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--node", required=True, help="name of the node; stands in the marker")
    parser.add_argument("--node-uid", required=True, help="uid of the Node object: a rebuilt node trusts no old marker")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--threads", type=int, default=3, help="files at once (default: 3)")
    parser.add_argument("--source-stall-s", type=float, default=30.0, help="no byte for so long is a stall (30)")
    parser.add_argument("--lock-wait-s", type=float, default=3600.0, help="how long to wait for another stager (3600)")
    return parser


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    store = store_from_environment(arguments.source_stall_s)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    node = Node(arguments.node, arguments.node_uid)
    stager = Stager(StoreSource(store), store, arguments.root, lock, node, arguments.reserve_bytes, stop)
    return stager.stage(arguments.threads, arguments.lock_wait_s)


def main(argv: list[str] | None = None) -> int:
    """Stage a lock on this node and return the exit code."""
    arguments = _parser().parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
