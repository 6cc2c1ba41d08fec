"""The objects of one kind as a watch keeps them: listed once, then only told the differences.

A watch can fail without a word: a proxy or a half-open connection holds it, and an empty stream looks like a quiet
cluster. So every watch is asked to end after a short window (`timeoutSeconds`, which the server keeps), and one that
is not ended in time has been lost: it is given up by its own deadline and begun again from the version last heard of.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, Self

from tasks.core.errors import After, K2Error, Never, UnavailableError
from tasks.ports import SILENT_S, Object

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_LINE_LIMIT_BYTES = 16 * 1024 * 1024


class ExpiredError(Exception):
    """The server no longer knows the version that a watch goes on from (410): everything must be listed anew."""


@dataclass(frozen=True)
class WatchTimes:
    """How long a watch is, and what counts as silence.

    Attributes:
        window_s: after which the server ends a watch in order; each end confirms what is known.
        grace_s: how much later than that a watch is given up as held.
        limit_s: how old the last confirmation may be for the objects still to be shown.
        failing_s: the same where it is known that nobody answers: each try to watch again has failed since.
    """

    window_s: float = 20.0
    grace_s: float = 5.0
    limit_s: float = 45.0
    failing_s: float = 5.0


DEFAULT_TIMES = WatchTimes()


class Stream(Protocol):
    """An open watch."""

    def blocks(self) -> Iterator[bytes]:
        """Yield bytes as they come; OSError when the connection breaks or says nothing until its timeout."""
        ...

    def close(self) -> None:
        """Give the connection up; a read in another thread ends."""
        ...


class Source(Protocol):
    """Where a mirror's objects come from."""

    def list_all(self) -> tuple[list[Object], str]:
        """Return all objects and the version that they are of; K2Error when they cannot be read."""
        ...

    def watch(self, version: str, window_s: float, silence_s: float) -> Stream:
        """Open a watch from a version; ExpiredError if it is too old, K2Error when it cannot be opened."""
        ...


class KubeMirror:
    """Implements `ports.Mirror`: a thread lists and watches until the context is left.

    Args:
        source: lists and watches.
        where: the kind, for messages.
        times: window, grace and limit of the watch.
    """

    def __init__(self, source: Source, where: str, times: WatchTimes) -> None:
        self._source = source
        self._where = where
        self._times = times
        self._lock = threading.Lock()
        self._known: dict[str, Object] = {}
        self._listed = threading.Event()
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._confirmed_at = time.monotonic()
        self._failing_since: float | None = None
        self._error: K2Error | None = None
        self._stream: Stream | None = None
        self._version = ""
        self._thread = threading.Thread(target=self._follow, name=f"mirror of {where}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; closing again changes nothing."""
        self._closed.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def objects(self) -> list[Object]:
        """Return the objects in the order of namespace and name, as the server last told them.

        Raises:
            UnavailableError: nothing has been listed yet, or nothing confirmed for longer than the limit (K2-UNA-001).
            K2Error: what the server says for good, such as a missing right; once listed, only beyond the limit.
        """
        self._heard.wait(self._times.limit_s)
        silent_s, failing_s = self.unconfirmed_s(), self._failing_s()
        error = self._error
        # Once something was listed a refusal is doubted as silence is: a server that has just started refuses all.
        doubted = self._listed.is_set() and silent_s <= self._times.limit_s
        if error is not None and isinstance(error.retry, Never) and not doubted:
            raise error
        if not self._listed.is_set() or silent_s > self._times.limit_s or failing_s > self._times.failing_s:
            raise UnavailableError(
                "K2-UNA-001",
                f"The API server has not confirmed what is known of {self._where}.",
                where=self._where,
                got=f"nothing for {silent_s:.0f} s" + (f" ({error.summary})" if error else ""),
                expected=f"a word at least every {self._times.limit_s:.0f} s",
                retry=After(2.0),
                details={SILENT_S: failing_s},
            )
        with self._lock:
            return [copy.deepcopy(obj) for _, obj in sorted(self._known.items())]

    def unconfirmed_s(self) -> float:
        """Return how long ago the server last confirmed what is known."""
        return time.monotonic() - self._confirmed_at

    def _failing_s(self) -> float:
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    # -- the thread

    def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                # A version that no watch confirms may be of a state that is gone (an etcd that was restored).
                if not self._version or self.unconfirmed_s() > self._times.limit_s:
                    self._list()
                self._watch()
            except ExpiredError:
                self._version = ""
            except K2Error as error:
                self._error = error
                if isinstance(error.retry, Never):
                    self._heard.set()
            except Exception as error:  # what a connection, a library or a broken answer brings: begin again
                self._error = _broken(error, self._where)
            else:
                pause_s = _FIRST_PAUSE_S
                continue
            if self._failing_since is None and _is_silence(self._error):
                self._failing_since = time.monotonic()
            self._closed.wait(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _list(self) -> None:
        found, version = self._source.list_all()
        with self._lock:
            self._known = {_key(obj): obj for obj in found}
        self._version = version
        self._confirm()
        self._listed.set()
        self._heard.set()

    def _watch(self) -> None:
        """Take in one watch up to its end in order. What was told before a break is known: the next goes on there."""
        times = self._times
        began = time.monotonic()
        stream = self._source.watch(self._version, times.window_s, times.window_s + times.grace_s)
        self._failing_since = None  # somebody answers
        with self._lock:
            self._stream = stream
        if self._closed.is_set():  # between the two lines above `close` had no stream to close
            stream.close()
        try:
            for line in _lines(_until(began + times.window_s + times.grace_s, stream.blocks())):
                self._take(json.loads(line))
        finally:
            with self._lock:
                self._stream = None
            stream.close()
        if time.monotonic() - began < times.window_s / 2:
            # Nobody asked for that end: it confirms nothing, and the next watch may end as soon.
            raise ConnectionError("the watch ended before its time")
        self._confirm()

    def _take(self, event: Object) -> None:
        kind, obj = event["type"], event["object"]
        if kind == "ERROR":
            if obj.get("code") == HTTPStatus.GONE:
                raise ExpiredError
            raise ConnectionError(str(obj.get("message", "")))
        if kind != "BOOKMARK":
            with self._lock:
                if kind == "DELETED":
                    self._known.pop(_key(obj), None)
                else:
                    self._known[_key(obj)] = obj
        self._version = str(obj["metadata"]["resourceVersion"])
        self._confirm()

    def _confirm(self) -> None:
        self._confirmed_at = time.monotonic()
        self._failing_since = None
        self._error = None


def _is_silence(error: K2Error | None) -> bool:
    return error is not None and isinstance(error.retry, After)


def _broken(error: Exception, where: str) -> UnavailableError:
    return UnavailableError(
        "K2-UNA-001", f"A watch broke: {type(error).__name__}.", where=where, retry=After(_LONGEST_PAUSE_S)
    )


def _key(obj: Object) -> str:
    """Return what tells objects apart, and what a server orders a list by."""
    metadata = obj["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def _until(deadline: float, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks; TimeoutError after the deadline, which a stream that drips would never let a read see."""
    for block in blocks:
        if time.monotonic() > deadline:
            raise TimeoutError("the server does not end the watch")
        yield block


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines; the rest of a stream that ends in the middle of one is no line."""
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from (line for line in whole if line.strip())
        if len(rest) > _LINE_LIMIT_BYTES:
            raise ConnectionError("an event is longer than any object may be")
