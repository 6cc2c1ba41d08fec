"""Collecting on a node: what an order names is moved only if it still is as it was listed, and nobody uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.collection import Inventory, inventory_from_data
from tasks.core.errors import IntegrityError, K2Error
from tasks.core.identity import canonical_bytes, sha256_hex
from tasks.core.lock import Lock, make_lock
from tasks.core.marker import MARKER_FILE
from tasks.core.spec import plain
from tasks.node import directory_lock
from tasks.node.collect import Collector, Done, Order, publish, read_order
from tasks.node.program import Stop
from tasks.node.trash import TRASH_DIR, Trash
from tests.fakes.bare_root import without_capabilities
from tests.fakes.checkpoints import REPO, fill
from tests.fakes.memory_store import MemoryStore
from tests.fakes.staged_node import FILES, SHARD, FaultyStore, assert_staged, stage

DAY_S = 86400.0
NOW = time.time()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def lock(store: FaultyStore, root: Path) -> Lock:
    """A lock that is staged on the node."""
    lock = fill(store, FILES)
    stage(store, root, lock)
    return lock


def collector(root: Path) -> Collector:
    return Collector(root, "node-1", Stop())


def listed(root: Path) -> Inventory:
    return collector(root).list()


def order(root: Path, **changes: Any) -> Order:
    """An order that moves everything that is listed, and deletes nothing."""
    move = {found.path: found.token for found in listed(root).checkpoints}
    return replace(Order("node-1", NOW, DAY_S, (), move, ()), **changes)


def carry_out(root: Path, what: Order) -> Done:
    return collector(root).carry_out(what)


def aged(root: Path, name: str, age_s: float) -> str:
    """Make an entry of the trash look as old by the pipeline's clock, and return its name."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(NOW - age_s))
    new = f"{stamp}-{name.partition('-')[2]}"
    (root / TRASH_DIR / name).rename(root / TRASH_DIR / new)
    return new


class Old(Trash):
    """A node whose own clock has gone on."""

    def age_s(self, name: str) -> float:
        return super().age_s(name) + 10 * DAY_S


def test_a_list_says_what_is_there_and_changes_nothing(root: Path, lock: Lock) -> None:
    (root / "somebody--else").mkdir()
    (root / "somebody--else" / "main").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "link--to").symlink_to(root / lock.model_dir)
    before = {str(p): (p.lstat().st_mtime_ns, p.lstat().st_mode) for p in root.rglob("*")}
    found = listed(root)
    (checkpoint,) = found.checkpoints
    assert (checkpoint.path, checkpoint.lock_digest, checkpoint.held, checkpoint.in_use) == (
        lock.model_dir,
        lock.digest,
        False,
        "",
    )
    assert checkpoint.files == len(FILES) + 1
    assert checkpoint.size_bytes > lock.total_bytes
    assert found.others == ("link--to", "notes.txt", "somebody--else/main")
    assert found.trash == ()
    assert 0 < found.free_bytes < found.total_bytes
    assert {str(p): (p.lstat().st_mtime_ns, p.lstat().st_mode) for p in root.rglob("*")} == before
    again = listed(root)
    assert again == replace(found, free_bytes=again.free_bytes)


def test_an_inventory_survives_its_way_through_the_store(root: Path, lock: Lock) -> None:
    done = carry_out(root, order(root))
    stage(fill_store(), root, lock)
    store = MemoryStore()
    message = publish(store, listed(root), "0" * 64, done, Stop())
    data = store.objects[f"inventories/{message['inventory']}.json"]
    assert sha256_hex(data) == message["inventory"]
    assert inventory_from_data(json.loads(data)).checkpoints == listed(root).checkpoints
    assert json.loads(data)["done"]["moved"] == done.moved
    with pytest.raises(IntegrityError):
        inventory_from_data({"node": "node-1"})


def fill_store() -> FaultyStore:
    store = FaultyStore()
    fill(store, FILES)
    return store


def test_what_nothing_needs_is_moved_whole_and_can_be_taken_back(root: Path, lock: Lock, store: FaultyStore) -> None:
    before = {p.relative_to(root / lock.model_dir): p.stat().st_ino for p in (root / lock.model_dir).rglob("*")}
    done = carry_out(root, order(root))
    name = done.moved[lock.model_dir]
    assert done.kept == {}
    assert not (root / lock.model_dir).exists()
    assert not (root / lock.model_dir).parent.exists()
    entry = root / TRASH_DIR / name
    assert {p.relative_to(entry): p.stat().st_ino for p in entry.rglob("*")} == before
    assert oct(entry.stat().st_mode & 0o777) == "0o555"
    (trashed,) = listed(root).trash
    assert (trashed.name, trashed.path, trashed.moved_at) == (name, lock.model_dir, int(NOW))
    assert trashed.age_s(NOW + 50) < 50
    # The way back that the runbook names: a move, after which nothing has to be fetched.
    (root / lock.model_dir).parent.mkdir()
    subprocess.run(["mv", entry, root / lock.model_dir], check=True)
    store.opened.clear()
    assert stage(store, root, lock)["bytes_written"] == 0
    assert store.opened == {}
    assert_staged(root, lock)


