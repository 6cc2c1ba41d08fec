"""Moves one blob from the Hub to the store, hashing it on the way; it gets a name there only with the right digest.

A large blob is a multipart upload, and an upload has no name before it is finished: it is finished after the digest
of all bytes matched, and aborted otherwise. A small blob is verified in memory and put at once. Its `.ok` statement
is written after the store has shown that it holds the object: with its size, and with the checksum that the store
itself computed or, where it states none, the etag that these bytes have. In doubt the object is read back.

After a kill the upload that was left is taken up again. The store cannot read back parts of an unfinished upload, and
a running sha256 cannot be restored from it, so the whole blob is read from the Hub again and hashed from its first
byte; a part that is already there is not sent again if its size and md5 (the part's ETag) equal those of the bytes
just read. An upload with parts of another size is left to the sweep.

Two may bring the same blob at once: they share an upload or each has one, the bytes are the same, and whoever finds
the upload gone looks what is there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tasks.core.errors import After, ConflictError, IntegrityError, UnavailableError
from tasks.core.identity import canonical_bytes, sha256_hex, sha256_of_parts
from tasks.core.lock import Lock, LockedFile
from tasks.node.meter import Meter
from tasks.node.program import Stop, say
from tasks.node.steady_stream import Pace, steady_blocks
from tasks.node.verified_file import check_content
from tasks.node.workers import attempt
from tasks.ports import UploadGoneError

if TYPE_CHECKING:
    from tasks.ports import Block, Hub, Store, UploadedPart

Outcome = TypeVar("Outcome")
MIN_PART_BYTES = 5 * 1024 * 1024
_MAX_PARTS = 10_000
_TRIES = 6
_BEGINNINGS = 4
_FINISH_S = 600.0
"""A store may take minutes to make an object out of thousands of parts."""


class _NotKeptError(UnavailableError):
    """The store acknowledged an object that it does not hold."""


@dataclass(frozen=True)
class Route:
    """Where blobs come from and go to, for one lock."""

    hub: Hub
    store: Store
    lock: Lock
    source: str
    part_bytes: int
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True)
class _Sent:
    """What the store must state of an object if it holds these bytes."""

    sha256s: tuple[str, ...]
    etag: str


def is_present(store: Store, file: LockedFile) -> bool:
    """Say whether the store holds a blob that was verified when it came in, with its whole size."""
    if not _stated(store, file):
        return False
    blob = store.head(f"blobs/{file.sha256}")
    return blob is not None and blob.size_bytes == file.size_bytes


def _stated(store: Store, file: LockedFile) -> bool:
    """Say whether there is a statement about the blob that says what the lock says."""
    try:
        data, _ = store.get(f"blobs/{file.sha256}.ok")
    except KeyError:
        return False
    return _agrees(data, file)


def _agrees(data: bytes, file: LockedFile) -> bool:
    try:
        statement = json.loads(data)
        return (statement["sha256"], statement["size_bytes"]) == (file.sha256, file.size_bytes)
    except (ValueError, TypeError, KeyError):
        return False


def move_blob(route: Route, file: LockedFile, meter: Meter, stop: Stop) -> bool:
    """Have a file's blob and its `.ok` statement in the store; return whether it came from the Hub.

    A blob that is there without its statement is read and hashed: whoever put it may have died before it was sure.

    Raises:
        IntegrityError: the Hub served other bytes twice (K2-INT-001), or the store keeps other ones (K2-INT-003);
            nothing wrong has a name.
        UnavailableError: the Hub or the store did not answer for too long; an upload is left to be taken up again.
        InputError: the Hub does not have the file, or refuses it.
    """
    return _Transfer(route, file, meter, stop).run()


@dataclass(frozen=True)
class _Transfer:
    """One blob on its way."""

    route: Route
    file: LockedFile
    meter: Meter
    stop: Stop

    @property
    def key(self) -> str:
        return f"blobs/{self.file.sha256}"

    def run(self) -> bool:
        """Do what `move_blob` says."""
        fetched = not self._holds_it() and self._fetch()
        self._state()
        return fetched

    def _patiently(self, work: Callable[[], Outcome]) -> Outcome:
        """Make one request to the store again and again, as long as it says that this may help."""

        def told(message: str) -> None:
            self.meter.failed(message)
            say(f"{self.file.path}: {message}")

        sleep = partial(self.meter.wait, self.stop)
        return attempt(work, self.stop, integrity_tries=1, tries=_TRIES, told=told, sleep=sleep)

    def _holds_it(self) -> bool:
        """Say whether the blob is in the store by now; one without a statement is read from end to end."""
        blob = self._patiently(lambda: self.route.store.head(self.key))
        if blob is None or blob.size_bytes != self.file.size_bytes:
            return False
        if self._patiently(lambda: _stated(self.route.store, self.file)):
            return True
        if self._read_back() == self.file.sha256:
            say(f"{self.file.path}: was in the store without a statement; its bytes are right")
            return True
        say(f"{self.file.path}: other bytes are in the store under its name, without a statement; they are replaced")
        return False

    def _read_back(self) -> str:
        digest = hashlib.sha256()
        open_from = partial(self.route.store.open, self.key)
        blocks = steady_blocks(open_from, self.file.size_bytes, self.route.pace, self.meter, self.stop)
        with closing(blocks):
            for block in blocks:
                digest.update(block)
                self.meter.moved(len(block))
        return digest.hexdigest()

    def _fetch(self) -> bool:
        mismatches = beginnings = 0
        while True:
            try:
                self._fetch_once()
                return True
            except IntegrityError as error:
                mismatches += 1
                if mismatches > 1:
                    raise
                self.meter.failed(str(error))
                say(f"{self.file.path}: trying again from the first byte: {error}")
            except (UploadGoneError, _NotKeptError) as error:
                beginnings += 1
                if beginnings >= _BEGINNINGS:
                    raise
                self.meter.failed(str(error))
                say(f"{self.file.path}: beginning anew: {error}")
                wait_s = error.retry.seconds if isinstance(error.retry, After) else 0.0
                self.meter.wait(self.stop, wait_s * beginnings)
                if self._holds_it():
                    return False
            self.meter.at(0)

    def _fetch_once(self) -> None:
        hub, lock = self.route.hub, self.route.lock

        def open_from(offset: int) -> Iterator[Block]:
            self.meter.opened()
            return hub.open_file(lock.repo, lock.revision, self.file.path, offset)

        stream = steady_blocks(open_from, self.file.size_bytes, self.route.pace, self.meter, self.stop)
        with closing(stream):
            whole = self.file.size_bytes <= self.route.part_bytes
            sent = self._put_whole(stream) if whole else self._upload(stream)
        self._check_kept(sent)

    def _put_whole(self, blocks: Iterator[Block]) -> _Sent:
        data = bytearray()
        for block in blocks:
            data += block
            self.meter.received(len(block))
            if len(data) > self.file.size_bytes:
                break
        content = bytes(data)
        self._check(len(content), sha256_hex(content))
        self._patiently(lambda: self.route.store.put(self.key, content))
        return _Sent((self.file.sha256,), hashlib.md5(content, usedforsecurity=False).hexdigest())

    def _upload(self, blocks: Iterator[Block]) -> _Sent:
        store, key, part_bytes = self.route.store, self.key, part_size_bytes(self.file, self.route.part_bytes)
        upload_id, there = self._patiently(partial(take_up, store, self.file, part_bytes)) or ("", [])
        if there:
            say(f"{self.file.path}: taking up an upload that has {len(there)} parts")
        upload_id = upload_id or self._patiently(lambda: store.start_upload(key))
        digest, size_bytes = hashlib.sha256(), 0
        parts: list[UploadedPart] = []
        try:
            for number, data in enumerate(self._parts(blocks, part_bytes), start=1):
                self.stop.check()
                digest.update(data)
                size_bytes += len(data)
                parts.append(self._part(upload_id, number, data, there))
            self._check(size_bytes, digest.hexdigest())
        except IntegrityError:
            self._patiently(lambda: store.abort_upload(key, upload_id))
            raise
        self.stop.check()
        self.meter.quiet(_FINISH_S)
        # Gone is as good: the answer to an earlier try was lost, or another one has finished it. What is there decides.
        with suppress(UploadGoneError):
            self._patiently(lambda: store.finish_upload(key, upload_id, parts))
        self.meter.quiet(0.0)
        etags = b"".join(bytes.fromhex(part.etag) for part in parts if len(part.etag) == 32)
        etag = f"{hashlib.md5(etags, usedforsecurity=False).hexdigest()}-{len(parts)}"
        return _Sent((self.file.sha256, sha256_of_parts([part.sha256 for part in parts])), etag)

    def _part(self, upload_id: str, number: int, data: Block, there: Sequence[UploadedPart]) -> UploadedPart:
        """Return a part whose bytes are these: one that is there already, or a new one.

        A store may list a number twice, when it was sent twice; it makes the object of the one that is named by its
        ETag.
        """
        candidates = [part for part in there if (part.number, part.size_bytes) == (number, len(data))]
        if candidates:
            sha256, md5 = sha256_hex(data), hashlib.md5(data, usedforsecurity=False).hexdigest()
            for part in candidates:
                if part.sha256 == sha256 or (not part.sha256 and part.etag == md5):
                    return replace(part, sha256=sha256)
        put_part, sent = self.route.store.put_part, self.meter.moved
        return self._patiently(lambda: put_part(self.key, upload_id, number, data, sent))

    def _parts(self, blocks: Iterator[Block], part_bytes: int) -> Iterator[memoryview]:
        """Yield the blocks as parts of one size (the last may be shorter); stop at the first byte too many.

        All are views of one buffer: each holds until the next is asked for.
        """
        part = memoryview(bytearray(part_bytes))
        filled = received = 0
        for block in blocks:
            received += len(block)
            self.meter.received(len(block))
            rest = memoryview(block)
            while rest:
                piece = rest[: part_bytes - filled]
                part[filled : filled + len(piece)] = piece
                filled, rest = filled + len(piece), rest[len(piece) :]
                if filled == part_bytes:
                    yield part
                    filled = 0
            if received > self.file.size_bytes:
                break
        if filled:
            yield part[:filled]

    def _check(self, size_bytes: int, sha256: str) -> None:
        lock = self.route.lock
        try:
            check_content(self.file.path, self.file, size_bytes, sha256)
        except IntegrityError as error:
            error.where = f"{lock.repo}@{lock.revision} {self.file.path}"
            error.details = {"source": self.route.source, "path": self.file.path}
            raise

    def _check_kept(self, sent: _Sent) -> None:
        """Raise unless the store holds what it acknowledged; remove what it holds in its place."""
        kept = self._patiently(lambda: self.route.store.head(self.key))
        if kept is None or kept.size_bytes != self.file.size_bytes:
            raise _NotKeptError(
                "K2-UNA-001",
                "The store acknowledged an object that it does not hold.",
                where=self.key,
                got="no object" if kept is None else f"{kept.size_bytes} bytes",
                expected=f"{self.file.size_bytes} bytes",
                retry=After(2.0),
            )
        right = kept.sha256 in sent.sha256s if kept.sha256 else kept.etag == sent.etag
        if right:
            return
        # Another one may have made the object out of other parts, and an encrypting store has etags of its own.
        sha256 = self._read_back()
        if sha256 != self.file.sha256:
            self._patiently(lambda: self.route.store.delete(self.key))
            raise IntegrityError(
                "K2-INT-003",
                "The store keeps other bytes than it was sent.",
                where=self.key,
                got=f"sha256 {sha256}",
                expected=f"sha256 {self.file.sha256}",
                details={"path": self.file.path},
            )

    def _state(self) -> None:
        """Leave the statement that the blob was verified; one that says so already is as good."""
        store, key, file = self.route.store, f"{self.key}.ok", self.file
        data = canonical_bytes({"size_bytes": file.size_bytes, "sha256": file.sha256, "source": self.route.source})
        etag = ""
        while True:
            try:
                self._patiently(partial(store.put, key, data, if_absent=not etag, if_match=etag))
                return
            except ConflictError:
                try:
                    there, etag = self._patiently(partial(store.get, key))
                except KeyError:
                    etag = ""
                else:
                    if _agrees(there, file):
                        return


def part_size_bytes(file: LockedFile, part_bytes: int) -> int:
    """Return the size of a file's parts: as wanted, but not more of them than S3 takes."""
    return max(part_bytes, math.ceil(file.size_bytes / _MAX_PARTS))


def take_up(store: Store, file: LockedFile, part_bytes: int) -> tuple[str, list[UploadedPart]] | None:
    """Return the upload that a dead puller of this blob has left and its parts, or None if none can be gone on with."""
    left = store.unfinished_upload(f"blobs/{file.sha256}")
    if left is None:
        return None
    sizes = {part.size_bytes for part in left[1] if part.number * part_bytes <= file.size_bytes}
    return left if sizes <= {part_bytes} else None
