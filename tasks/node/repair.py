"""Puts a right file in the place of one that has rotted, and the marker right afterwards.

In this order: the marker is taken away, so that no engine starts meanwhile; the right bytes are fetched and verified as
they are written; the file is swapped in; the old one, which had a second name by then, goes to the quarantine; when
all files are right, a new marker. A file that cannot be fetched stays where it is, without a marker: it may be the only
copy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import MARKER_FILE, FileStat, Marker, StagedFile
from tasks.core.staging import require_room
from tasks.core.units import format_bytes
from tasks.node import directory_lock
from tasks.node.open_files import in_use
from tasks.node.program import Stop, StoppedError, say
from tasks.node.quarantine import Quarantine
from tasks.node.rot import NO_FILE, Differences, Rot
from tasks.node.staged_directory import (
    close_for_writing,
    open_for_writing,
    read_marker,
    read_room,
    remove_marker,
    sweep_orphans,
)
from tasks.node.verified_file import (
    PARTIAL_DIR,
    Writing,
    disk_error,
    file_stat,
    fsync_directory,
    make_directory,
    write_document,
    write_verified,
)
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Block, Source, Store

_TRIES = 4


@dataclass(frozen=True)
class Place:
    """The checkpoint of a lock on one node."""

    root: Path
    lock: Lock
    node: str
    node_uid: str

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return self.root / self.lock.model_dir

    @property
    def marker_key(self) -> str:
        """The store key of the marker's copy."""
        return f"markers/{self.node}/{self.lock.digest}.json"

    def stat(self, path: str) -> FileStat | None:
        """Return the stat of a regular file; None for whatever else is there."""
        try:
            return file_stat(self.directory, path)
        except IntegrityError:
            return None

    def marker(self) -> Marker | None:
        """Return the marker, None if there is none that can be read; IntegrityError if it is of another lock."""
        try:
            marker = read_marker(self.directory)
        except IntegrityError as error:
            say(f"the marker that is there does not count: {error}")
            return None
        if marker is not None and marker.lock_digest != self.lock.digest:
            raise IntegrityError(
                "K2-INT-004",
                "The marker is of another lock.",
                where=f"{self.node}: {self.directory / MARKER_FILE}",
                got=marker.lock_digest,
                expected=self.lock.digest,
                details={"node": self.node},
            )
        return marker


