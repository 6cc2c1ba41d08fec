"""Where the nodes of an exchange find each other: a small object of each in the store, which it writes as a heartbeat.

`exchange/<lock digest>/<node>.json` is its note, `.../<node>.beat` its heartbeat. Only who has the store's credentials
can read the tokens in there. One listing a beat shows all heartbeats; a note is read when it has changed, so that many
nodes are no load. A store that is away for a while ages nobody: what cannot be read says nothing of the nodes.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.core.errors import ConflictError, K2Error
from tasks.core.standing import DONE, LEFT, WORKING, Note, Patience, Sighting, Standing, note_from_bytes
from tasks.node.program import say

if TYPE_CHECKING:
    from tasks.ports import Store

_END_S = 10.0
_NOTE, _BEAT = ".json", ".beat"


def prefix(lock_digest: str) -> str:
    """Return where the notes of an exchange stand in the store."""
    return f"exchange/{lock_digest}/"


def say_left(store: Store, lock_digest: str, node: str, run: str) -> None:
    """Say of a node that fails before it takes part that it has left, so that nobody waits for it to come."""
    note = Note(node, run, secrets.token_hex(8), LEFT, "", "")
    with contextlib.suppress(K2Error):
        store.put(f"{prefix(lock_digest)}{node}{_NOTE}", note.to_bytes())


class Rendezvous:
    """Says again and again that this node is there, and keeps what the others say, while its context is open.

    Args:
        store: where the notes are.
        lock_digest: what the exchange is of.
        node: this node.
        run: the run that started it.
        others: the other nodes of the exchange.
        address: returns the URL and the token by which this node can be asked now.
        patience: how long others are waited for.
        beat_s: how often.
    """

    def __init__(
        self,
        store: Store,
        lock_digest: str,
        node: str,
        run: str,
        others: Sequence[str],
        address: Callable[[], tuple[str, str]],
        patience: Patience,
        beat_s: float,
    ) -> None:
        self._store = store
        self._prefix = prefix(lock_digest)
        self._node, self._run, self._boot = node, run, secrets.token_hex(8)
        self._address = address
        self._beat_s = beat_s
        self._beats, self._state = 0, WORKING
        self._written: dict[str, str] = {}
        """Etags of what this node wrote last, by key."""
        self._said: Note | None = None
        self._heard = _HeardTime(beat_s)
        self._sightings = {other: Sighting(run, patience, self._heard.now) for other in others}
        self._read: dict[str, tuple[str, Note | None]] = {}
        """Notes as they were read, with their etags, by node."""
        self._lock = threading.RLock()
        self._woken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run_beats, name="rendezvous", daemon=True)
        self.superseded = False
        """Whether another process speaks for this node now."""

    def __enter__(self) -> Rendezvous:
        if self._sightings:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._sightings:
            return
        self._ended.set()
        self._woken.set()
        self._thread.join(_END_S)
        if not self._thread.is_alive() and not self.superseded:
            self._state = LEFT
            with contextlib.suppress(K2Error):
                self._say_here()

    def done(self) -> None:
        """Say from now on that this node has everything."""
        self._state = DONE
        self._woken.set()

    def standing(self, node: str) -> Standing:
        """Return how another node stands."""
        with self._lock:
            return self._sightings[node].standing

    def gone(self) -> set[str]:
        """Return the nodes that are gone."""
        with self._lock:
            return {node for node, seen in self._sightings.items() if seen.standing is Standing.GONE}

    def note(self, node: str) -> Note | None:
        """Return what a node that is here says of itself."""
        with self._lock:
            seen = self._sightings[node]
            return seen.note if seen.standing is Standing.HERE else None

    def strike(self, node: str) -> None:
        """Note that a node could not be reached."""
        with self._lock:
            self._sightings[node].strike()

    def answered(self, node: str) -> None:
        """Note that a node could be reached."""
        with self._lock:
            self._sightings[node].answered()

    def lied(self, node: str) -> None:
        """Note that a node gave other bytes than those of the lock."""
        with self._lock:
            self._sightings[node].lied()

    def in_need(self) -> list[str]:
        """Return the nodes that may still come for something."""
        with self._lock:
            return [node for node, seen in self._sightings.items() if seen.needs_us]

    def _run_beats(self) -> None:
        told = ""
        while not self._ended.is_set():
            try:
                if not self.superseded:
                    self._say_here()
                self._look()
            except K2Error as error:
                if not told:
                    say(f"the store cannot be reached ({error}); going on with the nodes that are known")
                told = str(error)
            except Exception as error:
                # Whatever it is, a node that falls silent would be given up by the others.
                say(f"rendezvous: {type(error).__name__}: {error}")
            else:
                told = ""
            self._woken.wait(self._beat_s)
            self._woken.clear()

    def _say_here(self) -> None:
        """Write the note if it has changed, and the heartbeat."""
        url, token = self._address() if self._state != LEFT else ("", "")
        note = Note(self._node, self._run, self._boot, self._state, url, token)
        self._beats += 1
        if note != self._said and self._wrote(self._key(self._node, _NOTE), note.to_bytes()):
            self._said = note
        if not self.superseded and self._state != LEFT:
            self._wrote(self._key(self._node, _BEAT), f"{self._boot} {self._beats}".encode())

    def _wrote(self, key: str, data: bytes) -> bool:
        """Write what this node says of itself; return False, and notice it, if another process speaks for it now."""
        try:
            self._written[key] = self._store.put(key, data, if_match=self._written.get(key, ""))
        except ConflictError:
            # Either another process speaks for this node, or our last write had no answer and yet was made.
            if not self._is_ours(key):
                self.superseded = True
                say(f"another process exchanges for {self._node} now: leaving it to that one")
            return False
        return True

    def _is_ours(self, key: str) -> bool:
        try:
            found, etag = self._store.get(key)
        except KeyError:
            self._written.pop(key)
            return True
        self._written[key] = etag
        return self._boot.encode() in found

    def _key(self, node: str, kind: str) -> str:
        return f"{self._prefix}{node}{kind}"

    def _look(self) -> None:
        """List everything, and read the notes that have changed."""
        listed = {item.key: item.etag for item in self._store.list_objects(self._prefix)}
        seen: dict[str, tuple[Note | None, str]] = {}
        for node in self._sightings:
            etag = listed.get(self._key(node, _NOTE), "")
            known, note = self._read.get(node, ("", None))
            if etag != known:
                note = self._noted(node) if etag else None
                self._read[node] = (etag, note)
            seen[node] = (note, listed.get(self._key(node, _BEAT), ""))
        self._take_in(seen)

    def _noted(self, node: str) -> Note | None:
        try:
            return note_from_bytes(self._store.get(self._key(node, _NOTE))[0])
        except KeyError:
            return None

    def _take_in(self, seen: Mapping[str, tuple[Note | None, str]]) -> None:
        with self._lock:
            self._heard.hear()
            for node, (note, beat) in seen.items():
                self._sightings[node].see(note, beat)


class _HeardTime:
    """Seconds in which the store could be read: it does not go on while nothing can be heard of anybody."""

    def __init__(self, beat_s: float) -> None:
        # The others' next beats come as soon as the store is back, so little of the time without it counts.
        self._most_s = 2 * beat_s
        self._heard_s = 0.0
        self._last = time.monotonic()

    def hear(self) -> None:
        self._heard_s = self.now()
        self._last = time.monotonic()

    def now(self) -> float:
        return self._heard_s + min(time.monotonic() - self._last, self._most_s)
