"""Parses SGLang's command line as strictly as SGLang does and makes the decisions that SGLang makes from it.

``options.json`` is the complete option table of SGLang 0.5.23 (names, types, choices, defaults; read from the wheel's
own ``add_cli_args``). Unknown options, ambiguous abbreviations and bad choices end in argparse's message and exit
code 2; failed checks end in SGLang's assertion text and exit code 1. Not checked here because it needs hardware:
``--disaggregation-ib-device`` against /sys/class/infiniband, and whether the weights fit the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.rehearsal.engine import journal

_TABLE = Path(__file__).with_name("options.json")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_SIZE_UNITS = {
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_DEFAULT_MAX_RUNNING = 2048
_DEFAULT_DISPATCH_TOKENS = 128


class ArgumentFault(AssertionError):
    """An argument list that parses but cannot be served; the text is SGLang's."""


@dataclass(frozen=True)
class ModelConfig:
    """The keys of the checkpoint's config.json that an engine decides by."""

    architecture: str
    model_type: str
    routed_experts: int
    layers: int
    max_positions: int
    kv_elements_per_token: int


@dataclass(frozen=True)
class EngineArguments:
    """One engine process: its own options, resolved, beside the full resolved table."""

    model_dir: Path
    model: ModelConfig
    checksum_file: Path | None
    served_model_name: str
    host: str
    port: int
    api_key: str | None
    tp_size: int
    attn_dp_size: int
    ep_size: int
    redundant_experts: int
    nnodes: int
    node_rank: int
    dist_init_addr: str | None
    mode: str
    transfer_backend: str
    bootstrap_port: int
    context_length: int
    max_running_requests: int
    max_total_tokens: int | None
    mem_fraction_static: float
    kv_cache_dtype: str
    page_size: int
    decode_graph_sizes: tuple[int, ...]
    low_latency_dispatch: bool
    dispatch_tokens_per_rank: int
    decode_log_interval: int
    enable_metrics: bool
    launch_command: tuple[str, ...]
    resolved: Mapping[str, Any]

    @property
    def is_leader(self) -> bool:
        """True on the one node that serves the API."""
        return self.node_rank == 0

    @property
    def local_ranks(self) -> int:
        """GPUs of this node."""
        return self.tp_size // self.nnodes

    @property
    def first_rank(self) -> int:
        """The lowest global rank on this node."""
        return self.node_rank * self.local_ranks

    @property
    def rank(self) -> str:
        """The rank part of this node's log lines."""
        return journal.rank_prefix(self.first_rank, self.attn_dp_size, self.ep_size)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, unit = match.groups()
    if "." in number and unit.endswith("i"):
        raise argparse.ArgumentTypeError(f"Decimals are not allowed with IEC suffixes like '{unit}'.")
    return int(float(number) * _SIZE_UNITS[unit])


_TYPES: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "json": json.loads, "size": _size}


class _Deprecated(argparse.Action):
    """Stores True and says which flag to use instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, use: str = "", **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=True, default=False, **kwargs)
        self.use = use

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        print(
            f"'{option}' is deprecated and will be removed in a future release. Use '{self.use}' instead.",
            file=sys.stderr,
        )
        setattr(namespace, self.dest, True)


def _add(parser: argparse.ArgumentParser, row: Mapping[str, Any]) -> None:
    names, dest, default = row["names"], row["dest"], row.get("default")
    kind = row["kind"]
    if kind == "flag":
        parser.add_argument(*names, dest=dest, action="store_true", default=bool(default))
    elif kind == "toggle":
        parser.add_argument(*names, dest=dest, action=argparse.BooleanOptionalAction, default=default)
    elif kind == "deprecated":
        parser.add_argument(*names, dest=dest, action=_Deprecated, use=row["use"])
    else:
        extra = {key: row[key] for key in ("nargs", "const", "choices", "required") if key in row}
        parser.add_argument(*names, dest=dest, type=_TYPES[row["type"]], default=default, **extra)


def parser() -> argparse.ArgumentParser:
    """Answers a parser with every option of SGLang 0.5.23, abbreviations allowed as there."""
    result = argparse.ArgumentParser(prog="sglang serve")
    for row in json.loads(_TABLE.read_text(encoding="utf-8"))["options"]:
        _add(result, row)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses ``argv``; exits with code 2 and argparse's message where SGLang would."""
    return parser().parse_args(list(argv))


