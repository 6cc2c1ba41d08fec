"""The puller: how work is dealt, what gets a name in the store and what does not, and how a killed pull goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import After, IntegrityError, UnavailableError
from tasks.core.lock import Lock, LockedFile, make_lock
from tasks.node import pull, transfer
from tasks.node.program import Stop, StoppedError
from tasks.node.stored_lock import read_lock
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of
from tests.fakes.memory_store import MemoryStore

PART = 64_000
BLOCK = 10_000
FILES = contents(shards=3)
SHARD = "model-2-of-3.safetensors"


class FakeHub:
    """Serves files in blocks, each stream through a function that may change it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.change: Callable[[str, int, Iterator[bytes]], Iterator[bytes]] = lambda path, nth, blocks: blocks

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        assert (repo, revision) == (REPO, REVISION)
        self.asked.append((path, offset))
        data = FILES[path][offset:]
        nth = [asked for asked, _ in self.asked].count(path)
        return self.change(path, nth, (data[i : i + BLOCK] for i in range(0, len(data), BLOCK)))


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(min_part_bytes=1)


def pull_all(hub: Any, store: MemoryStore, stop: Stop | None = None) -> dict[str, int]:
    lock = lock_of(FILES)
    route = transfer.Route(hub, store, lock, "http://hub", PART)
    return pull.pull(route, pull.share(lock, 0, 1), 2, stop or Stop())


def key(path: str = SHARD) -> str:
    return f"blobs/{hashlib.sha256(FILES[path]).hexdigest()}"


def flipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for i, block in enumerate(blocks):
        yield bytes([block[0] ^ 1]) + block[1:] if i == 3 else block


def test_everything_arrives_with_its_statement(hub: FakeHub, store: MemoryStore) -> None:
    outcome = pull_all(hub, store)
    total = sum(map(len, FILES.values()))
    assert outcome == {"files": len(FILES), "bytes_fetched": total, "files_present": 0}
    for path, data in FILES.items():
        assert store.objects[key(path)] == data
        statement = json.loads(store.objects[key(path) + ".ok"])
        assert statement == {"size_bytes": len(data), "sha256": key(path)[6:], "source": "http://hub"}
    assert store.uploads == {}


def test_what_is_there_is_not_fetched_again(hub: FakeHub, store: MemoryStore) -> None:
    pull_all(hub, store)
    hub.asked.clear()
    assert pull_all(hub, store) == {"files": len(FILES), "bytes_fetched": 0, "files_present": len(FILES)}
    assert hub.asked == []
    store.objects[key()] = FILES[SHARD][:-1]
    del store.objects[key("config.json") + ".ok"]
    assert pull_all(hub, store)["files_present"] == len(FILES) - 2
    assert sorted(path for path, _ in hub.asked) == ["config.json", SHARD]
    assert store.objects[key()] == FILES[SHARD]


def test_one_wrong_byte_is_fetched_again(hub: FakeHub, store: MemoryStore) -> None:
    hub.change = lambda path, nth, blocks: flipped(blocks) if (path, nth) == (SHARD, 1) else blocks
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert store.uploads == {}


@pytest.mark.parametrize("path", [SHARD, "config.json"])
def test_wrong_bytes_twice_fail_and_nothing_is_named(hub: FakeHub, store: MemoryStore, path: str) -> None:
    hub.change = lambda asked, nth, blocks: iter([b"x" * len(FILES[path])]) if asked == path else blocks
    with pytest.raises(IntegrityError) as caught:
        pull_all(hub, store)
    error = caught.value
    assert (error.code, error.exit_code) == ("K2-INT-001", 5)
    assert error.where == f"{REPO}@{REVISION} {path}"
    assert error.got == f"sha256 {hashlib.sha256(b'x' * len(FILES[path])).hexdigest()}"
    assert error.expected == f"sha256 {key(path)[6:]}"
    assert [asked for asked, _ in hub.asked].count(path) == 2
    assert key(path) not in store.objects
    assert key(path) + ".ok" not in store.objects
    assert not [of for of, _ in store.uploads.values() if of == key(path)]


@pytest.mark.parametrize("body", [FILES[SHARD][:-1], FILES[SHARD] + b"x", b""])
def test_another_size_is_refused(hub: FakeHub, store: MemoryStore, body: bytes) -> None:
    hub.change = lambda path, nth, blocks: iter([body]) if path == SHARD else blocks
    with pytest.raises(IntegrityError) as caught:
        pull_all(hub, store)
    assert caught.value.expected == f"{len(FILES[SHARD])} bytes"
    assert key() not in store.objects