class Repairer:
    """Repairs the files of one place.

    Args:
        place: where.
        sources: where a file is fetched from: the first that gives the right bytes.
        store: takes the marker's copy.
        writing: how fast; nothing of it stays in the page cache.
        reserve_bytes: what must stay free.
        lock_wait_s: how long to wait for a stager.
        stop: set by signals.
    """

    def __init__(
        self,
        place: Place,
        sources: Sequence[Source],
        store: Store,
        writing: Writing,
        reserve_bytes: int,
        lock_wait_s: float,
        stop: Stop,
    ) -> None:
        self._place = place
        self._sources = sources
        self._store = store
        self._writing = writing
        self._reserve_bytes = reserve_bytes
        self._lock_wait_s = lock_wait_s
        self._stop = stop

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one who writes weights to this node while the block runs; the directory is open meanwhile."""
        place, wait_s = self._place, self._lock_wait_s
        with (
            directory_lock.hold_node(place.root, place.lock.digest, wait_s, self._stop),
            directory_lock.hold(place.root, place.lock.revision, wait_s, self._stop),
        ):
            open_for_writing(place.directory)
            try:
                yield
            finally:
                close_for_writing(place.directory)

    def repair(self, file: LockedFile, before: FileStat | None, rot: Rot) -> StagedFile | None:
        """Return the right file, or None: somebody else has replaced it meanwhile, or it cannot be (`rot` says why).

        Args:
            file: as the lock has it.
            before: what stood there when it was read.
            rot: what is wrong with it; what becomes of it is noted there.
        """
        place = self._place
        try:
            with self.alone():
                if before is not None and before != place.stat(file.path):
                    rot.is_gone = True
                    return None
                self._unmark()
                self._require_room(file)
                return self._replace(file, rot)
        except StoppedError:
            raise
        except (K2Error, OSError) as error:
            rot.give_up(error if isinstance(error, K2Error) else disk_error(error, place.directory / file.path))
            return None

    def mark(self, files: tuple[StagedFile, ...]) -> tuple[Marker, bool]:
        """Return the marker that says that these files are right, and whether it had to be written.

        The caller is alone, and has seen that the files still are those that were read.
        """
        place = self._place
        marker, true = place.marker(), (files, place.node, place.node_uid)
        written = marker is None or (marker.files, marker.node, marker.node_uid) != true
        if marker is None or written:
            remove_marker(place.directory)
            marker = self._new_marker(files)
            write_document(place.directory / MARKER_FILE, marker.to_bytes())
        attempt(partial(self._publish, marker.to_bytes()), self._stop, integrity_tries=1, tries=_TRIES)
        return marker, written

    def _publish(self, data: bytes) -> None:
        """Put a copy of the marker into the store unless it is there."""
        try:
            if self._store.get(self._place.marker_key)[0] == data:
                return
        except KeyError:
            pass
        self._store.put(self._place.marker_key, data)

    def _unmark(self) -> None:
        """Take back that this directory is verified, before anything in it is touched: here, and in the store."""
        remove_marker(self._place.directory)
        # A store that is away keeps no engine from being stopped by the marker that is gone.
        with contextlib.suppress(UnavailableError):
            self._store.delete(self._place.marker_key)

    def _require_room(self, file: LockedFile) -> None:
        place, quarantine = self._place, Quarantine(self._place.directory)
        sweep_orphans(place.directory)
        room = read_room(place.directory, quarantine.size_bytes)
        if require_room(1, file.size_bytes, room, self._reserve_bytes, f"{place.node}: {file.path}"):
            say(f"{place.node}: {format_bytes(quarantine.sweep(keep=0))} of the quarantine give way")

    def _replace(self, file: LockedFile, rot: Rot) -> StagedFile:
        """Write the file anew, verified, over what is there, and keep that in the quarantine."""
        directory = self._place.directory
        aside = directory / PARTIAL_DIR / f"{file.sha256[:16]}.rotten"
        old = self._second_name(file, rot, aside)
        try:
            staged, source, differences = self._fetch(file, old)
            rot.put_right(source, differences)
            if old is not None:
                rot.still_open = held.why if (held := in_use([old])) else ""
                name = str(old.relative_to(directory))
                Quarantine(directory).take(name, rot.problem, rot.sha256, file.sha256, was=file.path)
                rot.quarantined = True
        finally:
            aside.unlink(missing_ok=True)
        return staged

    def _second_name(self, file: LockedFile, rot: Rot, aside: Path) -> Path | None:
        """Give what is there a second name, by which it can be kept when another takes its place; None for nothing."""
        path = self._place.directory / file.path
        make_directory(aside.parent)
        aside.unlink(missing_ok=True)
        if rot.problem == NO_FILE:
            # A pipe or a socket has no bytes to keep; a directory is left to a person (the error says so).
            path.unlink()
            fsync_directory(path.parent)
            return None
        try:
            os.link(path, aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            say(f"{path} is not kept when it is replaced: {error.strerror}")
            return None
        return aside

    def _fetch(self, file: LockedFile, old: Path | None) -> tuple[StagedFile, str, Differences | None]:
        """Fetch a file from the first source that gives the right bytes; raise what the first one said if none does."""
        problems: list[K2Error] = []
        for source in self._sources:
            fetch = partial(self._fetch_from, source, file, old)
            try:
                staged, differences = attempt(fetch, self._stop, integrity_tries=2, tries=_TRIES)
            except StoppedError:
                raise
            except K2Error as error:
                say(f"{self._place.node}: {file.path} does not come from {source.name}: {error}")
                problems.append(error)
            else:
                return staged, source.name, differences
        raise problems[0]

    def _fetch_from(self, source: Source, file: LockedFile, old: Path | None) -> tuple[StagedFile, Differences | None]:
        with contextlib.ExitStack() as stack:
            differences = stack.enter_context(Differences(old)) if old is not None else None
            blocks = stack.enter_context(contextlib.closing(self._compared(source.open(file), differences)))
            staged = write_verified(self._place.directory, file.path, file, blocks, lambda _: None, self._writing)
        return staged, differences

    def _compared(self, blocks: Iterator[Block], differences: Differences | None) -> Generator[Block, None, None]:
        for block in blocks:
            self._stop.check()
            if differences is not None:
                differences.compare(block)
            yield block

    def _new_marker(self, files: tuple[StagedFile, ...]) -> Marker:
        from importlib.metadata import version

        place = self._place
        return Marker(
            lock_digest=place.lock.digest,
            repo=place.lock.repo,
            revision=place.lock.revision,
            node=place.node,
            node_uid=place.node_uid,
            files=files,
            verified_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            tool=f"k2-release {version('k2-release')}",
        )
