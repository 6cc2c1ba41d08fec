"""What the last lines of an engine's log say: the phase of its start-up, and known causes of death.

A line that is not known stays unknown: evidence is shown, a cause is never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LogPhase:
    """A phase of the start-up with what the line says about it."""

    phase: str
    detail: str


@dataclass(frozen=True)
class Signature:
    """A line that has one known cause. `fatal`: starting again cannot help."""

    pattern: re.Pattern[str]
    category: str
    summary: str
    resolution: str
    fatal: bool


@dataclass(frozen=True)
class Cause:
    """A signature with the line that it matched."""

    signature: Signature
    line: str


_PHASES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"The server is fired up and ready to roll"), "Warming", "server is up"),
    (re.compile(r"Capturing batches.*"), "Capturing graphs", "{0}"),
    (re.compile(r"Capture .{0,60}\bend\b"), "Warming", "graphs captured"),
    (re.compile(r"Capture .{0,60}\bbegin\b"), "Capturing graphs", ""),
    (re.compile(r"DeepGEMM (?:warmup|JIT).{0,20}?(\d+%)"), "Compiling kernels", "{1}"),
    (re.compile(r"DeepGEMM.{0,40}(?:warmup|JIT)"), "Compiling kernels", ""),
    (re.compile(r"KV Cache is allocated|Memory pool end"), "Allocating KV cache", ""),
    (re.compile(r"Load weight end"), "Allocating KV cache", "weights loaded"),
    (
        re.compile(r"Loading safetensors checkpoint shards:\s*(\d+)% Completed \| (\d+)/(\d+)"),
        "Loading",
        "{1}% ({2} of {3} shards)",
    ),
    (re.compile(r"Loading safetensors checkpoint shards:\s*(\d+)%"), "Loading", "{1}%"),
    (re.compile(r"Load weight begin"), "Loading", "0%"),
    (re.compile(r"Init torch distributed|rendezvous|process group"), "Connecting ranks", ""),
)


def _signature(pattern: str, category: str, summary: str, resolution: str, *, fatal: bool) -> Signature:
    return Signature(re.compile(pattern), category, summary, resolution, fatal)


SIGNATURES: tuple[Signature, ...] = (
    _signature(
        r"error: (unrecognized arguments|ambiguous option|argument )",
        "arguments",
        "The engine does not take an argument.",
        "Correct the profile: this engine version lacks the option; preflight names known replacements.",
        fatal=True,
    ),
    _signature(
        r"num_physical_experts % ep_size|tp_size must be divisible|moe_dense_tp_size only supports",
        "arguments",
        "The arguments do not fit the model and the topology.",
        "Correct the profile; the line names the rule.",
        fatal=True,
    ),
    _signature(
        r"num_max_dispatch_tokens_per_rank",
        "arguments",
        "A batch is larger than DeepEP's low-latency buffer.",
        "Set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK to the largest batch of a GPU.",
        fatal=True,
    ),
    _signature(
        r"SafetensorError|MetadataIncompleteBuffer|HeaderTooLarge",
        "integrity",
        "A shard cannot be read.",
        "Run the verification Job on this node; it names the file that differs from the lock.",
        fatal=True,
    ),
    _signature(
        r"CUDA out of memory|OutOfMemoryError|Not enough memory\. Please try to increase",
        "memory",
        "The GPUs do not hold weights, buffers and KV cache.",
        "Lower mem-fraction-static, the dispatch tokens or the batch; see the memory rules of the plan.",
        fatal=True,
    ),
    _signature(
        r"system not yet initialized|CUDA error.{0,20}\b802\b",
        "node",
        "The NVLink fabric of the node is not up.",
        "Restart nvidia-fabricmanager on the node, in the driver's version; cordon it until then.",
        fatal=True,
    ),
    _signature(
        r"Address already in use",
        "node",
        "A port of the engine is taken.",
        "Find the process that was left on the node and end it.",
        fatal=True,
    ),
    _signature(
        r"ibv_(modify|create|reg)_\w+.{0,80}(fail|errno|\b110\b|\b12\b)|failed to modify QP",
        "network",
        "RDMA between nodes fails.",
        "Compare GID index, MTU and HCA list of the nodes; test the pair that fails.",
        fatal=False,
    ),
    _signature(
        r"Watchdog caught collective operation timeout",
        "network",
        "A collective operation timed out; the cause is in the rank that is silent.",
        "Look at the last lines of all ranks, the silent one first.",
        fatal=False,
    ),
    _signature(
        r"failed to register to bootstrap server",
        "network",
        "A prefill rank is not known to the bootstrap server; it looks healthy all the same.",
        "Check that port 8998 of the prefill leader is reachable from all pods.",
        fatal=False,
    ),
)


def read_phase(log: str) -> LogPhase | None:
    """Return the newest known phase of a log's last lines; None if there is none."""
    for line in reversed(re.split(r"[\r\n]+", log)):
        for pattern, phase, detail in _PHASES:
            match = pattern.search(line)
            if match:
                return LogPhase(phase, detail.format(match.group(0), *match.groups()))
    return None


def find_cause(log: str) -> Cause | None:
    """Return the first known cause in a log, in the order of its lines; None if there is none."""
    for line in re.split(r"[\r\n]+", log):
        for signature in SIGNATURES:
            if signature.pattern.search(line):
                return Cause(signature, line.strip())
    return None


def last_line(log: str) -> str:
    """Return the last line of a log as the end of a sentence; empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"; last line: {lines[-1][:200]}" if lines else ""
