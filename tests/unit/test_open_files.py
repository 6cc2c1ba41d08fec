"""Whether somebody has a file open: also in another container, also when it is only mapped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.node.open_files import ignore_lease_breaks, in_use, leased, processes_with, regular_files

OPENED = "import sys; f = open(sys.argv[1], 'rb')"
MAPPED = """
import ctypes, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_long(0))
assert address not in (None, 2**64 - 1)
os.close(fd)
assert not [fd for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')
            and os.path.samefile(f'/proc/self/fd/{fd}', sys.argv[1])]
"""
OTHER_CONTAINER = [
    "unshare",
    *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
    "--pid",
    "--fork",
    "--mount",
]


@contextlib.contextmanager
def holding(code: str, path: Path, *before: str) -> Iterator[None]:
    """Another process has a file open while the block runs."""
    end = "\nprint('ready', flush=True)\nsys.stdin.read()"
    argv = [*before, sys.executable, "-c", code + end, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 8192)
    path.chmod(0o444)
    return path


def test_a_file_that_nobody_has_open_is_not_in_use(path: Path) -> None:
    assert in_use([path]) is None


@pytest.mark.parametrize("code", [OPENED, MAPPED], ids=["opened", "mapped"])
@pytest.mark.parametrize("before", [[], OTHER_CONTAINER], ids=["beside us", "in other namespaces"])
def test_a_file_that_another_process_reads_is_in_use(path: Path, code: str, before: list[str]) -> None:
    with holding(code, path, *before):
        found = in_use([path])
        assert found is not None
        assert found.path == path
        assert found.why.startswith("open in ")
    assert in_use([path]) is None


def test_the_process_is_named_where_it_can_be_seen(path: Path) -> None:
    for code in (OPENED, MAPPED):
        with holding(code, path):
            assert ["python" in name for name in processes_with(path)] == [True]


def test_a_process_that_cannot_be_seen_counts_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.node.open_files.processes_with", lambda _: [])
    with holding(OPENED, path):
        found = in_use([path])
    assert found is not None
    assert found.why == "open in a process of another container"


def test_one_file_in_use_gives_back_the_leases_on_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"x")
    with holding(OPENED, paths[1]), leased(paths) as problem:
        assert problem is not None
        assert problem.path == paths[1]
        began = time.monotonic()
        paths[0].read_bytes()
        assert time.monotonic() - began < 5


def test_whoever_opens_a_file_meanwhile_waits_until_the_lease_is_given_back(path: Path) -> None:
    ignore_lease_breaks()
    child = None
    code = "import sys, time; print('go', flush=True); open(sys.argv[1], 'rb').read(); print('read', flush=True)"
    try:
        with leased([path]) as problem:
            assert problem is None
            child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            assert child.stdout.readline() == "go\n"
            told: list[str] = []
            reader = threading.Thread(target=lambda: told.append(child.stdout.readline()))
            reader.start()
            reader.join(0.5)
            assert told == []
        reader.join(30)
        assert told == ["read\n"]
    finally:
        if child is not None:
            child.wait(60)


def test_what_cannot_be_told_counts_as_in_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    found = in_use([path])
    assert found is not None
    assert "cannot be told" in found.why


def test_regular_files_are_those_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "d" / "f")
    (tmp_path / "to-directory").symlink_to(tmp_path / "d")
    os.mkfifo(tmp_path / "pipe")
    assert regular_files(tmp_path) == [tmp_path / "d" / "f"]
