"""The probe of a node's disk asks for no more than the stager will: its rule is that of `tasks.core.staging`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.core.staging import Room
from tasks.node import probe

MODEL_DIR = "a--b/" + "0" * 40
MIB = 2**20


class Node:
    """A directory for checkpoints on a disk that has as much left as a test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._message = root / "termination"
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("K2_TERMINATION_LOG", str(self._message))

    def stage(self, size_bytes: int) -> None:
        path = self.root / "models" / MODEL_DIR / "model-1-of-1.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * size_bytes)

    def probe(self, room: Room, *, total: int, reserve: int = 0) -> tuple[int, dict[str, Any]]:
        self._monkeypatch.setattr(probe, "read_room", lambda directory: room)
        arguments = ["--root", str(self.root / "models"), "--model-dir", MODEL_DIR, "--node", "node-1"]
        code = probe.main([*arguments, "--total-bytes", str(total), "--reserve-bytes", str(reserve)])
        return code, json.loads(self._message.read_text())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_disk_with_room_is_described(node: Node) -> None:
    code, said = node.probe(Room(100 * MIB, 5000), total=10 * MIB, reserve=MIB)
    assert code == 0
    assert (said["free_bytes"], said["needed_bytes"], said["free_inodes"]) == (100 * MIB, 11 * MIB, 5000)


def test_a_file_system_that_makes_inodes_as_needed_is_no_full_one(node: Node) -> None:
    code, said = node.probe(Room(100 * MIB, None), total=10 * MIB)
    assert (code, said["free_inodes"]) == (0, 0)


@pytest.mark.parametrize("room", [Room(10 * MIB, 5000), Room(100 * MIB, 10), Room(100 * MIB, 0)])
def test_a_disk_without_room_is_refused_by_name(node: Node, room: Room) -> None:
    code, said = node.probe(room, total=10 * MIB, reserve=MIB)
    assert (code, said["code"]) == (8, "K2-CAP-002")
    assert said["where"].startswith("node-1: ")


@pytest.mark.parametrize("room", [Room(0, 0), Room(0, None), Room(MIB, 3)])
def test_a_node_that_holds_everything_needs_neither_room_nor_reserve(node: Node, room: Room) -> None:
    node.stage(2 * MIB)
    code, said = node.probe(room, total=2 * MIB, reserve=10**12)
    assert (code, said["needed_bytes"], said["staged_bytes"]) == (0, 0, 2 * MIB)


def test_what_stands_there_is_not_counted_twice(node: Node) -> None:
    node.stage(2 * MIB)
    assert node.probe(Room(2 * MIB, None), total=3 * MIB, reserve=MIB)[0] == 0
    assert node.probe(Room(2 * MIB - 1, None), total=3 * MIB, reserve=MIB)[0] == 8


def test_a_directory_that_cannot_be_written_is_refused_by_owner_and_mode(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What root without capabilities is told, whoever runs this test (tests/kubelet asks a real kernel).
    monkeypatch.setattr(probe.os, "access", lambda path, mode: mode & os.W_OK == 0)
    code, said = node.probe(Room(100 * MIB, 5000), total=MIB)
    assert (code, said["code"]) == (6, "K2-RDY-004")
    assert "Permission denied" in said["summary"]
    assert f"owner {os.getuid()}:{os.getgid()}, mode 755" in said["got"]
    assert said["next"].endswith("chown root:root and chmod 755 the directory")


def test_a_disk_that_is_mounted_for_reading_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    code, said = node.probe(Room(100 * MIB, 5000), total=MIB)
    assert (code, said["code"]) == (6, "K2-RDY-004")
    assert "Read-only file system" in said["summary"]


def test_a_real_disk_is_looked_at(tmp_path: Path) -> None:
    assert (
        probe.main(["--root", str(tmp_path / "new"), "--model-dir", MODEL_DIR, "--total-bytes", "1", "--node", "n"])
        == 0
    )
