"""The stager: real files on a real disk, faults injected into the source and into the machine."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import After, CapacityError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE
from tasks.node.program import Stop
from tasks.node.sources import StoreSource
from tasks.node.stage import Node, Stager
from tasks.node.verified_file import PARTIAL_DIR
from tests.fakes.checkpoints import fill
from tests.fakes.staged_node import (
    FILES,
    NODE,
    SHARD,
    FaultyStore,
    assert_nothing_unverified,
    assert_staged,
    blob_key,
    flipped,
    quarantined,
    stage,
    tree,
)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def lock(store: FaultyStore) -> Lock:
    return fill(store, FILES)


def test_a_staged_node_has_every_file_and_a_marker(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    outcome = stage(store, tmp_path, lock)
    assert_staged(tmp_path, lock)
    directory = tmp_path / lock.model_dir
    marker = (directory / MARKER_FILE).read_bytes()
    worst = outcome.pop("worst")
    assert outcome.pop("seconds") > 0
    assert outcome == {
        "node": "node-1",
        "lock_digest": lock.digest,
        "marker_sha256": hashlib.sha256(marker).hexdigest(),
        "files": len(FILES),
        "bytes_written": lock.total_bytes,
        "files_kept": 0,
        "attempts": len(FILES),
        "quarantined": 0,
        "moved": [],
    }
    assert {row["path"]: row["bytes"] for row in worst}.items() <= {p: len(d) for p, d in FILES.items()}.items()
    assert {(row["attempts"], row["source"].startswith("store ")) for row in worst} == {(1, True)}
    assert store.objects[f"markers/node-1/{lock.digest}.json"] == marker
    assert {oct((directory / path).stat().st_mode & 0o777) for path in FILES} == {"0o444"}
    assert oct((directory / "code").stat().st_mode & 0o777) == "0o555"
    assert oct(directory.stat().st_mode & 0o777) == "0o555"
    assert list((directory / PARTIAL_DIR).iterdir()) == []


def test_staging_twice_reads_and_writes_nothing(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    first = stage(store, tmp_path, lock)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / lock.model_dir).rglob("*") if p.is_file()}
    store.opened.clear()
    second = stage(store, tmp_path, lock)
    assert store.opened == {}
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in before} == before
    assert second == first | {
        "bytes_written": 0, "files_kept": len(FILES), "attempts": 0, "worst": [], "seconds": second["seconds"]
    }  # fmt: skip


def test_one_wrong_byte_on_the_way_is_fetched_again(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() and nth == 1 else blocks
    stage(store, tmp_path, lock)
    assert_staged(tmp_path, lock)
    assert store.opened[blob_key()] == 2


def test_wrong_bytes_twice_fail_and_name_node_and_file(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() else blocks
    with pytest.raises(IntegrityError) as caught:
        stage(store, tmp_path, lock)
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("K2-INT-001", 5, f"node-1: {SHARD}")
    assert error.expected == f"sha256 {hashlib.sha256(FILES[SHARD]).hexdigest()}"
    assert error.got.startswith("sha256 ")
    assert error.got != error.expected
    assert store.opened[blob_key()] == 2
    assert_nothing_unverified(tmp_path, lock)
    assert SHARD not in tree(tmp_path, lock)
    assert not [key for key in store.objects if key.startswith("markers/")]


@pytest.mark.parametrize(
    "cut", [lambda blocks: (b for b in list(blocks)[:-1]), lambda blocks: iter([*blocks, b"more"])]
)
def test_a_body_of_another_size_is_refused(
    store: FaultyStore, lock: Lock, tmp_path: Path, cut: Callable[[Iterator[bytes]], Iterator[bytes]]
) -> None:
    store.change = lambda key, nth, blocks: cut(blocks) if key == blob_key() else blocks
    with pytest.raises(IntegrityError) as caught:
        stage(store, tmp_path, lock)
    assert caught.value.expected == f"{len(FILES[SHARD])} bytes"
    assert_nothing_unverified(tmp_path, lock)


def test_a_stream_that_breaks_is_opened_again(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    def broken(blocks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(blocks)
        raise UnavailableError("K2-UNA-001", "the stream broke", where="store", retry=After(0.0))

    store.change = lambda key, nth, blocks: broken(blocks) if key == blob_key() and nth < 3 else blocks
    stage(store, tmp_path, lock)
    assert_staged(tmp_path, lock)
    store.change = lambda key, nth, blocks: broken(blocks) if key == blob_key() else blocks
    (tmp_path / lock.model_dir / SHARD).unlink()
    with pytest.raises(UnavailableError) as caught:
        stage(store, tmp_path, lock)
    assert caught.value.where == f"node-1: {SHARD} (store)"
    assert_nothing_unverified(tmp_path, lock)


def test_files_that_nobody_vouches_for_are_hashed_kept_or_replaced(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    directory = tmp_path / lock.model_dir
    directory.mkdir(parents=True)
    right, wrong, short = sorted(path for path in FILES if path.startswith("model-"))[:3]
    (directory / right).write_bytes(FILES[right])
    (directory / wrong).write_bytes(bytes([FILES[wrong][0] ^ 1]) + FILES[wrong][1:])
    (directory / short).write_bytes(FILES[short][:-1])
    inode = (directory / right).stat().st_ino
    outcome = stage(store, tmp_path, lock)
    assert_staged(tmp_path, lock)
    assert (directory / right).stat().st_ino == inode
    assert oct((directory / right).stat().st_mode & 0o777) == "0o444"
    notes = {note["path"]: (note["reason"], data) for note, data in quarantined(tmp_path, lock)}
    assert notes == {
        wrong: ("wrong bytes", bytes([FILES[wrong][0] ^ 1]) + FILES[wrong][1:]),
        short: (f"{len(FILES[short]) - 1} bytes instead of {len(FILES[short])}", FILES[short][:-1]),
    }
    assert outcome["quarantined"] == 2
    assert outcome["files_kept"] == 1
    assert outcome["bytes_written"] == lock.total_bytes - len(FILES[right])


def test_only_a_touched_file_is_read_again(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stage(store, tmp_path, lock)
    path = tmp_path / lock.model_dir / SHARD
    os.utime(path, ns=(1, 1))
    store.opened.clear()
    outcome = stage(store, tmp_path, lock)
    assert (outcome["bytes_written"], store.opened) == (0, {})
    assert_staged(tmp_path, lock)
    path.chmod(0o644)
    path.write_bytes(b"x" * len(FILES[SHARD]))
    outcome = stage(store, tmp_path, lock)
    assert (outcome["bytes_written"], store.opened) == (len(FILES[SHARD]), {blob_key(): 1})
    assert_staged(tmp_path, lock)


def test_a_rebuilt_node_does_not_trust_the_old_marker(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stage(store, tmp_path, lock)
    path = tmp_path / lock.model_dir / SHARD
    path.chmod(0o644)
    before = path.stat()
    path.write_bytes(b"x" * len(FILES[SHARD]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    stage(store, tmp_path, lock, Node("node-1", "uid-2"))
    assert_staged(tmp_path, lock)


def test_a_failing_run_takes_the_old_marker_away(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stage(store, tmp_path, lock)
    (tmp_path / lock.model_dir / SHARD).unlink()
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() else blocks
    with pytest.raises(IntegrityError):
        stage(store, tmp_path, lock)
    assert_nothing_unverified(tmp_path, lock)


@pytest.mark.parametrize("marker", [b"not json", b"{}", b'{"version": 99}', b'{"version": 1, "files": 3}'])
def test_a_marker_that_cannot_be_read_does_not_count(
    store: FaultyStore, lock: Lock, tmp_path: Path, marker: bytes
) -> None:
    directory = tmp_path / lock.model_dir
    directory.mkdir(parents=True)
    (directory / MARKER_FILE).write_bytes(marker)
    stage(store, tmp_path, lock)
    assert_staged(tmp_path, lock)


def test_orphans_of_dead_stagers_are_swept(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    partial = tmp_path / lock.model_dir / PARTIAL_DIR
    partial.mkdir(parents=True)
    (partial / "f00.999999").write_bytes(b"x" * 1000)
    stage(store, tmp_path, lock)
    assert list(partial.iterdir()) == []


@pytest.mark.parametrize("place", ["", "code", SHARD, "other.bin", MARKER_FILE])
def test_a_symlink_in_the_tree_is_refused(store: FaultyStore, lock: Lock, tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "models"
    link = root / lock.model_dir / place
    root.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(IntegrityError):
        stage(store, root, lock)
    assert list(elsewhere.iterdir()) == []
    assert store.opened == {}


def test_room_is_checked_before_the_first_byte(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        stage(store, tmp_path, lock, reserve=10**18)
    assert caught.value.code == "K2-CAP-002"
    assert caught.value.details["needed_bytes"] == lock.total_bytes + 10**18
    assert caught.value.details["free_bytes"] > 0
    assert store.opened == {}
    stage(store, tmp_path, lock)
    stage(store, tmp_path, lock, reserve=10**18)  # nothing is missing, so nothing is needed


@contextmanager
def full_disk(path: Path, room_bytes: int) -> Iterator[None]:
    """Leave room for `room_bytes` at a path: a small file system for root, else a limit on the size of a file."""
    if os.geteuid() == 0:
        options = f"size={room_bytes},mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "k2-test", str(path)], check=True, timeout=60)
        try:
            yield
        finally:
            subprocess.run(["umount", str(path)], check=True, timeout=60)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes // 8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_in_the_middle(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody else takes the room after it was checked.
    monkeypatch.setattr("tasks.node.stager.check_room", lambda *_: None)
    root = tmp_path / "models"
    root.mkdir()
    with full_disk(root, 800_000):
        with pytest.raises(CapacityError) as caught:
            stage(store, root, lock)
        assert caught.value.code == "K2-CAP-002"
        assert caught.value.where in {f"node-1: {path}" for path in FILES}  # whichever came too late
        assert_nothing_unverified(root, lock)
        assert list((root / lock.model_dir / PARTIAL_DIR).iterdir()) == []


def test_two_stagers_at_once_write_each_file_once(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    outcomes: list[Any] = []
    threads = [threading.Thread(target=lambda: outcomes.append(stage(store, tmp_path, lock))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert_staged(tmp_path, lock)
    assert sorted(outcome["bytes_written"] for outcome in outcomes) == [0, lock.total_bytes]
    assert set(store.opened.values()) == {1}


def test_a_stager_that_may_not_wait_says_who_holds_the_directory(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(blocks: Iterator[bytes]) -> Iterator[bytes]:
        entered.set()
        leave.wait(60)
        return blocks

    store.change = lambda key, nth, blocks: slow(blocks)
    first = threading.Thread(target=lambda: stage(store, tmp_path, lock))
    first.start()
    assert entered.wait(60)
    with pytest.raises(UnavailableError, match="Another stager"):
        Stager(StoreSource(store), store, tmp_path, lock, NODE, 0, Stop()).stage(threads=1, lock_wait_s=0.3)
    leave.set()
    first.join(60)
    assert_staged(tmp_path, lock)


def test_a_stop_leaves_no_litter(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stop = Stop()

    def stopping(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block
            stop.set()

    store.change = lambda key, nth, blocks: stopping(blocks) if key == blob_key() else blocks
    with pytest.raises(UnavailableError, match="Stopped"):
        stage(store, tmp_path, lock, stop=stop)
    assert_nothing_unverified(tmp_path, lock)
    assert list((tmp_path / lock.model_dir / PARTIAL_DIR).iterdir()) == []


def test_a_missing_root_is_not_made(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(K2Error) as caught:
        stage(store, tmp_path / "not-mounted", lock)
    assert caught.value.code == "K2-INP-001"
    assert not (tmp_path / "not-mounted").exists()


@pytest.mark.parametrize("after_blocks", [0, 2, 4])
def test_a_killed_stager_leaves_nothing_unverified_and_is_resumed(
    store: FaultyStore, lock: Lock, tmp_path: Path, after_blocks: int
) -> None:
    hanging = tmp_path / "hanging"
    root = tmp_path / "models"
    root.mkdir()

    def hang(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for i, block in enumerate(blocks):
            if i == after_blocks:
                hanging.touch()
                time.sleep(60)
            yield block

    store.change = lambda key, nth, blocks: hang(blocks) if key == blob_key() else blocks
    if (child := os.fork()) == 0:
        stage(store, root, lock)
        os._exit(0)
    others = [root / lock.model_dir / path for path in FILES if path != SHARD]
    deadline = time.monotonic() + 50
    # One file is in its middle and another one is done: the resumed run has to write less than everything.
    while not (hanging.exists() and any(path.exists() for path in others)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert_nothing_unverified(root, lock)
    assert [path for path in tree(root, lock) if path.startswith(PARTIAL_DIR)]
    store.change = lambda key, nth, blocks: blocks
    outcome = stage(store, root, lock)
    assert_staged(root, lock)
    assert len(FILES[SHARD]) <= outcome["bytes_written"] < lock.total_bytes
    assert list((root / lock.model_dir / PARTIAL_DIR).iterdir()) == []
