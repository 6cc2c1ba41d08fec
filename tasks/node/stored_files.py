"""Reads the files of a lock out of an object store, in parallel, and judges each by the lock. Writes nothing.

Two layouts: blobs by digest, as pullers leave them, and a plain tree, as `aws s3 sync` of a checkout leaves one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tasks.core.errors import InputError, K2Error
from tasks.core.file_verdicts import (
    MISSING,
    UNREADABLE,
    FileVerdict,
    Findings,
    ignored_root,
    judge_digest,
    judge_size,
)
from tasks.core.lock import Lock, LockedFile
from tasks.node.checkout import Tally, look_at
from tasks.node.program import Stop, StoppedError
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Store

BY_DIGEST, BY_PATH = "blobs", "paths"
_TRIES = 4
_NO_OBJECT = "no such object"


@dataclass(frozen=True)
class StoredFindings:
    """What was found in a store: the verdicts, how files are named there, and blobs without a statement.

    A statement (`blobs/<sha256>.ok`) is written only after the digest matched; stagers do not take a blob without one.
    """

    findings: Findings
    layout: str
    without_statement: tuple[str, ...] = ()


def read_stored(
    store: Store, prefix: str, lock: Lock, *, threads: int, stop: Stop, tally: Tally | None = None
) -> StoredFindings:
    """Return the verdict on every file of the lock in a store, under a prefix that is empty or ends with a slash.

    A stream that breaks is tried again; one that stays broken is a file that cannot be read, and hides no other.

    Raises:
        UnavailableError: the store does not list its objects, or the work was stopped.
    """
    names = {file.path: f"{prefix}blobs/{file.sha256}" for file in lock.files}
    sizes = {found.key: found.size_bytes for found in store.list_objects(f"{prefix}blobs/")}
    layout, others = BY_DIGEST, {}
    if not sizes.keys() & set(names.values()) and prefix:
        others = {found.key: found.size_bytes for found in store.list_objects(prefix)}
        by_path = {file.path: prefix + file.path for file in lock.files}
        if others.keys() & set(by_path.values()):
            layout, names, sizes = BY_PATH, by_path, others
    reader = _Reader(store, names, sizes, tally)
    once = _once(lock, names)
    found = look_at(replace(lock, files=once), reader.judge, threads, stop)
    verdicts = {verdict.place: verdict for verdict in found.verdicts}
    findings = Findings(
        tuple(_of(file, verdicts[names[file.path]], once) for file in lock.files),
        *(_others(prefix, others, lock) if layout == BY_PATH else ()),
    )
    silent = () if layout == BY_PATH else _without_statement(names, sizes)
    return StoredFindings(findings, layout, silent)


def _once(lock: Lock, names: Mapping[str, str]) -> tuple[LockedFile, ...]:
    """Return the files with each object once: two paths may have the same content."""
    return tuple({names[file.path]: file for file in reversed(lock.files)}.values())[::-1]


def _of(file: LockedFile, verdict: FileVerdict, read: tuple[LockedFile, ...]) -> FileVerdict:
    """Return an object's verdict as that of one of its paths; its bytes were read once."""
    return replace(verdict, path=file.path, read_bytes=verdict.read_bytes if file in read else 0)


def _others(prefix: str, there: Mapping[str, int], lock: Lock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    locked = {file.path for file in lock.files}
    paths = sorted(path for key in there if (path := key.removeprefix(prefix)) not in locked and path)
    ignored = {root for path in paths if (root := ignored_root(path))}
    return tuple(path for path in paths if not ignored_root(path)), tuple(sorted(ignored))


def _without_statement(names: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted({key for key in names.values() if key in sizes and f"{key}.ok" not in sizes}))


@dataclass(frozen=True)
class _Reader:
    store: Store
    names: Mapping[str, str]
    sizes: Mapping[str, int]
    tally: Tally | None

    def judge(self, file: LockedFile, stop: Stop) -> FileVerdict:
        key = self.names[file.path]
        try:
            verdict = self._judge(file, key, stop)
        except StoppedError:
            raise
        except K2Error as error:
            verdict = FileVerdict(file.path, UNREADABLE, error.summary, file.sha256)
        if self.tally is not None:
            self.tally.file_done()
            self.tally.advance(file.size_bytes - verdict.read_bytes)
        return replace(verdict, place=key)

    def _judge(self, file: LockedFile, key: str, stop: Stop) -> FileVerdict:
        if key not in self.sizes:
            return FileVerdict(file.path, MISSING, _NO_OBJECT, file.sha256)
        other_size = judge_size(file, self.sizes[key])
        return other_size or attempt(partial(self._read, file, key, stop), stop, integrity_tries=1, tries=_TRIES)

    def _read(self, file: LockedFile, key: str, stop: Stop) -> FileVerdict:
        """Read an object once from its first byte on; what a broken stream brought counts for nothing."""
        digest, read_bytes = hashlib.sha256(), 0
        try:
            for block in self.store.open(key):
                stop.check()
                digest.update(block)
                read_bytes += len(block)
                if self.tally is not None:
                    self.tally.advance(len(block))
                if read_bytes > file.size_bytes:
                    break
        except K2Error:
            if self.tally is not None:
                self.tally.advance(-read_bytes)
            raise
        return judge_digest(file, read_bytes, digest.hexdigest())


def parse_store_uri(uri: str, bucket: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://BUCKET[/PREFIX]`; an empty URI is the site's own bucket.

    Raises:
        InputError: it is not of that form.
    """
    if not uri:
        return bucket, ""
    scheme, _, rest = uri.partition("://")
    named, _, prefix = rest.partition("/")
    if scheme != "s3" or not named:
        raise InputError(
            "K2-INP-001",
            "The store's address is not of the form s3://BUCKET/PREFIX.",
            where="--store",
            got=uri,
            expected="s3://BUCKET or s3://BUCKET/PREFIX, at the endpoint of the site",
        )
    prefix = prefix.strip("/")
    return named, f"{prefix}/" if prefix else ""
