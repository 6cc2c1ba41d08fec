"""The probe of a node's disk asks for no more than the stager will: its rule is that of `tasks.core.staging`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.core.errors import NotReadyError
from tasks.core.staging import Room
from tasks.node import file_system, probe
from tasks.node.file_system import file_system_of, is_shared, note_on
from tasks.node.quarantine import Quarantine
from tasks.node.staged_directory import refuse_other_disks
from tasks.node.verified_file import PARTIAL_DIR
from tests.fakes.checkpoints import contents, fill
from tests.fakes.memory_store import MemoryStore

MIB = 2**20
FILES = contents(shards=2, shard_bytes=MIB)
SHARD, OTHER = "model-1-of-2.safetensors", "model-2-of-2.safetensors"


class Node:
    """A directory for checkpoints on a disk that has as much left as a test says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = directory / "models"
        self._message = directory / "termination"
        self._monkeypatch = monkeypatch
        store = MemoryStore()
        self.lock = fill(store, FILES)
        monkeypatch.setenv("K2_TERMINATION_LOG", str(self._message))
        monkeypatch.setattr(probe, "store_from_environment", lambda stall_s: store)

    @property
    def directory(self) -> Path:
        return self.root / self.lock.model_dir

    def write(self, path: str, size_bytes: int) -> None:
        (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / path).write_bytes(b"x" * size_bytes)

    def stage(self, *paths: str) -> None:
        for path in paths or FILES:
            self.write(path, len(FILES[path]))

    def probe(self, room: Room | None = None, *, reserve: int = 0) -> tuple[int, dict[str, Any]]:
        if room is not None:
            made = lambda directory, reclaimable=0: Room(room.free_bytes, room.inodes, reclaimable)  # noqa: E731
            self._monkeypatch.setattr(probe, "read_room", made)
        arguments = ["--root", str(self.root), "--lock-digest", self.lock.digest, "--node", "node-1"]
        code = probe.main([*arguments, "--reserve-bytes", str(reserve)])
        return code, json.loads(self._message.read_text())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_disk_with_room_is_described(node: Node) -> None:
    code, said = node.probe(Room(100 * MIB, 5000), reserve=MIB)
    assert code == 0
    assert (said["free_bytes"], said["free_inodes"]) == (100 * MIB, 5000)
    assert said["needed_bytes"] == node.lock.total_bytes + MIB
    assert said["file_system"] == file_system_of(node.root)


def test_a_file_system_that_makes_inodes_as_needed_is_no_full_one(node: Node) -> None:
    code, said = node.probe(Room(100 * MIB, None))
    assert (code, said["free_inodes"]) == (0, 0)


@pytest.mark.parametrize("room", [Room(2 * MIB, 5000), Room(100 * MIB, 10), Room(100 * MIB, 0)])
def test_a_disk_without_room_is_refused_by_name(node: Node, room: Room) -> None:
    code, said = node.probe(room, reserve=MIB)
    assert (code, said["code"]) == (8, "K2-CAP-002")
    assert said["where"].startswith("node-1: ")


@pytest.mark.parametrize("room", [Room(0, 0), Room(0, None), Room(MIB, 3)])
def test_a_node_that_holds_everything_needs_neither_room_nor_reserve(node: Node, room: Room) -> None:
    node.stage()
    code, said = node.probe(room, reserve=10**12)
    assert (code, said["needed_bytes"], said["staged_bytes"]) == (0, 0, node.lock.total_bytes)


def test_what_stands_there_is_not_counted_twice(node: Node) -> None:
    node.stage(SHARD)
    missing = node.lock.total_bytes - len(FILES[SHARD])
    assert node.probe(Room(missing + MIB, None), reserve=MIB)[0] == 0
    assert node.probe(Room(missing + MIB - 1, None), reserve=MIB)[0] == 8


def test_only_files_of_the_lock_with_their_size_are_staged_bytes(node: Node) -> None:
    node.stage(SHARD)
    node.write(OTHER, len(FILES[OTHER]) - 1)
    node.write("somebody-elses.bin", 5 * MIB)
    _, said = node.probe(Room(100 * MIB, 5000))
    assert said["staged_bytes"] == len(FILES[SHARD])
    assert said["needed_bytes"] == node.lock.total_bytes - len(FILES[SHARD])


