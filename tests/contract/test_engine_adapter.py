"""The engine adapter against the real sglang-router in PD mode, in front of one prefill and one decode engine."""

from __future__ import annotations

import pytest

from tasks.adapters.engine import GatewayEngine
from tasks.core.spec import Workload
from tests.contract.engine_pair import until
from tests.contract.test_engine_router import ROUTER_URL, Pair, pair

__all__ = ["pair"]  # the fixture


@pytest.fixture
def engine(pair: Pair) -> GatewayEngine:
    return GatewayEngine(ROUTER_URL, "kimi-k2")


@pytest.mark.parametrize("stream", [True, False])
def test_a_question_is_answered(engine: GatewayEngine, stream: bool) -> None:
    answer = engine.ask("What is 2+2?", serving="", max_tokens=8, stream=stream, timeout_s=60)
    assert (answer.status, answer.done, answer.error) == (200, True, "")
    assert answer.text
    assert answer.finish_reason in ("stop", "length")
    assert answer.prompt_tokens > 0
    assert answer.completion_tokens > 0
    assert 0 < answer.ttft_s <= answer.latency_s


def test_a_load_goes_through_prefill_and_decode(engine: GatewayEngine) -> None:
    name = "sglang_num_requests_total"
    before = engine.counters("any")
    samples = engine.run_load("any", Workload(100, 12, 10, 4), lambda _: None)
    assert [sample.error for sample in samples if not sample.ok] == []
    assert {sample.output_tokens for sample in samples} == {12}
    assert all(80 < sample.input_tokens < 160 for sample in samples)

    def counted() -> list[float]:
        after = engine.counters("any")
        return [after[f"{role}:{name}"] - before.get(f"{role}:{name}", 0.0) for role in ("prefill", "decode")]

    until(lambda: counted() == [10, 10], 60, "ten requests on both sides")
    after = engine.counters("any")
    tokens = "decode:sglang_generation_tokens_total"
    assert after[tokens] - before.get(tokens, 0.0) == 120
