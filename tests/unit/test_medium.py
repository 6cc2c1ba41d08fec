"""Reading past the page cache: what is read is the medium, and what others have in the cache stays there."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import random
from pathlib import Path

import pytest

from tasks.core.errors import IntegrityError
from tasks.node.medium import BLOCK_BYTES, BUFFERED, DIRECT, MediumError, read_medium

PAGE = mmap.PAGESIZE


def cached_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    pages = ctypes.create_string_buffer((size + PAGE - 1) // PAGE)
    assert libc.mincore(address, size, pages) == 0
    libc.munmap(address, size)
    return sum(byte & 1 for byte in pages.raw)


def written(path: Path, size: int) -> bytes:
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return data


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12_345]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_every_size_is_read_whole(size: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(tmp_path / "f", size)
    if not direct:
        refuse_direct_reads(monkeypatch)
    taken: list[int] = []
    reading = read_medium(tmp_path / "f", taken.append)
    assert (reading.size_bytes, reading.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert sum(taken) == size
    assert reading.how == (DIRECT if direct else BUFFERED)


def refuse_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file system refuse O_DIRECT."""
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


def test_what_a_serving_engine_has_in_the_cache_stays_there_and_nothing_comes_in(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    for path in (hot, cold):
        written(path, BLOCK_BYTES)
        drop(path)
    hot.read_bytes()
    before = cached_pages(hot)
    assert before == BLOCK_BYTES // PAGE
    assert cached_pages(cold) == 0
    for path in (hot, cold):
        assert read_medium(path, lambda _: None).how == DIRECT
    assert (cached_pages(hot), cached_pages(cold)) == (before, 0)


def test_a_file_system_that_refuses_direct_reads_is_read_behind_a_dropped_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "f", BLOCK_BYTES)
    (tmp_path / "f").read_bytes()
    refuse_direct_reads(monkeypatch)
    assert read_medium(tmp_path / "f", lambda _: None).how == BUFFERED
    assert cached_pages(tmp_path / "f") == 0


def test_what_was_only_written_into_the_cache_is_seen(tmp_path: Path) -> None:
    written(tmp_path / "f", BLOCK_BYTES)
    with (tmp_path / "f").open("r+b") as file:
        file.seek(77)
        file.write(b"!")
    data = (tmp_path / "f").read_bytes()
    assert read_medium(tmp_path / "f", lambda _: None).sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("direct", [True, False])
def test_a_read_error_of_the_device_names_where_it_was(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "f", 3 * BLOCK_BYTES)
    if not direct:
        refuse_direct_reads(monkeypatch)
    real = os.preadv

    def broken(fd, buffers, offset):
        if offset >= BLOCK_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(MediumError) as caught:
        read_medium(tmp_path / "f", lambda _: None)
    assert caught.value.offset == BLOCK_BYTES


def test_a_direct_read_that_is_cut_short_is_not_taken_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "f", 2 * BLOCK_BYTES)
    real = os.preadv
    cut: list[int] = []

    def short(fd, buffers, offset):
        if offset % 512:
            raise OSError(errno.EINVAL, "Invalid argument")
        count = real(fd, buffers, offset)
        if not cut:
            cut.append(offset)
            return 1000
        return count

    monkeypatch.setattr(os, "preadv", short)
    reading = read_medium(tmp_path / "f", lambda _: None)
    assert (reading.sha256, reading.how) == (hashlib.sha256(data).hexdigest(), BUFFERED)


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    {
        "symlink": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }[kind]()
    with pytest.raises(IntegrityError):
        read_medium(path, lambda _: None)


def test_a_missing_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_medium(tmp_path / "f", lambda _: None)
