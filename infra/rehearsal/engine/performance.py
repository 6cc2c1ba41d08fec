"""Answers how long things take: prefill, decode steps, KV transfer and start-up, from ``performance.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

_FILE = Path(__file__).with_name("performance.yaml")


class GroupShape(Protocol):
    """What the model needs to know of an engine group."""

    @property
    def tp_size(self) -> int: ...  # noqa: D102
    @property
    def kv_cache_dtype(self) -> str: ...  # noqa: D102
    @property
    def model(self) -> KvShape: ...  # noqa: D102


class KvShape(Protocol):
    """What the model needs to know of a checkpoint."""

    @property
    def kv_elements_per_token(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class GroupTimes:
    """Patience of a group of processes with one another."""

    assemble_s: float
    connect_retry_s: float
    heartbeat_s: float
    heartbeat_timeout_s: float


@dataclass(frozen=True)
class RequestTimes:
    """Waits and deadlines of single requests."""

    health_wait_s: float
    bootstrap_timeout_s: float
    waiting_timeout_s: float
    drain_s: float


@dataclass(frozen=True)
class Parameters:
    """The file's contents."""

    throughput_scale: float
    startup_scale: float
    prefill_tok_per_s_node: float
    prefill_floor_s: float
    decode_tok_per_s_node: float
    decode_batch_per_gpu: int
    decode_floor_s: float
    gpu_memory_gb: float
    weights_gb: float
    gpus_per_node: int
    kv_element_bytes: int
    transfer_gb_per_s_node: float
    startup_s: dict[str, float]
    group: GroupTimes
    requests: RequestTimes

    def for_group(self, shape: GroupShape) -> PerformanceModel:
        """Answers the model of one group of this shape."""
        element_bytes = 1 if "fp8" in shape.kv_cache_dtype else self.kv_element_bytes
        return PerformanceModel(
            parameters=self,
            nodes=shape.tp_size / self.gpus_per_node,
            kv_bytes_per_token=shape.model.kv_elements_per_token * element_bytes,
        )


@dataclass(frozen=True)
class PerformanceModel:
    """Times of one group; ``nodes`` is its GPUs over the GPUs of a node."""

    parameters: Parameters
    nodes: float
    kv_bytes_per_token: int

    @property
    def prefill_tok_per_s(self) -> float:
        """Scaled prefill rate of the group."""
        return self.parameters.prefill_tok_per_s_node * self.nodes * self.parameters.throughput_scale

    @property
    def transfer_bytes_per_s(self) -> float:
        """Scaled KV rate of the group."""
        return self.parameters.transfer_gb_per_s_node * 1e9 * self.nodes * self.parameters.throughput_scale

    @property
    def full_batch(self) -> float:
        """Scaled number of sequences at which decode reaches its peak rate."""
        p = self.parameters
        return p.decode_batch_per_gpu * p.gpus_per_node * self.nodes * p.throughput_scale

    def decode_step_s(self, batch: int) -> float:
        """Answers the time of one decode step for ``batch`` running sequences."""
        p = self.parameters
        full_step_s = p.decode_batch_per_gpu * p.gpus_per_node / p.decode_tok_per_s_node
        return p.decode_floor_s + (full_step_s - p.decode_floor_s) * batch / self.full_batch

    def startup_s(self, phase: str) -> float:
        """Answers the scaled seconds of a start-up phase."""
        return self.parameters.startup_s[phase] * self.parameters.startup_scale

    def describe(self) -> dict[str, Any]:
        """Answers real and scaled figures side by side, for /server_info."""
        p = self.parameters
        scale = p.throughput_scale
        return {
            "simulated": True,
            "throughput_scale": scale,
            "startup_scale": p.startup_scale,
            "nodes": self.nodes,
            "prefill_tok_per_s_node": {"published": p.prefill_tok_per_s_node, "here": p.prefill_tok_per_s_node * scale},
            "decode_tok_per_s_node": {"published": p.decode_tok_per_s_node, "here": p.decode_tok_per_s_node * scale},
            "decode_full_batch_group": {"published": self.full_batch / scale, "here": self.full_batch},
            "kv_transfer_gb_per_s_node": {
                "assumed": p.transfer_gb_per_s_node,
                "here": p.transfer_gb_per_s_node * scale,
            },
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "startup_s": {
                "assumed": sum(p.startup_s.values()),
                "here": sum(p.startup_s.values()) * p.startup_scale,
            },
        }


def load(path: Path = _FILE) -> Parameters:
    """Reads the parameters."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    raw = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506
    prefill, decode, gpu, kv = raw["prefill"], raw["decode"], raw["gpu"], raw["kv"]
    return Parameters(
        throughput_scale=raw["throughput_scale"],
        startup_scale=raw["startup_scale"],
        prefill_tok_per_s_node=prefill["tok_per_s_node"],
        prefill_floor_s=prefill["floor_s"],
        decode_tok_per_s_node=decode["tok_per_s_node"],
        decode_batch_per_gpu=decode["batch_per_gpu"],
        decode_floor_s=decode["floor_s"],
        gpu_memory_gb=gpu["memory_gb"],
        weights_gb=gpu["weights_gb"],
        gpus_per_node=gpu["gpus_per_node"],
        kv_element_bytes=kv["element_bytes"],
        transfer_gb_per_s_node=kv["transfer_gb_per_s_node"],
        startup_s=dict(raw["startup_s"]),
        group=GroupTimes(**raw["group"]),
        requests=RequestTimes(**raw["requests"]),
    )
