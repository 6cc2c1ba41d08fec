"""Engine arguments checked against the model's config, the topology and the engine's version, before a GPU is touched.

Each rule is data: what it is for, what to do, and where the fact comes from. This is a first set; it knows what made
real deployments of this model fail, not every option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.group_arguments import Situation, situation_of
from tasks.core.spec import Profile, Workload

DISPATCH_TOKENS_ENV = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
_DISPATCH_TOKENS_DEFAULT = 128
_DISPATCH_TOKENS_LIMIT = 1024
_LOW_LATENCY_ONLY_FROM_RANKS = 96
_MAX_WATCHDOG_S = 3600.0

_OWNED = (
    "model-path",
    "served-model-name",
    "host",
    "port",
    "nnodes",
    "node-rank",
    "dist-init-addr",
    "disaggregation-mode",
    "disaggregation-bootstrap-port",
)
_SAFETY_TIMEOUTS_S: Mapping[str, float] = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": 3600.0,
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": 3600.0,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": 60.0,
}


@dataclass(frozen=True)
class Gone:
    """An option that an engine version no longer takes, and what to write in its place."""

    option: str
    since: tuple[int, ...]
    instead: str


GONE: tuple[Gone, ...] = (
    Gone("enable-deepep-moe", (0, 5, 3), "moe-a2a-backend: deepep"),
    Gone("enable-ep-moe", (0, 5, 3), "ep-size: <tp-size>"),
    Gone("cuda-graph-bs", (0, 5, 20), "cuda-graph-bs-decode (decode) or cuda-graph-bs-prefill"),
    Gone("cuda-graph-max-bs", (0, 5, 20), "cuda-graph-max-bs-decode or cuda-graph-max-bs-prefill"),
    Gone("enable-dp-attention", (0, 5, 22), "attn-dp-size: <tp-size>, without dp-size"),
    Gone("disable-cuda-graph", (0, 5, 14), "cuda-graph-backend-decode: disabled, cuda-graph-backend-prefill: disabled"),
    Gone("prefill-round-robin-balance", (0, 5, 7), "nothing: leave it out"),
)


@dataclass(frozen=True)
class Finding:
    """One argument that cannot work (`error`) or that costs something (`warning`), with the rule that says so."""

    rule: str
    severity: str
    where: str
    summary: str
    got: str
    expected: str
    remedy: str
    source: str


Problem = tuple[str, str, str, str]
"""role, option, got, expected"""


@dataclass(frozen=True)
class Rule:
    """A check with its reason. `check` yields (role, option, got, expected) for each violation."""

    id: str
    why: str
    remedy: str
    source: str
    check: Callable[[Situation], Iterable[Problem]]
    severity: str = "error"


def check_arguments(
    profile: Profile, config: Mapping[str, Any], workload: Workload | None = None
) -> tuple[Finding, ...]:
    """Return what cannot work, in the order of the rules.

    Args:
        profile: with the release's overrides applied.
        config: the model's config.json as data.
        workload: what the release will be measured with; None leaves out the rules about it.
    """
    situation = situation_of(profile, config, workload)
    return tuple(
        Finding(rule.id, rule.severity, f"{role}: {option}", rule.why, got, expected, rule.remedy, rule.source)
        for rule in RULES
        for role, option, got, expected in rule.check(situation)
    )


def _owned(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        for option in _OWNED:
            # A served name of its own is caught by the rule about names, with a better sentence.
            if option in group.options and option != "served-model-name":
                yield group.role, option, str(group.options[option]), "left out: the release sets it"


def _gone(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        for gone in GONE:
            if gone.option in group.options and situation.version >= gone.since:
                yield group.role, gone.option, f"--{gone.option}", gone.instead
        dp = group.number("dp-size", 1)
        if dp > 1 and group.shape.nodes > 1 and situation.version >= (0, 5, 20):
            yield group.role, "dp-size", f"dp-size: {dp} over {group.shape.nodes} nodes", f"attn-dp-size: {dp}"


def _roles(situation: Situation) -> Iterator[Problem]:
    for role in ("prefill", "decode"):
        if not any(group.role == role for group in situation.groups):
            yield role, "groups", "no such group", "one group of this role"


def _tp_covers_gpus(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        ranks = group.tp * group.number("pp-size", 1)
        if ranks != group.gpus:
            nodes = group.shape.nodes
            yield group.role, "tp-size", f"{ranks} ranks", f"{group.gpus} ({nodes} nodes of {group.gpus // nodes} GPUs)"


def _attention_dp(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        if group.attention_dp < 1 or group.tp % group.attention_dp:
            yield group.role, "attn-dp-size", str(group.attention_dp), f"a divisor of tp-size {group.tp}"


def _experts_divide(situation: Situation) -> Iterator[Problem]:
    experts = _integer(situation.config, "n_routed_experts")
    for group in situation.groups:
        if experts and group.ep > 1 and (experts + group.redundant) % group.ep:
            low = group.redundant - (experts + group.redundant) % group.ep
            choices = [n for n in (low, low + group.ep) if n >= 0]
            yield (
                group.role,
                "ep-num-redundant-experts",
                f"{group.redundant}: ({experts} + {group.redundant}) / {group.ep} is no whole number",
                " or ".join(str(n) for n in choices),
            )


def _block_divides(situation: Situation) -> Iterator[Problem]:
    quantization = situation.config.get("quantization_config") or {}
    block = (quantization.get("weight_block_size") or [0])[0]
    dense = _integer(situation.config, "intermediate_size")
    expert = _integer(situation.config, "moe_intermediate_size")
    if quantization.get("quant_method") != "fp8" or not block:
        return
    for group in situation.groups:
        dense_tp = group.number("moe-dense-tp-size", group.tp)
        if dense and dense % (dense_tp * block):
            got = f"{dense} / {dense_tp} is no multiple of {block}"
            yield group.role, "moe-dense-tp-size", got, "1"
        expert_tp = max(group.tp // group.ep, 1)
        if expert and expert % (expert_tp * block):
            got = f"{expert} / {expert_tp} is no multiple of {block}"
            yield group.role, "ep-size", got, f"experts over at most {expert // block} ranks each: raise ep-size"


def _low_latency(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        mode = str(group.options.get("deepep-mode", "auto"))
        if group.deepep and group.tp >= _LOW_LATENCY_ONLY_FROM_RANKS and mode != "low_latency":
            yield group.role, "deepep-mode", mode, "low_latency"


def _dispatch_tokens(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        if not group.deepep or group.options.get("deepep-mode") != "low_latency":
            continue
        text = group.env.get(DISPATCH_TOKENS_ENV, str(_DISPATCH_TOKENS_DEFAULT))
        tokens = int(text) if text.isdigit() else 0
        running = -(-group.number("max-running-requests", 0) // max(group.attention_dp, 1))
        graph = group.number("cuda-graph-bs-decode", 0)
        if tokens < max(running, graph) or not 1 <= tokens <= _DISPATCH_TOKENS_LIMIT:
            wanted = f"at least {max(running, graph, 1)} and at most {_DISPATCH_TOKENS_LIMIT}"
            yield group.role, DISPATCH_TOKENS_ENV, text, f"{wanted} (requests a rank {running}, graph batch {graph})"


def _context(situation: Situation) -> Iterator[Problem]:
    if situation.workload is None:
        return
    limit = _integer(situation.config, "max_position_embeddings")
    for group in situation.groups:
        length = group.number("context-length", limit)
        needed = situation.workload.input_tokens + (situation.workload.output_tokens if group.role == "decode" else 1)
        if length and length < needed:
            yield group.role, "context-length", str(length), f"at least {needed} for the workload of the gates"


def _safety(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        watchdog = group.options.get("watchdog-timeout")
        if watchdog is not None and not 0 < _float(watchdog) <= _MAX_WATCHDOG_S:
            yield group.role, "watchdog-timeout", str(watchdog), f"above 0 and at most {_MAX_WATCHDOG_S:.0f} s"
        for name, most in _SAFETY_TIMEOUTS_S.items():
            if name in group.env and not 0 < _float(group.env[name]) <= most:
                yield group.role, name, group.env[name], f"above 0 and at most {most:.0f} s"


def _served_name(situation: Situation) -> Iterator[Problem]:
    for group in situation.groups:
        name = group.options.get("served-model-name")
        if name is not None:
            yield (
                group.role,
                "served-model-name",
                str(name),
                f"left out: {situation.profile.served_model_name} for both",
            )


def _equal(option: str, default: str) -> Callable[[Situation], Iterator[Problem]]:
    def check(situation: Situation) -> Iterator[Problem]:
        values = {group.role: str(group.options.get(option, default)) for group in situation.groups}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{role} {value}" for role, value in values.items())
            yield "prefill and decode", option, shown, "the same value"

    return check


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return -1.0


RULES: tuple[Rule, ...] = (
    Rule(
        "removed-option",
        "This engine version no longer takes the option, and refuses to start.",
        "Write the named option in its place.",
        "argparse of the sglang wheels 0.4.9.post2 to 0.5.23",
        _gone,
    ),
    Rule(
        "owned-option",
        "The option follows from the release and the cluster.",
        "Take it out of the profile.",
        "tasks.core.render",
        _owned,
    ),
    Rule("both-roles", "A disaggregated unit has one group of each role.", "Add the group.", "tasks.core.spec", _roles),
    Rule(
        "ranks-fill-nodes",
        "Every GPU of a group is one rank.",
        "Set tp-size (times pp-size) to nodes x GPUs of a node.",
        "sglang server_args: tp_size must be divisible by the number of nodes",
        _tp_covers_gpus,
    ),
    Rule(
        "attention-dp-divides",
        "Attention replicas share the ranks evenly.",
        "Choose a divisor of tp-size.",
        "sglang server_args",
        _attention_dp,
    ),
    Rule(
        "experts-divide",
        "Routed and redundant experts are spread evenly over the expert ranks; the engine stops on a bare assert.",
        "Choose another number of redundant experts.",
        "sglang eplb/expert_location.py: num_physical_experts % ep_size == 0",
        _experts_divide,
    ),
    Rule(
        "fp8-block-divides",
        "FP8 weights are scaled in blocks: a shard that is no whole number of blocks cannot be loaded.",
        "Set moe-dense-tp-size to 1, and spread experts by ep-size.",
        "config.json quantization_config.weight_block_size; sglang fp8 linear layers",
        _block_divides,
    ),
    Rule(
        "low-latency-only",
        "DeepEP's normal kernels do not cover this many ranks: the first batch stops the group.",
        "Set deepep-mode to low_latency.",
        "DeepEP before c939644; normal mode has no configuration for 96 ranks",
        _low_latency,
    ),
    Rule(
        "dispatch-tokens",
        "A rank may not dispatch more tokens than its low-latency buffer holds.",
        f"Set {DISPATCH_TOKENS_ENV} in the group's env, or lower max-running-requests or cuda-graph-bs-decode.",
        "sglang layers/moe/token_dispatcher/deepep.py; default 128, at most 1024",
        _dispatch_tokens,
    ),
    Rule(
        "context-holds-workload",
        "Requests of the release's own workload would be refused.",
        "Raise context-length or leave it out.",
        "release: gates.workload",
        _context,
    ),
    Rule(
        "safety-on",
        "The timeout is what ends a hang; so large it is switched off.",
        "Leave it out: the engine's default is meant for production.",
        "MoonshotAI deploy_guidance.md sets them off for a benchmark",
        _safety,
    ),
    Rule(
        "served-names-equal",
        "Prefill and decode advertise one name, or clients get 404 by chance.",
        "Set served_model_name of the profile.",
        "OME kimi-k2-pd-rt.yaml sets it on decode only",
        _served_name,
    ),
    Rule(
        "kv-page-equal",
        "KV pages are copied between the roles byte for byte.",
        "Give both roles the same value.",
        "sglang disaggregation: page size is exchanged, not converted",
        _equal("page-size", "default"),
    ),
    Rule(
        "kv-dtype-equal",
        "KV pages are copied between the roles byte for byte.",
        "Give both roles the same value.",
        "sglang disaggregation: no conversion of the KV type",
        _equal("kv-cache-dtype", "auto"),
    ),
    Rule(
        "transfer-backend-equal",
        "Both ends of a KV transfer speak one protocol.",
        "Give both roles the same value.",
        "sglang --disaggregation-transfer-backend, default mooncake",
        _equal("disaggregation-transfer-backend", "mooncake"),
    ),
)
