"""Moves one blob from the Hub to the store, hashing it on the way; it gets a name there only with the right digest.

A large blob is a multipart upload, and an upload has no name before it is finished: it is finished after the digest
of all bytes matched, and aborted otherwise. A small blob is verified in memory and put at once.

After a kill the upload that was left is taken up again. The store cannot read back parts of an unfinished upload, and
a running sha256 cannot be restored from it, so the whole blob is read from the Hub again and hashed from its first
byte; a part that is already there is not sent again if its size and md5 (the part's ETag) equal those of the bytes
just read. Parts of another size, or of a store whose ETags are not md5, are simply sent again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tasks.core.errors import After, IntegrityError, UnavailableError
from tasks.core.identity import canonical_bytes, sha256_hex
from tasks.core.lock import Lock, LockedFile
from tasks.node.program import Stop, say
from tasks.node.verified_file import check_content
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Block, Hub, Store, UploadedPart

MIN_PART_BYTES = 5 * 1024 * 1024
_MAX_PARTS = 10_000
_TRIES = 5


@dataclass(frozen=True)
class Route:
    """Where blobs come from and go to, for one lock."""

    hub: Hub
    store: Store
    lock: Lock
    source: str
    part_bytes: int


def is_present(store: Store, file: LockedFile) -> bool:
    """Say whether the store holds a blob that was verified when it came in, with its whole size."""
    if store.head(f"blobs/{file.sha256}.ok") is None:
        return False
    blob = store.head(f"blobs/{file.sha256}")
    return blob is not None and blob.size_bytes == file.size_bytes


def move_blob(route: Route, file: LockedFile, stop: Stop, advance: Callable[[int], None]) -> int:
    """Move a file's blob and leave its `.ok` marker; return the bytes fetched from the Hub.

    Raises:
        IntegrityError: the Hub served other bytes twice (K2-INT-001); nothing is named.
        UnavailableError: the Hub or the store did not answer for too long; an upload is left to be taken up again.
        InputError: the Hub does not have the file, or refuses it.
    """
    fetched = 0

    def count(count_bytes: int) -> None:
        nonlocal fetched
        fetched += max(0, count_bytes)
        advance(count_bytes)

    def once() -> None:
        before = fetched
        try:
            _move_once(route, file, stop, count)
        except (IntegrityError, UnavailableError):
            advance(before - fetched)
            raise

    attempt(once, stop, integrity_tries=2, tries=_TRIES)
    statement = {"size_bytes": file.size_bytes, "sha256": file.sha256, "source": route.source}
    ok_key, data = f"blobs/{file.sha256}.ok", canonical_bytes(statement)
    attempt(lambda: route.store.put(ok_key, data), stop, integrity_tries=1, tries=_TRIES)
    return fetched


def _move_once(route: Route, file: LockedFile, stop: Stop, advance: Callable[[int], None]) -> None:
    with closing(_blocks(route, file, stop, advance)) as blocks:
        if file.size_bytes <= route.part_bytes:
            _put_whole(route, file, blocks)
        else:
            _upload(route, file, blocks, stop)


def _put_whole(route: Route, file: LockedFile, blocks: Iterator[Block]) -> None:
    data = bytearray()
    for block in blocks:
        data += block
        if len(data) > file.size_bytes:
            break
    _check(route, file, len(data), sha256_hex(bytes(data)))
    route.store.put(f"blobs/{file.sha256}", bytes(data))


def _upload(route: Route, file: LockedFile, blocks: Iterator[Block], stop: Stop) -> None:
    key = f"blobs/{file.sha256}"
    left = route.store.unfinished_upload(key)
    upload_id, there = left if left is not None else (route.store.start_upload(key), [])
    if there:
        say(f"{file.path}: taking up an upload that has {len(there)} parts")
    digest, size_bytes = hashlib.sha256(), 0
    parts: list[UploadedPart] = []
    try:
        for number, data in enumerate(_parts(file, blocks, _part_bytes(route, file)), start=1):
            stop.check()
            digest.update(data)
            size_bytes += len(data)
            parts.append(_part(route.store, key, upload_id, number, data, there))
        _check(route, file, size_bytes, digest.hexdigest())
    except IntegrityError:
        route.store.abort_upload(key, upload_id)
        raise
    stop.check()
    route.store.finish_upload(key, upload_id, parts)


def _part(
    store: Store, key: str, upload_id: str, number: int, data: bytes, there: Sequence[UploadedPart]
) -> UploadedPart:
    """Return a part whose bytes are these: one that is there already, or a new one.

    A store may list a number twice, when it was sent twice; it makes the object of the one that is named by its ETag.
    """
    candidates = [part for part in there if (part.number, part.size_bytes) == (number, len(data))]
    if candidates:
        sha256, md5 = sha256_hex(data), hashlib.md5(data, usedforsecurity=False).hexdigest()
        for part in candidates:
            if part.sha256 == sha256 or (not part.sha256 and part.etag == md5):
                return replace(part, sha256=sha256)
    return store.put_part(key, upload_id, number, data)


def _part_bytes(route: Route, file: LockedFile) -> int:
    return max(route.part_bytes, math.ceil(file.size_bytes / _MAX_PARTS))


def _parts(file: LockedFile, blocks: Iterator[Block], part_bytes: int) -> Iterator[bytes]:
    """Yield the blocks as parts of one size (the last may be shorter); stop at the first byte too many."""
    buffer, received = bytearray(), 0
    for block in blocks:
        buffer += block
        received += len(block)
        while len(buffer) >= part_bytes:
            yield bytes(memoryview(buffer)[:part_bytes])
            del buffer[:part_bytes]
        if received > file.size_bytes:
            break
    if buffer:
        yield bytes(buffer)


def _blocks(route: Route, file: LockedFile, stop: Stop, advance: Callable[[int], None]) -> Generator[Block, None, None]:
    """Yield the file's bytes from the Hub; a stream that breaks after it brought bytes goes on where it broke."""
    offset = 0
    while True:
        begin = offset
        try:
            stream = route.hub.open_file(route.lock.repo, route.lock.revision, file.path, offset)
            for block in stream:
                stop.check()
                offset += len(block)
                advance(len(block))
                yield block
        except UnavailableError as error:
            stop.check()
            if offset == begin or offset >= file.size_bytes:
                raise
            wait_s = error.retry.seconds if isinstance(error.retry, After) else 0.0
            say(f"{file.path}: the stream broke at byte {offset}; going on from there in {wait_s:g} s: {error}")
            stop.sleep(wait_s)
        else:
            return


def _check(route: Route, file: LockedFile, size_bytes: int, sha256: str) -> None:
    try:
        check_content(file.path, file, size_bytes, sha256)
    except IntegrityError as error:
        error.where = f"{route.lock.repo}@{route.lock.revision} {file.path}"
        error.details = {"source": route.source, "path": file.path}
        raise
