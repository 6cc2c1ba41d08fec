"""Reads the files of a checkpoint where they lie, in parallel, and judges each by the lock. Writes nothing.

How they are read, and why not in another way, is in ADR 0025.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from tasks.core.errors import InputError
from tasks.core.file_verdicts import (
    DIFFERS,
    MISSING,
    NOT_REGULAR,
    POINTER_MAX_BYTES,
    UNREADABLE,
    FileVerdict,
    Findings,
    ignored_root,
    in_order,
    judge_digest,
    judge_pointer,
    judge_size,
)
from tasks.core.lock import Lock, LockedFile
from tasks.node.program import Stop
from tasks.node.workers import run_all

BLOCK_BYTES = 4 * 1024 * 1024
NO_FILE = "no such file"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class Tally(Protocol):
    """Where a reader says how far it is; threads share it."""

    def advance(self, count_bytes: int) -> None:
        """Count bytes."""
        ...

    def file_done(self) -> None:
        """Count a file."""
        ...


def look_at(lock: Lock, judge: Callable[[LockedFile, Stop], FileVerdict], threads: int, stop: Stop) -> Findings:
    """Have every file of a lock judged, the largest first, so that no thread is left with a large one at the end."""
    largest_first = sorted(lock.files, key=lambda file: (-file.size_bytes, file.path))
    return Findings(in_order(lock, run_all(largest_first, judge, threads, stop, lambda: None)))


def read_checkout(
    directory: Path, lock: Lock, *, links: bool, threads: int, stop: Stop, tally: Tally | None = None
) -> Findings:
    """Return the verdict on every file of the lock in a directory.

    Args:
        directory: where the files are.
        lock: what they should be.
        links: follow a link in place of a file, as the Hub's own cache has them; without, it is no regular file. A
            directory that is a link is followed in no case.
        threads: files that are read at once.
        stop: ends the work; then an UnavailableError is raised.
        tally: is told how far the work is.
    """
    return look_at(lock, partial(_judge, directory, links, tally), threads, stop)


def _judge(directory: Path, links: bool, tally: Tally | None, file: LockedFile, stop: Stop) -> FileVerdict:
    def advance(count_bytes: int) -> None:
        stop.check()
        if tally is not None:
            tally.advance(count_bytes)

    verdict = judge_file(directory, file, links=links, advance=advance)
    if tally is not None:
        tally.file_done()
        # What was not read is settled all the same.
        tally.advance(file.size_bytes - verdict.read_bytes)
    return verdict


class _RefusedError(Exception):
    """A file that is not read, and why."""

    def __init__(self, verdict: str, got: str) -> None:
        super().__init__(verdict, got)
        self.verdict, self.got = verdict, got


def judge_file(directory: Path, file: LockedFile, *, links: bool, advance: Callable[[int], None]) -> FileVerdict:
    """Return the verdict on one file; whatever is wrong with it is a verdict, not an exception."""
    link = False
    try:
        with ExitStack() as stack:
            folder = _open_folder(stack, directory, file.path)
            name = file.path.rpartition("/")[2]
            link = stat.S_ISLNK(_stat(folder, name, follow=False).st_mode)
            fd = _open_regular(stack, folder, name, followed=link and links)
            return replace(_judge_open(fd, file, advance), link=link)
    except _RefusedError as refused:
        return FileVerdict(file.path, refused.verdict, refused.got, file.sha256, link=link)
    except OSError as error:
        return FileVerdict(file.path, UNREADABLE, error.strerror or str(error), file.sha256, link=link)


def _open_folder(stack: ExitStack, directory: Path, path: str) -> int:
    """Open the directory of a file step by step, so that no link on the way leads elsewhere."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, folder)
    for part in path.split("/")[:-1]:
        found = _stat(folder, part, follow=False)
        if stat.S_ISLNK(found.st_mode):
            raise _RefusedError(NOT_REGULAR, f"its directory {part} is a link")
        if not stat.S_ISDIR(found.st_mode):
            raise _RefusedError(MISSING, f"{part} is no directory")
        folder = os.open(part, _DIRECTORY, dir_fd=folder)
        stack.callback(os.close, folder)
    return folder