def test_a_stream_that_breaks_goes_on_where_it_broke(hub: FakeHub, store: MemoryStore) -> None:
    def broken(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(3):
            yield next(blocks)
        raise UnavailableError("K2-UNA-001", "cut", retry=After(0.0))

    hub.change = lambda path, nth, blocks: broken(blocks) if path == SHARD and nth < 3 else blocks
    outcome = pull_all(hub, store)
    assert [offset for path, offset in hub.asked if path == SHARD] == [0, 3 * BLOCK, 6 * BLOCK]
    assert outcome["bytes_fetched"] == sum(map(len, FILES.values()))
    assert store.objects[key()] == FILES[SHARD]


def test_a_hub_that_stays_away_ends_the_pull(hub: FakeHub, store: MemoryStore) -> None:
    def away(path: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        raise UnavailableError("K2-UNA-001", "away", retry=After(0.01))

    hub.change = away
    with pytest.raises(UnavailableError, match="away"):
        pull_all(hub, store)
    assert [k for k in store.objects if k.endswith(".ok")] == []


def cut_after(parts: int) -> Callable[[str, int, Iterator[bytes]], Iterator[bytes]]:
    """Return a change that ends the stream of the shard like a kill: nothing is cleaned up after `parts` parts."""

    def change(path: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        sent = 0
        for block in blocks:
            if path == SHARD and sent >= parts * PART:
                raise KeyboardInterrupt
            sent += len(block)
            yield block

    return change


def killed_pull(hub: FakeHub, store: MemoryStore, parts: int) -> None:
    hub.change = cut_after(parts)
    lock = lock_of(FILES)
    with pytest.raises(KeyboardInterrupt):
        transfer.move_blob(transfer.Route(hub, store, lock, "", PART), lock.file(SHARD), Stop(), lambda _: None)  # type: ignore[arg-type]
    hub.change = lambda path, nth, blocks: blocks
    store.calls.clear()


def test_a_killed_upload_is_taken_up_and_hashed_from_its_first_byte(hub: FakeHub, store: MemoryStore) -> None:
    killed_pull(hub, store, 2)
    (upload,) = store.uploads
    assert key() not in store.objects
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    sent = [call for call in store.calls if call.startswith("put_part")]
    of_others = 2 * len(range(0, 300_000, PART))
    assert len(sent) == len(range(0, 300_000, PART)) - 2 + of_others  # parts 1 and 2 were not sent again
    assert upload == "upload-1"
    assert store.uploads == {}


def test_parts_with_other_bytes_or_sizes_are_sent_again(hub: FakeHub, store: MemoryStore) -> None:
    killed_pull(hub, store, 2)
    (upload,) = store.uploads
    store.put_part(key(), upload, 1, b"x" * PART)
    store.put_part(key(), upload, 2, FILES[SHARD][PART : 2 * PART - 1])
    store.put_part(key(), upload, 99, b"of an upload with smaller parts")
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]


def test_a_resumed_upload_of_wrong_bytes_is_still_found(hub: FakeHub, store: MemoryStore) -> None:
    killed_pull(hub, store, 2)
    hub.change = lambda path, nth, blocks: flipped(blocks) if path == SHARD else blocks
    with pytest.raises(IntegrityError):
        pull_all(hub, store)
    assert key() not in store.objects


def test_a_stop_keeps_the_upload_for_the_next_run(hub: FakeHub, store: MemoryStore) -> None:
    stop = Stop()

    def stopping(path: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for i, block in enumerate(blocks):
            if path == SHARD and i == 20:
                stop.set()
            yield block

    hub.change = stopping
    with pytest.raises(StoppedError):
        pull_all(hub, store, stop)
    assert key() not in store.objects
    hub.change = lambda path, nth, blocks: blocks
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert store.uploads == {}


def test_a_lock_with_other_bytes_is_refused(store: MemoryStore) -> None:
    lock = lock_of(FILES)
    stored = f"locks/{lock.digest}.json"
    with pytest.raises(UnavailableError):
        read_lock(store, lock.digest)
    store.objects[stored] = lock.to_bytes()
    assert read_lock(store, lock.digest) == lock
    store.objects[stored] = lock.to_bytes().replace(b"config.json", b"konfig.json")
    with pytest.raises(IntegrityError) as caught:
        read_lock(store, lock.digest)
    assert (caught.value.code, caught.value.where, caught.value.expected) == ("K2-INT-003", stored, lock.digest)


def lock_with_sizes(sizes: list[int]) -> Lock:
    files = [
        LockedFile(f"m-{i}.safetensors", size, "shard", sha256=hashlib.sha256(b"%d %d" % (i % 40, size)).hexdigest())
        for i, size in enumerate(sizes)
    ]
    return make_lock(REPO, REVISION, files)


@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=80), st.integers(1, 20))
def test_the_deal_covers_each_blob_once_and_evenly(sizes: list[int], pullers: int) -> None:
    lock = lock_with_sizes(sizes)
    hands = [pull.share(lock, i, pullers) for i in range(pullers)]
    dealt = [file.sha256 for hand in hands for file in hand]
    assert sorted(dealt) == sorted({file.sha256 for file in lock.files})
    loads = [sum(file.size_bytes for file in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(sizes)


def test_the_deal_does_not_depend_on_the_order_of_paths() -> None:
    sizes = [random.Random(3).randrange(10**9) for _ in range(30)]
    assert pull.share(lock_with_sizes(sizes), 1, 4) == pull.share(lock_with_sizes(sizes), 1, 4)
    assert [f.size_bytes for f in pull.share(lock_with_sizes(sizes), 0, 1)] == sorted(sizes, reverse=True)


def test_one_content_under_two_paths_is_fetched_once(store: MemoryStore) -> None:
    lock = lock_of({"a.safetensors": b"same", "b.safetensors": b"same"})
    assert [file.path for file in pull.share(lock, 0, 1)] == ["a.safetensors"]
