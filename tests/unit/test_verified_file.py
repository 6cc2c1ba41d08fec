"""How one file gets its name: the order of things, a disk that fails at each of them, the page cache, the rate."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import After, CapacityError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import LockedFile
from tasks.core.marker import StagedFile
from tasks.node import verified_file
from tasks.node.rate_limit import RateLimit
from tasks.node.verified_file import PARTIAL_DIR, Writing, write_verified

DATA = os.urandom(300_000)
PATH = "code/model.py"
KEEP, DROP = Writing("keep"), Writing("drop")


@pytest.fixture(params=[KEEP, DROP], ids=["keep", "drop"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(verified_file, "DROP_WINDOW_BYTES", 100_000)
    return request.param


def locked(data: bytes = DATA, path: str = PATH) -> LockedFile:
    return LockedFile(path, len(data), "code", hashlib.sha256(data).hexdigest())


def in_blocks(data: bytes, size: int = 70_000) -> Iterator[memoryview]:
    """Yield blocks in one buffer that is used again, as the store's stream does."""
    buffer = memoryview(bytearray(size))
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        buffer[: len(piece)] = piece
        yield buffer[: len(piece)]
        buffer[:] = bytes(size)


def write(directory: Path, writing: Writing = KEEP, data: bytes = DATA, **changes: Any) -> StagedFile:
    blocks = changes.get("blocks") or in_blocks(data)
    advance: Callable[[int], None] = changes.get("advance") or (lambda count: None)
    return write_verified(directory, PATH, changes.get("expected") or locked(), blocks, advance, writing)


def litter(directory: Path) -> list[str]:
    return [path.name for path in (directory / PARTIAL_DIR).iterdir()]


def test_right_bytes_get_their_name_and_identity(tmp_path: Path, writing: Writing) -> None:
    counted: list[int] = []
    staged = write(tmp_path, writing, advance=counted.append)
    found = (tmp_path / PATH).stat()
    assert (tmp_path / PATH).read_bytes() == DATA
    assert staged == StagedFile(PATH, len(DATA), locked().sha256, found.st_mtime_ns, found.st_ino)
    assert oct(found.st_mode & 0o777) == "0o444"
    assert sum(counted) == len(DATA)
    assert litter(tmp_path) == []


def test_the_order_of_things(tmp_path: Path, writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)  # so that the directories are there
    done: list[str] = []

    def noted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            what = arguments[0]
            place = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            kind = "dir" if Path(place).is_dir() else "temp" if PARTIAL_DIR in place else "other"
            result = real(*arguments, **named)
            if f"{name} {kind}" != (done or [""])[-1]:  # many writes are one
                done.append(f"{name} {kind}")
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("write", "fchmod", "fdatasync", "fsync", "rename", "close", "posix_fadvise"):
        noted(name)
    write(tmp_path, writing)
    monkeypatch.undo()
    ends = {
        "keep": ["write temp"],
        "drop": ["write temp", "fdatasync temp", "posix_fadvise temp"] * 2 + ["write temp"],
    }
    drop = ["posix_fadvise temp"] if writing is DROP else []
    assert done == [
        *ends[writing.cache_mode],
        "fchmod temp",
        "fsync temp",
        *drop,
        "close temp",
        "rename temp",
        "fsync dir",
        "close dir",
    ]


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, on_directory: bool = False) -> None:
    """Let a call of the system fail; of `fsync` only that of a directory, or only that of a file."""
    real = getattr(os, name)

    def call(*arguments: Any, **named: Any) -> Any:
        what = arguments[0]
        if isinstance(what, int) and Path(os.readlink(f"/proc/self/fd/{what}")).is_dir() != on_directory:
            return real(*arguments, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, call)


