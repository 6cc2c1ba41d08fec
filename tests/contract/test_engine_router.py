"""The engine simulator behind the real sglang-router 0.3.2: one prefill, one decode, PD mode."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import requests

from tests.contract.engine_pair import (
    LEASE,
    READY_WITHIN_S,
    WAITING_TIMEOUT_S,
    Processes,
    engine_command,
    engine_url,
    make_checkpoint,
    router_command,
    until,
)

PREFILL, DECODE, ROUTER = (LEASE.address(9, number) for number in (11, 12, 13))
PREFILL_URL, DECODE_URL, ROUTER_URL = engine_url(PREFILL), engine_url(DECODE), f"http://{ROUTER}:30080"


class Pair(Processes):
    """One prefill, one decode and their router."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("pair")
    model = make_checkpoint(logs / "model")
    running = Pair(logs)
    try:
        running.start("prefill", engine_command(model, "prefill", PREFILL), PREFILL)
        running.start("decode", engine_command(model, "decode", DECODE), DECODE)
        for url in (PREFILL_URL, DECODE_URL):
            until(lambda url=url: requests.get(f"{url}/health", timeout=30).ok, READY_WITHIN_S, f"{url}/health")
        running.start("router", router_command(ROUTER, [PREFILL], [DECODE]), ROUTER)
        until(lambda: requests.get(f"{ROUTER_URL}/readiness", timeout=30).ok, READY_WITHIN_S, "router readiness")
        yield running
    finally:
        running.stop()


def chat(question: str, **options: object) -> dict[str, object]:
    return {"model": "kimi-k2", "messages": [{"role": "user", "content": question}], **options}


def metric(url: str, name: str) -> float:
    text = requests.get(f"{url}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^sglang:{name}{{[^}}]*}} (\S+)$", text, re.M))


def counted(url: str, name: str, value: float) -> None:
    """Wait until a metric has the value: an engine may count after it has answered."""
    until(lambda: metric(url, name) == value, 60, f"{name} of {url} = {value:g}")


def read_stream(url: str, body: dict[str, object]) -> tuple[str, dict[str, int], bool, str | None]:
    """Answers the text, the usage, whether [DONE] came, and the finish reason."""
    text, usage, done, finish = "", {}, False, None
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=60) as reply:
        assert reply.status_code == 200, reply.text
        for line in reply.iter_lines():
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    return text, usage, done, finish


def test_router_is_ready_with_one_prefill_and_one_decode(pair: Pair) -> None:
    ready = requests.get(f"{ROUTER_URL}/readiness", timeout=30).json()
    assert (ready["status"], ready["healthy_workers"]) == ("ready", 2)
    kinds = {worker["worker_type"] for worker in requests.get(f"{ROUTER_URL}/workers", timeout=30).json()["workers"]}
    assert kinds == {"prefill", "decode"}
    assert pair.log("prefill").startswith("SIMULATED ENGINE: no GPU")


