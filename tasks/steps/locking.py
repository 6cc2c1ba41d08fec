"""A lock made from the Hub, with everything checked that can be without the shards' bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tasks.core.errors import After, InputError, IntegrityError, UnavailableError
from tasks.core.identity import check_revision, git_blob_sha1_hex, sha256_hex
from tasks.core.lock import Lock, LockedFile, accept_small_files, make_lock
from tasks.core.paths import linked_path
from tasks.core.safetensors import (
    INDEX_FILE,
    LENGTH_BYTES,
    ShardHeader,
    ShardIndex,
    check_names,
    check_shards,
    check_total,
    header_bytes,
    parse_header,
    parse_index,
)
from tasks.ports import Hub, Progress

_SMALL_FILE_MAX_BYTES = 64 * 1024 * 1024
_FIRST_READ_BYTES = 512 * 1024
"""Holds the header of a layer with 384 experts, so that one request is enough for most shards."""
_READERS = 8
_TRIES = 3
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_Made = TypeVar("_Made")


def make_accepted_lock(
    hub: Hub, repo: str, revision: str, progress: Progress | None = None, *, total_size: bool = True
) -> tuple[Lock, dict[str, bytes]]:
    """Return the lock of a commit, small files accepted, and the bytes of the small files that were read.

    Each small file is checked against its git blob id and gets our own sha256. The index must name exactly the shards,
    and each shard's header must agree with index and size; of a shard no more is fetched than its header. That carries
    no digest of its own: what is found here is about the upload, and the bytes are the pull's to compare.

    Args:
        hub: where the commit is.
        repo: owner/name.
        revision: the commit.
        progress: where to show how many files have been read.
        total_size: whether the index's total_size, if it states one, must be that of the tensors.

    Raises:
        InputError: no such repository or commit, an unsafe path, an inconsistent checkpoint.
        IntegrityError: a small file's bytes do not have the blob id that the Hub states for them.
        UnavailableError: the Hub does not answer, or not twice the same.
    """
    check_revision(revision)
    lock = make_lock(repo, revision, hub.list_revision(repo, revision).files)
    large_indexes = [name for name in _index_names(lock) if lock.file(name).sha256]
    small_paths = [*(file.path for file in lock.files if not file.sha256), *large_indexes]
    work = _Reading(hub, lock, progress, len(small_paths) + len(lock.shards))
    small = work.small_files(small_paths)
    indexes = {_folder(name): parse_index(name, small[name]) for name in _index_names(lock)}
    check_shards((file.path for file in lock.shards), indexes)
    headers = work.headers(indexes)
    if not any(header.names for header in headers if not _folder(header.path)):
        raise InputError("K2-INP-004", "The revision holds no tensor.", where=headers[0].path)
    for folder, index in indexes.items() if total_size else ():
        check_total((header for header in headers if _folder(header.path) == folder), index)
    return accept_small_files(lock, {path: sha256_hex(data) for path, data in small.items()}), small


def _index_names(lock: Lock) -> list[str]:
    """Return the indexes that stand beside shards."""
    names = {f"{_folder(file.path)}/{INDEX_FILE}".lstrip("/") for file in lock.shards}
    return sorted(names & {file.path for file in lock.files})


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


@dataclass(frozen=True)
class _Reading:
    """What is read of a commit's files, several at once."""

    hub: Hub
    lock: Lock
    progress: Progress | None
    total_files: int

    def small_files(self, paths: list[str]) -> dict[str, bytes]:
        """Return the bytes of small files, each checked against the digest that the Hub lists for it."""
        return dict(zip(paths, self._all(self._small, [self.lock.file(path) for path in paths], 0), strict=True))

    def headers(self, indexes: Mapping[str, ShardIndex]) -> list[ShardHeader]:
        """Return the header of every shard, compared with the index of its directory, if that has one.

        It comes after the small files, for the progress.
        """
        shards = self.lock.shards
        return self._all(partial(self._header, indexes), shards, self.total_files - len(shards))

    def _all(self, read: Callable[[LockedFile], _Made], files: Sequence[LockedFile], before: int) -> list[_Made]:
        made: list[_Made] = []
        pool = ThreadPoolExecutor(_READERS, thread_name_prefix="lock")
        try:
            for future in [pool.submit(_again, partial(read, file)) for file in files]:
                made.append(future.result())
                if self.progress:
                    self.progress.show("lock", before + len(made), self.total_files, "files")
        finally:
            # What has not begun is not wanted any more after the first failure.
            pool.shutdown(wait=True, cancel_futures=True)
        return made

    def _small(self, file: LockedFile) -> bytes:
        lock = self.lock
        data = self.hub.read_file(lock.repo, lock.revision, file.path, _SMALL_FILE_MAX_BYTES)
        got, expected = (sha256_hex(data), file.sha256) if file.sha256 else (git_blob_sha1_hex(data), file.git_sha1)
        if got != expected:
            raise IntegrityError(
                "K2-INT-001",
                "A small file's bytes are not those that the Hub lists.",
                where=f"{lock.repo}@{lock.revision[:8]} {file.path}",
                got=got,
                expected=expected,
            )
        _check_plain(lock, file, data)
        return data

    def _header(self, indexes: Mapping[str, ShardIndex], file: LockedFile) -> ShardHeader:
        """Return a shard's header; InputError for a wrong one that comes twice the same.

        Nothing else tells a fault of the upload from one of the line.
        """
        index = indexes.get(_folder(file.path))
        try:
            return self._read_header(file, index)
        except InputError as error:
            first = str(error)
        try:
            self._read_header(file, index)
        except InputError as error:
            if str(error) == first:
                raise
        raise self._unreliable(file, "another header at the second try")

    def _read_header(self, file: LockedFile, index: ShardIndex | None) -> ShardHeader:
        """Return a shard's header; no more of the shard is fetched than that and half a megabyte."""
        start = self._read(file, 0, min(file.size_bytes, _FIRST_READ_BYTES))
        end = LENGTH_BYTES + header_bytes(file.path, file.size_bytes, start)
        if end > len(start):
            start += self._read(file, len(start), end - len(start))
        header = parse_header(file.path, file.size_bytes, start[LENGTH_BYTES:end])
        if index:
            check_names(header, index)
        return header

    def _read(self, file: LockedFile, offset: int, size_bytes: int) -> bytes:
        where = self.lock.repo, self.lock.revision, file.path
        data = self.hub.read_range(*where, offset, size_bytes) if size_bytes else b""
        if len(data) < size_bytes:
            raise self._unreliable(file, f"{len(data)} of {size_bytes} bytes from {offset} on")
        return data

    def _unreliable(self, file: LockedFile, got: str) -> UnavailableError:
        return UnavailableError(
            "K2-UNA-001",
            "The Hub did not give a shard's header as it lists the shard.",
            where=f"{self.lock.repo}@{self.lock.revision[:8]} {file.path}",
            got=got,
            expected=f"the header of a file of {file.size_bytes} bytes",
            retry=After(5.0),
        )


def _again(read: Callable[[], _Made]) -> _Made:
    """Return what is read, at the last of a few tries, where a connection broke.

    After an answer of the server's own, such as a limit of its rate, it is for the caller to wait.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except UnavailableError as error:
            if "status" in error.details:
                raise
    return read()


def _check_plain(lock: Lock, file: LockedFile, data: bytes) -> None:
    """Check that a small file is its own content, and not where git says that the content is.

    Raises:
        InputError: it is a symbolic link or the pointer to a large file.
    """
    if data.startswith(_LFS_POINTER):
        raise InputError(
            "K2-INP-004",
            "A file is only a pointer to its content (git-lfs).",
            where=file.path,
            got=f"{file.size_bytes} bytes that name the content",
            expected="the content",
        )
    target = linked_path(file.path, data, [other.path for other in lock.files])
    if target:
        raise InputError(
            "K2-INP-003",
            "A file of the checkpoint is a symbolic link.",
            where=file.path,
            got=f"a link to {target}",
            expected="the content itself: a link is not staged",
        )
