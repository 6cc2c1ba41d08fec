"""Which files can be had now, when a stager begins before its source is filled, and in which order they are taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from tasks.core.errors import After, UnavailableError
from tasks.core.units import format_bytes
from tasks.node.program import Stop, say

if TYPE_CHECKING:
    from tasks.core.lock import LockedFile
    from tasks.ports import Store

_POLL_S = 2.0
_TICK_S = 0.1
_SAY_EVERY_S = 60.0


class Arrivals(Protocol):
    """Says which files a source has. Errors: UnavailableError, which counts as nothing new."""

    def arrived(self, files: Collection[LockedFile]) -> set[str]:
        """Return the paths of those of the files that can be opened now."""
        ...


class StoreArrivals:
    """Implements `Arrivals` on the blobs of a store: there with its size, and vouched for by whoever pulled it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def arrived(self, files: Collection[LockedFile]) -> set[str]:
        """Return the paths whose blob and its `.ok` are in the store."""
        sizes = {item.key: item.size_bytes for item in self._store.list_objects("blobs/")}
        return {
            file.path
            for file in files
            if f"blobs/{file.sha256}.ok" in sizes and sizes.get(f"blobs/{file.sha256}") == file.size_bytes
        }


class FileQueue:
    """Deals out the files of one stager: always the largest that can be had, and none waits while one can be had.

    Threads share it. A file that only has to be hashed can always be had.

    Args:
        to_hash: stand on the disk already, and may be right.
        to_fetch: have to come from the source.
        arrivals: asked every two seconds while a thread has nothing to do; None where the source has everything.
        wait_s: how long nothing new may come.
        node: for messages.
    """

    def __init__(
        self,
        to_hash: Iterable[LockedFile],
        to_fetch: Iterable[LockedFile],
        arrivals: Arrivals | None,
        wait_s: float,
        node: str,
    ) -> None:
        self._lock = threading.Lock()
        self._arrivals = arrivals
        self._wait_s = wait_s
        self._node = node
        self._here = {file.path: file for file in to_hash}
        fetch = {file.path: file for file in to_fetch}
        self._ready: dict[str, LockedFile] = {} if arrivals else fetch
        self._missing: dict[str, LockedFile] = fetch if arrivals else {}
        self._polling = False
        # Never the wall clock: it may jump.
        self._next_poll = self._new_at = self._said_at = time.monotonic()
        self._silence: UnavailableError | None = None

    def take(self, stop: Stop) -> tuple[LockedFile, bool]:
        """Return a file, and whether it stands on the disk and has to be hashed; wait for one that can be had.

        The caller asks no more often than there are files left.

        Raises:
            UnavailableError: nothing new has come for `wait_s`; names the largest file that is missing.
        """
        while True:
            stop.check()
            with self._lock:
                if (found := self._largest()) is not None:
                    return found
                mine = not self._polling and time.monotonic() >= self._next_poll
                self._polling = self._polling or mine
            if mine:
                self._poll()
            else:
                stop.sleep(_TICK_S)

    def fetch_instead(self, file: LockedFile) -> None:
        """Put back a file whose bytes on the disk are wrong: it has to come from the source."""
        with self._lock:
            (self._missing if self._arrivals else self._ready)[file.path] = file

    def _largest(self) -> tuple[LockedFile, bool] | None:
        """Take the largest file that can be had out of the queue; the paths make the order everybody's."""
        candidates = [*((file, True) for file in self._here.values()), *((f, False) for f in self._ready.values())]
        if not candidates:
            return None
        file, here = min(candidates, key=lambda pair: (-pair[0].size_bytes, pair[0].path))
        del (self._here if here else self._ready)[file.path]
        return file, here

    def _poll(self) -> None:
        """Ask what has come. Only one thread does, and none holds the lock while the source thinks."""
        with self._lock:
            wanted = dict(self._missing)
        assert self._arrivals is not None
        arrived: set[str] = set()
        silence = None
        try:
            arrived = self._arrivals.arrived(wanted.values())
        except UnavailableError as error:
            if not isinstance(error.retry, After):
                raise
            silence = error
        finally:
            with self._lock:
                self._polling = False
                self._next_poll = time.monotonic() + _POLL_S
        with self._lock:
            self._silence = silence
            for path in arrived:
                self._ready[path] = self._missing.pop(path)
            if arrived:
                self._new_at = time.monotonic()
            self._judge()

    def _judge(self) -> None:
        """Tell of a wait now and then; raise UnavailableError if it has been too long."""
        now = time.monotonic()
        if self._ready or not self._missing:
            return
        largest = min(self._missing.values(), key=lambda file: (-file.size_bytes, file.path))
        waited_s = now - self._new_at
        if waited_s >= self._wait_s:
            raise UnavailableError(
                "K2-UNA-001",
                f"A file does not come: nothing new was there for {waited_s:.0f} s.",
                where=f"{self._node}: {largest.path}",
                got=self._silence.summary if self._silence else f"{len(self._missing)} files missing at the source",
                expected=f"blobs/{largest.sha256} and its .ok",
                hint="Is it pulled? kubectl -n k2 get jobs -l k2-release.io/role=pull; then run the release again: "
                "what was verified stays.",
                retry=After(5.0),
            ) from self._silence
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            size_bytes = sum(file.size_bytes for file in self._missing.values())
            say(
                f"{self._node}: waiting for {len(self._missing)} files ({format_bytes(size_bytes)}) that are not "
                f"pulled yet; gives up in {self._wait_s - waited_s:.0f} s without a new one"
            )