def _require(condition: object, text: str) -> None:
    if not condition:
        raise ArgumentFault(text)


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and makes sure that the directory is a safetensors checkpoint with an index."""
    if not model_dir.is_dir():
        raise OSError(f"{model_dir} is not a local folder and the hub is not reachable: cannot load the configuration")
    path = model_dir / "config.json"
    if not path.is_file():
        raise OSError(f"{model_dir} does not appear to have a file named config.json.")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not (model_dir / "model.safetensors.index.json").is_file():
        raise OSError(f"Cannot find any model weights with `{model_dir}`: no model.safetensors.index.json")
    return ModelConfig(
        architecture=(config.get("architectures") or ["DeepseekV3ForCausalLM"])[0],
        model_type=config.get("model_type", "kimi_k2"),
        routed_experts=int(config.get("n_routed_experts") or 0),
        layers=int(config["num_hidden_layers"]),
        max_positions=int(config["max_position_embeddings"]),
        kv_elements_per_token=(int(config.get("kv_lora_rank") or 512) + int(config.get("qk_rope_head_dim") or 64))
        * int(config["num_hidden_layers"]),
    )


def _resolve_parallelism(values: dict[str, Any]) -> None:
    if values["enable_dp_attention"] and values["dp_size"] > 1:
        values["attn_dp_size"], values["dp_size"] = values["dp_size"], 1
    if values["moe_a2a_backend"] in ("deepep", "deepep_v2") and values["ep_size"] != values["tp_size"]:
        journal.warning(
            f"DeepEP MoE is enabled. The expert parallel size is adjusted to be the same as the "
            f"tensor parallel size[{values['tp_size']}]."
        )
        values["ep_size"] = values["tp_size"]
    tp, nnodes = values["tp_size"], values["nnodes"]
    _require((tp * values["pp_size"]) % nnodes == 0, "tp_size must be divisible by number of nodes")
    _require(
        not (values["dp_size"] > 1 and nnodes != 1),
        "multi-node data-parallel replicas are not supported; use attention DP (--attn-dp-size) across nodes",
    )
    _require(tp % values["attn_dp_size"] == 0, "tp_size must be divisible by attn_dp_size * attn_cp_size")
    _require(tp % values["ep_size"] == 0, "tp_size must be divisible by ep_size")
    _require(
        values["moe_dense_tp_size"] in (None, 1, tp),
        "moe_dense_tp_size only supports None, 1, or tp_size currently",
    )
    _require(0 <= values["node_rank"] < nnodes, f"node_rank {values['node_rank']} is outside of nnodes {nnodes}")
    _require(nnodes == 1 or values["dist_init_addr"], "dist_init_addr is required when nnodes > 1")


def _check_experts(values: Mapping[str, Any], model: ModelConfig) -> None:
    physical = model.routed_experts + values["ep_num_redundant_experts"]
    _require(
        physical % values["ep_size"] == 0,
        f"num_physical_experts % ep_size == 0 failed: ({model.routed_experts} + "
        f"{values['ep_num_redundant_experts']}) % {values['ep_size']} = {physical % values['ep_size']}",
    )
    _require(not values["enable_eplb"] or values["ep_size"] > 1, "enable_eplb requires ep_size > 1")


def _resolve_schedule(values: dict[str, Any], model: ModelConfig, env: Mapping[str, str]) -> None:
    longest = model.max_positions
    asked = values["context_length"]
    if (
        asked
        and asked > longest
        and env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "").lower() not in ("1", "true")
    ):
        raise ValueError(
            f"User-specified context_length ({asked}) is greater than the derived context_length ({longest}). "
            "To allow overriding this maximum, set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
    values["context_length"] = asked or longest
    values["page_size"] = values["page_size"] or 1
    values["chunked_prefill_size"] = values["chunked_prefill_size"] or 8192
    if values["attn_dp_size"] > 1 and values["chunked_prefill_size"] > 0:
        values["chunked_prefill_size"] //= values["attn_dp_size"]
        journal.warning(
            "DP attention is enabled. The chunked prefill size is adjusted to "
            f"{values['chunked_prefill_size']} to avoid MoE kernel issues."
        )
    if values["disaggregation_mode"] != "decode" and values["chunked_prefill_size"] > 0:
        _require(
            values["chunked_prefill_size"] % values["page_size"] == 0,
            "chunked_prefill_size must be divisible by page_size",
        )
    if values["disaggregation_mode"] == "decode" and not values["disaggregation_decode_enable_radix_cache"]:
        values["disable_radix_cache"] = True
    values["max_running_requests"] = values["max_running_requests"] or _DEFAULT_MAX_RUNNING
    values["mem_fraction_static"] = values["mem_fraction_static"] or 0.85


def _check_simulated(values: Mapping[str, Any]) -> None:
    """Refuses what would be believed and not done."""
    _require(not values["config"], "the simulated engine reads no --config file: give the options themselves")
    _require(
        values["host"] not in ("0.0.0.0", "::"),
        f"--host {values['host']}: one such bind takes the port from every pod of this machine; give the pod's address",
    )
    checksum = values["model_checksum"]
    _require(
        checksum is None or Path(checksum).is_file(),
        f"--model-checksum {checksum!r}: the simulated engine has no hub; give the path of a checksum list",
    )


def _check_names(values: dict[str, Any]) -> None:
    values["served_model_name"] = values["served_model_name"] or values["model_path"]
    values["tokenizer_path"] = values["tokenizer_path"] or values["model_path"]
    _require(
        ":" not in values["served_model_name"],
        "served_model_name cannot contain a colon (':') character. The colon is reserved for the 'model:adapter' "
        f"syntax used in LoRA adapter specification. Invalid value: '{values['served_model_name']}'",
    )


def resolve(
    namespace: argparse.Namespace, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> EngineArguments:
    """Makes SGLang's decisions from a parsed command line and the checkpoint; raises where it would stop."""
    env = os.environ if env is None else env
    values: dict[str, Any] = dict(vars(namespace))
    model_dir = Path(values["model_path"])
    model = read_model_config(model_dir)
    _check_simulated(values)
    _check_names(values)
    _resolve_parallelism(values)
    _check_experts(values, model)
    _resolve_schedule(values, model, env)
    dispatch = int(env.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", _DEFAULT_DISPATCH_TOKENS))
    _require(dispatch <= 1024, "self.num_max_dispatch_tokens_per_rank <= 1024")
    return EngineArguments(
        model_dir=model_dir,
        model=model,
        checksum_file=Path(values["model_checksum"]) if values["model_checksum"] is not None else None,
        served_model_name=values["served_model_name"],
        host=values["host"],
        port=values["port"],
        api_key=values["api_key"],
        tp_size=values["tp_size"],
        attn_dp_size=values["attn_dp_size"],
        ep_size=values["ep_size"],
        redundant_experts=values["ep_num_redundant_experts"],
        nnodes=values["nnodes"],
        node_rank=values["node_rank"],
        dist_init_addr=values["dist_init_addr"],
        mode=values["disaggregation_mode"],
        transfer_backend=values["disaggregation_transfer_backend"],
        bootstrap_port=values["disaggregation_bootstrap_port"],
        context_length=values["context_length"],
        max_running_requests=values["max_running_requests"],
        max_total_tokens=values["max_total_tokens"],
        mem_fraction_static=values["mem_fraction_static"],
        kv_cache_dtype=values["kv_cache_dtype"],
        page_size=values["page_size"],
        decode_graph_sizes=_graph_sizes(values),
        low_latency_dispatch=values["moe_a2a_backend"] == "deepep" and values["deepep_mode"] == "low_latency",
        dispatch_tokens_per_rank=dispatch,
        decode_log_interval=max(1, values["decode_log_interval"]),
        enable_metrics=values["enable_metrics"],
        launch_command=tuple(argv),
        resolved=values,
    )


def _graph_sizes(values: Mapping[str, Any]) -> tuple[int, ...]:
    disabled = (
        values["disable_cuda_graph"]
        or values["disable_decode_cuda_graph"]
        or values["cuda_graph_backend_decode"] == "disabled"
        or (values["moe_a2a_backend"] == "deepep" and values["deepep_mode"] == "normal")
    )
    if disabled or values["disaggregation_mode"] == "prefill":
        return ()
    return tuple(values["cuda_graph_bs_decode"] or (1, 2, 4, 8, 16, 24, 32, 64, 128))