def test_stream_is_complete_and_says_what_the_plain_answer_says(pair: Pair) -> None:
    before = {url: metric(url, "num_requests_total") for url in (PREFILL_URL, DECODE_URL)}
    body = chat("Tell me about the sea.", max_tokens=40)
    text, usage, done, finish = read_stream(
        ROUTER_URL, {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert done
    assert finish == "length"
    assert usage["completion_tokens"] == 40
    plain = requests.post(f"{ROUTER_URL}/v1/chat/completions", json=body, timeout=60).json()
    assert plain["choices"][0]["message"]["content"] == text
    assert plain["usage"]["completion_tokens"] == 40
    assert plain["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    for url, count in before.items():
        counted(url, "num_requests_total", count + 2)
    assert metric(DECODE_URL, "kv_transfer_total_mb") > 0
    assert metric(PREFILL_URL, "prompt_tokens_total") == metric(DECODE_URL, "prompt_tokens_total") > 0


def test_graded_answers_and_native_form_come_through(pair: Pair) -> None:
    reply = requests.post(f"{ROUTER_URL}/v1/chat/completions", json=chat("What is 17 + 25?"), timeout=60).json()
    assert reply["choices"][0]["message"]["content"] == "42"
    assert reply["choices"][0]["finish_reason"] == "stop"
    native = {"text": "What is the capital of France?", "sampling_params": {"max_new_tokens": 50, "temperature": 0.7}}
    assert requests.post(f"{ROUTER_URL}/generate", json=native, timeout=60).json()["text"] == "Paris"


def test_too_long_a_request_is_refused(pair: Pair) -> None:
    body = chat("word " * 5000, max_tokens=5)
    reply = requests.post(f"{ROUTER_URL}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "longer than the model's context length" in reply.text


def test_many_streams_at_once_are_all_complete(pair: Pair) -> None:
    body = chat("Tell me about the sea.", max_tokens=30, stream=True, stream_options={"include_usage": True})
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: read_stream(ROUTER_URL, body), range(32)))
    assert all(done and usage["completion_tokens"] == 30 for _, usage, done, _ in results)


def test_client_that_leaves_frees_the_running_count(pair: Pair) -> None:
    aborted = metric(DECODE_URL, "num_aborted_requests_total")
    body = chat("Tell me about the sea.", max_tokens=3000, stream=True)
    with requests.post(f"{ROUTER_URL}/v1/chat/completions", json=body, stream=True, timeout=60) as reply:
        next(reply.iter_content(64))
        assert metric(DECODE_URL, "num_running_reqs") == 1
    counted(DECODE_URL, "num_running_reqs", 0)
    counted(DECODE_URL, "num_aborted_requests_total", aborted + 1)
    until(lambda: requests.get(f"{PREFILL_URL}/get_load", timeout=30).json()[0]["num_reqs"] == 0, 60, "prefill idle")


@dataclass(frozen=True)
class Alone:
    """What one side answered to a request whose other side never came."""

    reply: requests.Response
    took_s: float
    counted: float


@pytest.fixture(scope="module")
def alone(pair: Pair) -> dict[str, Alone]:
    """Each side left alone with a room of its own, both at once: each waits for the whole timeout."""

    def ask(url: str, room: int, counter: str) -> Alone:
        before, started = metric(url, counter), time.monotonic()
        body = chat("What is 1 + 1?", bootstrap_host=PREFILL, bootstrap_port=8998, bootstrap_room=room)
        reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        return Alone(reply, time.monotonic() - started, metric(url, counter) - before)

    with ThreadPoolExecutor(2) as pool:
        decode = pool.submit(ask, DECODE_URL, 4711, "num_transfer_failed_reqs_total")
        prefill = pool.submit(ask, PREFILL_URL, 4712, "num_bootstrap_failed_reqs_total")
        return {"decode": decode.result(), "prefill": prefill.result()}


def test_room_without_a_prefill_request_times_out(alone: dict[str, Alone]) -> None:
    decode = alone["decode"]
    assert decode.reply.status_code == 500
    assert "KVTransferError(bootstrap_room=4711)" in decode.reply.text
    assert decode.took_s > WAITING_TIMEOUT_S - 0.5
    assert decode.counted == 1


def test_prefill_without_a_decode_gives_up(alone: dict[str, Alone]) -> None:
    assert alone["prefill"].reply.status_code == 500
    assert alone["prefill"].counted == 1


def test_death_of_the_prefill_fails_the_decode_request(pair: Pair) -> None:
    """Last in the module: it takes the pair apart."""
    lonely = chat("What is 1 + 1?", bootstrap_host=PREFILL, bootstrap_port=8998, bootstrap_room=4713)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(requests.post, f"{DECODE_URL}/v1/chat/completions", json=lonely, timeout=60)
        counted(DECODE_URL, "num_decode_transfer_queue_reqs", 1)
        pair.processes["prefill"].send_signal(signal.SIGKILL)
        reply = waiting.result(timeout=60)
    assert reply.status_code == 500
    assert "Losing connection with prefill instance" in reply.text
    through_router = requests.post(f"{ROUTER_URL}/v1/chat/completions", json=chat("What is 1 + 1?"), timeout=60)
    assert through_router.status_code >= 500
