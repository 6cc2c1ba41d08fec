"""Multipart uploads over S3: an upload has no name before it is finished, and outlives whoever started it."""

from __future__ import annotations

import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from tasks.adapters.store_answers import NotThereError, checksum_of, etag_of, hex_of, store_time
from tasks.ports import Block, UnfinishedUpload, UploadedPart, unheeded


class StoreUploads(ABC):
    """The part of `ports.Store` that is about multipart uploads."""

    @abstractmethod
    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        """Make one request; every failure leaves as one of ours."""

    def unfinished_upload(self, key: str) -> tuple[str, list[UploadedPart]] | None:
        """Return the newest unfinished multipart upload of a key and its parts, or None."""
        uploads = [item for item, _ in self._uploads(key) if item["Key"] == key]
        for upload in sorted(uploads, key=lambda item: str(item.get("Initiated", "")), reverse=True):
            try:
                return upload["UploadId"], [_part(item) for item in self._parts(key, upload["UploadId"])]
            except NotThereError:
                continue  # ended between the two requests
        return None

    def unfinished_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        """Return every unfinished multipart upload of the keys under a prefix."""
        found = []
        for item, now in self._uploads(prefix):
            try:
                parts = list(self._parts(item["Key"], item["UploadId"]))
            except NotThereError:
                continue
            written = [moment for moment in (item.get("Initiated"), *(p.get("LastModified") for p in parts)) if moment]
            idle_s = max(0.0, (now - max(written)).total_seconds()) if now and written else 0.0
            size_bytes = sum(int(part["Size"]) for part in parts)
            found.append(UnfinishedUpload(item["Key"], item["UploadId"], len(parts), size_bytes, idle_s))
        return found

    def start_upload(self, key: str) -> str:
        """Start a multipart upload and return its id."""
        return str(self._call("create_multipart_upload", key, Key=key, ChecksumAlgorithm="SHA256")["UploadId"])

    def put_part(
        self, key: str, upload_id: str, number: int, data: Block, sent: Callable[[int], None] = unheeded
    ) -> UploadedPart:
        """Upload one part with a checksum that the store checks; UploadGoneError if there is no such upload."""
        checksum = checksum_of(data)
        made = self._call(
            "upload_part",
            key,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=_Watched(data, sent),
            ChecksumSHA256=checksum,
        )
        return UploadedPart(number, len(data), etag_of(made), hex_of(checksum))

    def finish_upload(self, key: str, upload_id: str, parts: Iterable[UploadedPart]) -> None:
        """Make the object out of its parts; UploadGoneError if there is no such upload."""
        listed = [
            {
                "PartNumber": part.number,
                "ETag": f'"{part.etag}"',
                "ChecksumSHA256": base64.b64encode(bytes.fromhex(part.sha256)).decode(),
            }
            for part in parts
        ]
        self._call("complete_multipart_upload", key, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed})

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an unfinished upload; dropping what is not there is no error."""
        try:
            self._call("abort_multipart_upload", key, Key=key, UploadId=upload_id)
        except NotThereError:
            return

    def _uploads(self, prefix: str) -> Iterator[tuple[Mapping[str, Any], datetime | None]]:
        """Yield the unfinished uploads of keys under a prefix, all pages, each with the store's time of its page."""
        arguments: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self._call("list_multipart_uploads", prefix, **arguments)
            for item in page.get("Uploads", ()):
                yield item, store_time(page)
            if not page.get("IsTruncated"):
                return
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def _parts(self, key: str, upload_id: str) -> Iterator[Mapping[str, Any]]:
        arguments: dict[str, Any] = {"Key": key, "UploadId": upload_id}
        while True:
            page = self._call("list_parts", key, **arguments)
            yield from page.get("Parts", ())
            if not page.get("IsTruncated"):
                return
            arguments["PartNumberMarker"] = page["NextPartNumberMarker"]


class _Watched:
    """A request's body that tells of each piece that is taken for sending, and copies no more than that piece."""

    def __init__(self, data: Block, sent: Callable[[int], None]) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._sent = sent

    def read(self, size: int | None = -1) -> bytes:
        """Return the next piece."""
        end = len(self._data) if size is None or size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        self._sent(len(piece))
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another place; a request that is made again begins anew."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at


def _part(item: Mapping[str, Any]) -> UploadedPart:
    return UploadedPart(
        int(item["PartNumber"]), int(item["Size"]), etag_of(item), hex_of(item.get("ChecksumSHA256", ""))
    )