CALLS = ["write", "fchmod", "fsync", "fdatasync", "fstat", "rename"]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_before_the_name_is_given(
    tmp_path: Path, writing: Writing, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    if name == "fdatasync" and writing is KEEP:
        name = "fsync"  # the only one that it makes
    old = b"an older version"
    write(tmp_path, data=old, expected=locked(old))
    failing(monkeypatch, name, number)
    with pytest.raises(K2Error) as caught:
        write(tmp_path, writing)
    monkeypatch.undo()
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert isinstance(caught.value, CapacityError if full else UnavailableError)
    assert full or isinstance(caught.value.retry, After)
    assert caught.value.where == str(tmp_path / PATH)
    assert (tmp_path / PATH).read_bytes() == old
    assert litter(tmp_path) == []
    write(tmp_path, writing)  # and when the disk is well again, it goes on
    assert (tmp_path / PATH).read_bytes() == DATA


def test_a_name_that_is_not_durable_is_told_and_may_be_written_again(
    tmp_path: Path, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    failing(monkeypatch, "fsync", errno.EIO, on_directory=True)
    with pytest.raises(UnavailableError):
        write(tmp_path, writing)
    monkeypatch.undo()
    assert (tmp_path / PATH).read_bytes() == DATA
    write(tmp_path, writing)


def test_what_cannot_be_cleaned_up_does_not_hide_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "write", errno.ENOSPC)
    failing(monkeypatch, "unlink", errno.EROFS)
    with pytest.raises(CapacityError):
        write(tmp_path)


def test_writes_that_take_only_a_part_are_gone_on_with(
    tmp_path: Path, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:1000]))
    write(tmp_path, writing)
    assert (tmp_path / PATH).read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", DATA[:-1] + b"x", b"", bytes(len(DATA))])
def test_other_bytes_get_no_name(tmp_path: Path, writing: Writing, data: bytes) -> None:
    with pytest.raises(IntegrityError) as caught:
        write(tmp_path, writing, data, expected=locked() if data != DATA else None)
    assert caught.value.code == "K2-INT-001"
    assert not (tmp_path / PATH).exists()
    assert litter(tmp_path) == []


def test_a_stream_without_end_is_left_at_the_first_byte_too_many(tmp_path: Path) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield DATA

    with pytest.raises(IntegrityError, match="another size"):
        write(tmp_path, blocks=endless())


def test_a_source_that_breaks_leaves_nothing(tmp_path: Path, writing: Writing) -> None:
    def breaking() -> Iterator[memoryview]:
        yield from in_blocks(DATA[:200_000])
        raise UnavailableError("K2-UNA-001", "cut")

    with pytest.raises(UnavailableError, match="cut"):
        write(tmp_path, writing, blocks=breaking())
    assert not (tmp_path / PATH).exists()
    assert litter(tmp_path) == []


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, page = path.stat().st_size, os.sysconf("SC_PAGE_SIZE")
    fd = os.open(path, os.O_RDONLY)
    try:
        place = libc.mmap(None, ctypes.c_size_t(size), 1, 1, fd, ctypes.c_long(0))
        found = (ctypes.c_ubyte * -(-size // page))()
        assert libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), found) == 0
        libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
    finally:
        os.close(fd)
    return page * sum(entry & 1 for entry in found)


def test_what_stays_in_the_page_cache() -> None:
    """On a real disk: /tmp may be in memory itself."""
    data = os.urandom(20_000_123)
    for writing, expected in ((KEEP, -(-len(data) // 4096) * 4096), (DROP, 0)):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
            most = 0

            def look(count: int, directory: Path = Path(name)) -> None:
                nonlocal most
                (temp,) = (directory / PARTIAL_DIR).iterdir()
                most = max(most, resident_bytes(temp))

            write(Path(name), writing, expected=locked(data), blocks=in_blocks(data, 1_000_000), advance=look)
            assert resident_bytes(Path(name) / PATH) == expected
            assert (most > verified_file.DROP_WINDOW_BYTES) == (writing is KEEP)


def test_a_file_system_without_advice_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "posix_fadvise", errno.EINVAL)
    write(tmp_path, DROP)
    assert (tmp_path / PATH).read_bytes() == DATA


def test_a_limit_is_paid_before_the_bytes_are_written(tmp_path: Path) -> None:
    waited: list[float] = []
    limit = RateLimit(100_000, sleep=waited.append, now=lambda: 0.0)
    write(tmp_path, Writing(limit=limit))
    # By a clock that stands still each wait is until everything so far is paid for.
    assert waited[-1] == pytest.approx(len(DATA) / 100_000)


def test_only_known_cache_modes() -> None:
    with pytest.raises(ValueError, match="keep, drop"):
        Writing("hot")
