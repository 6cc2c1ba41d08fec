"""An object store in memory with the contract of `ports.Store`, for tests of what is built on the port.

The port cases in tests/contract/store run on this and on a real S3 server; where they differ this is wrong.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tasks.core.errors import ConflictError, UnavailableError
from tasks.core.identity import sha256_hex, sha256_of_parts
from tasks.ports import Block, StoredObject, UnfinishedUpload, UploadedPart, UploadGoneError, unheeded

BLOCK_BYTES = 64 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024


class MemoryStore:
    """Keeps objects and unfinished uploads in dictionaries.

    Args:
        min_part_bytes: parts but the last are not smaller; S3's bound unless a test wants many small parts.
    """

    def __init__(self, min_part_bytes: int = MIN_PART_BYTES) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.calls: list[str] = []
        self._min_part_bytes = min_part_bytes
        self._started = 0
        self._lock = threading.RLock()
        self._uploaded: dict[str, tuple[bytes, str, str]] = {}
        """Objects that were made out of parts, with their etags and checksums."""
        self._finished: set[tuple[str, str]] = set()
        self.written_at: dict[str, float] = {}
        """When each unfinished upload was last written to, by the store's clock."""
        self.now: Callable[[], float] = time.time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}  # a world is copied, its lock not

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def ensure_bucket(self) -> None:
        """Do nothing: there is one bucket."""

    def head(self, key: str) -> StoredObject | None:
        with self._lock:
            data = self.objects.get(key)
            if data is None:
                return None
            made, _, sha256 = self._uploaded.get(key, (b"", "", ""))
            return StoredObject(
                key, len(data), self._etag(key), sha256 if sha256 and made == data else sha256_hex(data)
            )

    def get(self, key: str) -> tuple[bytes, str]:
        with self._lock:
            return self.objects[key], self._etag(key)

    def _etag(self, key: str) -> str:
        data, (made, etag, _) = self.objects[key], self._uploaded.get(key, (b"", "", ""))
        return etag if etag and made == data else _md5(data)

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        with self._lock:
            there = key in self.objects
            if (if_absent and there) or (if_match and (not there or self._etag(key) != if_match)):
                raise ConflictError(
                    "K2-CON-004", "The stored object is not the one this write was decided on.", where=key
                )
            self.calls.append(f"put {key}")
            self.objects[key] = bytes(data)
            self._uploaded.pop(key, None)
            return _md5(data)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        with self._lock:
            found = sorted((key, len(data)) for key, data in self.objects.items() if key.startswith(prefix))
            return [StoredObject(key, size_bytes, self._etag(key)) for key, size_bytes in found]

    def open(self, key: str, offset: int = 0) -> Iterator[memoryview]:
        self.calls.append(f"open {key}")
        if key not in self.objects:
            raise UnavailableError("K2-UNA-001", "The store does not hold the object.", where=key)
        data = self.objects[key]
        if offset and offset >= len(data):
            raise UnavailableError("K2-UNA-001", "The store answered InvalidRange.", where=key)
        # One buffer for all blocks, as the real one has it: who keeps a block sees it change.
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for start in range(offset, len(data), BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            buffer[: len(piece)] = piece
            yield buffer[: len(piece)]

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def unfinished_upload(self, key: str) -> tuple[str, list[UploadedPart]] | None:
        with self._lock:
            for upload_id, (of, parts) in reversed(self.uploads.items()):
                if of == key:
                    return upload_id, [UploadedPart(n, len(d), _md5(d)) for n, d in sorted(parts.items())]
            return None

    def unfinished_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        with self._lock:
            return [
                UnfinishedUpload(
                    key,
                    upload_id,
                    len(parts),
                    sum(map(len, parts.values())),
                    max(0.0, self.now() - self.written_at[upload_id]),
                )
                for upload_id, (key, parts) in sorted(self.uploads.items())
                if key.startswith(prefix)
            ]

    def start_upload(self, key: str) -> str:
        with self._lock:
            self._started += 1
            upload_id = f"upload-{self._started}"
            self.written_at[upload_id] = self.now()
            self.uploads[upload_id] = (key, {})
            return upload_id

    def put_part(
        self, key: str, upload_id: str, number: int, data: Block, sent: Callable[[int], None] = unheeded
    ) -> UploadedPart:
        self.calls.append(f"put_part {number}")
        with self._lock:
            of, parts = self.uploads.get(upload_id, ("", {}))
            if of != key:
                raise UploadGoneError("K2-UNA-001", "no such upload", where=key)
            parts[number] = bytes(data)
            self.written_at[upload_id] = self.now()
        sent(len(data))
        return UploadedPart(number, len(data), _md5(data), hashlib.sha256(data).hexdigest())

    def finish_upload(self, key: str, upload_id: str, parts: Iterable[UploadedPart]) -> None:
        with self._lock:
            if (key, upload_id) not in self._finished:
                self._finish(key, upload_id, list(parts))

    def _finish(self, key: str, upload_id: str, listed: list[UploadedPart]) -> None:
        of, there = self.uploads.get(upload_id, ("", {}))
        if of != key:
            raise UploadGoneError("K2-UNA-001", "no such upload", where=key)
        if not listed or any(not _same(there.get(p.number), p) for p in listed):
            raise UnavailableError("K2-UNA-001", "invalid part", where=key)
        numbers = [part.number for part in listed]
        if numbers != sorted(set(numbers)) or any(len(there[n]) < self._min_part_bytes for n in numbers[:-1]):
            raise UnavailableError("K2-UNA-001", "parts in disorder or too small", where=key)
        made = b"".join(there[number] for number in numbers)
        digests = b"".join(hashlib.md5(there[n], usedforsecurity=False).digest() for n in numbers)
        sha256 = sha256_of_parts([sha256_hex(there[n]) for n in numbers])
        self.objects[key] = made
        self._uploaded[key] = (made, f"{_md5(digests)}-{len(numbers)}", sha256)
        self._finished.add((key, upload_id))
        del self.uploads[upload_id]

    def abort_upload(self, key: str, upload_id: str) -> None:
        self.uploads.pop(upload_id, None)


def _md5(data: Block) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _same(data: bytes | None, part: UploadedPart) -> bool:
    return data is not None and (_md5(data), hashlib.sha256(data).hexdigest()) == (part.etag, part.sha256)
