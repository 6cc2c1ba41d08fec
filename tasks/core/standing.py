"""What the nodes of an exchange say of themselves, and what another node makes of it: who is there, awaited or gone.

No clocks are compared. A node writes a small object again and again, with a count in it; that the object has changed
since it was last listed, by the reader's own clock, is what shows that the node lives. Where it can be asked stands in
a note beside that, which is written when it changes and read when it has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from tasks.core.identity import canonical_bytes

NOTE_VERSION = 1
WORKING, DONE, LEFT = "working", "done", "left"


class Standing(Enum):
    """How a node stands towards the exchange, as seen by another one."""

    AWAITED = "awaited"
    """It has not come yet, and there is still time."""
    HERE = "here"
    """It can be asked."""
    GONE = "gone"
    """It does not come, has left, or has fallen silent."""


@dataclass(frozen=True)
class Note:
    """What a node says of itself: where it can be asked and with which token.

    `run` is the run that its Job was started by, `boot` is drawn anew by each process. A node that has LEFT says no
    more where it was.
    """

    node: str
    run: str
    boot: str
    state: str
    url: str
    token: str = field(repr=False)

    def to_bytes(self) -> bytes:
        """Return the note as it is stored."""
        fields = ("node", "run", "boot", "state", "url", "token")
        return canonical_bytes({"version": NOTE_VERSION, **{name: getattr(self, name) for name in fields}})


def note_from_bytes(data: bytes) -> Note | None:
    """Return the note of an object's bytes; None if they are not one that can be used."""
    try:
        found: Mapping[str, Any] = json.loads(data)
        note = Note(
            str(found["node"]),
            str(found["run"]),
            str(found["boot"]),
            str(found["state"]),
            str(found["url"]),
            str(found["token"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
    usable = note.state == LEFT or (note.state in (WORKING, DONE) and urlsplit(note.url).scheme == "http")
    return note if found.get("version") == NOTE_VERSION and usable else None


@dataclass(frozen=True)
class Patience:
    """What others are forgiven.

    `join_s` is how long one may take to come, `lost_s` how long it may be silent. After so many `strikes` in a row (it
    could not be reached, or broke off) it is left alone for `forgive_s`; after so many `lies` it is asked no more.
    """

    join_s: float = 60.0
    lost_s: float = 15.0
    strikes: int = 3
    forgive_s: float = 60.0
    lies: int = 2


class Sighting:
    """One other node, as this node has seen it so far."""

    def __init__(self, run: str, patience: Patience, now: Callable[[], float]) -> None:
        self._run = run
        self._patience = patience
        self._now = now
        self._began = now()
        self._changed: float | None = None
        self._strikes = 0
        self._struck = 0.0
        self._lies = 0
        self._beat = ""
        self.note: Note | None = None

    def see(self, note: Note | None, beat: str) -> None:
        """Take in what the node says of itself now, None if it says nothing, and what its heartbeat is now."""
        before, self.note = (self.note, self._beat), note
        self._beat = beat
        if note is None or before == (note, beat):
            return
        if before[0] is None and note.run != self._run:
            # Left there by a process that may be long dead: its next beat will tell.
            return
        if before[0] is None or before[0].boot != note.boot:
            self._strikes = self._lies = 0
        self._changed = self._now()

    def strike(self) -> None:
        """Note that the node could not be reached, or broke off."""
        self._strikes += 1
        self._struck = self._now()

    def answered(self) -> None:
        """Note that it could be."""
        self._strikes = 0

    def lied(self) -> None:
        """Note that it gave other bytes than those of the lock."""
        self._lies += 1

    @property
    def standing(self) -> Standing:
        """How it stands now."""
        now = self._now()
        if self.note is None or self._changed is None:
            return Standing.AWAITED if now - self._began < self._patience.join_s else Standing.GONE
        if self.note.state == LEFT or now - self._changed > self._patience.lost_s:
            return Standing.GONE
        if self._lies >= self._patience.lies:
            return Standing.GONE
        if self._strikes >= self._patience.strikes:
            if now - self._struck < self._patience.forgive_s:
                return Standing.GONE
            self._strikes = 0
        return Standing.HERE

    @property
    def needs_us(self) -> bool:
        """Whether it may still come for something."""
        standing = self.standing
        if standing is Standing.HERE:
            return self.note is not None and self.note.state == WORKING
        return standing is Standing.AWAITED
