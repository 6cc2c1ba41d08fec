"""An exchange among nodes of one process: what the Hub is asked for, who is trusted, how it ends when some fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import After, CapacityError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE, check_marker_against_lock, marker_from_data
from tasks.core.ownership import deal
from tasks.core.standing import Patience, note_from_bytes
from tasks.node.exchange_stager import ExchangeStager, Manner, Party
from tasks.node.peer_source import Pace
from tasks.node.program import Stop
from tasks.node.rendezvous import prefix
from tasks.node.sources import HubSource
from tasks.node.staging_result import Node
from tasks.node.verified_file import PARTIAL_DIR
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.memory_store import MemoryStore
from tests.fakes.odd_peer import OddPeer, odd_peer, send

FILES = contents(shards=12, shard_bytes=60_000) | {"LICENSE": b"same\n", "docs/LICENSE": b"same\n"}
NODES = ("node-1", "node-2", "node-3", "node-4")
# Long enough for a machine on which much else runs; tests of silence and of absence are less patient.
PATIENCE = Patience(join_s=10.0, lost_s=5.0, strikes=2, forgive_s=10.0)
MANNER = Manner(
    host="",
    port=0,
    pull_threads=2,
    threads=2,
    serve_s=10.0,
    deny_s=0.5,
    beat_s=0.1,
    patience=PATIENCE,
    pace=Pace(stall_s=0.5),
)


class CountingHub(MemoryHub):
    """Counts how often each file was asked for, and fails where a test wants it to."""

    def __repr__(self) -> str:
        return "in memory"

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        self.fault(path)
        return super().open_file(repo, revision, path, offset)

    def fault(self, path: str) -> None:
        """Raise what the Hub fails with."""


@dataclass
class Exchange:
    """A lock, a Hub and a store, and nodes that exchange it in threads of their own."""

    root: Path
    hub: CountingHub = field(default_factory=lambda: CountingHub(REPO, REVISION, FILES))
    store: MemoryStore = field(default_factory=MemoryStore)
    lock: Lock = field(default_factory=lambda: lock_of(FILES))
    nodes: tuple[str, ...] = NODES
    guests: tuple[str, ...] = ()
    manner: Manner = MANNER
    stops: dict[str, Stop] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(12))

    def start(
        self, node: str, run: str = "run-1", stager: type[ExchangeStager] = ExchangeStager, **changes: Any
    ) -> Future[dict[str, Any]]:
        root = self.root / node
        root.mkdir(exist_ok=True)
        self.stops[node] = Stop()
        hub = changes.pop("hub", self.hub)
        one = stager(
            HubSource(hub, self.lock),
            changes.pop("store", self.store),
            root,
            self.lock,
            Node(node, f"uid-{node}"),
            changes.pop("reserve_bytes", 0),
            self.stops[node],
            changes.pop("party", Party(self.nodes, self.guests, run)),
            replace(self.manner, host=f"127.77.0.{10 + [*self.nodes, *self.guests].index(node)}", **changes),
        )
        return self.pool.submit(one.exchange, 30.0)

    def all(self, *nodes: str, **changes: Any) -> dict[str, dict[str, Any]]:
        started = {node: self.start(node, **changes) for node in nodes or (*self.nodes, *self.guests)}
        return {node: future.result(30) for node, future in started.items()}

    def assert_staged(self, *nodes: str) -> None:
        for node in nodes:
            directory = self.root / node / self.lock.model_dir
            found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
            marker = marker_from_data(json.loads(found.pop(MARKER_FILE)))
            assert found == FILES
            check_marker_against_lock(marker, self.lock, node)
            assert not [*(directory / PARTIAL_DIR).glob("*")]

    def asked(self) -> Counter[str]:
        """How often the Hub was asked for each content."""
        return Counter(hashlib.sha256(FILES[path]).hexdigest() for path in self.hub.opened)

    def owner(self, path: str) -> str:
        return deal(self.lock.files, self.nodes)[self.lock.file(path).sha256]

    def owned(self, node: str) -> list[str]:
        return [path for path in FILES if self.owner(path) == node]


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    # In memory where there is such a place: a thousand fsyncs are not what these tests are about.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as root:
        made = Exchange(Path(root))
        yield made
        for stop in made.stops.values():
            stop.set()
        made.pool.shutdown(wait=True)


def test_each_content_is_pulled_once_and_everybody_has_everything(exchange: Exchange) -> None:
    outcomes = exchange.all()
    exchange.assert_staged(*NODES)
    assert set(exchange.asked().values()) == {1}
    assert len(exchange.asked()) == len({file.sha256 for file in exchange.lock.files})
    total = exchange.lock.total_bytes
    assert {outcome["bytes_written"] for outcome in outcomes.values()} == {total}
    assert sum(outcome["origin_bytes"] for outcome in outcomes.values()) == sum(
        {file.sha256: file.size_bytes for file in exchange.lock.files}.values()
    )
    assert sum(o["served_bytes"] for o in outcomes.values()) == sum(o["peer_bytes"] for o in outcomes.values())
    assert [outcome["wrong_from"] for outcome in outcomes.values()] == [{}] * 4


def test_twice_asks_for_nothing_and_writes_nothing(exchange: Exchange) -> None:
    exchange.all()
    exchange.hub.opened.clear()
    began = time.monotonic()
    outcomes = exchange.all(run="run-2")
    assert time.monotonic() - began < 3
    assert exchange.hub.opened == []
    assert {(o["bytes_written"], o["peer_bytes"]) for o in outcomes.values()} == {(0, 0)}


def test_a_node_that_lost_files_gets_them_from_the_others_and_not_from_the_hub(exchange: Exchange) -> None:
    exchange.all()
    exchange.hub.opened.clear()
    for path in ("model-1-of-12.safetensors", "model-5-of-12.safetensors", "config.json"):
        (exchange.root / "node-2" / exchange.lock.model_dir / path).unlink()
    outcomes = exchange.all(run="run-2")
    exchange.assert_staged(*NODES)
    assert exchange.hub.opened == []
    assert outcomes["node-2"]["peer_bytes"] == outcomes["node-2"]["bytes_written"] > 80_000


def test_a_guest_owns_nothing_and_gets_everything(exchange: Exchange) -> None:
    exchange.guests = ("node-8",)
    outcomes = exchange.all()
    exchange.assert_staged(*NODES, "node-8")
    assert set(exchange.asked().values()) == {1}
    assert outcomes["node-8"]["origin_bytes"] == 0


def test_a_node_alone_pulls_everything_and_serves_nobody(exchange: Exchange) -> None:
    exchange.nodes = ("node-1",)
    outcome = exchange.all()["node-1"]
    exchange.assert_staged("node-1")
    assert outcome["origin_bytes"] == sum({f.sha256: f.size_bytes for f in exchange.lock.files}.values())
    assert not [key for key in exchange.store.objects if key.startswith("exchange/")]


def impatient(**changes: float) -> Manner:
    return replace(MANNER, patience=replace(PATIENCE, **changes))


def test_all_others_never_come(exchange: Exchange) -> None:
    exchange.manner = impatient(join_s=0.5)
    exchange.start("node-3").result(30)
    exchange.assert_staged("node-3")
    assert set(exchange.asked().values()) == {1}


def test_nobody_is_left_in_the_store_that_could_still_be_asked(exchange: Exchange) -> None:
    exchange.all()
    for node in NODES:
        note = note_from_bytes(exchange.store.objects[f"{prefix(exchange.lock.digest)}{node}.json"])
        assert note is not None
        assert (note.state, note.url, note.token) == ("left", "", "")


def test_a_node_that_fails_before_its_share_is_replaced(exchange: Exchange) -> None:
    """Its disk is full: the others end, each content is pulled once, and the node says why it failed."""
    futures = {node: exchange.start(node) for node in NODES if node != "node-2"}
    full = exchange.start("node-2", reserve_bytes=10**18)
    with pytest.raises(CapacityError):
        full.result(30)
    for future in futures.values():
        future.result(30)
    exchange.assert_staged(*futures)
    assert set(exchange.asked().values()) == {1}


class DiskFills(ExchangeStager):
    """A node whose disk is full after its first files."""

    def _get(self, queue: Any, progress: Any, take: Any, stop: Any) -> Any:
        if len(self._holdings._held) >= 3:
            raise CapacityError("K2-CAP-002", "The disk is full.", where=take.wanted.file.path)
        return super()._get(queue, progress, take, stop)


def test_a_disk_that_fills_up_keeps_no_other_node_from_ending(exchange: Exchange) -> None:
    futures = {node: exchange.start(node) for node in NODES if node != "node-4"}
    full = exchange.start("node-4", stager=DiskFills)
    with pytest.raises(CapacityError):
        full.result(30)
    for future in futures.values():
        future.result(30)
    exchange.assert_staged(*futures)
    assert max(exchange.asked().values()) <= 2


def test_a_node_that_the_hub_refuses_gets_its_share_from_the_others(exchange: Exchange) -> None:
    class Refusing(CountingHub):
        def fault(self, path: str) -> None:
            raise UnavailableError("K2-UNA-001", "The Hub answered HTTP 403.", where=path)

    futures = {node: exchange.start(node) for node in NODES if node != "node-1"}
    refused = exchange.start("node-1", hub=Refusing(REPO, REVISION, FILES))
    outcome = refused.result(30)
    for future in futures.values():
        future.result(30)
    exchange.assert_staged(*NODES)
    assert outcome["origin_bytes"] == 0
    assert set(exchange.asked().values()) == {1}


def test_a_hub_that_refuses_everybody_is_what_the_error_says(exchange: Exchange) -> None:
    def refuse(path: str) -> None:
        raise UnavailableError("K2-UNA-001", "The Hub answered HTTP 403.", where=path)

    exchange.hub.fault = refuse  # type: ignore[method-assign]
    futures = [exchange.start(node) for node in NODES]
    for future in futures:
        with pytest.raises(UnavailableError) as caught:
            future.result(30)
        assert "HTTP 403" in str(caught.value)


def test_a_hub_with_wrong_bytes_ends_the_exchange_and_leaves_nothing_unverified(exchange: Exchange) -> None:
    path = "model-3-of-12.safetensors"
    exchange.hub.served[path] = FILES[path][:-1] + b"x"
    futures = [exchange.start(node) for node in NODES]
    errors = []
    for future in futures:
        with pytest.raises(K2Error) as caught:
            future.result(30)
        errors.append(caught.value)
    owner = exchange.owner(path)
    first = next(error for error in errors if isinstance(error, IntegrityError) and error.where == f"{owner}: {path}")
    assert "another mirror" in first.hint and "blobs/" not in first.hint
    for node in NODES:
        directory = exchange.root / node / exchange.lock.model_dir
        assert not (directory / MARKER_FILE).exists()
        found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        assert all(FILES[path] == data for path, data in found.items())


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"x"


def drip(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for i in range(len(data)):
        handler.wfile.write(data[i : i + 1])
        handler.wfile.flush()
        time.sleep(0.05)


def hang(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    time.sleep(2)


WRONG: dict[str, Callable[[BaseHTTPRequestHandler, bytes], None]] = {
    "one bit": lambda h, data: send(h, flipped(data)),
    "short": lambda h, data: send(h, data[:-1]),
    "long": lambda h, data: send(h, data + b"x"),
    "zeros": lambda h, data: send(h, bytes(len(data) or 1)),
    "an error page": lambda h, data: send(h, b"<html>Bad Gateway</html>"),
    "another file": lambda h, data: send(h, FILES["model-1-of-12.safetensors"] + b"!"),
    "no length, short": lambda h, data: send(h, data[: len(data) // 2], length=-1, Connection="close"),
}
NO_ANSWER: dict[str, Callable[[BaseHTTPRequestHandler, bytes], None]] = {
    "cut": lambda h, data: send(h, data[: len(data) // 2], length=len(data)),
    "hang": hang,
    "drip": drip,
    "500": lambda h, data: send(h, b"", 500),
    "401": lambda h, data: send(h, b"", 401),
    "a redirect": lambda h, data: send(h, b"", 302, Location="http://127.77.0.99:9/steal"),
    "a range that was not asked for": lambda h, data: send(h, data, 206, Content_Range="bytes 5-9/10"),
    "no HTTP": lambda h, data: h.wfile.write(b"SSH-2.0-x\r\n") and None,
}


def by_digest() -> dict[str, bytes]:
    return {hashlib.sha256(data).hexdigest(): data for data in FILES.values()}


@contextlib.contextmanager
def odd_ones(exchange: Exchange, *answers: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[list[OddPeer]]:
    """An exchange of two nodes and an odd one for each way to answer; each owns a share."""
    odd = [f"node-{3 + number}" for number in range(len(answers))]
    exchange.nodes = ("node-1", "node-2", *odd)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                odd_peer(exchange.store, exchange.lock.digest, node, by_digest(), answer, f"127.77.1.{number}")
            )
            for number, (node, answer) in enumerate(zip(odd, answers, strict=True), start=1)
        ]


def test_nodes_that_lie_are_named_and_their_files_taken_from_elsewhere(exchange: Exchange) -> None:
    with odd_ones(exchange, *WRONG.values()) as liars:
        outcomes = exchange.all("node-1", "node-2", serve_s=0.1)
    exchange.assert_staged("node-1", "node-2")
    named = sum((Counter(outcome["wrong_from"]) for outcome in outcomes.values()), Counter())
    assert set(named) == {f"node-{3 + number}" for number in range(len(liars))}
    assert max(named.values()) <= 2 * (2 + MANNER.threads + MANNER.pull_threads)  # lies that were under way at once
    assert max(exchange.asked().values()) <= 2


def test_nodes_that_do_not_answer_rightly_are_replaced(exchange: Exchange) -> None:
    with odd_ones(exchange, *NO_ANSWER.values()) as odd:
        outcomes = exchange.all("node-1", "node-2", serve_s=0.1)
    exchange.assert_staged("node-1", "node-2")
    assert [outcome["wrong_from"] for outcome in outcomes.values()] == [{}, {}]
    # A token goes to the node that gave it, and nowhere else.
    assert {headers["Authorization"] for peer in odd for _, headers in peer.asked} == {"Bearer odd-token"}
    assert all(peer.asked for peer in odd)
    assert max(exchange.asked().values()) <= 2


def test_an_owner_that_falls_silent_is_replaced(exchange: Exchange) -> None:
    """Its heart stops while it still says that the files are coming."""
    exchange.manner = impatient(lost_s=1.0)
    with odd_ones(exchange, lambda h, data: send(h, b"", 503)) as (peer,):
        futures = [exchange.start(node, serve_s=0.1) for node in ("node-1", "node-2")]
        wait_for(lambda: len(peer.asked) > 4)
        peer.beats = False
        for future in futures:
            future.result(30)
    exchange.assert_staged("node-1", "node-2")
    assert max(exchange.asked().values()) <= 2


def test_an_owner_that_does_not_get_its_files_is_replaced_in_the_end(exchange: Exchange) -> None:
    """It lives and answers, but to it the files are another node's: it was started with another list."""
    with odd_ones(exchange, lambda h, data: send(h, b"", 404)):
        exchange.all("node-1", "node-2", serve_s=0.1)
    exchange.assert_staged("node-1", "node-2")


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nodes_that_were_started_with_different_lists_end(exchange: Exchange) -> None:
    """A run was repeated with another choice of nodes while Jobs of the first still ran."""
    first, second = Party(NODES[:3], (), "run-1"), Party((NODES[3], *NODES[:2]), (), "run-2")
    parties = {"node-1": first, "node-2": first, "node-3": first, "node-4": second}
    futures = [exchange.start(node, party=party) for node, party in parties.items()]
    for future in futures:
        future.result(30)
    exchange.assert_staged(*NODES)