def test_orphans_and_quarantine_count_as_room_and_the_trash_does_not(node: Node) -> None:
    node.write(f"{PARTIAL_DIR}/f00.999", MIB)
    node.write("wrong.bin", MIB)
    Quarantine(node.directory).take("wrong.bin", "wrong bytes")
    trash = node.root / ".k2-trash" / "old"
    trash.mkdir(parents=True)
    (trash / "model.safetensors").write_bytes(b"x" * 3 * MIB)
    code, said = node.probe(Room(node.lock.total_bytes - 2 * MIB, 5000))
    assert (code, said["reclaimable_bytes"], said["trash_bytes"]) == (0, 2 * MIB, 3 * MIB)
    code, said = node.probe(Room(node.lock.total_bytes - 2 * MIB - 1, 5000))
    assert (code, said["code"]) == (8, "K2-CAP-002")
    assert said["details"]["reclaimable_bytes"] == 2 * MIB
    assert "that give way" in said["got"]
    # It only looks.
    assert (node.directory / PARTIAL_DIR / "f00.999").exists()
    assert Quarantine(node.directory).size_bytes == MIB


def test_a_directory_that_cannot_be_written_is_refused_by_owner_and_mode(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What root without capabilities is told, whoever runs this test (tests/kubelet asks a real kernel).
    monkeypatch.setattr(probe.os, "access", lambda path, mode: mode & os.W_OK == 0)
    code, said = node.probe(Room(100 * MIB, 5000))
    assert (code, said["code"]) == (6, "K2-RDY-004")
    assert "Permission denied" in said["summary"]
    assert f"owner {os.getuid()}:{os.getgid()}, mode 755" in said["got"]
    assert said["next"].endswith("chown root:root and chmod 755 the directory")


def test_a_disk_that_is_mounted_for_reading_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    code, said = node.probe(Room(100 * MIB, 5000))
    assert (code, said["code"]) == (6, "K2-RDY-004")
    assert "Read-only file system" in said["summary"]


def test_a_link_in_the_checkpoint_is_found_before_anything_moves(node: Node, tmp_path: Path) -> None:
    node.stage(SHARD)
    (node.directory / OTHER).symlink_to(tmp_path)
    code, said = node.probe(Room(100 * MIB, 5000))
    assert (code, said["code"]) == (5, "K2-INT-002")


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "lustre", "ceph", "fuse.juicefs", "fuse.glusterfs", "gpfs"])
def test_a_file_system_that_nodes_share_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(probe, "file_system_of", lambda root: kind)
    code, said = node.probe(Room(100 * MIB, 5000))
    assert (code, said["code"], said["got"]) == (6, "K2-RDY-004", kind)
    assert "share" in said["summary"]


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("ext4", ""),
        ("xfs", ""),
        ("tmpfs", "memory"),
        ("overlay", "the layers"),
        ("9p", "not one of"),
        ("", "not one of"),
    ],
)
def test_an_odd_file_system_is_told_and_no_more(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str, note: str
) -> None:
    monkeypatch.setattr(probe, "file_system_of", lambda root: kind)
    code, said = node.probe(Room(100 * MIB, 5000))
    assert code == 0
    assert said["note"].startswith(note)
    assert bool(said["note"]) == bool(note)
    assert not is_shared(kind)
    assert note_on(kind) == said["note"]


def test_the_kind_of_a_file_system_is_the_one_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["df", "--output=fstype", str(tmp_path)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    assert said.split()[-1] == file_system_of(tmp_path)
    device = tmp_path.stat().st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(file_system, "_MOUNTS", table)
    table.write_text(
        "36 25 0:31 / /proc rw shared:5 - proc proc rw\n"
        f"99 25 {here} /nvme /models rw,relatime shared:7 master:1 - xfs /dev/nvme0n1 rw\n"
    )
    assert file_system_of(tmp_path) == "xfs"
    table.write_text("36 25 999:999 / / rw - ext4 /dev/x rw\nnonsense\n")
    assert file_system_of(tmp_path) == ""
    table.unlink()
    assert file_system_of(tmp_path) == ""


def test_a_part_on_another_disk_is_refused() -> None:
    with pytest.raises(NotReadyError) as caught:
        refuse_other_disks(Path("/"), Path("/proc/self/fdinfo"), "node-1")
    assert (caught.value.code, caught.value.where) == ("K2-RDY-002", "node-1: /proc/self/fdinfo")
    assert "unmount" in caught.value.hint


def test_a_real_disk_is_looked_at(node: Node) -> None:
    assert node.probe()[0] == 0
    assert node.root.is_dir()
