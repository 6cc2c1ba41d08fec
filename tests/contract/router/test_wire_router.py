"""The engine adapter and a real router that dies, comes back, or answers what no router should."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest

from tasks.adapters.engine import GatewayEngine
from tasks.core.errors import After, UnavailableError
from tests.contract.faulty_line import FaultyLine
from tests.contract.odd_server import odd_server, send
from tests.contract.router.conftest import ROLES, ROUTER, ROUTER_PORT, SERVING, URLS, RealBed, eventually

NO_WORKER = "00000000-0000-0000-0000-000000000000"


def test_a_router_that_died_has_no_workers_and_comes_back_with_all(real: RealBed) -> None:
    """Behind the gateway its absence is an HTTP status; whoever has it forget a worker must hear that it did not."""
    before = {worker["id"] for worker in real.engine.workers(SERVING)}
    forgotten = next(worker["id"] for worker in real.engine.workers(SERVING) if worker["url"] == URLS["decode-0"])
    real.engine.forget_worker(SERVING, forgotten)
    real.kill("router")
    assert real.engine.workers(SERVING) == []
    assert real.engine.router_ready(SERVING) is False
    with pytest.raises(UnavailableError, match="503") as caught:
        real.engine.forget_worker(SERVING, forgotten)
    assert isinstance(caught.value.retry, After)
    real.start_router()  # waits until it knows them all
    after = {worker["id"] for worker in real.engine.workers(SERVING)}
    assert len(after) == len(ROLES)
    assert not before & after  # ids are those of one life of the router
    real.engine.forget_worker(SERVING, forgotten)
    assert real.well()


def test_an_id_that_is_none_is_refused_by_the_router_and_told(real: RealBed) -> None:
    with pytest.raises(UnavailableError, match="400") as caught:
        real.engine.forget_worker(SERVING, "no/such id")
    assert "Invalid worker_id" in caught.value.got
    assert real.well()


def test_what_is_in_flight_on_a_forgotten_worker_ends_well(real: RealBed) -> None:
    decodes = [worker for worker in real.engine.workers(SERVING) if worker["worker_type"] == "decode"]
    question = "Tell me about the sea."
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(real.engine.ask, question, serving=SERVING, max_tokens=200, stream=True, timeout_s=60)
            for _ in range(4)
        ]
        eventually(lambda: real.engine.counters(SERVING).get("decode:sglang_num_running_reqs") == 4)
        real.engine.forget_worker(SERVING, decodes[0]["id"])
        eventually(lambda: len(real.engine.workers(SERVING)) == 2)
        assert not any(future.done() for future in asked)
        answers = [future.result(timeout=90) for future in asked]
    assert [(answer.status, answer.done, answer.error, answer.completion_tokens) for answer in answers] == [
        (200, True, "", 200)
    ] * 4


def test_a_list_that_is_cut_on_the_way_is_no_list(real: RealBed) -> None:
    with FaultyLine(ROUTER, ROUTER_PORT) as line:
        line.cut_after_bytes = 300
        with pytest.raises(UnavailableError) as caught:
            GatewayEngine(line.url, "kimi-k2").workers(SERVING)
    assert isinstance(caught.value.retry, After)


def test_an_engine_that_died_gets_no_more_requests(real: RealBed) -> None:
    """Last of those with the real router: an engine takes seconds to start again."""
    real.kill("decode-1")
    eventually(lambda: any(not worker["is_healthy"] for worker in real.engine.workers(SERVING)))
    for _ in range(4):
        answer = real.engine.ask("What is 1 + 1?", serving=SERVING, max_tokens=8, stream=False, timeout_s=30)
        assert (answer.status, answer.error) == (200, "")


def test_nobody_there_may_be_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        engine = GatewayEngine(f"http://127.0.0.1:{taken.getsockname()[1]}", "kimi-k2")
        calls = (engine.workers, engine.router_ready, lambda serving: engine.forget_worker(serving, NO_WORKER))
        for call in calls:
            with pytest.raises(UnavailableError) as caught:
                call(SERVING)
            assert isinstance(caught.value.retry, After)


def test_a_gateway_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnavailableError, match="ReadTimeout"):
        GatewayEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", "kimi-k2", timeout_s=0.3).workers(SERVING)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503, 504])
def test_an_error_status_is_no_workers_and_not_ready(status: int) -> None:
    with odd_server(lambda handler: send(handler, status, b'{"workers": [{"url": "x"}], "status": "ready"}')) as url:
        engine = GatewayEngine(url, "kimi-k2")
        assert engine.workers(SERVING) == []
        assert engine.router_ready(SERVING) is False


@pytest.mark.parametrize(
    "body", ["", "not json", "[]", "null", "{}", '{"workers": null}', '{"workers": ["x", 1]}', '{"workers": {"a": 1}}']
)
def test_an_answer_that_makes_no_sense_is_no_workers(body: str) -> None:
    with odd_server(lambda handler: send(handler, 200, body.encode())) as url:
        engine = GatewayEngine(url, "kimi-k2")
        assert engine.workers(SERVING) == []
        assert engine.router_ready(SERVING) is False


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
def test_a_worker_that_is_not_forgotten_is_told(status: int) -> None:
    with odd_server(lambda handler: send(handler, status, b"No.")) as url:
        with pytest.raises(UnavailableError, match=str(status)) as caught:
            GatewayEngine(url, "kimi-k2").forget_worker(SERVING, NO_WORKER)
        assert caught.value.got == "No."


def test_an_id_stays_within_its_place_in_the_address() -> None:
    asked: list[tuple[str, str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append((handler.command, handler.path, handler.headers["x-k2-release"]))
        send(handler, 202, b"{}")

    with odd_server(answer) as url:
        GatewayEngine(url, "kimi-k2").forget_worker(SERVING, "../v1?x=1#/y z")
    assert asked == [("DELETE", "/workers/..%2Fv1%3Fx%3D1%23%2Fy%20z", SERVING)]
