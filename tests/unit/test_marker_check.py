"""The gate before every engine start, and the deep verification: what each finds and what each costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import IntegrityError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE
from tasks.node.marker_check import check_directory, main
from tasks.node.program import Stop, write_termination_message
from tasks.node.sources import StoreSource
from tasks.node.stage import Node, Stager
from tasks.node.verify_files import verify_directory
from tests.fakes.checkpoints import contents, fill, lock_of
from tests.fakes.memory_store import MemoryStore

FILES = contents(shards=2)
SHARD = "model-1-of-2.safetensors"


@pytest.fixture
def lock_and_directory(tmp_path: Path) -> tuple[Lock, Path]:
    store = MemoryStore()
    lock = fill(store, FILES)
    Stager(StoreSource(store), store, tmp_path, lock, Node("node-1", "uid-1"), 0, Stop()).stage(
        threads=1, lock_wait_s=1.0
    )
    return lock, tmp_path / lock.model_dir


def change_one_byte(path: Path, *, keep_mtime: bool) -> None:
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(1234)
        byte = file.read(1)
        file.seek(1234)
        file.write(bytes([byte[0] ^ 1]))
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_a_staged_directory_passes(lock_and_directory: tuple[Lock, Path]) -> None:
    lock, directory = lock_and_directory
    assert check_directory(directory, lock.digest).node == "node-1"
    assert verify_directory(directory, lock, "node-1", 2, Stop()) == lock.total_bytes


def test_a_changed_byte_is_found_by_its_mtime(lock_and_directory: tuple[Lock, Path]) -> None:
    lock, directory = lock_and_directory
    change_one_byte(directory / SHARD, keep_mtime=False)
    with pytest.raises(IntegrityError) as caught:
        check_directory(directory, lock.digest)
    assert (caught.value.code, caught.value.exit_code) == ("K2-INT-002", 5)
    assert caught.value.where == f"node-1: {SHARD}"


def test_a_byte_that_rotted_is_found_by_reading_only(lock_and_directory: tuple[Lock, Path]) -> None:
    lock, directory = lock_and_directory
    change_one_byte(directory / SHARD, keep_mtime=True)
    check_directory(directory, lock.digest)
    with pytest.raises(IntegrityError) as caught:
        verify_directory(directory, lock, "node-1", 2, Stop())
    error = caught.value
    assert (error.exit_code, error.where, error.expected) == (5, f"node-1: {SHARD}", lock.file(SHARD).sha256)
    assert len(error.got) == 64
    problem = {"path": SHARD, "got": error.got, "expected": error.expected, "verdict": "differs"}
    assert error.details == {"node": "node-1", "problems": [problem], "count": 1}


@pytest.mark.parametrize("damage", ["gone", "longer", "another inode", "symlink", "fifo"])
def test_other_damage_is_found_by_both(lock_and_directory: tuple[Lock, Path], damage: str) -> None:
    lock, directory = lock_and_directory
    path = directory / SHARD
    stat, data = path.stat(), path.read_bytes()
    path.rename(path.with_name("aside"))
    if damage == "longer":
        path.write_bytes(data + b"x")
    elif damage == "another inode":
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif damage == "symlink":
        path.symlink_to("aside")
    elif damage == "fifo":
        os.mkfifo(path)
    with pytest.raises(IntegrityError):
        check_directory(directory, lock.digest)
    if damage == "another inode":  # the same bytes
        verify_directory(directory, lock, "node-1", 2, Stop())
        return
    with pytest.raises(IntegrityError):
        verify_directory(directory, lock, "node-1", 2, Stop())


def test_right_bytes_behind_a_link_are_not_right_on_a_node(lock_and_directory: tuple[Lock, Path]) -> None:
    lock, directory = lock_and_directory
    (directory / SHARD).rename(directory.parent / "aside")
    (directory / SHARD).symlink_to("../aside")
    with pytest.raises(IntegrityError) as caught:
        verify_directory(directory, lock, "node-1", 2, Stop())
    assert (caught.value.where, caught.value.got) == (f"node-1: {SHARD}", "a link")


@pytest.mark.parametrize("name", ["a", "n" * 180])
def test_however_many_files_are_wrong_the_message_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lock = lock_of({f"{name}-{number:02}.safetensors": b"%d" % number for number in range(40)})
    with pytest.raises(IntegrityError) as caught:
        verify_directory(tmp_path, lock, "node-1", 2, Stop())
    monkeypatch.setenv("K2_TERMINATION_LOG", str(tmp_path / "log"))
    write_termination_message(caught.value.as_data())
    said = json.loads((tmp_path / "log").read_text())["details"]
    assert said["count"] == 40
    assert 1 <= len(said["problems"]) <= 10
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("missing: ")]) == 40


def test_a_marker_of_another_lock_stops_the_engine(lock_and_directory: tuple[Lock, Path]) -> None:
    _, directory = lock_and_directory
    with pytest.raises(IntegrityError) as caught:
        check_directory(directory, "f" * 64)
    assert caught.value.code == "K2-INT-004"


def test_no_marker_stops_the_engine(lock_and_directory: tuple[Lock, Path], tmp_path: Path) -> None:
    lock, directory = lock_and_directory
    (directory / MARKER_FILE).unlink()
    for place in (directory, tmp_path / "nothing"):
        with pytest.raises(IntegrityError) as caught:
            check_directory(place, lock.digest)
        assert caught.value.code == "K2-INT-004"


def run_program(directory: Path, digest: str, log: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *more, "-m", "tasks.node.marker_check", "--dir", str(directory), "--lock-digest", digest]
    environment = {**os.environ, "K2_TERMINATION_LOG": str(log)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_the_program_says_why_and_exits_5(lock_and_directory: tuple[Lock, Path], tmp_path: Path) -> None:
    lock, directory = lock_and_directory
    log = tmp_path / "termination"
    passed = run_program(directory, lock.digest, log)
    assert (passed.returncode, json.loads(log.read_text())["files"]) == (0, len(FILES))
    change_one_byte(directory / SHARD, keep_mtime=False)
    failed = run_program(directory, lock.digest, log)
    message: dict[str, Any] = json.loads(log.read_text())
    assert failed.returncode == message["exit_code"] == 5
    assert message["where"] == f"node-1: {SHARD}"
    assert "K2-INT-002" in failed.stderr
    assert SHARD in failed.stderr


def test_the_program_needs_the_standard_library_only(lock_and_directory: tuple[Lock, Path], tmp_path: Path) -> None:
    lock, directory = lock_and_directory
    # -S: no site-packages at all; the repository is on the path by the working directory.
    done = run_program(directory, lock.digest, tmp_path / "log", "-S")
    assert done.returncode == 0, done.stderr


def test_a_termination_log_that_cannot_be_written_is_no_error(
    lock_and_directory: tuple[Lock, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, directory = lock_and_directory
    monkeypatch.setenv("K2_TERMINATION_LOG", "/nonexistent/directory/log")
    assert main(["--dir", str(directory), "--lock-digest", lock.digest]) == 0


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "exit codes" in capsys.readouterr().out
