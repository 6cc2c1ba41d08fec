"""The puller: how work is dealt, what gets a name in the store and what does not, and how a killed pull goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import After, IntegrityError, UnavailableError
from tasks.core.lock import Lock, LockedFile, make_lock
from tasks.node import puller, transfer
from tasks.node.meter import Meter, Reports
from tasks.node.program import Stop, StoppedError
from tasks.node.steady_stream import Pace
from tasks.node.stored_lock import read_lock
from tasks.ports import StoredObject, UploadedPart
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


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.node.steady_stream.backoff_s", lambda asked_s, failures: min(asked_s, 0.001))
    monkeypatch.setattr("tasks.node.workers.backoff_s", lambda asked_s, failures: min(asked_s, 0.001))


def pull_all(hub: Any, store: Any, stop: Stop | None = None) -> dict[str, Any]:
    """Pull everything; return the outcome with what the plan and the meters said."""
    lock, told = lock_of(FILES), []
    route = transfer.Route(hub, store, lock, "http://hub", PART, Pace(tries=3))
    reports = Reports(told.append, interval_s=10.0)
    with reports.running():
        outcome = puller.pull(route, puller.share(lock, 0, 1), 2, stop or Stop(), reports)
    (plan,) = (line["plan"] for line in told if "plan" in line)
    files = [file for line in told for file in line.get("files", ())]
    assert all(file["done"] for file in files)
    return {**plan, **outcome, "moved": {file["path"]: file for file in files}}


def key(path: str = SHARD) -> str:
    return f"blobs/{hashlib.sha256(FILES[path]).hexdigest()}"


def flipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for i, block in enumerate(blocks):
        yield bytes([block[0] ^ 1]) + block[1:] if i == 3 else block


def test_everything_arrives_with_its_statement(hub: FakeHub, store: MemoryStore) -> None:
    outcome = pull_all(hub, store)
    total = sum(map(len, FILES.values()))
    assert (outcome["files"], outcome["missing"], outcome["missing_bytes"]) == (len(FILES), len(FILES), total)
    assert {path: moved["hub_bytes"] for path, moved in outcome["moved"].items()} == {
        path: len(data) for path, data in FILES.items()
    }
    for path, data in FILES.items():
        assert store.objects[key(path)] == data
        statement = json.loads(store.objects[key(path) + ".ok"])
        assert statement == {"size_bytes": len(data), "sha256": key(path)[6:], "source": "http://hub"}
    assert store.uploads == {}


def test_what_is_there_is_not_fetched_again(hub: FakeHub, store: MemoryStore) -> None:
    pull_all(hub, store)
    hub.asked.clear()
    outcome = pull_all(hub, store)
    assert (outcome["missing"], outcome["moved"]) == (0, {})
    assert hub.asked == []


def test_a_blob_without_a_statement_is_verified_anew(hub: FakeHub, store: MemoryStore) -> None:
    pull_all(hub, store)
    hub.asked.clear()
    short, wrong, right = SHARD, "model-1-of-3.safetensors", "model-3-of-3.safetensors"
    store.objects[key(short)] = FILES[short][:-1]
    for path in (wrong, right, "config.json"):
        del store.objects[key(path) + ".ok"]
    store.objects[key(wrong)] = b"x" * len(FILES[wrong])
    outcome = pull_all(hub, store)
    assert (outcome["missing"], outcome["verified_anew"]) == (4, 2)
    assert sorted(path for path, _ in hub.asked) == [wrong, short]
    for path, data in FILES.items():
        assert store.objects[key(path)] == data
        assert json.loads(store.objects[key(path) + ".ok"])["sha256"] == key(path)[6:]


@pytest.mark.parametrize("statement", [b"", b"{}", b"[1]", b'{"sha256": "%s", "size_bytes": 1}' % (b"a" * 64)])
def test_a_statement_that_says_something_else_is_none(hub: FakeHub, store: MemoryStore, statement: bytes) -> None:
    pull_all(hub, store)
    store.objects[key() + ".ok"] = statement
    store.objects[key()] = b"x" * len(FILES[SHARD])
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert json.loads(store.objects[key() + ".ok"])["sha256"] == key()[6:]


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
    moved = outcome["moved"][SHARD]
    assert (moved["hub_bytes"], moved["streams"]) == (len(FILES[SHARD]), 3)
    assert "cut" in moved["last_error"]
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
        transfer.move_blob(transfer.Route(hub, store, lock, "", PART), lock.file(SHARD), Meter(SHARD, 1), Stop())  # type: ignore[arg-type]
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


def test_parts_with_other_bytes_are_sent_again(hub: FakeHub, store: MemoryStore) -> None:
    killed_pull(hub, store, 2)
    (upload,) = store.uploads
    store.put_part(key(), upload, 1, b"x" * PART)
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert store.uploads == {}


def test_an_upload_with_parts_of_another_size_is_not_gone_on_with(hub: FakeHub, store: MemoryStore) -> None:
    killed_pull(hub, store, 2)
    (upload,) = store.uploads
    store.put_part(key(), upload, 2, FILES[SHARD][PART : 2 * PART - 1])
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert list(store.uploads) == [upload]  # the sweep's


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
    hands = [puller.share(lock, i, pullers) for i in range(pullers)]
    dealt = [file.sha256 for hand in hands for file in hand]
    assert sorted(dealt) == sorted({file.sha256 for file in lock.files})
    loads = [sum(file.size_bytes for file in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(sizes)


def test_the_deal_does_not_depend_on_the_order_of_paths() -> None:
    sizes = [random.Random(3).randrange(10**9) for _ in range(30)]
    assert puller.share(lock_with_sizes(sizes), 1, 4) == puller.share(lock_with_sizes(sizes), 1, 4)
    assert [f.size_bytes for f in puller.share(lock_with_sizes(sizes), 0, 1)] == sorted(sizes, reverse=True)


def test_one_content_under_two_paths_is_fetched_once(store: MemoryStore) -> None:
    lock = lock_of({"a.safetensors": b"same", "b.safetensors": b"same"})
    assert [file.path for file in puller.share(lock, 0, 1)] == ["a.safetensors"]


class OddStore:
    """A store with one thing wrong; the rest is a memory store's."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def lost(store: MemoryStore, of: str, times: int) -> Any:
    """Return a store that acknowledges so many writes of an object and keeps nothing."""
    left = [times]

    class Lost(OddStore):
        def put(self, name: str, data: bytes, **condition: Any) -> str:
            if name == of and left[0]:
                left[0] -= 1
                return "etag"
            return self._store.put(name, data, **condition)

        def finish_upload(self, name: str, upload_id: str, parts: Any) -> None:
            if name == of and left[0]:
                left[0] -= 1
                self._store.abort_upload(name, upload_id)
                return
            self._store.finish_upload(name, upload_id, parts)

    return Lost(store)


