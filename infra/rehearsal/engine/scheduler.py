"""Runs requests through a simulated prefill queue and one decode loop, in the time that the performance model gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.batch import DecodeLoop, FifoServer
from infra.rehearsal.engine.injection import Injections
from infra.rehearsal.engine.metrics import Metrics
from infra.rehearsal.engine.performance import PerformanceModel, RequestTimes
from infra.rehearsal.engine.sequence import Progress, Sequence, Work
from infra.rehearsal.engine.transfer import BootstrapFault, DecodeLink, Rooms, TransferFault


class Scheduler:
    """The serving part of one engine group."""

    def __init__(
        self,
        engine: EngineArguments,
        model: PerformanceModel,
        times: RequestTimes,
        injections: Injections,
        max_total_tokens: int,
    ) -> None:
        self.metrics = Metrics(engine.served_model_name, engine.mode)
        self.max_total_tokens = max_total_tokens
        self.rooms = Rooms()
        self.link = DecodeLink({"mode": "decode", "kv_cache_dtype": engine.kv_cache_dtype}, times.waiting_timeout_s)
        self._engine = engine
        self._model = model
        self._times = times
        self._injections = injections
        self._prefill = FifoServer(lambda: injections.slow_factor)
        self._transfer = FifoServer(lambda: injections.slow_factor)
        self.decode = DecodeLoop(engine, model, self.metrics, lambda: injections.slow_factor)
        self._slots = asyncio.Semaphore(engine.max_running_requests)
        self._live: dict[str, Sequence] = {}
        self._running = 0
        self._admitted = 0
        self._bootstrapping = 0
        self._transferring = 0
        self.prompt_tokens_held = 0

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered to the end."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Requests that compute or decode."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for a slot, a partner or the prefill."""
        return self.in_flight - self._running

    @property
    def used_tokens(self) -> int:
        """KV slots in use."""
        return self.prompt_tokens_held + sum(sequence.tokens for sequence in self._live.values())

    def queues(self) -> dict[str, int]:
        """Answers the lengths of the queues of the disaggregated modes."""
        is_prefill = self._engine.mode == "prefill"
        return {
            "prefill_bootstrap_queue_reqs": self._bootstrapping if is_prefill else 0,
            "prefill_inflight_queue_reqs": self._transferring if is_prefill else 0,
            "decode_prealloc_queue_reqs": 0 if is_prefill else self.in_flight - self._admitted,
            "decode_transfer_queue_reqs": 0 if is_prefill else self.link.waiting,
            "decode_retracted_queue_reqs": 0,
        }

    def abort(self, rid: str | None, everything: bool) -> int:
        """Ends requests whose id begins with ``rid``, or all; answers how many."""
        chosen = [s for r, s in self._live.items() if everything or (rid and r.startswith(rid))]
        for sequence in chosen:
            self.decode.discard(sequence)
            sequence.end("abort")
            if sequence.start is not None:
                sequence.start.cancel()
        return len(chosen)

    async def generate(self, work: Work) -> AsyncGenerator[Progress, None]:
        """Yields the request's tokens as they come; raises TransferFault. Closing the iterator aborts the request."""
        sequence = Sequence(work, self._injections.wrong)
        self._live[work.rid] = sequence
        self.prompt_tokens_held += work.prompt_tokens
        decoding = False
        try:
            async with self._slots:
                self._admitted += 1
                try:
                    await self._first_token(sequence)
                    self._running += 1
                    decoding = True
                    self._start_decoding(sequence)
                    finish = None
                    while finish is None:
                        progress = await sequence.progress()
                        finish = progress.finish
                        yield progress
                finally:
                    self._admitted -= 1
        except TransferFault as fault:
            self._note_fault(work, fault)
            sequence.end("failed")
            raise
        finally:
            self._running -= 1 if decoding else 0
            self.prompt_tokens_held -= work.prompt_tokens
            self._live.pop(work.rid, None)
            self.decode.discard(sequence)
            self._note_end(sequence)

    async def _first_token(self, sequence: Sequence) -> None:
        """Waits for the first token; an abort ends the wait."""
        sequence.start = asyncio.ensure_future(self._until_first_token(sequence))
        try:
            await sequence.start
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if sequence.finish != "abort" or (task is not None and task.cancelling()):
                raise  # the client went away
        if sequence.first_token_s is not None:
            self.metrics.add("generation_tokens_total")
            self.metrics.observe("time_to_first_token_seconds", sequence.first_token_s - sequence.arrived_s)

    def _start_decoding(self, sequence: Sequence) -> None:
        if sequence.finish is not None:
            return
        if self._engine.mode == "prefill":
            sequence.end("length")  # a prefill answers after one token
        else:
            self.decode.add(sequence)

    async def _until_first_token(self, sequence: Sequence) -> None:
        if self._engine.mode == "decode":
            await self._receive(sequence)
        elif self._engine.mode == "prefill" and self._has_partner(sequence.work):
            await self._hand_over(sequence)
        else:
            await self._compute(sequence)
        if sequence.finish is None:
            sequence.emit(time.monotonic())

    def _has_partner(self, work: Work) -> bool:
        bootstrap = work.bootstrap
        return bootstrap is not None and not bootstrap.is_fake and self._engine.transfer_backend != "fake"

    async def _compute(self, sequence: Sequence) -> None:
        floor_s = self._model.parameters.prefill_floor_s
        self._running += 1
        try:
            seconds = await self._prefill.serve(sequence.work.prompt_tokens, self._model.prefill_tok_per_s, floor_s)
        finally:
            self._running -= 1
        waited_s = time.monotonic() - sequence.arrived_s - seconds - floor_s
        self.metrics.observe("queue_time_seconds", max(0.0, waited_s))
        self.metrics.add("prompt_tokens_total", sequence.work.prompt_tokens)

    async def _hand_over(self, sequence: Sequence) -> None:
        """The prefill's half: handshake, compute, transfer."""
        bootstrap = sequence.work.bootstrap
        assert bootstrap is not None
        room = self.rooms.open(bootstrap.room)
        try:
            self._bootstrapping += 1
            try:
                await self.rooms.wait_for_decode(room, self._times.bootstrap_timeout_s)
            finally:
                self._bootstrapping -= 1
            await self._compute(sequence)
            room.check()
            moved_bytes = sequence.work.prompt_tokens * self._model.kv_bytes_per_token
            self._transferring += 1
            try:
                seconds = await self._transfer.serve(moved_bytes, self._model.transfer_bytes_per_s)
            finally:
                self._transferring -= 1
            room.check()
            if sequence.finish is None:
                room.outcome.set_result(
                    {
                        "tokens": sequence.work.prompt_tokens,
                        "bytes": moved_bytes,
                        "seconds": seconds,
                        "wrong": self._injections.wrong,
                    }
                )
                self.link.speed_gb_s = moved_bytes / max(seconds, 1e-6) / 1e9
                self.link.latency_ms = seconds * 1000
                self.link.total_mb = moved_bytes / 1e6
        finally:
            self.rooms.close(room)

    async def _receive(self, sequence: Sequence) -> None:
        """The decode's half: asks the prefill for the room."""
        bootstrap = sequence.work.bootstrap
        if bootstrap is None or not self._has_partner(sequence.work):
            return
        found = await self.link.fetch(bootstrap.host, bootstrap.port, bootstrap.room)
        self.metrics.add("prompt_tokens_total", sequence.work.prompt_tokens)
        if found.get("wrong"):
            sequence.spoil()  # a broken prefill gives broken KV, whoever decodes it

    def _note_fault(self, work: Work, fault: TransferFault) -> None:
        is_prefill = self._engine.mode == "prefill"
        if is_prefill and isinstance(fault, BootstrapFault):
            self.metrics.add("num_bootstrap_failed_reqs_total")
        else:
            self.metrics.add("num_transfer_failed_reqs_total")
        side = "Prefill" if is_prefill else "Decode"
        journal.error(
            f"{side} transfer failed for request rank=0 req.rid='{work.rid}' with exception {fault}", self._engine.rank
        )

    def _note_end(self, sequence: Sequence) -> None:
        now = time.monotonic()
        if sequence.finish in (None, "abort"):
            self.metrics.add("num_aborted_requests_total")
            return
        if sequence.finish == "failed":
            return
        self.metrics.add("num_requests_total")
        self.metrics.observe("e2e_request_latency_seconds", now - sequence.arrived_s)
        if sequence.first_token_s is not None and sequence.tokens > 1:
            spent_s = (sequence.last_token_s - sequence.first_token_s) / (sequence.tokens - 1)
            self.metrics.observe("request_time_per_output_token_seconds", spent_s)
