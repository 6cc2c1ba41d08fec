"""Simulated engines and the real sglang-router in front of them, as processes of a test."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests

from infra.rehearsal.addresses import SubnetLease

ROOT = Path(__file__).resolve().parents[2]
# Addresses of this run alone until it ends, so that two runs on one machine do not meet.
LEASE = SubnetLease.acquire()
WAITING_TIMEOUT_S = 5
READY_WITHIN_S = 90
ENGINE_PORT, ROUTER_PORT, BOOTSTRAP_PORT = 30000, 30080, 8998


def make_checkpoint(directory: Path, shards: int = 4) -> Path:
    """Writes a tiny safetensors checkpoint with Kimi K2's config keys."""
    directory.mkdir(parents=True)
    weight_map = {}
    for index in range(1, shards + 1):
        name = f"model-{index}-of-{shards}.safetensors"
        tensor = f"model.layers.{index}.mlp.experts.0.gate_proj.weight"
        header = json.dumps({tensor: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        (directory / name).write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * 16)
        weight_map[tensor] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "num_hidden_layers": 61,
        "max_position_embeddings": 131072,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass
class Processes:
    """The running processes."""

    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: list[str], address: str) -> None:
        env = {
            **os.environ,
            "POD_IP": address,
            "POD_NAME": f"k2-test-{name}-0",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAITING_TIMEOUT_S),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(WAITING_TIMEOUT_S),
        }
        with (self.logs / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=30)


def engine_command(model: Path, mode: str, address: str) -> list[str]:
    return [
        sys.executable, "-m", "infra.rehearsal.engine", "--model-path", str(model), "--served-model-name", "kimi-k2",
        "--trust-remote-code", "--host", address, "--port", str(ENGINE_PORT), "--tp-size", "8", "--attn-dp-size", "8",
        "--moe-a2a-backend", "deepep", "--moe-dense-tp-size", "1", "--disaggregation-mode", mode,
        "--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", "8998",
        "--ep-num-redundant-experts", "8", "--enable-eplb", "--enable-metrics", "--tool-call-parser", "kimi_k2",
        "--context-length", "4096",
        "--deepep-mode", "normal" if mode == "prefill" else "low_latency",
    ]  # fmt: skip


def router_command(
    address: str, prefill: Sequence[str], decode: Sequence[str], *options: str, health_interval_s: int = 2
) -> list[str]:
    """Return the command of a router in PD mode that listens on an address, with these engine addresses behind it."""
    workers = [part for at in prefill for part in ("--prefill", engine_url(at), str(BOOTSTRAP_PORT))]
    workers += [part for at in decode for part in ("--decode", engine_url(at))]
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--host", address, "--port", str(ROUTER_PORT),
        "--prometheus-host", address, "--prometheus-port", "29000", "--pd-disaggregation", *workers,
        "--policy", "round_robin", "--worker-startup-check-interval", "1",
        "--health-check-interval-secs", str(health_interval_s), "--health-check-timeout-secs", "30", *options,
    ]  # fmt: skip


def engine_url(address: str) -> str:
    """Return where an engine answers."""
    return f"http://{address}:{ENGINE_PORT}"


def until(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except requests.RequestException:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {within_s} s")