@pytest.mark.parametrize("path", [SHARD, "config.json"])
def test_a_store_that_acknowledges_and_keeps_nothing_once_is_written_again(
    hub: FakeHub, store: MemoryStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "wait", lambda self, stop, seconds: None)
    pull_all(hub, lost(store, key(path), 1))
    assert store.objects[key(path)] == FILES[path]


@pytest.mark.parametrize("path", [SHARD, "config.json"])
def test_a_store_that_keeps_nothing_gets_no_statement(
    hub: FakeHub, store: MemoryStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "wait", lambda self, stop, seconds: None)
    with pytest.raises(UnavailableError, match="does not hold") as caught:
        pull_all(hub, lost(store, key(path), 99))
    assert caught.value.exit_code == 11
    assert key(path) + ".ok" not in store.objects


def keeping_others(store: MemoryStore, of: str, *, stated: bool) -> Any:
    """Return a store that keeps other bytes of the same size, and states the checksum of what it keeps or none."""

    class Others(OddStore):
        def _spoil(self, name: str) -> None:
            if name == of:
                data = self._store.objects[name]
                self._store.objects[name] = bytes([data[0] ^ 1]) + data[1:]

        def put(self, name: str, data: bytes, **condition: Any) -> str:
            etag = self._store.put(name, data, **condition)
            self._spoil(name)
            return etag

        def finish_upload(self, name: str, upload_id: str, parts: Any) -> None:
            self._store.finish_upload(name, upload_id, parts)
            self._spoil(name)

        def head(self, name: str) -> StoredObject | None:
            there = self._store.head(name)
            return there if stated or there is None else replace(there, sha256="")

    return Others(store)


@pytest.mark.parametrize("stated", [True, False], ids=["checksum", "etag"])
@pytest.mark.parametrize("path", [SHARD, "config.json"])
def test_a_store_that_keeps_other_bytes_is_found_out(hub: FakeHub, store: MemoryStore, path: str, stated: bool) -> None:
    with pytest.raises(IntegrityError) as caught:
        pull_all(hub, keeping_others(store, key(path), stated=stated))
    assert (caught.value.code, caught.value.exit_code) == ("K2-INT-003", 5)
    assert key(path) not in store.objects
    assert key(path) + ".ok" not in store.objects


