"""How nodes of an exchange find each other in the store: little to read, one process a node, answers that get lost."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tasks.core.errors import After, UnavailableError
from tasks.core.standing import LEFT, Patience, Standing, note_from_bytes
from tasks.node.rendezvous import Rendezvous
from tests.fakes.memory_store import MemoryStore

NODES = ("node-1", "node-2", "node-3")
PATIENCE = Patience(join_s=5.0, lost_s=0.5)
PREFIX = "exchange/lock/"


class WatchedStore(MemoryStore):
    """Counts reads, and loses the answers of writes where a test wants it to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.lost_answers = 0

    def get(self, key: str) -> tuple[bytes, str]:
        self.reads[key] += 1
        return super().get(key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        self.writes[key] += 1
        etag = super().put(key, data, if_absent=if_absent, if_match=if_match)
        if self.lost_answers:
            self.lost_answers -= 1
            raise UnavailableError("K2-UNA-001", "The store did not answer.", retry=After(0.1))
        return etag


def rendezvous(store: MemoryStore, node: str, **changes: Any) -> Rendezvous:
    others = tuple(other for other in NODES if other != node)
    address = changes.pop("address", lambda: (f"http://127.0.0.1/{node}", "token"))
    return Rendezvous(store, "lock", node, changes.pop("run", "run-1"), others, address, PATIENCE, 0.02)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_heartbeats_are_seen_by_listing_and_a_note_is_read_once() -> None:
    store = WatchedStore()
    with contextlib.ExitStack() as stack:
        made = {node: stack.enter_context(rendezvous(store, node)) for node in NODES}
        for node, one in made.items():
            wait_for(lambda node=node, one=one: all(one.note(other) for other in NODES if other != node))
        wait_for(lambda: min(store.writes[f"{PREFIX}{node}.beat"] for node in NODES) > 20)
        assert {key: count for key, count in store.reads.items() if key.endswith(".beat")} == {}
        assert max(store.reads.values()) == 2  # each of the two others, once
        assert {store.writes[f"{PREFIX}{node}.json"] for node in NODES} == {1}
        assert all(one.gone() == set() for one in made.values())
        made["node-1"].done()
        wait_for(lambda: "node-1" not in made["node-2"].in_need())
        assert made["node-2"].standing("node-1") is Standing.HERE
    notes = [note_from_bytes(store.objects[f"{PREFIX}{node}.json"]) for node in NODES]
    assert [note.state for note in notes if note] == [LEFT] * 3


def test_a_token_that_is_renewed_is_read_anew() -> None:
    store, token = WatchedStore(), ["first"]
    with rendezvous(store, "node-1", address=lambda: ("http://x", token[0])), rendezvous(store, "node-2") as other:
        wait_for(lambda: (note := other.note("node-1")) is not None and note.token == "first")
        token[0] = "second"
        wait_for(lambda: (note := other.note("node-1")) is not None and note.token == "second")


def test_a_second_process_of_a_node_takes_over_and_the_first_falls_silent() -> None:
    store = WatchedStore()
    with rendezvous(store, "node-1") as first, rendezvous(store, "node-2") as other:
        wait_for(lambda: other.note("node-1") is not None)
        with rendezvous(store, "node-1", run="run-2", address=lambda: ("http://second", "t")) as second:
            wait_for(lambda: first.superseded)
            wait_for(lambda: (note := other.note("node-1")) is not None and note.url == "http://second")
            assert not second.superseded
            first.__exit__()
            assert b"http://second" in store.objects[f"{PREFIX}node-1.json"]


def test_a_write_whose_answer_was_lost_is_no_second_process() -> None:
    store = WatchedStore()
    with rendezvous(store, "node-1") as one, rendezvous(store, "node-2") as other:
        wait_for(lambda: other.note("node-1") is not None)
        store.lost_answers = 6
        wait_for(lambda: store.lost_answers == 0)
        before = store.writes[f"{PREFIX}node-1.beat"]
        wait_for(lambda: store.writes[f"{PREFIX}node-1.beat"] > before + 5)
        assert not one.superseded and not other.superseded
        assert other.standing("node-1") is Standing.HERE


def test_a_node_alone_writes_nothing() -> None:
    store = WatchedStore()
    with Rendezvous(store, "lock", "node-1", "run-1", (), lambda: ("", ""), PATIENCE, 0.02) as one:
        assert (one.gone(), one.in_need()) == (set(), [])
    assert store.objects == {}