def test_another_revision_of_the_same_model_stays(root: Path, lock: Lock, store: FaultyStore) -> None:
    other = make_lock(REPO, "f" * 40, lock.files)
    stage(store, root, other)
    keep = order(root, move={lock.model_dir: order(root).move[lock.model_dir]})
    assert list(carry_out(root, keep).moved) == [lock.model_dir]
    assert_staged(root, other)


def kept(root: Path, what: Order) -> str:
    """Carry an order out of which nothing may come, and return why."""
    done = carry_out(root, what)
    assert done.moved == {}
    assert not (root / TRASH_DIR).exists()
    (why,) = done.kept.values()
    return why


def test_what_is_protected_stays_whatever_the_order_says(root: Path, lock: Lock) -> None:
    assert kept(root, order(root, protect=(lock.model_dir,))) == "something needs it"
    assert_staged(root, lock)


def test_what_a_stager_has_looked_at_since_stays_although_it_changed_nothing(
    root: Path, lock: Lock, store: FaultyStore
) -> None:
    """A release that begins after the decision: its stager finds every file there and writes nothing."""
    decided = order(root)
    assert stage(store, root, lock)["bytes_written"] == 0
    assert "used or changed" in kept(root, decided)
    assert_staged(root, lock)


@pytest.mark.parametrize("change", ["marker", "file", "new file", "mode of a marker only"])
def test_what_has_changed_since_stays(root: Path, lock: Lock, change: str) -> None:
    decided = order(root)
    directory = root / lock.model_dir
    directory.chmod(0o755)
    if change == "marker":
        (directory / MARKER_FILE).unlink()
    elif change == "file":
        (directory / SHARD).chmod(0o644)
        (directory / SHARD).write_bytes(b"x")
    elif change == "new file":
        (directory / "new").write_bytes(b"")
    else:
        os.utime(directory / MARKER_FILE)
    assert "used or changed" in kept(root, decided)


def test_where_somebody_works_nothing_is_moved(root: Path, lock: Lock) -> None:
    decided, stop = order(root), Stop()
    with directory_lock.hold_scrub(root, lock.revision, stop):
        assert kept(root, decided) == "a stager or a scrub works there"
    with directory_lock.hold(root, lock.revision, 0.0, stop):
        assert kept(root, decided) == "a stager or a scrub works there"
        assert [found.held for found in listed(root).checkpoints] == [True]
    assert [found.held for found in listed(root).checkpoints] == [False]


@pytest.mark.parametrize("mapped", [False, True])
def test_what_an_engine_has_open_or_mapped_stays(root: Path, lock: Lock, mapped: bool) -> None:
    """In another pid namespace, where nobody's /proc shows it to us."""
    from tests.unit.test_open_files import MAPPED, OPENED, OTHER_CONTAINER, holding

    decided = order(root)
    with holding(MAPPED if mapped else OPENED, root / lock.model_dir / SHARD, *OTHER_CONTAINER):
        assert kept(root, decided).startswith(f"{SHARD}: open in ")
        assert [found.in_use.startswith(SHARD) for found in listed(root).checkpoints] == [True]
    assert list(carry_out(root, decided).moved) == [lock.model_dir]


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", ".k2-locks", "a--b/main", "a--b/../../c", ""])
def test_only_checkpoints_are_moved_whatever_the_order_says(root: Path, path: str) -> None:
    (root / "a--b" / "main").mkdir(parents=True)
    (root.parent / "elsewhere").mkdir()
    assert kept(root, Order("node-1", NOW, DAY_S, (), {path: ""}, ())) == "no checkpoint's directory"
    assert (root.parent / "elsewhere").is_dir()


def test_a_link_to_a_checkpoint_is_none(root: Path, lock: Lock) -> None:
    (root / "link--to").symlink_to((root / lock.model_dir).parent)
    path = f"link--to/{lock.revision}"
    assert kept(root, Order("node-1", NOW, DAY_S, (), {path: ""}, ())) == "no checkpoint's directory"


def test_an_order_of_another_node_is_refused(root: Path, lock: Lock) -> None:
    with pytest.raises(K2Error):
        carry_out(root, order(root, node="node-2"))
    assert_staged(root, lock)