def test_a_store_with_etags_and_checksums_of_its_own_is_read_back(hub: FakeHub, store: MemoryStore) -> None:
    class Encrypting(OddStore):
        def head(self, name: str) -> StoredObject | None:
            there = self._store.head(name)
            return there and replace(there, sha256="", etag="0" * 32)

    pull_all(hub, Encrypting(store))
    opened = [call for call in store.calls if call.startswith("open blobs/")]
    assert len(opened) == len(FILES)
    assert all(store.objects[key(path)] == data for path, data in FILES.items())


def test_a_store_that_fails_for_a_moment_costs_no_byte_of_the_hub(hub: FakeHub, store: MemoryStore) -> None:
    failing = {"put_part": 2, "finish_upload": 1, "start_upload": 1, "put": 3, "head": 1}

    class Failing(OddStore):
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                if failing.get(name):
                    failing[name] -= 1
                    raise UnavailableError("K2-UNA-001", f"no {name}", retry=After(0.0))
                return getattr(self._store, name)(*arguments, **more)

            return call

    outcome = pull_all(hub, Failing(store))
    assert not any(failing.values())
    assert [offset for _, offset in hub.asked] == [0] * len(FILES)
    assert sum(moved["hub_bytes"] for moved in outcome["moved"].values()) == sum(map(len, FILES.values()))


def test_two_pullers_of_the_same_blobs_at_once(hub: FakeHub, store: MemoryStore) -> None:
    """The second one comes in the middle of the first one's upload, shares it and finishes it."""
    second: list[Mapping[str, Any]] = []

    def meeting(path: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for i, block in enumerate(blocks):
            if path == SHARD and nth == 1 and i == 20:
                second.append(pull_all(FakeHub(), store))
            yield block

    hub.change = meeting
    outcome = pull_all(hub, store)
    assert second[0]["missing"]
    assert outcome["missing"] == len(FILES)
    assert all(store.objects[key(path)] == data for path, data in FILES.items())
    assert store.uploads == {}


def test_an_answer_to_the_finish_that_is_lost_is_looked_for(hub: FakeHub, store: MemoryStore) -> None:
    class Forgetting(OddStore):
        def finish_upload(self, name: str, upload_id: str, parts: Any) -> None:
            self._store.finish_upload(name, upload_id, parts)
            self._store._finished.clear()  # AWS: an upload that is finished is gone
            if "lost" not in self._store.calls:
                self._store.calls.append("lost")
                raise UnavailableError("K2-UNA-001", "no answer", retry=After(0.0))

    pull_all(hub, Forgetting(store))
    assert store.objects[key()] == FILES[SHARD]
    assert [path for path, _ in hub.asked].count(SHARD) == 1


def test_an_upload_that_is_swept_away_under_a_living_puller_is_begun_anew(hub: FakeHub, store: MemoryStore) -> None:
    def sweeping(path: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for i, block in enumerate(blocks):
            if path == SHARD and nth == 1 and i == 20:
                store.uploads = {name: value for name, value in store.uploads.items() if value[0] != key()}
            yield block

    hub.change = sweeping
    pull_all(hub, store)
    assert store.objects[key()] == FILES[SHARD]
    assert [path for path, _ in hub.asked].count(SHARD) == 2


def test_a_statement_that_another_one_left_meanwhile_is_as_good(hub: FakeHub, store: MemoryStore) -> None:
    theirs = json.dumps({"sha256": key()[6:], "size_bytes": len(FILES[SHARD]), "source": "http://mirror"}).encode()

    class Late(OddStore):
        def put(self, name: str, data: bytes, **condition: Any) -> str:
            if name == key() + ".ok":
                self._store.objects[name] = theirs
            return self._store.put(name, data, **condition)

    pull_all(hub, Late(store))
    assert store.objects[key() + ".ok"] == theirs


def test_what_a_part_sends_is_seen_while_it_is_sent(hub: FakeHub, store: MemoryStore) -> None:
    meter, lock = Meter(SHARD, len(FILES[SHARD])), lock_of(FILES)
    seen: list[int] = []

    class Slow(OddStore):
        def put_part(self, name: str, upload_id: str, number: int, data: bytes, sent: Any) -> UploadedPart:
            before = meter.line()["moved_bytes"]
            part = self._store.put_part(name, upload_id, number, data, sent)
            seen.append(meter.line()["moved_bytes"] - before)
            return part

    route = transfer.Route(hub, Slow(store), lock, "", PART)  # type: ignore[arg-type]
    assert transfer.move_blob(route, lock.file(SHARD), meter, Stop())
    assert sum(seen) == len(FILES[SHARD])
    assert meter.line()["moved_bytes"] == 2 * len(FILES[SHARD])
