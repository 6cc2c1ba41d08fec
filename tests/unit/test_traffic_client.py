"""The traffic client counts every way a request can go wrong, each once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from infra.rehearsal.addresses import free_ports
from infra.rehearsal.client.questions import Question, ask_repeat, ask_sum
from infra.rehearsal.client.tally import Histogram, Outcome, Sample, Tally
from infra.rehearsal.client.traffic import Client, Plan
from infra.rehearsal.engine.answers import known_answer

HOST = "127.0.0.1"
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def good(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    text = known_answer(body["messages"][-1]["content"]) or ""
    return await (_stream(request, text) if body.get("stream") else _plain(text))


async def wrong(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await (_stream(request, "!!!") if body.get("stream") else _plain("!!!"))


async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """End in order, but early: what a router does when its worker dies."""
    return await _stream(request, known_answer(body["messages"][-1]["content"]) or "", done=False)


async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Break off in the middle of the body."""
    response = await _begin(request)
    await _event(response, {"choices": [{"delta": {"content": "4"}}]})
    assert request.transport is not None
    request.transport.abort()
    return response


async def refused(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=500)


async def parked(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"code": "parked"}}, status=503, headers={"Retry-After": "30"})


async def overloaded(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=503)


async def _plain(text: str) -> web.StreamResponse:
    document = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return web.json_response(document, headers={"x-k2-release": "aaa"})


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"x-k2-release": "aaa"})
    await response.prepare(request)
    return response


async def _event(response: web.StreamResponse, document: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")


async def _stream(request: web.Request, text: str, *, done: bool = True) -> web.StreamResponse:
    response = await _begin(request)
    await _event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for piece in (text[:1], text[1:]):
        await _event(response, {"choices": [{"delta": {"content": piece}}]})
    if done:
        await _event(response, {"choices": [], "usage": {"total_tokens": 9}})
        await response.write(b"data: [DONE]\n\n")
    return response


async def served(handler: Handler, out: Path, *, stop: asyncio.Event | None = None, **plan: Any) -> dict[str, Any]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request, await request.json())

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner, port = web.AppRunner(app, access_log=None), free_ports(1, HOST)[0]
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    try:
        await Client(Plan(url=f"http://{HOST}:{port}", **plan), out).run(stop or asyncio.Event())
    finally:
        await runner.cleanup()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize(
    ("handler", "stream", "plan", "counts", "reason"),
    [
        (good, 0.0, {}, (12, 0, 0, 0), None),
        (good, 1.0, {}, (12, 0, 0, 0), None),
        (wrong, 0.5, {}, (0, 12, 0, 0), "wrong answer"),
        (cut, 1.0, {}, (0, 0, 12, 0), "cut stream"),
        (broken, 1.0, {}, (0, 0, 12, 0), "cut stream"),
        (refused, 0.5, {}, (0, 12, 0, 0), "status 500"),
        (parked, 0.5, {}, (0, 12, 0, 0), "status 503"),
        (parked, 0.5, {"parked_apart": True}, (0, 0, 0, 12), "parked"),
        (overloaded, 0.5, {"parked_apart": True}, (0, 12, 0, 0), "status 503"),
    ],
)
def test_every_request_is_counted_once(
    tmp_path: Path,
    handler: Handler,
    stream: float,
    plan: dict[str, Any],
    counts: tuple[int, int, int, int],
    reason: str | None,
) -> None:
    report = asyncio.run(served(handler, tmp_path / "r.json", max_requests=12, stream_share=stream, **plan))
    assert tuple(report[name] for name in ("ok", "failed", "cut_streams", "parked")) == counts
    assert (report["requests"], report["finished"], report["in_flight"]) == (12, True, 0)
    assert report["reasons"] == ({} if reason is None else {reason: 12})
    assert len(report["first_failures"]) == counts[1] + counts[2]


