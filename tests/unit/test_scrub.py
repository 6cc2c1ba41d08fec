"""The scrub on a node: real files that rot in every way, a store that fails in every way, deaths in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import IntegrityError, UnavailableError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE, marker_from_data
from tasks.node import directory_lock
from tasks.node.marker_check import check_directory
from tasks.node.program import Stop
from tasks.node.repair import Place
from tasks.node.scrub import Pace, Scrubber
from tasks.node.scrub_record import RECORDS_DIR
from tasks.node.sources import StoreSource
from tests.fakes.bare_root import without_capabilities
from tests.fakes.checkpoints import fill
from tests.fakes.staged_node import FILES, SHARD, FaultyStore, blob_key, flipped, quarantined, stage, tree

CODE = "code/modeling.py"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def lock(store: FaultyStore, tmp_path: Path) -> Lock:
    """A lock that is staged below tmp_path."""
    lock = fill(store, FILES)
    stage(store, tmp_path, lock)
    store.opened.clear()
    return lock


def scrubber(
    store: Any, root: Path, lock: Lock, sources: Any = None, stop: Stop | None = None, **pace: Any
) -> Scrubber:
    place = Place(root, lock, "node-1", "uid-1")
    return Scrubber(place, sources or [StoreSource(store)], store, Pace(lock_wait_s=20.0, **pace), stop or Stop())


def scrub(store: Any, root: Path, lock: Lock, **more: Any) -> dict[str, Any]:
    return scrubber(store, root, lock, **more).scrub()


def rot(path: Path, offset: int = 150_000, data: bytes = b"") -> bytes:
    """Change a byte, keeping size and time, as a medium does."""
    was = path.stat()
    content = bytearray(path.read_bytes())
    content[offset : offset + max(1, len(data))] = data or bytes([content[offset] ^ 1])
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    path.chmod(0o444)
    return bytes(content)


def assert_right(root: Path, lock: Lock, store: FaultyStore) -> None:
    """Every byte is that of the lock, the marker lets an engine start, and the store's copy is the same."""
    found = tree(root, lock)
    marker = found.pop(MARKER_FILE)
    assert found == FILES
    assert check_directory(root / lock.model_dir, lock.digest).to_bytes() == marker
    assert store.objects[f"markers/node-1/{lock.digest}.json"] == marker


def marker_of(root: Path, lock: Lock) -> bytes:
    return (root / lock.model_dir / MARKER_FILE).read_bytes()


