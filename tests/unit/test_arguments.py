"""Argument rules against the published config of the model: each rule is shown by a profile that breaks it alone."""

from dataclasses import replace

import pytest

from tasks.core.arguments import DISPATCH_TOKENS_ENV, GONE, RULES, check_arguments
from tasks.core.spec import Workload
from tasks.specs import load_profile

CONFIG = {
    "n_routed_experts": 384,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
WORKLOAD = Workload(input_tokens=2000, output_tokens=100, requests=10, concurrency=2)


def changed(role, args=None, env=None, base="h200x16-4p12d", **fields):
    profile = load_profile(base)
    groups = tuple(
        replace(
            group,
            args={k: v for k, v in {**group.args, **(args or {})}.items() if v is not None},
            env={k: v for k, v in {**group.env, **(env or {})}.items() if v is not None},
            **fields,
        )
        if group.role == role
        else group
        for group in profile.groups
    )
    return replace(profile, groups=groups)


def found(profile, workload=WORKLOAD):
    return check_arguments(profile, CONFIG, workload)


@pytest.mark.parametrize("name", ["h200x16-4p12d", "rehearsal-4p12d", "rehearsal-1p2d"])
def test_shipped_profiles_break_no_rule(name):
    assert found(load_profile(name)) == ()


@pytest.mark.parametrize(
    ("rule", "role", "args", "env", "expected"),
    [
        ("removed-option", "prefill", {"enable-deepep-moe": True}, {}, "moe-a2a-backend: deepep"),
        ("removed-option", "decode", {"cuda-graph-bs": 480}, {}, "cuda-graph-bs-decode"),
        ("removed-option", "decode", {"dp-size": 96}, {}, "attn-dp-size: 96"),
        ("removed-option", "decode", {"enable-dp-attention": True}, {}, "attn-dp-size"),
        ("owned-option", "prefill", {"host": "0.0.0.0"}, {}, "left out"),
        ("owned-option", "prefill", {"nccl-init-addr": "x:1"}, {}, "left out"),
        ("ranks-fill-nodes", "prefill", {"tp-size": 16, "attn-dp-size": 16}, {}, "32 (4 nodes of 8 GPUs)"),
        ("attention-dp-divides", "prefill", {"attn-dp-size": 5}, {}, "divisor of tp-size 32"),
        ("experts-divide", "decode", {"ep-num-redundant-experts": 95}, {}, "0 or 96"),
        ("experts-divide", "prefill", {"ep-num-redundant-experts": 40}, {}, "32 or 64"),
        ("fp8-block-divides", "decode", {"moe-dense-tp-size": None}, {}, "1"),
        ("fp8-block-divides", "prefill", {"moe-dense-tp-size": 32}, {}, "1"),
        ("low-latency-only", "decode", {"deepep-mode": "auto"}, {}, "low_latency"),
        ("low-latency-only", "decode", {"deepep-mode": None}, {}, "low_latency"),
        ("dispatch-tokens", "decode", {}, {DISPATCH_TOKENS_ENV: None}, "at least 480"),
        ("dispatch-tokens", "decode", {"max-running-requests": 96 * 481}, {}, "at least 481"),
        ("dispatch-tokens", "decode", {}, {DISPATCH_TOKENS_ENV: "2048"}, "at most 1024"),
        ("context-holds-workload", "decode", {"context-length": 2099}, {}, "at least 2100"),
        ("safety-on", "decode", {"watchdog-timeout": 1000000}, {}, "at most 3600 s"),
        ("safety-on", "prefill", {}, {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "10000000"}, "at most 60 s"),
        ("served-names-equal", "decode", {"served-model-name": "other"}, {}, "kimi-k2 for both"),
        ("kv-page-equal", "decode", {"page-size": 64}, {}, "the same value"),
        ("kv-dtype-equal", "prefill", {"kv-cache-dtype": "fp8_e4m3"}, {}, "the same value"),
        ("transfer-backend-equal", "prefill", {"disaggregation-transfer-backend": "nixl"}, {}, "the same value"),
    ],
)
def test_rule_finds_what_breaks_it_alone(rule, role, args, env, expected):
    findings = found(changed(role, args, env))
    assert {finding.rule for finding in findings} == {rule}
    assert expected in findings[0].expected
    assert role in findings[0].where
    assert findings[0].severity == "error"
    assert findings[0].remedy and findings[0].source and findings[0].summary


def test_missing_role_is_found():
    profile = load_profile("h200x16-4p12d")
    profile = replace(profile, groups=(profile.group("prefill"),))
    assert [finding.rule for finding in found(profile)] == ["both-roles"]


def test_context_that_just_holds_the_workload_is_fine():
    # The model's own guide sets 2176 for 2000 + 100.
    assert found(changed("decode", {"context-length": 2176})) == ()


@pytest.mark.parametrize("redundant", [0, 96])
def test_redundant_experts_that_divide(redundant):
    assert found(changed("decode", {"ep-num-redundant-experts": redundant})) == ()


def test_tensor_parallel_experts_need_whole_blocks():
    # 2048 / 32 = 64: half a block; with EP each expert stays whole.
    profile = changed("prefill", {"moe-a2a-backend": None, "deepep-mode": None, "ep-num-redundant-experts": None})
    assert [(f.rule, f.where) for f in found(profile)] == [("fp8-block-divides", "prefill: ep-size")]


def test_options_are_known_by_their_other_names():
    profile = changed("prefill", {"tp-size": None, "tensor-parallel-size": 32})
    assert found(profile) == ()


def test_removed_options_go_by_the_engine_version():
    profile = replace(changed("decode", {"cuda-graph-bs": 480}), engine_version="0.5.19")
    assert "removed-option" not in {finding.rule for finding in found(profile)}


def test_no_workload_leaves_its_rules_out():
    assert found(changed("decode", {"context-length": 16}), workload=None) == ()


def test_rules_have_an_id_of_their_own():
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert len({gone.option for gone in GONE}) == len(GONE)
