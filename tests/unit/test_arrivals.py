"""A stager that begins before its source is filled: takes each file when it is there, and waits not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import After, InputError, UnavailableError
from tasks.core.lock import LockedFile
from tasks.node import arrivals as module
from tasks.node.arrivals import FileQueue, StoreArrivals
from tasks.node.program import Stop, StoppedError
from tests.fakes.checkpoints import fill, lock_of
from tests.fakes.staged_node import (
    FILES,
    SHARD,
    FaultyStore,
    assert_nothing_unverified,
    assert_staged,
    blob_key,
    quarantined,
    stage,
)

LOCK = lock_of(FILES)
BY_SIZE = sorted(LOCK.files, key=lambda file: (-file.size_bytes, file.path))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_TICK_S", 0.005)


class Filling(FaultyStore):
    """A store that is being filled: `pull` brings a blob and then its word for it, as a puller does."""

    def __init__(self) -> None:
        super().__init__()
        fill(self, FILES)
        for key in [key for key in self.objects if key.startswith("blobs/")]:
            del self.objects[key]

    def pull(self, path: str) -> None:
        self.objects[blob_key(path)] = FILES[path]
        self.objects[blob_key(path) + ".ok"] = b"{}"


@pytest.fixture
def store() -> Filling:
    return Filling()


def staging(store: Filling, root: Path, wait_s: float = 30.0, **more: Any) -> tuple[threading.Thread, list[Any]]:
    """Start a stager beside the pull and return its thread and what will be its outcome."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(
                stage(store, root, LOCK, arrivals=StoreArrivals(store), source_wait_s=wait_s, **more)  # type: ignore[arg-type]
            )
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_each_file_is_staged_as_soon_as_it_is_pulled(store: Filling, tmp_path: Path) -> None:
    thread, outcome = staging(store, tmp_path)
    for path in sorted(FILES, key=lambda path: len(FILES[path])):
        assert not (tmp_path / LOCK.model_dir / path).exists()
        store.pull(path)
        until((tmp_path / LOCK.model_dir / path).exists)
    thread.join(20)
    assert outcome[0]["bytes_written"] == LOCK.total_bytes
    assert_staged(tmp_path, LOCK)


def test_a_blob_without_the_pullers_word_or_with_another_size_is_not_taken(store: Filling, tmp_path: Path) -> None:
    key = blob_key()
    store.objects[key] = FILES[SHARD]
    assert StoreArrivals(store).arrived(LOCK.files) == set()  # type: ignore[arg-type]
    store.objects[f"{key}.ok"] = b"{}"
    assert StoreArrivals(store).arrived(LOCK.files) == {SHARD}  # type: ignore[arg-type]
    store.objects[key] = FILES[SHARD][:-1]
    assert StoreArrivals(store).arrived(LOCK.files) == set()  # type: ignore[arg-type]


def test_a_store_that_is_full_is_never_asked_what_it_has(store: Filling, tmp_path: Path) -> None:
    for path in FILES:
        store.pull(path)
    asked: list[str] = []
    real = store.list_objects
    store.list_objects = lambda prefix: asked.append(prefix) or real(prefix)  # type: ignore[method-assign,func-returns-value]
    stage(store, tmp_path, LOCK)
    assert asked == []
    assert_staged(tmp_path, LOCK)