class GatedHub(CountingHub):
    """Holds back some files until it is told to go on."""

    def __init__(self, held: set[str]) -> None:
        super().__init__(REPO, REVISION, FILES)
        self.held = held
        self.waiting: list[str] = []
        self.go = threading.Event()

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        blocks = super().open_file(repo, revision, path, offset)
        if path in self.held:
            self.waiting.append(path)
            assert self.go.wait(30)
        return blocks


def test_a_store_that_is_away_in_the_middle_is_waited_for_and_nobody_is_given_up(exchange: Exchange) -> None:
    exchange.manner = impatient(lost_s=1.0)
    exchange.hub = GatedHub({"model-2-of-12.safetensors", "model-7-of-12.safetensors"})
    away = AwayStore()
    exchange.store = away
    futures = [exchange.start(node) for node in NODES]
    wait_for(lambda: len(exchange.hub.waiting) == 2)
    away.away = True
    time.sleep(1.5)  # longer than a node may be silent
    exchange.hub.go.set()
    time.sleep(0.3)
    away.away = False
    for future in futures:
        future.result(30)
    exchange.assert_staged(*NODES)
    assert set(exchange.asked().values()) == {1}


class AwayStore(MemoryStore):
    away = False

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("K2-UNA-001", "The store did not answer.", retry=After(0.1))

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        self._check()
        return super().put(key, data, if_absent=if_absent, if_match=if_match)

    def list_objects(self, prefix: str) -> Any:
        self._check()
        return super().list_objects(prefix)


