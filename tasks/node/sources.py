"""Where a stager gets the bytes of a lock's files: the store, or the Hub itself. None of them is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tasks.core.errors import UnavailableError

if TYPE_CHECKING:
    from tasks.core.lock import Lock, LockedFile
    from tasks.ports import Block, Hub, Store


class StoreSource:
    """Implements `ports.Source` on blobs of the store, which pullers have verified."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"store {self._store}"

    def open(self, file: LockedFile) -> Iterator[Block]:
        """Yield the bytes of the file's blob; a stream that breaks goes on where it broke."""
        return resumed(lambda offset: self._store.open(f"blobs/{file.sha256}", offset), file.size_bytes)


class HubSource:
    """Implements `ports.Source` on a commit at the Hub."""

    def __init__(self, hub: Hub, lock: Lock) -> None:
        self._hub = hub
        self._lock = lock

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"Hub {self._hub}"

    def open(self, file: LockedFile) -> Iterator[Block]:
        """Yield the file's bytes at the locked commit; a stream that breaks goes on where it broke."""
        repo, revision = self._lock.repo, self._lock.revision
        return resumed(lambda offset: self._hub.open_file(repo, revision, file.path, offset), file.size_bytes)


def resumed(open_at: Callable[[int], Iterator[Block]], size_bytes: int) -> Iterator[Block]:
    """Yield a stream's blocks; one that breaks after it brought bytes is opened again there, at once.

    A stream that breaks without a byte, or behind the end of the file, raises: whoever waits and tries again is told.
    """
    offset = 0
    while True:
        begin = offset
        try:
            for block in open_at(offset):
                offset += len(block)
                yield block
        except UnavailableError:
            if offset == begin or offset >= size_bytes:
                raise
        else:
            return