def test_what_is_right_is_read_and_left_alone(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    before = {p: p.stat() for p in (tmp_path / lock.model_dir).rglob("*") if p.is_file()}
    outcome = scrub(store, tmp_path, lock)
    assert {key: outcome[key] for key in ("rotten", "unrepaired", "marker", "files", "files_read", "bytes_read")} == {
        "rotten": 0,
        "unrepaired": 0,
        "marker": "kept",
        "files": len(FILES),
        "files_read": len(FILES),
        "bytes_read": lock.total_bytes,
    }
    assert outcome["how"] == "direct"
    assert outcome["marker_sha256"] == hashlib.sha256(marker_of(tmp_path, lock)).hexdigest()
    after = {p: p.stat() for p in before}
    assert [(s.st_ino, s.st_mtime_ns) for s in after.values()] == [(s.st_ino, s.st_mtime_ns) for s in before.values()]
    assert store.opened == {}
    assert_right(tmp_path, lock, store)


@pytest.mark.parametrize("path", [SHARD, CODE])
def test_a_flipped_bit_is_found_repaired_and_told(store: FaultyStore, lock: Lock, tmp_path: Path, path: str) -> None:
    before = marker_from_data(json.loads(marker_of(tmp_path, lock)))
    offset = 150_000 if path == SHARD else 2
    wrong = rot(tmp_path / lock.model_dir / path, offset)
    outcome = scrub(store, tmp_path, lock)
    assert (outcome["rotten"], outcome["unrepaired"], outcome["marker"]) == (1, 0, "written anew")
    (row,) = outcome["problems"]
    assert row == {
        "path": path,
        "problem": "content",
        "got": f"sha256 {hashlib.sha256(wrong).hexdigest()}",
        "expected": f"sha256 {hashlib.sha256(FILES[path]).hexdigest()}",
        "repaired": True,
        "source": f"store {store}",
        "quarantined": True,
        "differs_from": offset,
        "differs_to": offset,
        "differing_4k_pages": 1,
    }
    assert_right(tmp_path, lock, store)
    ((note, kept),) = quarantined(tmp_path, lock)
    assert (note["path"], note["sha256"], kept) == (path, hashlib.sha256(wrong).hexdigest(), wrong)
    after = marker_from_data(json.loads(marker_of(tmp_path, lock)))
    assert after.content_digest == before.content_digest  # what a receipt pins is as before
    assert after.digest == outcome["marker_sha256"] != before.digest
    report = json.loads(store.objects[f"scrubs/node-1/{lock.digest}.json"])
    assert report["problems"] == [row]


def test_where_a_file_differs_is_told_from_the_first_to_the_last_byte(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    rot(tmp_path / lock.model_dir / SHARD, 4096 * 3 + 7, bytes(4096 * 2))
    (row,) = scrub(store, tmp_path, lock)["problems"]
    assert (row["differs_from"], row["differs_to"], row["differing_4k_pages"]) == (12295, 20486, 3)


def truncate(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 1000)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "missing"),
        (truncate, "size"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    ],
    ids=["missing", "size", "fifo"],
)
def test_other_damage_is_repaired_too(
    store: FaultyStore, lock: Lock, tmp_path: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    damage(tmp_path / lock.model_dir / SHARD)
    outcome = scrub(store, tmp_path, lock)
    assert [(row["path"], row["problem"], row["repaired"]) for row in outcome["problems"]] == [(SHARD, problem, True)]
    assert_right(tmp_path, lock, store)


def test_a_medium_that_cannot_be_read_is_rotten(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = (tmp_path / lock.model_dir / SHARD).stat().st_ino
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    outcome = scrub(store, tmp_path, lock)
    (row,) = outcome["problems"]
    assert (row["problem"], row["repaired"]) == ("unreadable", True)
    assert "bytes 0 to" in row["got"]
    assert_right(tmp_path, lock, store)


def test_a_symlink_in_the_tree_ends_it_before_anything_is_read(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    path = tmp_path / lock.model_dir / SHARD
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock)
    assert caught.value.where.endswith(SHARD)
    assert (tmp_path / "elsewhere").read_bytes() == FILES[SHARD]


def test_the_marker_is_gone_before_the_file_is_touched(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    """I2: an engine that starts while the file is fetched is stopped; one that is started afterwards is not."""
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    seen: list[tuple[bool, bool, bytes]] = []

    def look(key: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        there = (tmp_path / lock.model_dir / MARKER_FILE).exists()
        copied = f"markers/node-1/{lock.digest}.json" in store.objects
        seen.append((there, copied, (tmp_path / lock.model_dir / SHARD).read_bytes()))
        return blocks

    store.change = look
    scrub(store, tmp_path, lock)
    assert seen == [(False, False, wrong)]  # and the old bytes stay until the good ones are in hand
    assert_right(tmp_path, lock, store)


class Gone(FaultyStore):
    """A store that does not hold one blob."""

    def open(self, key: str, offset: int = 0) -> Iterator[bytes]:
        if key == blob_key():
            raise UnavailableError("K2-UNA-001", "The store does not hold the object.", where=key)
        return super().open(key, offset)


def assert_left_wrong(root: Path, lock: Lock, store: FaultyStore, wrong: bytes) -> None:
    """Nobody says that all is well, and the only copy that a serving engine may read has not been taken away."""
    found = tree(root, lock)
    assert MARKER_FILE not in found
    assert f"markers/node-1/{lock.digest}.json" not in store.objects
    assert found == {**FILES, SHARD: wrong}
    assert quarantined(root, lock) == []


def test_without_a_good_copy_the_wrong_one_stays_and_no_marker(tmp_path: Path) -> None:
    store = Gone()
    lock = fill(store, FILES)
    good = FaultyStore()
    fill(good, FILES)
    stage(good, tmp_path, lock)
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock)
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("K2-INT-002", 5, f"node-1: {SHARD}")
    assert "does not hold the object" in error.hint
    assert "k2ctl scrub --node node-1" in error.hint
    assert [row["repaired"] for row in error.details["problems"]] == [False]
    assert_left_wrong(tmp_path, lock, store, wrong)
    with pytest.raises(IntegrityError):
        check_directory(tmp_path / lock.model_dir, lock.digest)
    # Once it can be had, the next one repairs it and reads nothing else again.
    store.objects |= good.objects
    outcome = scrub(good, tmp_path, lock)
    assert (outcome["files_read"], outcome["files_read_before"], outcome["rotten"]) == (1, len(FILES) - 1, 1)
    assert_right(tmp_path, lock, good)


def test_what_the_store_does_not_have_comes_from_the_hub(tmp_path: Path) -> None:
    store, hub = Gone(), FaultyStore()
    lock = fill(store, FILES)
    fill(hub, FILES)
    stage(hub, tmp_path, lock)
    rot(tmp_path / lock.model_dir / SHARD)
    outcome = scrub(store, tmp_path, lock, sources=[StoreSource(store), StoreSource(hub)])
    assert [row["source"] for row in outcome["problems"]] == [f"store {hub}"]
    assert_right(tmp_path, lock, store)


def test_a_store_that_lies_gives_nothing_a_name(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() else blocks
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock)
    assert "K2-INT-001" in caught.value.hint
    assert store.opened[blob_key()] == 2
    assert_left_wrong(tmp_path, lock, store, wrong)


def test_a_disk_without_room_gives_up_its_quarantine_first_and_then_says_so(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    rot(tmp_path / lock.model_dir / SHARD)
    scrub(store, tmp_path, lock)
    assert len(quarantined(tmp_path, lock)) == 1
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    free = os.statvfs(tmp_path)
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock, reserve_bytes=free.f_bavail * free.f_frsize * 2)
    assert "K2-CAP-002" in caught.value.hint
    assert MARKER_FILE not in tree(tmp_path, lock)
    assert tree(tmp_path, lock)[SHARD] == wrong


def test_two_files_rot_and_one_cannot_be_had(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    rot(tmp_path / lock.model_dir / CODE, 2)
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    store.objects.pop(blob_key())
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock)
    assert caught.value.details["rotten"] == 2
    assert caught.value.details["unrepaired"] == 1
    found = tree(tmp_path, lock)
    assert MARKER_FILE not in found
    assert (found[CODE], found[SHARD]) == (FILES[CODE], wrong)


@pytest.mark.parametrize("marker", [None, b"not json", b'{"version": 99}'])
def test_without_a_readable_marker_the_bytes_that_were_read_make_one(
    store: FaultyStore, lock: Lock, tmp_path: Path, marker: bytes | None
) -> None:
    path = tmp_path / lock.model_dir / MARKER_FILE
    path.unlink()
    if marker is not None:
        path.write_bytes(marker)
    outcome = scrub(store, tmp_path, lock)
    assert (outcome["rotten"], outcome["marker"]) == (0, "written anew")
    assert_right(tmp_path, lock, store)


def test_a_right_file_with_another_time_gets_a_marker_that_lets_engines_start_again(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    os.utime(tmp_path / lock.model_dir / SHARD, ns=(1, 1))
    with pytest.raises(IntegrityError):
        check_directory(tmp_path / lock.model_dir, lock.digest)
    assert scrub(store, tmp_path, lock)["marker"] == "written anew"
    assert_right(tmp_path, lock, store)


def test_a_marker_of_another_lock_is_left_alone(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    path = tmp_path / lock.model_dir / MARKER_FILE
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "lock_digest": "0" * 64}))
    before = path.read_bytes()
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path, lock)
    assert caught.value.code == "K2-INT-004"
    assert path.read_bytes() == before


def test_a_node_without_the_directory_fetches_nothing(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(IntegrityError) as caught:
        scrub(store, tmp_path / "other", lock)
    assert "node-1" in caught.value.where
    assert store.opened == {}
    assert list((tmp_path / "other").iterdir()) == []


def test_an_engine_that_has_the_old_file_open_keeps_it_and_is_named(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    path = tmp_path / lock.model_dir / SHARD
    wrong = rot(path)
    with path.open("rb") as engine:
        (row,) = scrub(store, tmp_path, lock)["problems"]
        assert row["still_open"].startswith("open in ")
        assert engine.read() == wrong
    assert_right(tmp_path, lock, store)


def test_a_stop_in_the_middle_is_gone_on_from(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stop = Stop()
    first = scrubber(store, tmp_path, lock, stop=stop)
    seen = 0

    def take(count: int, real: Callable[[int], None] = first._take) -> None:
        nonlocal seen
        real(count)
        seen += count
        if seen > lock.total_bytes // 2:
            stop.set()

    first._take = take  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="Stopped"):
        first.scrub()
    outcome = scrub(store, tmp_path, lock)
    assert outcome["files_read"] + outcome["files_read_before"] == len(FILES)
    assert 0 < outcome["files_read_before"] < len(FILES)
    assert scrub(store, tmp_path, lock)["files_read"] == len(FILES)  # that one was finished: all anew
    assert_right(tmp_path, lock, store)


def test_a_file_that_rots_after_it_was_read_is_not_hidden_by_the_record_for_long(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a scrub that was never finished, and one that was written by a clock that had jumped."""
    for age_s in (8 * 86400, -3600):
        record = tmp_path / RECORDS_DIR / f"{lock.digest}.json"
        scrub(store, tmp_path, lock)
        data = json.loads(record.read_bytes())
        data["finished_at"] = None
        for row in data["files"].values():
            row["read_at"] = time.time() - age_s
        record.chmod(0o644)
        record.write_text(json.dumps(data))
        assert scrub(store, tmp_path, lock)["files_read"] == len(FILES)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 1}', b"\xff", b'{"version": 1, "files": {"a": 3}}'])
def test_a_record_that_cannot_be_read_is_no_record(
    store: FaultyStore, lock: Lock, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / RECORDS_DIR).mkdir()
    (tmp_path / RECORDS_DIR / f"{lock.digest}.json").write_bytes(content)
    assert scrub(store, tmp_path, lock)["files_read"] == len(FILES)


def test_a_killed_repair_leaves_no_marker_and_is_finished_by_the_next(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    wrong = rot(tmp_path / lock.model_dir / SHARD)
    hanging = tmp_path / "hanging"

    def hang(blocks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(blocks)
        hanging.touch()
        time.sleep(60)

    store.change = lambda key, nth, blocks: hang(blocks) if key == blob_key() else blocks
    if (child := os.fork()) == 0:
        scrub(store, tmp_path, lock)
        os._exit(0)
    deadline = time.monotonic() + 50
    while not hanging.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = tree(tmp_path, lock)
    assert MARKER_FILE not in found
    assert found[SHARD] == wrong
    store.change = lambda key, nth, blocks: blocks
    assert scrub(store, tmp_path, lock)["unrepaired"] == 0
    assert_right(tmp_path, lock, store)
    assert [p for p in tree(tmp_path, lock) if p.startswith(".k2-partial")] == []


def test_a_second_scrub_of_the_same_directory_does_not_begin(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    with directory_lock.hold_scrub(tmp_path, lock.revision, Stop()), pytest.raises(UnavailableError, match="scrub"):
        scrub(store, tmp_path, lock)


def test_it_stands_back_while_a_stager_works_on_the_node(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stop = Stop()
    outcomes: list[dict[str, Any]] = []
    with directory_lock.hold_node(tmp_path, "another lock", 0.0, stop):
        thread = threading.Thread(target=lambda: outcomes.append(scrub(store, tmp_path, lock)))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        record = tmp_path / RECORDS_DIR / f"{lock.digest}.json"
        assert not record.exists()
    thread.join(30)
    assert outcomes[0]["files_read"] == len(FILES)


def test_a_stager_that_replaces_the_file_first_leaves_nothing_to_repair(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    rot(tmp_path / lock.model_dir / SHARD)
    work = scrubber(store, tmp_path, lock)
    real = work._repairer.repair

    def late(file: Any, before: Any, found: Any) -> Any:
        if not store.opened:
            (tmp_path / lock.model_dir / SHARD).unlink()
            stage(store, tmp_path, lock)
        return real(file, before, found)

    work._repairer.repair = late  # type: ignore[method-assign]
    outcome = work.scrub()
    assert (outcome["rotten"], outcome["marker"]) == (0, "kept")
    assert store.opened == {blob_key(): 1}
    assert_right(tmp_path, lock, store)


def test_the_rate_is_kept(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    began = time.monotonic()
    scrub(store, tmp_path, lock, read_bytes_per_s=lock.total_bytes)
    assert time.monotonic() - began > 0.6  # one second less the burst that is let through at once


def test_it_is_done_as_root_without_capabilities(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    """As the Job runs: directories that are closed for writing are closed for it, too, until it opens them."""
    rot(tmp_path / lock.model_dir / SHARD)
    outcome = without_capabilities(lambda: scrub(store, tmp_path, lock))
    assert outcome["unrepaired"] == 0
    found = tree(tmp_path, lock)
    found.pop(MARKER_FILE)
    assert found == FILES
    assert oct((tmp_path / lock.model_dir).stat().st_mode & 0o777) == "0o555"
