"""An object store in memory with the contract of `ports.Store`, for tests of what is built on the port.

The contract suite (tests/contract/test_store.py) runs on this and on a real S3 server; where they differ this is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from tasks.core.errors import ConflictError, UnavailableError
from tasks.ports import StoredObject, UploadedPart

BLOCK_BYTES = 64 * 1024


class MemoryStore:
    """Keeps objects and unfinished uploads in dictionaries."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.calls: list[str] = []
        self._started = 0

    def ensure_bucket(self) -> None:
        """Do nothing: there is one bucket."""

    def head(self, key: str) -> StoredObject | None:
        data = self.objects.get(key)
        return None if data is None else StoredObject(key, len(data), _md5(data))

    def get(self, key: str) -> tuple[bytes, str]:
        data = self.objects[key]
        return data, _md5(data)

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        there = self.objects.get(key)
        if (if_absent and there is not None) or (if_match and (there is None or _md5(there) != if_match)):
            raise ConflictError("K2-CON-004", "The stored object is not the one this write was decided on.", where=key)
        self.calls.append(f"put {key}")
        self.objects[key] = bytes(data)
        return _md5(data)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        return [StoredObject(k, len(v), _md5(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix)]

    def open(self, key: str, offset: int = 0) -> Iterator[bytes]:
        self.calls.append(f"open {key}")
        if key not in self.objects:
            raise UnavailableError("K2-UNA-001", "The store does not hold the object.", where=key)
        data = self.objects[key]
        for start in range(offset, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def unfinished_upload(self, key: str) -> tuple[str, list[UploadedPart]] | None:
        for upload_id, (of, parts) in reversed(self.uploads.items()):
            if of == key:
                return upload_id, [UploadedPart(n, len(d), _md5(d)) for n, d in sorted(parts.items())]
        return None

    def start_upload(self, key: str) -> str:
        self._started += 1
        upload_id = f"upload-{self._started}"
        self.uploads[upload_id] = (key, {})
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, data: bytes) -> UploadedPart:
        self.calls.append(f"put_part {number}")
        of, parts = self.uploads.get(upload_id, ("", {}))
        if of != key:
            raise UnavailableError("K2-UNA-001", "no such upload", where=key)
        parts[number] = bytes(data)
        return UploadedPart(number, len(data), _md5(data), hashlib.sha256(data).hexdigest())

    def finish_upload(self, key: str, upload_id: str, parts: Iterable[UploadedPart]) -> None:
        of, there = self.uploads.get(upload_id, ("", {}))
        listed = list(parts)
        if of != key or not listed or any(not _same(there.get(p.number), p) for p in listed):
            raise UnavailableError("K2-UNA-001", "invalid part", where=key)
        self.objects[key] = b"".join(there[part.number] for part in listed)
        del self.uploads[upload_id]

    def abort_upload(self, key: str, upload_id: str) -> None:
        self.uploads.pop(upload_id, None)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _same(data: bytes | None, part: UploadedPart) -> bool:
    return data is not None and (_md5(data), hashlib.sha256(data).hexdigest()) == (part.etag, part.sha256)
