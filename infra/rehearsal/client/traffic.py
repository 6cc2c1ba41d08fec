"""Sends the requests: so many at a time, at most so many a second, until told to stop."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from infra.rehearsal.client.questions import Question, ask_repeat, ask_sum
from infra.rehearsal.client.tally import NO_RELEASE, Outcome, Sample, Tally

RELEASE_HEADER = "x-k2-release"
_CONTENT = re.compile(rb'"content":\s*"[^"]')
_DONE = b"data: [DONE]"
_WRITE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send."""

    url: str
    model: str = "kimi-k2"
    concurrency: int = 6
    rate_per_s: float | None = None
    """Most requests begun in a second; None: as many as the concurrency allows."""
    stream_share: float = 0.5
    max_requests: int | None = None
    parked_apart: bool = False
    """Count 503 with Retry-After as parked instead of failed."""
    timeout_s: float = 60.0
    seed: int = 1


@dataclass(slots=True)
class _Answer:
    """What has come back for one request so far: kept outside of the reading, which may break off."""

    status: int | None = None
    release: str = NO_RELEASE
    retry_after: str | None = None
    body: bytearray | bytes = b""
    ttft_s: float | None = None


class Client:
    """One run of traffic."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan, self._out = plan, out
        self.tally = Tally()
        self._dice = random.Random(plan.seed)  # noqa: S311  (questions, not secrets)
        self._begun = self._in_flight = 0
        self._next_at_s = 0.0
        self._started_at_s = time.time()

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop` is set or enough was sent; requests in flight are read to their end."""
        timeout = aiohttp.ClientTimeout(total=self._plan.timeout_s, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            writer = asyncio.create_task(self._write_for_ever())
            try:
                await asyncio.gather(*(self._work(session, stop) for _ in range(self._plan.concurrency)))
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                self._write(finished=True)

    async def _work(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set() and not self._enough():
            await self._wait_for_turn(stop)
            if stop.is_set() or self._enough():
                return
            number, self._begun, self._in_flight = self._begun, self._begun + 1, self._in_flight + 1
            stream = self._dice.random() < self._plan.stream_share
            question = ask_repeat(self._dice) if stream and self._dice.random() < 0.5 else ask_sum(self._dice)
            try:
                self.tally.add(await self._ask(session, question, stream, number))
            finally:
                self._in_flight -= 1

    def _enough(self) -> bool:
        return self._plan.max_requests is not None and self._begun >= self._plan.max_requests

    async def _wait_for_turn(self, stop: asyncio.Event) -> None:
        if self._plan.rate_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        at_s = max(self._next_at_s, now_s)
        self._next_at_s = at_s + 1 / self._plan.rate_per_s
        if at_s > now_s:
            try:
                await asyncio.wait_for(stop.wait(), at_s - now_s)
            except TimeoutError:
                return

    async def _ask(self, session: aiohttp.ClientSession, question: Question, stream: bool, number: int) -> Sample:
        body: dict[str, Any] = {
            "model": self._plan.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = _Answer()
        at_s, began_s, error = time.time(), time.monotonic(), None
        try:
            headers = {"x-request-id": f"rehearsal-client-{int(self._started_at_s)}-{number}"}
            url = f"{self._plan.url}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                await _read(response, answer, began_s, stream)
        except (aiohttp.ClientError, TimeoutError, OSError) as broken:
            error = broken
        outcome, reason, detail = judge(answer, question, stream, error, parked_apart=self._plan.parked_apart)
        return Sample(
            outcome=outcome,
            at_s=at_s,
            latency_s=time.monotonic() - began_s,
            stream=stream,
            status=answer.status,
            release=answer.release,
            ttft_s=answer.ttft_s,
            reason=reason,
            detail=detail,
        )

    async def _write_for_ever(self) -> None:
        while True:
            self._write(finished=False)
            await asyncio.sleep(_WRITE_EVERY_S)

    def _write(self, *, finished: bool) -> None:
        now_s = time.time()
        seconds = now_s - self._started_at_s
        document = {
            "url": self._plan.url,
            "model": self._plan.model,
            "finished": finished,
            "started_at_s": round(self._started_at_s, 3),
            "updated_at_s": round(now_s, 3),
            "in_flight": self._in_flight,
            "rate_per_s": round(self.tally.requests / seconds, 2) if seconds > 0 else 0.0,
            "cpu_s": round(time.process_time(), 2),
            **self.tally.report(now_s),
        }
        # Readers poll this file: it is whole at every moment.
        temporary = self._out.with_name(f".{self._out.name}.tmp")
        temporary.write_text(json.dumps(document, indent=1))
        temporary.replace(self._out)


async def _read(response: aiohttp.ClientResponse, answer: _Answer, began_s: float, stream: bool) -> None:
    answer.status = response.status
    answer.release = response.headers.get(RELEASE_HEADER, NO_RELEASE)
    answer.retry_after = response.headers.get("Retry-After")
    if not stream or response.status != 200:
        answer.body = await response.read()
        return
    answer.body = body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        # The first event names the role and has no text yet.
        if answer.ttft_s is None and _CONTENT.search(body):
            answer.ttft_s = time.monotonic() - began_s


def judge(
    answer: _Answer, question: Question, stream: bool, error: Exception | None, *, parked_apart: bool
) -> tuple[Outcome, str, str]:
    """Return how a request ended, why in few words, and what was seen."""
    head = bytes(answer.body[:300]).decode(errors="replace")
    began = stream and answer.status == 200
    if began and _DONE not in answer.body:
        tail = bytes(answer.body[-150:]).decode(errors="replace")
        return Outcome.CUT, "cut stream", f"{error!r}; {len(answer.body)} bytes, the last: {tail}"
    if error is not None and not began:
        return Outcome.FAILED, type(error).__name__, f"{error!r}; {head}"
    if answer.status != 200:
        if parked_apart and answer.status == 503 and answer.retry_after is not None:
            return Outcome.PARKED, "parked", head
        return Outcome.FAILED, f"status {answer.status}", head
    try:
        text = _streamed_text(answer.body) if stream else _plain_text(answer.body)
    except (ValueError, KeyError, IndexError, TypeError) as broken:
        return Outcome.FAILED, "unreadable answer", f"{broken!r}; {head}"
    if not question.is_answered_by(text):
        return Outcome.FAILED, "wrong answer", f"asked {question.prompt!r}, got {text[:120]!r}"
    return Outcome.OK, "", ""


def _plain_text(body: bytes | bytearray) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


def _streamed_text(body: bytes | bytearray) -> str:
    """Join the pieces of a stream; an error event in it raises."""
    parts, has_usage = [], False
    for line in bytes(body).split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"error event: {event['error']}")
        has_usage = has_usage or bool(event.get("usage"))
        parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    if not has_usage:
        raise ValueError("no usage in the stream, though it was asked for")
    return "".join(parts)