def test_report_names_releases_and_first_tokens(tmp_path: Path) -> None:
    report = asyncio.run(served(good, tmp_path / "r.json", max_requests=10, stream_share=1.0))
    assert report["releases"] == {"aaa": 10}
    assert report["by_release"]["aaa"]["ok"] == report["recent"]["releases"]["aaa"] == report["streams"] == 10
    assert report["statuses"] == {"200": 10}
    assert 0 < report["ttft_ms"]["p50"] <= report["latency_ms"]["max"]


def test_nobody_listening_is_a_failure_and_not_a_crash(tmp_path: Path) -> None:
    plan = Plan(url=f"http://{HOST}:{free_ports(1, HOST)[0]}", max_requests=3)
    asyncio.run(Client(plan, tmp_path / "r.json").run(asyncio.Event()))
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["failed"], report["statuses"]) == (3, {"none": 3})


class HurriedLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer whenever nothing else is left to do, and stands still otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout_s: float | None) -> Any:
            self.now_s += timeout_s or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


class AnsweredClient(Client):
    """Its requests take 0.3 s and need nobody to answer them."""

    async def _ask(self, *request: Any) -> Sample:
        await asyncio.sleep(0.3)
        return Sample(Outcome.OK, at_s=0.0, latency_s=0.3, stream=False, status=200)


def test_rate_is_held(tmp_path: Path) -> None:
    async def story() -> float:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.525, stop.set)
        await AnsweredClient(Plan(url="", rate_per_s=20, concurrency=40), tmp_path / "r.json").run(stop)
        return loop.time()

    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        ended_s = runner.run(story())
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["requests"], report["ok"]) == (11, 11)  # at 0, 0.05, ... 0.5 s
    assert ended_s == pytest.approx(0.8, abs=0.01)


def test_stop_reads_the_running_requests_to_their_end(tmp_path: Path) -> None:
    async def story() -> dict[str, Any]:
        stop, running = asyncio.Event(), 0

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal running
            running += 1
            if running == 6:
                stop.set()
            await stop.wait()
            await asyncio.sleep(0.05)
            return await good(request, body)

        return await served(slow, tmp_path / "r.json", stop=stop, concurrency=6, stream_share=0.5)

    report = asyncio.run(story())
    assert (report["requests"], report["ok"]) == (6, 6)


@pytest.mark.parametrize("ask", [ask_sum, ask_repeat])
def test_the_simulated_engine_knows_the_answers(ask: Callable[[random.Random], Question]) -> None:
    dice = random.Random(7)
    for _ in range(50):
        question = ask(dice)
        assert question.is_answered_by(known_answer(question.prompt) or "")


@pytest.mark.parametrize(
    ("text", "right"), [("42", True), ("The answer is 42.", True), ("142", False), ("17 + 25", False), ("", False)]
)
def test_grading(text: str, right: bool) -> None:
    assert Question("What is 17 + 25?", "42", 16).is_answered_by(text) is right


def test_percentiles_are_within_two_percent() -> None:
    histogram = Histogram()
    for i in range(1, 1001):
        histogram.add(i / 1000)
    for percent in (50, 90, 99):
        assert histogram.percentile_s(percent) == pytest.approx(percent / 100, rel=0.025)
    assert histogram.report_ms()["max"] == 1000.0
    assert Histogram().percentile_s(50) is None


def test_recent_forgets_and_totals_do_not() -> None:
    tally = Tally()
    tally.add(Sample(Outcome.FAILED, at_s=0.0, latency_s=1.0, stream=False, status=500, detail="x" * 999))
    tally.add(Sample(Outcome.OK, at_s=100.0, latency_s=1.0, stream=False, status=200, release="bbb"))
    report = tally.report(now_s=102.0)
    assert (report["requests"], report["failed"]) == (2, 1)
    assert (report["recent"]["requests"], report["recent"]["releases"]) == (1, {"bbb": 1})
    assert len(report["first_failures"][0]["detail"]) == 300
