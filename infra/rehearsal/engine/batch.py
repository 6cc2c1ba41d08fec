"""Spends the time of a group: a queue served at a fixed rate, and the loop that steps all decoding sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.metrics import Metrics
from infra.rehearsal.engine.performance import PerformanceModel
from infra.rehearsal.engine.sequence import Sequence

_LOG_EVERY_S = 1.0


class FifoServer:
    """One resource that serves in order of arrival at a fixed rate: the prefill of a group, or its KV links."""

    def __init__(self, slow_factor: Callable[[], float]) -> None:
        self._slow_factor = slow_factor
        self._free_at_s = 0.0

    async def serve(self, amount: float, rate_per_s: float, floor_s: float = 0.0) -> float:
        """Waits for the turn and the service; answers the seconds of the service alone.

        A cancelled caller leaves its share in the queue: a started batch is not taken back either.
        """
        now = time.monotonic()
        factor = self._slow_factor()
        seconds = amount / rate_per_s * factor
        self._free_at_s = max(now, self._free_at_s) + seconds
        await asyncio.sleep(self._free_at_s + floor_s * factor - now)
        return seconds


class DecodeLoop:
    """Steps all running sequences together; one timer for the whole batch."""

    def __init__(self, engine: EngineArguments, model: PerformanceModel, metrics: Metrics, slow: Callable[[], float]):
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._slow = slow
        self._running: set[Sequence] = set()
        self._wanted = asyncio.Event()
        self._window_started_s = time.monotonic()
        self._window_tokens = 0
        self._logged_s = 0.0
        self.throughput = 0.0

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence into the batch from the next step on."""
        self._running.add(sequence)
        self._wanted.set()

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch."""
        self._running.discard(sequence)

    async def run(self) -> None:
        """Steps for ever; sleeps without a timer while the batch is empty."""
        due_s = 0.0
        steps = 0
        while True:
            if not self._running:
                self._wanted.clear()
                await self._wanted.wait()
                self._window_started_s, self._window_tokens = time.monotonic(), 0
                due_s = time.monotonic()
            # Steps keep to their own clock, so that a late wake-up is made good in the next one; never in a burst.
            step_s = self._model.decode_step_s(len(self._running)) * self._slow()
            now = time.monotonic()
            due_s = max(due_s + step_s, now)
            await asyncio.sleep(due_s - now)
            self._step(time.monotonic())
            steps += 1
            if steps % self._engine.decode_log_interval == 0:
                self._log()

    def _step(self, now: float) -> None:
        batch = list(self._running)
        for sequence in batch:
            # One observation a token, as SGLang has it.
            self._metrics.observe("inter_token_latency_seconds", now - sequence.last_token_s)
            sequence.emit(now)
            if sequence.finish is not None:
                self._running.discard(sequence)
        self._metrics.add("generation_tokens_total", len(batch))
        self._window_tokens += len(batch)
        elapsed_s = now - self._window_started_s
        if elapsed_s >= 1.0:
            self.throughput = self._window_tokens / elapsed_s
            self._window_started_s, self._window_tokens = now, 0

    def _log(self) -> None:
        # SGLang logs every interval; here at most once a second, for the disk's sake.
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            journal.info(
                f"Decode batch, #running-req: {len(self._running)}, gen throughput (token/s): {self.throughput:.2f}",
                self._engine.rank,
            )
