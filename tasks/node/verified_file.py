"""The one place where a file of a checkpoint gets its final name, and only after its bytes were verified (I1).

Temp file on the same file system, sha256 of the very bytes that are written, size, fsync, rename, fsync of the
directory. A reader who opens a final name therefore sees verified bytes, after a kill and after a power loss too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import After, CapacityError, IntegrityError, K2Error, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.core.lock import LockedFile
from tasks.core.marker import FileStat, StagedFile
from tasks.core.paths import check_relative_path

if TYPE_CHECKING:
    from tasks.node.rate_limit import RateLimit
    from tasks.ports import Block

PARTIAL_DIR = ".k2-partial"
READ_BLOCK_BYTES = 4 * 1024 * 1024
CACHE_MODES = ("keep", "drop")
DROP_WINDOW_BYTES = 16 * 1024 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Writing:
    """How bytes are put on the disk.

    `cache_mode`: `keep` leaves them in the page cache, for an engine that starts soon; `drop` leaves nothing of them
    there, so that nothing is pushed out of it that a serving engine has there. `limit` is shared by all threads of a
    program; None for none.
    """

    cache_mode: str = "keep"
    limit: RateLimit | None = None

    def __post_init__(self) -> None:
        if self.cache_mode not in CACHE_MODES:
            raise ValueError(f"cache_mode is one of {', '.join(CACHE_MODES)}, not {self.cache_mode!r}")


PLAIN = Writing()


class HashingWriter:
    """Writes blocks to a descriptor and hashes the same blocks: what was hashed is what was written.

    With cache_mode `drop` no more than a window of the file is ever in the page cache.
    """

    def __init__(self, fd: int, writing: Writing = PLAIN) -> None:
        self._fd = fd
        self._writing = writing
        self._hash = hashlib.sha256()
        self._kept_bytes = 0
        self.size_bytes = 0

    def write(self, block: Block) -> None:
        """Write a whole block."""
        view = memoryview(block)
        if self._writing.limit is not None:
            self._writing.limit.take(len(view))
        self._hash.update(view)
        self.size_bytes += len(view)
        self._kept_bytes += len(view)
        while view:
            view = view[os.write(self._fd, view) :]
        if self._writing.cache_mode == "drop" and self._kept_bytes >= DROP_WINDOW_BYTES:
            os.fdatasync(self._fd)
            self._drop()

    def sync(self) -> None:
        """Make all that was written durable."""
        os.fsync(self._fd)
        if self._writing.cache_mode == "drop":
            self._drop()

    def _drop(self) -> None:
        """Let go of all pages of the file: they are on the disk, and only such pages can be let go of."""
        with contextlib.suppress(
            OSError
        ):  # a file system that knows no such advice, and whose pages are its own affair
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._kept_bytes = 0

    @property
    def sha256(self) -> str:
        """The digest of all blocks so far."""
        return self._hash.hexdigest()


def write_verified(
    dest_dir: Path,
    path: str,
    expected: LockedFile,
    blocks: Iterable[Block],
    advance: Callable[[int], None],
    writing: Writing = PLAIN,
) -> StagedFile:
    """Write `dest_dir/path` from blocks, replacing what is there only if the bytes are those of the lock.

    Args:
        dest_dir: the checkpoint's directory; temps stand in its `.k2-partial`.
        path: relative path in it.
        expected: size and sha256 that the bytes must have.
        blocks: the bytes, from wherever; iteration stops at the first byte too many.
        advance: called with the count of each block written.
        writing: what stays in the page cache, and how fast.

    Raises:
        IntegrityError: other bytes or another size (K2-INT-001); the temp is gone and the final name untouched.
        CapacityError: the disk is full (K2-CAP-002).
        UnavailableError: the disk failed; or whatever `blocks` raises.
    """
    check_relative_path(path)
    final = dest_dir / path
    temp = temp_path(dest_dir, path, expected)
    try:
        make_directory(temp.parent)
        make_directory(final.parent)
        with contextlib.ExitStack() as stack:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            writer = HashingWriter(fd, writing)
            for block in blocks:
                writer.write(block)
                advance(len(block))
                if writer.size_bytes > expected.size_bytes:
                    break
            check_content(path, expected, writer.size_bytes, writer.sha256)
            os.fchmod(fd, 0o444)
            writer.sync()
            # Of the very file that was written: by its name it could be another one by then.
            found = os.fstat(fd)
        temp.rename(final)
        fsync_directory(final.parent)
    except OSError as error:
        raise disk_error(error, final) from error
    finally:
        with contextlib.suppress(OSError):  # it would hide what went wrong; the next stager sweeps
            temp.unlink(missing_ok=True)
    return StagedFile(path, found.st_size, expected.sha256, found.st_mtime_ns, found.st_ino)


def adopt_verified(
    dest_dir: Path, path: str, expected: LockedFile, temp: Path, advance: Callable[[int], None]
) -> StagedFile:
    """Give a file that another program has written its final name, if its bytes, read for that, are those of the lock.

    Args:
        dest_dir: the checkpoint's directory; `temp` is on its file system.
        path: relative path in it.
        expected: size and sha256 that the bytes must have.
        temp: what was written; nobody may write it any more.
        advance: called with the count of each block read.

    Raises:
        IntegrityError: other bytes (K2-INT-001), or no file of its own (K2-INT-002); the final name is untouched.
        UnavailableError: the disk failed.
    """
    check_relative_path(path)
    final = dest_dir / path
    try:
        before = temp.lstat()
        if before.st_nlink != 1:
            raise not_regular(temp)  # who has the other name may write to it
        size_bytes, sha256 = hash_file(temp, advance)
        check_content(path, expected, size_bytes, sha256)
        temp.chmod(0o444)
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        after = temp.lstat()
        if (after.st_mtime_ns, after.st_ino, after.st_size) != (before.st_mtime_ns, before.st_ino, before.st_size):
            raise not_regular(temp)
        make_directory(final.parent)
        temp.rename(final)
        fsync_directory(final.parent)
    except OSError as error:
        raise disk_error(error, final) from error
    return StagedFile(path, after.st_size, expected.sha256, after.st_mtime_ns, after.st_ino)


def temp_path(dest_dir: Path, path: str, expected: LockedFile) -> Path:
    """Return where a file is written before it has its name: one place a process, swept if that dies."""
    return dest_dir / PARTIAL_DIR / f"{expected.sha256}.{sha256_hex(path.encode())[:8]}.{os.getpid()}"


def check_content(path: str, expected: LockedFile, size_bytes: int, sha256: str) -> None:
    """Raise IntegrityError unless size and digest are those of the lock."""
    if size_bytes != expected.size_bytes:
        raise IntegrityError(
            "K2-INT-001",
            "A file arrived with another size.",
            where=path,
            got=f"{size_bytes} bytes or more" if size_bytes > expected.size_bytes else f"{size_bytes} bytes",
            expected=f"{expected.size_bytes} bytes",
        )
    if sha256 != expected.sha256:
        raise IntegrityError(
            "K2-INT-001",
            "A file arrived with other bytes than the lock says.",
            where=path,
            got=f"sha256 {sha256}",
            expected=f"sha256 {expected.sha256}",
        )


def hash_file(path: Path, advance: Callable[[int], None]) -> tuple[int, str]:
    """Return size and sha256 of a regular file; raise IntegrityError for a symlink or anything else."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_regular(path) from error
        raise
    with os.fdopen(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise not_regular(path)
        buffer = bytearray(READ_BLOCK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size_bytes += count
            advance(count)
    return size_bytes, digest.hexdigest()


def not_regular(path: Path) -> IntegrityError:
    """Return the error for a symlink or special file where a verified file should stand."""
    return IntegrityError(
        "K2-INT-002",
        "Something other than a regular file stands in the checkpoint.",
        where=str(path),
        got="a symlink or special file",
        expected="a regular file",
        hint="Remove it: verified bytes are never reached through a link. Then run the release again.",
    )


def file_stat(dest_dir: Path, path: str) -> FileStat | None:
    """Return the stat of a file without following links, None if there is none; IntegrityError if not regular."""
    try:
        found = (dest_dir / path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise not_regular(dest_dir / path)
    return FileStat(path, found.st_size, found.st_mtime_ns, found.st_ino)


def staged_file(dest_dir: Path, path: str, sha256: str) -> StagedFile:
    """Return the identity of a file that was just verified."""
    found = (dest_dir / path).lstat()
    return StagedFile(path, found.st_size, sha256, found.st_mtime_ns, found.st_ino)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, each so that it is there after a power loss."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=0o755, exist_ok=True)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_document(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all: temp, fsync, rename, fsync of the directory."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.chmod(0o444)
        temp.rename(path)
        fsync_directory(path.parent)
    finally:
        temp.unlink(missing_ok=True)


def disk_error(error: OSError, path: Path) -> K2Error:
    """Return what a failure of the node's disk means to the person on call."""
    if error.errno in _NO_ROOM:
        return CapacityError(
            "K2-CAP-002", "The disk is full.", where=str(path), got=error.strerror or "", expected="room for the file"
        )
    return UnavailableError(
        "K2-UNA-001",
        f"The node's disk failed: {error.strerror or error}.",
        where=str(path),
        hint="Check the disk (dmesg, mount options), then run the release again.",
        retry=After(5.0),
    )
