"""Holds one request while it is in the engine: what was asked, what has come, how it ended."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.rehearsal.engine.answers import Completion
from infra.rehearsal.engine.transfer import FAKE_BOOTSTRAP_HOST


@dataclass(frozen=True)
class Bootstrap:
    """Where a request's other half is."""

    host: str
    port: int
    room: int

    @property
    def is_fake(self) -> bool:
        """True for health and warm-up requests, which have no other half."""
        return self.host == FAKE_BOOTSTRAP_HOST


@dataclass(frozen=True)
class Work:
    """One request as the scheduler sees it."""

    prompt_tokens: int
    completion: Completion
    bootstrap: Bootstrap | None = None
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    streaming: bool = False


@dataclass(frozen=True)
class Progress:
    """What came since the last look: text, tokens so far, and the finish reason at the end."""

    text: str
    tokens: int
    finish: str | None


class Sequence:
    """A request while it is in the engine."""

    def __init__(self, work: Work, wrong: bool) -> None:
        self.work = work
        self.arrived_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.arrived_s
        self.tokens = 0
        self.finish: str | None = None
        self.start: asyncio.Future[None] | None = None
        self._piece: Callable[[int], str] = work.completion.wrong_piece if wrong else work.completion.piece
        self._fresh: list[str] = []
        self._woken = asyncio.Event()

    def spoil(self) -> None:
        """Makes every further token garbage."""
        self._piece = self.work.completion.wrong_piece

    def emit(self, now: float) -> None:
        """Makes the next token."""
        if self.tokens < self.work.completion.length:
            self._fresh.append(self._piece(self.tokens))
            self.tokens += 1
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now
        if self.tokens >= self.work.completion.length:
            self.finish = self.work.completion.finish
        self._woken.set()

    def end(self, finish: str) -> None:
        """Ends the sequence before its time."""
        if self.finish is None:
            self.finish = finish
        self._woken.set()

    async def progress(self) -> Progress:
        """Waits for tokens and takes all there are."""
        await self._woken.wait()
        self._woken.clear()
        text = "".join(self._fresh)
        self._fresh.clear()
        return Progress(text, self.tokens, self.finish)