def test_two_exchanges_at_once_on_the_same_nodes(exchange: Exchange) -> None:
    """The second of each node waits for the first, then finds everything there; the first leaves the node to it."""
    futures = [exchange.start(node, run) for run in ("run-1", "run-2") for node in NODES]
    outcomes = [future.result(30) for future in futures]
    exchange.assert_staged(*NODES)
    assert sorted(outcome["bytes_written"] for outcome in outcomes) == [0] * 4 + [exchange.lock.total_bytes] * 4
    assert set(exchange.asked().values()) == {1}


def test_a_signal_ends_a_node_and_leaves_no_litter(exchange: Exchange) -> None:
    exchange.hub = GatedHub(set(FILES))
    futures = {node: exchange.start(node) for node in NODES}
    wait_for(lambda: len(exchange.hub.waiting) >= 4)
    exchange.stops["node-2"].set()
    exchange.hub.go.set()
    with pytest.raises(UnavailableError, match="Stopped by a signal"):
        futures.pop("node-2").result(30)
    for future in futures.values():
        future.result(30)
    exchange.assert_staged(*futures)
    directory = exchange.root / "node-2" / exchange.lock.model_dir
    assert not (directory / MARKER_FILE).exists()
    assert not [*(directory / PARTIAL_DIR).glob("*")]
    exchange.hub.opened.clear()
    exchange.all(run="run-2")
    exchange.assert_staged(*NODES)
    assert exchange.hub.opened == []


def test_a_signal_to_a_node_that_only_serves_is_no_failure(exchange: Exchange) -> None:
    exchange.nodes = NODES[:2]
    exchange.all()
    exchange.manner = impatient(join_s=30.0)
    future = exchange.start("node-1", run="run-2")
    with pytest.raises(TimeoutError):
        future.result(0.3)  # node-2 has not come, and there is time for it to
    exchange.stops["node-1"].set()
    assert future.result(30)["bytes_written"] == 0