def _open_regular(stack: ExitStack, folder: int, name: str, *, followed: bool) -> int:
    """Open a regular file, looked at before and after: to open a device may already do something."""
    try:
        found = _stat(folder, name, follow=followed)
    except _RefusedError as missing:
        if not followed:
            raise
        target = os.readlink(name, dir_fd=folder)
        raise _RefusedError(MISSING, f"a link that leads nowhere: {target}") from missing
    if not stat.S_ISREG(found.st_mode):
        raise _RefusedError(NOT_REGULAR, _kind(found.st_mode))
    fd = os.open(name, _FILE if followed else _FILE | os.O_NOFOLLOW, dir_fd=folder)
    stack.callback(os.close, fd)
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        raise _RefusedError(NOT_REGULAR, _kind(mode))
    return fd


def _stat(folder: int, name: str, *, follow: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise _RefusedError(MISSING, NO_FILE) from error
        raise


def _kind(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "a special file")


def _judge_open(fd: int, file: LockedFile, advance: Callable[[int], None]) -> FileVerdict:
    before = os.fstat(fd)
    verdict = judge_size(file, before.st_size) or judge_digest(file, *_hash(fd, file.size_bytes, advance))
    after = os.fstat(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return FileVerdict(file.path, DIFFERS, "changed while it was read", file.sha256, read_bytes=verdict.read_bytes)
    if not verdict.ok and before.st_size <= POINTER_MAX_BYTES:
        return judge_pointer(file, os.pread(fd, POINTER_MAX_BYTES, 0)) or verdict
    return verdict


def _hash(fd: int, size_bytes: int, advance: Callable[[int], None]) -> tuple[int, str]:
    """Return how many bytes were read and their sha256; reading ends behind the size that the file should have."""
    digest, read_bytes = hashlib.sha256(), 0
    buffer = bytearray(min(BLOCK_BYTES, size_bytes + 1))
    view = memoryview(buffer)
    while read_bytes <= size_bytes and (count := os.readv(fd, [buffer])):
        digest.update(view[:count])
        read_bytes += count
        advance(count)
    return read_bytes, digest.hexdigest()


def list_others(directory: Path, lock: Lock) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what stands in a directory beside the lock's files, and what of that is ignored by rule.

    A directory that cannot be listed is named with a slash at its end.
    """
    locked = {file.path for file in lock.files}
    extra, ignored = set(), set()
    for path in _walk(directory, ""):
        if root := ignored_root(path):
            ignored.add(root)
        elif path not in locked:
            extra.add(path)
    return tuple(sorted(extra)), tuple(sorted(ignored))


def _walk(directory: Path, below: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(directory / below))
    except OSError:
        yield f"{below}/"
        return
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False) and not ignored_root(path):
            yield from _walk(directory, path)
        else:
            yield path


def find_checkout(given: Path, lock: Lock) -> Path:
    """Return the directory with the files: the given one, or the snapshot of the lock's commit in a cache of the Hub.

    Raises:
        InputError: there is no such directory, or it is a cache without that commit.
    """
    if not given.is_dir():
        raise InputError(
            "K2-INP-001", "There is no such directory.", where="--dir", got=str(given), expected="a directory of files"
        )
    for repository in (given / f"models--{lock.repo.replace('/', '--')}", given):
        snapshots = repository / "snapshots"
        if not (snapshots.is_dir() and (repository / "blobs").is_dir()):
            continue
        if (snapshots / lock.revision).is_dir():
            return snapshots / lock.revision
        raise InputError(
            "K2-INP-001",
            "The cache does not hold the commit of the lock.",
            where=str(snapshots),
            got=", ".join(sorted(path.name for path in snapshots.iterdir())) or "no commit",
            expected=lock.revision,
            hint=f"hf download {lock.repo} --revision {lock.revision}",
        )
    return given