def trashed(root: Path, age_s: float) -> str:
    """Move what is staged into the trash so long ago, and return its name there."""
    (name,) = carry_out(root, order(root)).moved.values()
    return aged(root, name, age_s)


def deleting(root: Path, name: str, **changes: Any) -> Done:
    collect = collector(root)
    collect._trash = Old(root)
    return collect.carry_out(replace(Order("node-1", NOW, DAY_S, (), {}, (name,)), **changes))


def test_what_is_old_enough_by_both_clocks_is_deleted(root: Path, lock: Lock) -> None:
    name = trashed(root, 2 * DAY_S)
    done = deleting(root, name)
    assert done.deleted == [name]
    assert done.freed_bytes > lock.total_bytes
    assert list((root / TRASH_DIR).iterdir()) == []


def test_a_clock_that_jumps_makes_nothing_older(root: Path, lock: Lock) -> None:
    """The pipeline's alone, or the node's alone."""
    name = trashed(root, 2 * DAY_S)
    done = carry_out(root, Order("node-1", NOW, DAY_S, (), {}, (name,)))
    assert "its time is not over" in done.kept[name]
    young = aged(root, name, 3600)
    done = deleting(root, young)
    assert "its time is not over" in done.kept[young]
    assert len(listed(root).trash) == 1


def test_what_this_run_has_moved_it_does_not_delete(root: Path, lock: Lock) -> None:
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(NOW))}-{lock.model_dir.replace('/', '@')}"
    done = carry_out(root, order(root, delete=(name,), trash_age_s=-DAY_S))
    assert list(done.moved.values()) == [name]
    assert done.deleted == []
    assert done.kept == {name: "not in the trash"}


def test_what_is_needed_again_or_open_stays_in_the_trash(root: Path, lock: Lock) -> None:
    name = trashed(root, 2 * DAY_S)
    assert deleting(root, name, protect=(lock.model_dir,)).kept == {name: "something needs it again"}
    with (root / TRASH_DIR / name / SHARD).open("rb"):
        assert deleting(root, name).kept[name].startswith(f"{SHARD}: open in ")
    assert deleting(root, name).deleted == [name]


@pytest.mark.parametrize("name", ["..", "../nvme", "notes", "20261130T000000Z-a--b@main", "."])
def test_only_entries_of_the_trash_are_deleted_whatever_the_order_says(root: Path, lock: Lock, name: str) -> None:
    (root / TRASH_DIR / "notes").mkdir(parents=True)
    assert deleting(root, name).kept == {name: "not in the trash"}
    assert (root / TRASH_DIR / "notes").is_dir()
    assert f"{TRASH_DIR}/notes" in listed(root).others
    assert_staged(root, lock)


def test_a_death_in_the_middle_of_a_deletion_leaves_no_marker_and_is_finished(
    root: Path, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = trashed(root, 2 * DAY_S)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        deleting(root, name)
    monkeypatch.undo()
    assert not (root / TRASH_DIR / name / MARKER_FILE).exists()
    assert deleting(root, name).deleted == [name]


def test_a_stager_that_begins_in_the_middle_of_a_move_stages_anew(
    root: Path, lock: Lock, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move holds the stager's lock: it waits, and then finds no directory."""
    decided, threads = order(root), list[threading.Thread]()
    real = Trash.take

    def take(self: Trash, path: str, now: float) -> str:
        threads.append(threading.Thread(target=lambda: stage(store, root, lock)))
        threads[0].start()
        threads[0].join(0.4)
        assert threads[0].is_alive()
        return real(self, path, now)

    monkeypatch.setattr(Trash, "take", take)
    assert list(carry_out(root, decided).moved) == [lock.model_dir]
    threads[0].join(30)
    assert_staged(root, lock)


def test_it_is_done_as_root_without_capabilities(root: Path, lock: Lock) -> None:
    done = without_capabilities(lambda: plain(carry_out(root, order(root))))
    (name,) = done["moved"].values()
    name = aged(root, name, 2 * DAY_S)
    assert without_capabilities(lambda: deleting(root, name).deleted) == [name]


def test_an_order_is_taken_only_by_its_digest() -> None:
    store = MemoryStore()
    body = {"version": 1, "node": "node-1", "now": 1.0, "trash_age_s": 2.0, "protect": [], "move": {}, "delete": []}
    data = canonical_bytes(body)
    store.objects[f"collections/{sha256_hex(data)}.json"] = data
    assert read_order(store, sha256_hex(data)).node == "node-1"
    store.objects[f"collections/{sha256_hex(data)}.json"] = canonical_bytes({**body, "protect": ["a"]})
    with pytest.raises(IntegrityError):
        read_order(store, sha256_hex(data))
    with pytest.raises(K2Error):
        read_order(store, "0" * 64)
