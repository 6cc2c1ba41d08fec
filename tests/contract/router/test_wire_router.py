"""The engine adapter and a real router that dies, comes back, or answers what no router should."""

from __future__ import annotations

import socket

import pytest
import requests

from tasks.adapters.engine import GatewayEngine
from tasks.core.errors import After, UnavailableError
from tests.contract.faulty_line import FaultyLine
from tests.contract.odd_server import odd_server, send
from tests.contract.router.conftest import ROLES, ROUTER, ROUTER_PORT, SERVING, RealBed, eventually


def test_a_router_that_died_has_no_workers_and_comes_back_with_all(real: RealBed) -> None:
    """Behind the gateway its absence is an HTTP status."""
    before = {worker["id"] for worker in real.engine.workers(SERVING)}
    real.kill("router")
    assert real.engine.workers(SERVING) == []
    assert real.engine.router_ready(SERVING) is False
    real.start_router()  # waits until it knows them all
    after = {worker["id"] for worker in real.engine.workers(SERVING)}
    assert len(after) == len(ROLES)
    assert not before & after  # ids are those of one life of the router


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/workers/{id}"),
        ("PUT", "/workers/{id}"),
        ("POST", "/workers"),
        ("GET", "/workers/{id}"),
        ("DELETE", "/workers"),
        ("POST", "/add_worker?url=http://127.0.0.1:1"),
        ("POST", "/remove_worker?url={url}"),
        ("POST", "/flush_cache"),
        ("GET", "/metrics"),
    ],
)
def test_nobody_changes_a_router_through_the_gateway(real: RealBed, method: str, path: str) -> None:
    """Whoever reads an answer's headers could name the set: its probe route leads to no other path than gates need."""
    worker = real.engine.workers(SERVING)[0]
    asked = path.format(id=worker["id"], url=worker["url"])
    url, headers = f"http://127.0.0.1:{real.port}{asked}", {"x-k2-release": SERVING}
    assert requests.request(method, url, headers=headers, timeout=10).status_code == 404
    assert real.well()


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
        for call in (engine.workers, engine.router_ready):
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
