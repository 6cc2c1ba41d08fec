"""A stager whose files come from an origin and from other nodes, and which gives them what it has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks.core.errors import CapacityError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import Lock, LockedFile
from tasks.core.marker import Marker
from tasks.core.staging import StagingPlan
from tasks.core.standing import Patience, Standing
from tasks.node.fetching import Fetch
from tasks.node.peer_source import NeverError, NotHeldError, NotYetError, Pace, PeerSource
from tasks.node.program import ProgressLines, Stop, StoppedError, say
from tasks.node.rendezvous import Rendezvous, say_left
from tasks.node.shard_queue import Reply, ShardQueue, Take, Wanted, Way
from tasks.node.shard_server import Holdings, ShardServer, Tokens
from tasks.node.sources import StoreSource
from tasks.node.stager import Stager
from tasks.node.staging_result import Node, Staged, fitted
from tasks.node.verified_file import PLAIN, Writing
from tasks.node.workers import attempt, run_all

if TYPE_CHECKING:
    from tasks.ports import Fetcher, Source, Store

_TRIES = 4
_PUBLISH_TRIES = 30
_POLL_S = 0.1
_NAMED = 8
_REPLIES: Mapping[type[K2Error], Reply] = {
    NotYetError: Reply.NOT_YET,
    NotHeldError: Reply.DENIED,
    NeverError: Reply.FAILED,
}
_HERE = frozenset({Way.CHECK, Way.COPY})
ORIGIN_SLOT, PEER_SLOT = _HERE | {Way.ORIGIN}, _HERE | {Way.PEER}


@dataclass(frozen=True)
class Party:
    """Who takes part: the nodes that own the files, guests that own none, and the run that started them."""

    nodes: tuple[str, ...]
    guests: tuple[str, ...]
    run: str

    def others(self, me: str) -> tuple[str, ...]:
        """Return all but this node, those first that come after it."""
        everybody = (*self.nodes, *self.guests)
        here = everybody.index(me)
        return (*everybody[here + 1 :], *everybody[:here])


@dataclass(frozen=True)
class Manner:
    """How a node takes part: its address, how many files at once from where, and how long it waits for what.

    `serve_s`: how long it serves at most after it has everything; `deny_s`: how long a node whose turn it is may say
    that it does not have a file before the turn goes on; `beat_s`: how often it says that it is there.
    """

    host: str
    port: int
    pull_threads: int = 3
    threads: int = 3
    serve_s: float = 1800.0
    deny_s: float = 30.0
    beat_s: float = 2.0
    patience: Patience = field(default_factory=Patience)
    pace: Pace = field(default_factory=Pace)


class ExchangeStager(Stager):
    """Stages one lock on one node of an exchange; see tasks.node.exchange."""

    def __init__(
        self,
        origin: Source | Fetcher,
        store: Store,
        root: Path,
        lock: Lock,
        node: Node,
        reserve_bytes: int,
        stop: Stop,
        party: Party,
        manner: Manner,
        writing: Writing = PLAIN,
    ) -> None:
        # Files come by this class's own ways; the stager below it only names their source.
        super().__init__(cast("Source", origin), store, root, lock, node, reserve_bytes, stop, writing=writing)
        self._origin = origin
        self._party = party
        self._manner = manner
        self._others = party.others(node.name)
        self._holdings = Holdings(self._directory)
        self._context = contextlib.ExitStack()
        self._server: ShardServer | None = None
        self._bytes: Counter[Way] = Counter()
        self._counting = threading.Lock()
        self._wrong: Counter[str] = Counter()

    def exchange(self, lock_wait_s: float) -> dict[str, Any]:
        """Stage, then serve the others until they have everything; return the outcome."""
        with self._context:
            try:
                outcome = self.stage(self._manner.threads, lock_wait_s)
            except K2Error:
                if self._others and self._server is None:
                    say_left(self._store, self._lock.digest, self._node.name, self._party.run)
                raise
            self._serve_on()
            return fitted(
                {
                    **outcome,
                    "origin_bytes": self._bytes[Way.ORIGIN],
                    "peer_bytes": self._bytes[Way.PEER],
                    "served_bytes": self._server.bytes_served if self._server else 0,
                    "wrong_from": dict(self._wrong.most_common(_NAMED)),
                }
            )

    def _work(self, plan: StagingPlan, threads: int) -> list[Staged]:
        for kept in plan.kept:
            self._holdings.holds(kept)
        jobs = (*plan.to_write, *plan.to_hash)
        queue = self._join(jobs, [file.path for file in plan.to_hash])
        progress = ProgressLines(sum(file.size_bytes for file in jobs), len(jobs))
        slots = [*[ORIGIN_SLOT] * self._manner.pull_threads, *([PEER_SLOT] * threads if self._others else [])]
        try:
            work = partial(self._slot, queue, progress)
            done = run_all(slots if jobs else [], work, len(slots), self._stop, self._abandon_temps)
        finally:
            progress.finish()
        return [staged for slot in done for staged in slot]

    def _join(self, jobs: Sequence[LockedFile], here: Sequence[str]) -> ShardQueue:
        """Begin to serve, and to say so, until the context is left; return the queue of what is missing."""
        tokens, expected = Tokens(), self._had_everything() if jobs else []
        if self._others:
            server = ShardServer(self._manner.host, self._manner.port, self._holdings, tokens)
            self._server = self._context.enter_context(server)
            url = server.url
        rendezvous = Rendezvous(
            self._store,
            self._lock.digest,
            self._node.name,
            self._party.run,
            self._others,
            lambda: (url, tokens.current()),
            self._manner.patience,
            self._manner.beat_s,
        )
        queue = ShardQueue(
            jobs,
            self._lock.files,
            here,
            self._party.nodes,
            self._node.name,
            rendezvous,
            self._holdings.has,
            expected,
            self._manner.deny_s,
        )
        self._holdings.expect(queue.outlook)
        self._rendezvous = self._context.enter_context(rendezvous)
        return queue

    def _had_everything(self) -> list[str]:
        """Return the others that have had this lock before: once they come, they need not be pulled for."""
        keys = {node: f"markers/{node}/{self._lock.digest}.json" for node in self._others}
        try:
            return [node for node, key in keys.items() if self._store.head(key) is not None]
        except UnavailableError:
            return []

    def _slot(self, queue: ShardQueue, progress: ProgressLines, ways: frozenset[Way], stop: Stop) -> list[Staged]:
        """Get one file after another until nothing is missing."""
        done = []
        while (take := queue.take(stop, ways)) is not None:
            if (staged := self._get(queue, progress, take, stop)) is not None:
                self._holdings.holds(staged.file)
                queue.done(take.wanted)
                progress.file_done()
                done.append(staged)
        return done

    def _get(self, queue: ShardQueue, progress: ProgressLines, take: Take, stop: Stop) -> Staged | None:
        """Return the file, or None with the reason in the queue."""
        wanted = take.wanted
        if take.way is Way.CHECK:
            if (right := self._keep_if_right(progress, wanted.file, stop)) is None:
                queue.wrong_here(wanted)
            return right
        fetch = Fetch(self._directory, wanted.file, progress, stop, self._writing)
        return self._got(queue, take, fetch)

    def _got(self, queue: ShardQueue, take: Take, fetch: Fetch) -> Staged | None:
        """Return the file after fetching it; what the quarantine holds gives way to it if the disk is full."""
        wanted = take.wanted
        while True:
            emptied = self._emptied
            try:
                if take.way is Way.COPY:
                    return self._copied(queue, wanted, fetch)
                if take.way is Way.PEER:
                    return self._from_peer(queue, wanted, fetch, take.node)
                return self._from_origin(queue, wanted, fetch)
            except CapacityError:
                if not (self._empty_quarantine() or self._emptied > emptied):
                    raise

    def _copied(self, queue: ShardQueue, wanted: Wanted, fetch: Fetch) -> Staged | None:
        try:
            return fetch.staged(self._holdings)
        except (IntegrityError, UnavailableError) as error:
            if isinstance(error, StoppedError) or not (fetch.source_failed or isinstance(error, IntegrityError)):
                raise
            say(f"{self._node.name}: the other copy of {wanted.file.path} is not right: {error}")
            self._holdings.drop(wanted.file.sha256)
            queue.back(wanted)
            return None

    def _from_peer(self, queue: ShardQueue, wanted: Wanted, fetch: Fetch, node: str) -> Staged | None:
        found = self._asked(node, fetch, partial(queue.streams, wanted))
        if isinstance(found, Staged):
            return found
        queue.said(wanted, node, found)
        return None

    def _from_origin(self, queue: ShardQueue, wanted: Wanted, fetch: Fetch) -> Staged | None:
        """Return the file from a node that has it already, else from the origin."""
        in_hand = ""
        for node in self._others:
            if self._rendezvous.standing(node) is not Standing.HERE or node in wanted.refused:
                continue
            found = self._asked(node, fetch, partial(queue.streams, wanted))
            if isinstance(found, Staged):
                return found
            if found is Reply.NOT_YET:
                in_hand = node
            elif found is Reply.LIED:
                queue.never_again(wanted, node)
            elif found is Reply.BROKE:
                self._rendezvous.strike(node)
        if in_hand and queue.may_yield(wanted):
            queue.said(wanted, in_hand, Reply.NOT_YET)
            return None
        queue.streams(wanted)
        return self._pulled(queue, wanted, fetch)

    def _pulled(self, queue: ShardQueue, wanted: Wanted, fetch: Fetch) -> Staged | None:
        try:
            found = attempt(partial(fetch.staged, self._origin), fetch.stop, integrity_tries=2, tries=_TRIES)
        except StoppedError:
            raise
        except K2Error as error:
            named = self._explained(error, fetch)
            if isinstance(error, IntegrityError) or not fetch.source_failed or not self._others:
                raise named from error
            say(f"{self._node.name}: {self._origin.name} does not give {wanted.file.path}, others are asked: {error}")
            queue.failed(wanted, named)
            return None
        with self._counting:
            self._bytes[Way.ORIGIN] += found.file.size_bytes
        return found

    def _explained(self, error: K2Error, fetch: Fetch) -> K2Error:
        """Return the error with its place, and with the remedy where bytes did not come from the store."""
        named = self._named(error, fetch.file, fetch.wrong)
        if isinstance(error, IntegrityError) and not isinstance(self._origin, StoreSource):
            named.hint = (
                f"Nothing unverified was kept on {self._node.name}. Run the release again; if it comes again, "
                f"{self._origin.name} serves other bytes than it lists: set another mirror as hub.endpoint in the site "
                "file. Never edit the lock."
            )
        return named

    def _asked(self, node: str, fetch: Fetch, begun: Callable[[], None]) -> Staged | Reply:
        """Return the file as another node gives it, or what it said instead."""
        note = self._rendezvous.note(node)
        if note is None:
            return Reply.BROKE
        try:
            found = fetch.staged(PeerSource(node, note.url, note.token, self._manner.pace, begun))
        except StoppedError:
            raise
        except (NotYetError, NotHeldError, NeverError) as error:
            self._rendezvous.answered(node)
            return _REPLIES[type(error)]
        except IntegrityError as error:
            self._wrong[node] += 1
            self._rendezvous.lied(node)
            say(
                f"{self._node.name}: {node} gave other bytes of {fetch.file.path} (got {error.got}, expected "
                f"{error.expected}); nothing of them is kept, and it is taken from elsewhere"
            )
            return Reply.LIED
        except UnavailableError as error:
            if not fetch.source_failed:
                raise self._explained(error, fetch) from error
            say(f"{self._node.name}: {node} does not give {fetch.file.path}: {error}")
            return Reply.BROKE
        self._rendezvous.answered(node)
        with self._counting:
            self._bytes[Way.PEER] += found.file.size_bytes
        return found

    def _publish(self, marker: Marker) -> None:
        """Put a copy of the marker into the store; one that is away is waited for, while this node serves."""
        key = f"markers/{self._node.name}/{self._lock.digest}.json"
        attempt(partial(self._store.put, key, marker.to_bytes()), self._stop, integrity_tries=1, tries=_PUBLISH_TRIES)

    def _serve_on(self) -> None:
        """Serve until no other node needs anything, for a while at most, or until a signal."""
        if self._server is None:
            return
        self._rendezvous.done()
        until, told = time.monotonic() + self._manner.serve_s, False
        with contextlib.suppress(StoppedError):
            while time.monotonic() < until and not self._rendezvous.superseded:
                needed = self._rendezvous.in_need()
                if not needed and not self._server.is_sending:
                    return
                if needed and not told:
                    say(f"{self._node.name} has everything; serving {', '.join(needed[:_NAMED])}")
                    told = True
                self._stop.sleep(_POLL_S)