class Source:
    """Says what has arrived, by path."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.error: Exception | None = None
        self.asked = 0

    def arrived(self, files: Collection[LockedFile]) -> set[str]:
        self.asked += 1
        if self.error:
            raise self.error
        return {file.path for file in files if file.path in self.there}


def queue(source: Source, wait_s: float = 30.0, here: tuple[LockedFile, ...] = ()) -> FileQueue:
    return FileQueue(here, [f for f in BY_SIZE if f not in here], source, wait_s, "node-1")


def test_the_largest_that_can_be_had_comes_first_and_none_waits_while_one_can_be_had() -> None:
    source = Source()
    source.there = {BY_SIZE[-1].path, BY_SIZE[2].path}
    dealt = queue(source)
    assert dealt.take(Stop()) == (BY_SIZE[2], False)
    source.there.add(BY_SIZE[0].path)
    assert dealt.take(Stop()) == (BY_SIZE[-1], False)  # it can be had without asking anybody
    assert dealt.take(Stop()) == (BY_SIZE[0], False)


def test_what_stands_on_the_disk_is_hashed_while_nothing_comes() -> None:
    source = Source()
    dealt = queue(source, here=(BY_SIZE[1], BY_SIZE[3]))
    assert [dealt.take(Stop()), dealt.take(Stop())] == [(BY_SIZE[1], True), (BY_SIZE[3], True)]
    assert source.asked == 0
    dealt.fetch_instead(BY_SIZE[1])
    source.there = {BY_SIZE[1].path}
    assert dealt.take(Stop()) == (BY_SIZE[1], False)


def test_nothing_new_for_too_long_names_the_largest_file_that_is_missing(store: Filling, tmp_path: Path) -> None:
    for path in FILES:
        if path != SHARD:
            store.pull(path)
    thread, outcome = staging(store, tmp_path, wait_s=0.2)
    thread.join(20)
    error = outcome[0]
    assert isinstance(error, UnavailableError)
    assert (error.code, error.where, error.got) == ("K2-UNA-001", f"node-1: {SHARD}", "1 files missing at the source")
    assert error.expected == f"{blob_key()} and its .ok"
    assert "role=pull" in error.hint
    assert_nothing_unverified(tmp_path, LOCK)
    store.pull(SHARD)
    again = stage(store, tmp_path, LOCK)
    assert again["bytes_written"] == len(FILES[SHARD])
    assert_staged(tmp_path, LOCK)


def test_the_deadline_counts_from_the_last_file_that_came() -> None:
    source = Source()
    dealt = queue(source, wait_s=0.3)
    began = time.monotonic()
    for file in BY_SIZE:
        threading.Timer(0.1, source.there.add, [file.path]).start()
        assert dealt.take(Stop()) == (file, False)
    assert time.monotonic() - began > 0.6  # twice the deadline in all


@pytest.mark.parametrize("wait_s", [0.2, 30.0])
def test_a_source_that_does_not_answer_is_waited_for_like_one_that_has_nothing_new(wait_s: float) -> None:
    source = Source()
    source.error = UnavailableError("K2-UNA-001", "The store did not answer.", retry=After(2.0))
    dealt = queue(source, wait_s=wait_s)
    if wait_s < 1:
        with pytest.raises(UnavailableError) as caught:
            dealt.take(Stop())
        assert caught.value.got == "The store did not answer."
        return
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(dealt.take(Stop())))
    thread.start()
    until(lambda: source.asked > 3)
    source.there, source.error = {BY_SIZE[0].path}, None
    thread.join(20)
    assert taken == [(BY_SIZE[0], False)]


def test_a_source_that_refuses_is_not_asked_again() -> None:
    source = Source()
    for error in (UnavailableError("K2-UNA-001", "AccessDenied"), InputError("K2-INP-001", "No such bucket.")):
        source.error, source.asked = error, 0
        with pytest.raises(type(error)):
            queue(source).take(Stop())
        assert source.asked == 1


def test_one_thread_asks_and_the_others_take_what_it_finds() -> None:
    source = Source()
    asking, leave = threading.Event(), threading.Event()
    real = source.arrived

    def slow(files: Collection[LockedFile]) -> set[str]:
        asking.set()
        leave.wait(20)
        return real(files)

    source.arrived = slow  # type: ignore[method-assign]
    source.there = {file.path for file in BY_SIZE}
    dealt, taken = queue(source), list[Any]()
    threads = [threading.Thread(target=lambda: taken.append(dealt.take(Stop()))) for _ in BY_SIZE]
    for thread in threads:
        thread.start()
    assert asking.wait(20)
    time.sleep(0.05)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert source.asked == 1
    assert sorted(file.path for file, _ in taken) == sorted(FILES)


def test_who_waits_ends_at_once_when_told_to(store: Filling, tmp_path: Path) -> None:
    stop = Stop()
    store.pull("config.json")
    thread, outcome = staging(store, tmp_path, stop=stop)
    until((tmp_path / LOCK.model_dir / "config.json").exists)
    stop.set()
    began = time.monotonic()
    thread.join(20)
    assert time.monotonic() - began < 2
    assert isinstance(outcome[0], StoppedError)
    assert_nothing_unverified(tmp_path, LOCK)


def test_a_wrong_file_on_the_disk_waits_for_the_pull_and_keeps_no_other_from_being_staged(
    store: Filling, tmp_path: Path
) -> None:
    directory = tmp_path / LOCK.model_dir
    directory.mkdir(parents=True)
    (directory / SHARD).write_bytes(b"x" * len(FILES[SHARD]))
    thread, outcome = staging(store, tmp_path, threads=1)
    until(lambda: not (directory / SHARD).exists())
    assert [note["path"] for note, _ in quarantined(tmp_path, LOCK)] == [SHARD]
    for path in FILES:
        if path != SHARD:
            store.pull(path)
            until((directory / path).exists)
    store.pull(SHARD)
    thread.join(20)
    assert outcome[0]["quarantined"] == 1
    assert_staged(tmp_path, LOCK)


def test_a_failure_of_one_file_ends_those_who_wait(store: Filling, tmp_path: Path) -> None:
    def wrong(blocks: Iterator[bytes]) -> Iterator[bytes]:
        yield from (bytes([block[0] ^ 1]) + block[1:] for block in blocks)

    store.change = lambda key, nth, blocks: wrong(blocks)
    store.pull(SHARD)
    thread, outcome = staging(store, tmp_path)
    thread.join(20)
    assert outcome[0].code == "K2-INT-001"
    assert outcome[0].where == f"node-1: {SHARD}"
