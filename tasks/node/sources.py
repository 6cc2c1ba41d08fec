"""Where a stager gets the bytes of a lock's files: the store, or the Hub itself. None of them is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
        """Yield the bytes of the file's blob."""
        return self._store.open(f"blobs/{file.sha256}")


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
        """Yield the file's bytes at the locked commit."""
        return self._hub.open_file(self._lock.repo, self._lock.revision, file.path, 0)
