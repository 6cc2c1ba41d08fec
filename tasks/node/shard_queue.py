"""What a node of an exchange still wants, and where each file can be had now. Threads share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from tasks.core.errors import K2Error, UnavailableError
from tasks.core.ownership import deal, in_rotation, turns, whose_turn
from tasks.core.standing import Standing
from tasks.node.program import Stop, say
from tasks.node.shard_server import Outlook

if TYPE_CHECKING:
    from tasks.core.lock import LockedFile

_TICK_S = 0.05
_FIRST_WAIT_S, _MOST_WAIT_S = 0.1, 2.0
_BROKEN_WAIT_S = 1.0


class Others(Protocol):
    """How the other nodes of an exchange stand: see tasks.node.rendezvous."""

    def standing(self, node: str) -> Standing:
        """Return how a node stands."""
        ...

    def gone(self) -> set[str]:
        """Return the nodes that are gone."""
        ...

    def strike(self, node: str) -> None:
        """Note that a node could not be reached."""
        ...


class Way(Enum):
    """How a file is got."""

    CHECK = "check"
    """It stands on the disk already and may be right."""
    COPY = "copy"
    """The same bytes stand on the disk under another name."""
    PEER = "peer"
    ORIGIN = "origin"


class Reply(Enum):
    """What another node says that does not give a file."""

    NOT_YET = "not yet"
    """It is getting the file."""
    DENIED = "denied"
    """It does not have the file, and is not getting it."""
    FAILED = "failed"
    """It has tried to get the file, and could not."""
    LIED = "lied"
    """It gave other bytes."""
    BROKE = "broke"
    """It could not be reached, or broke off."""


@dataclass
class Wanted:
    """A file that the node does not have yet, and what it knows of it."""

    file: LockedFile
    order: tuple[str, ...]
    is_here: bool
    active: bool = False
    streaming: bool = False
    not_before: float = 0.0
    wait_s: float = _FIRST_WAIT_S
    refused: set[str] = field(default_factory=set)
    """Nodes whose turn it is no more: they lied, could not get it, or do not have it and do not get it."""
    denied: dict[str, float] = field(default_factory=dict)
    """Since when a node has said that it does not have it."""
    yielding: float | None = None
    """Since when it is our turn while another node has it in hand."""
    error: K2Error | None = None
    """Why we cannot get it from the origin."""


@dataclass(frozen=True)
class Take:
    """What a thread is to do: get a file in some way; `node` is the peer, where one is asked."""

    wanted: Wanted
    way: Way
    node: str = ""


class ShardQueue:
    """Deals out the files that are wanted. A thread that was given one says what became of it.

    Args:
        files: the files that are wanted, of `everything` that the lock has; ownership is of everything.
        here: paths of those that stand on the disk and may be right.
        nodes: who owns the blobs, in one order on all nodes.
        me: this node.
        others: how the others stand.
        holds: whether the node has a blob already.
        expected: nodes that are awaited and are likely to have everything: they had it before.
        deny_s: how long a node whose turn it is may say that it does not have a file.
        yield_s: how long another node is waited for that has a file in hand whose turn is ours.
    """

    def __init__(
        self,
        files: Iterable[LockedFile],
        everything: Sequence[LockedFile],
        here: Iterable[str],
        nodes: Sequence[str],
        me: str,
        others: Others,
        holds: Callable[[str], bool],
        expected: Iterable[str] = (),
        deny_s: float = 30.0,
        yield_s: float = 120.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        owners = deal(everything, nodes)
        there = set(here)
        ordered = in_rotation(files, owners, nodes, me)
        self._wanted = [Wanted(f, turns(nodes, owners[f.sha256], me), f.path in there) for f in ordered]
        self._me = me
        self._others = others
        self._holds = holds
        self._expected = tuple(node for node in expected if node != me)
        self._deny_s = deny_s
        self._yield_s = yield_s
        self._now = now
        self._lock = threading.RLock()

    def take(self, stop: Stop, ways: frozenset[Way]) -> Take | None:
        """Return the next file that can be got in one of these ways, waiting for one; None when nothing is wanted.

        Raises:
            K2Error: why a file cannot be had from the origin, if no other node is left that could have it.
        """
        while True:
            stop.check()
            with self._lock:
                if not self._wanted:
                    return None
                if (found := self._next(ways)) is not None:
                    found.wanted.active = True
                    return found
            stop.sleep(_TICK_S)

    def outlook(self, sha256: str) -> Outlook:
        """Return what becomes of a blob: it comes if its bytes come in, or if it is this node's turn to pull it."""
        with self._lock:
            gone = self._others.gone()
            files = [wanted for wanted in self._wanted if wanted.file.sha256 == sha256]
            if any(w.streaming or w.is_here or self._turn(w, gone) == self._me for w in files):
                return Outlook.COMING
            return Outlook.FAILED if any(wanted.error for wanted in files) else Outlook.ABSENT

    def streams(self, wanted: Wanted) -> None:
        """Note that a file's bytes come in."""
        with self._lock:
            wanted.streaming = True

    def done(self, wanted: Wanted) -> None:
        """Note that the node has a file."""
        with self._lock:
            self._wanted.remove(wanted)

    def wrong_here(self, wanted: Wanted) -> None:
        """Note that what stands on the disk is not the file."""
        with self._back(wanted):
            wanted.is_here = False

    def said(self, wanted: Wanted, node: str, reply: Reply) -> None:
        """Take in what another node said instead of giving a file, and give the file back."""
        if reply is Reply.BROKE:
            self._others.strike(node)
        with self._back(wanted):
            now = self._now()
            if reply in (Reply.LIED, Reply.FAILED):
                wanted.refused.add(node)
            elif reply is Reply.BROKE:
                wanted.not_before = now + _BROKEN_WAIT_S
            else:
                self._not_now(wanted, node, reply, now)

    def _not_now(self, wanted: Wanted, node: str, reply: Reply, now: float) -> None:
        wanted.not_before = now + wanted.wait_s
        wanted.wait_s = min(wanted.wait_s * 1.5, _MOST_WAIT_S)
        if reply is Reply.NOT_YET:
            wanted.denied.pop(node, None)
            if self._turn(wanted, self._others.gone()) == self._me and wanted.yielding is None:
                wanted.yielding = now
        elif now - wanted.denied.setdefault(node, now) >= self._deny_s:
            say(f"{wanted.file.path}: {node} does not get it; the turn goes on")
            wanted.refused.add(node)

    def never_again(self, wanted: Wanted, node: str) -> None:
        """Note that a node is not to be asked for a file that is still in hand: it gave other bytes."""
        with self._lock:
            wanted.refused.add(node)

    def back(self, wanted: Wanted) -> None:
        """Give a file back as it was."""
        with self._back(wanted):
            pass

    def failed(self, wanted: Wanted, error: K2Error) -> None:
        """Note that the origin does not give a file: the turn goes on to the next node."""
        with self._back(wanted):
            wanted.error = error

    def may_yield(self, wanted: Wanted) -> bool:
        """Say whether another node that has a file in hand is still waited for although the turn is ours."""
        with self._lock:
            return wanted.yielding is None or self._now() - wanted.yielding < self._yield_s

    @contextmanager
    def _back(self, wanted: Wanted) -> Iterator[None]:
        """Give a file back, with what is noted of it in the block."""
        with self._lock:
            yield
            wanted.active = wanted.streaming = False

    def _turn(self, wanted: Wanted, gone: set[str]) -> str | None:
        return whose_turn(wanted.order, gone | wanted.refused | ({self._me} if wanted.error else set()))

    def _next(self, ways: frozenset[Way]) -> Take | None:
        now, gone = self._now(), self._others.gone()
        in_hand = {w.file.sha256 for w in self._wanted if w.active}
        awaits = any(self._others.standing(node) is Standing.AWAITED for node in self._expected)
        for wanted in self._wanted:
            if wanted.file.sha256 in in_hand or wanted.not_before > now:
                continue
            way, node = self._way(wanted, gone)
            blocked = way is Way.ORIGIN and awaits
            if way in ways and not blocked and (way is not Way.PEER or self._others.standing(node) is Standing.HERE):
                return Take(wanted, way, node)
        return None

    def _way(self, wanted: Wanted, gone: set[str]) -> tuple[Way, str]:
        if wanted.is_here:
            return Way.CHECK, ""
        if self._holds(wanted.file.sha256):
            return Way.COPY, ""
        node = self._turn(wanted, gone)
        if node is None:
            raise wanted.error or nobody_left(wanted.file)
        return (Way.ORIGIN, "") if node == self._me else (Way.PEER, node)


def nobody_left(file: LockedFile) -> UnavailableError:
    """Return the error for a file that no node is left to get."""
    return UnavailableError("K2-UNA-001", "No node of the exchange is left that could have a file.", where=file.path)
