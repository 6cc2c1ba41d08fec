"""Reads a file from the medium it lies on, past the page cache, so that neither what is read nor who serves is cached.

O_DIRECT where the file system takes it. Where it does not, the file's clean pages are dropped before and after: those
that a process has mapped stay, and then it is the cache that is read. Every reading says which of the two it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.node.verified_file import not_regular

BLOCK_BYTES = 4 * 1024 * 1024
DIRECT, BUFFERED = "direct", "buffered"
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class MediumError(Exception):
    """The medium could not be read: the device's own error, and the offset of the block in which it was.

    It is no OSError, so that nothing takes it for a disk that may answer the next time.
    """

    def __init__(self, offset: int, size_bytes: int) -> None:
        super().__init__(f"read error of the medium in bytes {offset} to {offset + size_bytes - 1}")
        self.offset = offset
        self.size_bytes = size_bytes


@dataclass(frozen=True)
class Reading:
    """What a file held: its size and digest, and how it was read (`direct` or `buffered`)."""

    size_bytes: int
    sha256: str
    how: str


def read_medium(path: Path, take: Callable[[int], None]) -> Reading:
    """Return size, sha256 and how they were read.

    Args:
        path: a regular file.
        take: called with the bytes of each block before they are read; it waits for a rate, counts, or stops.

    Raises:
        MediumError: the device cannot read some of it.
        IntegrityError: something other than a regular file stands there.
        OSError: anything else; FileNotFoundError where there is none.
    """
    try:
        return _read(path, take, direct=True)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    return _read(path, take, direct=False)


def _read(path: Path, take: Callable[[int], None], *, direct: bool) -> Reading:
    with _opened(path, direct=direct) as fd:
        digest, offset = hashlib.sha256(), 0
        for view in _blocks(fd, take, direct=direct):
            digest.update(view)
            offset += len(view)
    return Reading(offset, digest.hexdigest(), DIRECT if direct else BUFFERED)


@contextlib.contextmanager
def _opened(path: Path, *, direct: bool) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_regular(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise not_regular(path)
        yield fd
    finally:
        os.close(fd)


def _blocks(fd: int, take: Callable[[int], None], *, direct: bool) -> Iterator[memoryview]:
    """Yield the file's bytes in views of one buffer, which is aligned to pages as O_DIRECT needs it."""
    size_bytes, offset = os.fstat(fd).st_size, 0
    if not direct:
        os.fdatasync(fd)  # dirty pages are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, BLOCK_BYTES) as buffer, memoryview(buffer) as view:
        while True:
            take(min(BLOCK_BYTES, max(0, size_bytes - offset)))
            count = _fill(fd, view, offset)
            if not direct:
                os.posix_fadvise(fd, offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
            if count:
                with view[:count] as block:
                    yield block
            offset += count
            if count == BLOCK_BYTES:
                continue
            if direct and offset < size_bytes:
                # Cut short in the middle, and the rest is not aligned: read it the other way.
                raise OSError(errno.EINVAL, "a direct read was cut short")
            return


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read at an offset until the buffer is full or the file ends, and return how many bytes."""
    count = 0
    while count < len(view):
        try:
            with view[count:] as rest:
                got = os.preadv(fd, [rest], offset + count)
        except OSError as error:
            if error.errno == errno.EIO:
                raise MediumError(offset, len(view)) from error
            if error.errno == errno.EINVAL and count:
                return count  # behind the file's end, at an offset that is no multiple of a sector
            raise
        if not got:
            return count
        count += got
    return count
