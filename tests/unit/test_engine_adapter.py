"""The engine adapter against servers that answer in every wrong way: each failure is a value that can be graded."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tasks.adapters.engine import GatewayEngine, load_prompt, sum_by_role
from tasks.core.errors import UnavailableError
from tasks.core.samples import Answer
from tasks.core.spec import Workload

Handler = BaseHTTPRequestHandler


@contextmanager
def server(answer: Callable[[Handler], None]) -> Iterator[str]:
    class Server(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(0)
            answer(self)

        def do_POST(self) -> None:
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    listening = Quiet(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def send(handler: Handler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def chunk(handler: Handler, data: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.flush()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def content(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": text}, "finish_reason": reason}], usage=None)


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def streaming(
    *parts: bytes, pause_s: float = 0.0, end: bool = True, before_last: Callable[[], None] = lambda: None
) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("x-k2-release", "abcdef012345")
        handler.end_headers()
        for i, part in enumerate(parts, start=1):
            if i == len(parts):
                before_last()
            chunk(handler, part)
            time.sleep(pause_s)
        if end:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.connection.shutdown(socket.SHUT_RDWR)

    return answer


def ask(url: str, *, stream: bool = True, timeout_s: float = 60.0, serving: str = "") -> Answer:
    return GatewayEngine(url, "kimi-k2").ask("2+2?", serving=serving, max_tokens=8, stream=stream, timeout_s=timeout_s)


def test_a_whole_stream() -> None:
    parts = (content(""), content("fo"), content("ur", "stop"), USAGE, DONE)
    with server(streaming(*parts, pause_s=0.05)) as url:
        answer = ask(url)
        # The first content comes with the second event, and the rest after it. A busy machine may let this reader sleep
        # until all is there: then the stream is read anew.
        deadline = time.monotonic() + 60
        while answer.ttft_s >= answer.latency_s - 0.1 and time.monotonic() < deadline:
            answer = ask(url)
    assert (answer.status, answer.text, answer.finish_reason, answer.done) == (200, "four", "stop", True)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.error) == (7, 3, "")
    assert answer.served_by == "abcdef012345"
    assert 0.04 < answer.ttft_s < answer.latency_s - 0.1


def test_events_may_be_cut_anywhere() -> None:
    data = content("four", "stop") + USAGE + DONE
    with server(streaming(*(data[i : i + 7] for i in range(0, len(data), 7)))) as url:
        answer = ask(url)
    assert (answer.text, answer.done, answer.completion_tokens) == ("four", True, 3)


@pytest.mark.parametrize(
    ("parts", "end", "text"),
    [
        ((content("fo"),), True, "fo"),
        ((content("fo"),), False, "fo"),
        ((), True, ""),
        ((content("fo"), b'data: {"error": {"message": "worker died"}}\n\n'), True, "fo"),
        ((content("fo"), b"data: {\n\n", DONE), True, "fo"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(parts: tuple[bytes, ...], end: bool, text: str) -> None:
    with server(streaming(*parts, end=end)) as url:
        answer = ask(url)
    assert (answer.status, answer.text, answer.done) == (200, text, False)
    assert answer.error


def test_a_stream_that_goes_on_too_long_is_ended() -> None:
    with server(streaming(*[content("x")] * 1200, pause_s=0.05)) as url:
        answer = ask(url, timeout_s=0.3)
    assert not answer.done
    assert "0.3 s" in answer.error
    assert answer.latency_s < 30  # of 60


def test_an_answer_that_does_not_come_is_an_error() -> None:
    asked_long_ago = threading.Event()
    with server(lambda _: bool(asked_long_ago.wait(60)) and None) as url:
        answer = ask(url, timeout_s=0.2)
        asked_long_ago.set()
    assert (answer.status, answer.done) == (0, False)
    assert "Timeout" in answer.error


def test_an_answer_in_one_document() -> None:
    body = {
        "choices": [{"message": {"content": "four"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1},
    }
    with server(lambda handler: send(handler, 200, json.dumps(body).encode())) as url:
        answer = ask(url, stream=False)
    assert (answer.status, answer.text, answer.finish_reason, answer.done) == (200, "four", "stop", True)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.error) == (7, 1, "")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_status_200_is_no_evidence(body: bytes) -> None:
    with server(lambda handler: send(handler, 200, body)) as url:
        answer = ask(url, stream=False)
    assert answer.status == 200
    assert answer.finish_reason == ""
    assert answer.completion_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_status_is_a_value(stream: bool) -> None:
    with server(lambda handler: send(handler, 503, b"parked", **{"Retry-After": "30"})) as url:
        answer = ask(url, stream=stream)
    assert (answer.status, answer.text, answer.error) == (503, "parked", "HTTP 503")
    assert answer.done is not stream


def test_the_probe_route_is_chosen_by_a_header_and_temperature_is_zero() -> None:
    seen: list[Any] = []

    def answer(handler: Any) -> None:
        seen.append((handler.headers.get("x-k2-release"), handler.body))
        send(handler, 200, b"{}")

    with server(answer) as url:
        ask(url, stream=False, serving="abcdef012345")
        ask(url, stream=False)
    assert [header for header, _ in seen] == ["abcdef012345", None]
    assert seen[0][1]["temperature"] == 0
    assert seen[0][1]["model"] == "kimi-k2"


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert ask(url).status == 0
        engine = GatewayEngine(url, "kimi-k2")
        for call in (engine.router_ready, engine.workers, engine.counters):
            with pytest.raises(UnavailableError):
                call("")


def test_a_router_that_is_not_reached_or_not_ready() -> None:
    body = b'{"status":"not ready","reason":"insufficient healthy workers"}'
    with server(lambda handler: send(handler, 503, body)) as url:
        engine = GatewayEngine(url, "kimi-k2")
        assert engine.router_ready("x") is False
        assert engine.workers("x") == []
        assert engine.counters("x") == {}


def test_a_load_measures_each_request() -> None:
    prompts: list[str] = []
    at_once, most = 0, 0
    lock = threading.Lock()

    def leave() -> None:
        """Before the last byte of an answer: as soon as its reader has that, the next request may come."""
        nonlocal at_once
        with lock:
            at_once -= 1

    def answer(handler: Any) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            prompts.append(handler.body["messages"][0]["content"])
            assert handler.body["ignore_eos"] is True
            number = len(prompts)
        if number == 3:
            leave()
            send(handler, 500, b"no")
        elif number == 5:
            streaming(content("x"), end=False, before_last=leave)(handler)
        elif number == 7:
            streaming(content("x"), DONE, before_last=leave)(handler)
        else:
            parts = (content("x"), content("y", "length"), USAGE, DONE)
            streaming(*parts, pause_s=0.01, before_last=leave)(handler)

    counts: list[int] = []
    with server(answer) as url:
        engine = GatewayEngine(url, "kimi-k2")
        samples = engine.run_load("x", Workload(50, 3, 20, 4), counts.append)
    assert counts == list(range(1, 21))
    assert 1 < most <= 4
    assert len(set(prompts)) == 20
    assert all(len(prompt.split()) == 50 for prompt in prompts)
    good = [sample for sample in samples if sample.ok]
    assert len(good) == 17
    assert {(sample.input_tokens, sample.output_tokens) for sample in good} == {(7, 3)}
    assert all(0 < sample.ttft_s < sample.latency_s for sample in good)
    assert sorted(sample.started_s for sample in samples) == [sample.started_s for sample in samples]
    assert "HTTP 500" in {sample.error for sample in samples}
    assert "no usage was reported" in {sample.error for sample in samples}


def reasoning(text: str) -> bytes:
    return event(choices=[{"delta": {"reasoning_content": text, "content": None}, "finish_reason": None}], usage=None)


def test_reasoning_is_a_first_token_and_no_part_of_the_answer() -> None:
    with server(streaming(reasoning("hm"), content("4", "stop"), USAGE, DONE, pause_s=0.05)) as url:
        answer = ask(url)
        (sample,) = GatewayEngine(url, "kimi-k2").run_load("x", Workload(5, 3, 1, 1), lambda _: None)
    assert answer.text == "4"
    assert 0 < answer.ttft_s < answer.latency_s
    assert sample.ok
    assert 0 < sample.ttft_s < sample.latency_s


def test_a_stream_of_reasoning_alone_has_a_first_token() -> None:
    with server(streaming(reasoning("hm"), reasoning("so"), USAGE, DONE, pause_s=0.05)) as url:
        (sample,) = GatewayEngine(url, "kimi-k2").run_load("x", Workload(5, 3, 1, 1), lambda _: None)
    assert sample.ok
    assert 0 < sample.ttft_s < sample.latency_s


def test_a_stream_without_any_token_is_no_good_sample_and_no_fast_one() -> None:
    with server(streaming(content(""), USAGE, DONE, pause_s=0.05)) as url:
        (sample,) = GatewayEngine(url, "kimi-k2").run_load("x", Workload(5, 3, 1, 1), lambda _: None)
    assert (sample.ok, sample.error) == (False, "no token")
    assert sample.ttft_s == sample.latency_s > 0


def test_progress_of_a_load_is_told_by_the_calling_thread() -> None:
    threads: set[int] = set()
    with server(streaming(content("x", "length"), USAGE, DONE)) as url:
        GatewayEngine(url, "kimi-k2").run_load("x", Workload(5, 3, 8, 4), lambda _: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_a_load_whose_progress_cannot_be_told_is_ended() -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    answered: list[int] = []

    def answer(handler: Any) -> None:
        answered.append(1)
        streaming(content("x", "length"), USAGE, DONE, pause_s=0.02)(handler)

    with server(answer) as url, pytest.raises(KeyboardInterrupt):
        GatewayEngine(url, "kimi-k2").run_load("x", Workload(5, 3, 500, 2), stop)
    assert len(answered) < 100


def test_prompts_are_repeatable_and_share_no_prefix() -> None:
    prompts = [load_prompt(i, 30) for i in range(200)]
    assert prompts == [load_prompt(i, 30) for i in range(200)]
    assert len({prompt.split()[0] for prompt in prompts}) == 200
    assert len(load_prompt(1, 1).split()) == 1


def test_metrics_are_summed_by_role() -> None:
    text = """# TYPE sglang_num_requests_total counter
sglang_num_requests_total{engine_type="decode",worker_addr="http://127.0.0.2:30000"} 2
sglang_num_requests_total{engine_type="decode",worker_addr="http://127.0.0.3:30000"} 3.0
sglang_num_requests_total{engine_type="prefill",worker_addr="http://127.0.0.4:30000"} 7
sglang_queue_time_seconds_bucket{engine_type="prefill",worker_addr="http://127.0.0.4:30000",le="+Inf"} 7
sglang_queue_time_seconds_sum{engine_type="prefill",worker_addr="http://127.0.0.4:30000"} 0.5
sglang_odd{engine_type="prefill"} nonsense
"""
    roles = {"http://127.0.0.2:30000": "decode", "http://127.0.0.4:30000": "prefill"}
    assert sum_by_role(text, roles) == {
        "decode:sglang_num_requests_total": 5.0,
        "prefill:sglang_num_requests_total": 7.0,
        "prefill:sglang_queue_time_seconds_sum": 0.5,
    }
