"""Walks one node through SGLang's start-up: load, KV cache, JIT, graphs; each with its log lines and its time."""

from __future__ import annotations

import asyncio
import time

from infra.rehearsal.engine import checkpoint, journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.performance import PerformanceModel

_PROGRESS_EVERY_S = 0.1


class PhaseFault(RuntimeError):
    """A start-up phase that ends the engine; the text is what the real one dies with."""


class Startup:
    """The phases of one node between a complete group and a server that may be probed."""

    def __init__(self, engine: EngineArguments, model: PerformanceModel) -> None:
        self._engine = engine
        self._model = model
        self._available_gb = model.parameters.gpu_memory_gb - 1.2  # CUDA context
        self.weight_load_s = 0.0
        self.phase = "distributed"

    @property
    def max_total_tokens(self) -> int:
        """KV slots of the group, from the memory left beside the weights unless the arguments say."""
        if self._engine.max_total_tokens:
            return self._engine.max_total_tokens
        p = self._model.parameters
        left_gb = p.gpu_memory_gb * self._engine.mem_fraction_static - self._weights_gb
        per_rank = max(left_gb, 1.0) * 1e9 / self._model.kv_bytes_per_token
        return max(self._engine.context_length, int(per_rank)) * self._engine.attn_dp_size

    @property
    def _weights_gb(self) -> float:
        """Weights of one GPU: its share of the experts, redundant ones included, and the rest of the model."""
        experts = self._engine.model.routed_experts or 1
        physical = (experts + self._engine.redundant_experts) / experts
        return self._model.parameters.weights_gb * physical / self._engine.tp_size

    async def run(self) -> None:
        """Runs all phases; raises what the real engine would die of."""
        await self._load()
        await self._allocate_kv()
        await self._warm_deep_gemm()
        await self._capture_graphs()
        self.phase = "loaded"

    def _say(self, message: str) -> None:
        journal.info(message, self._engine.rank)

    async def _load(self) -> None:
        self.phase = "load"
        started = time.monotonic()
        self._say(f"Load weight begin. avail mem={self._available_gb:.2f} GB")
        directory = self._engine.model_dir
        self._verify_checksums()
        names = checkpoint.shard_names(directory)
        pause_s = self._model.startup_s("load") / len(names)
        said_at = 0.0
        for done, name in enumerate(names, start=1):
            path = directory / name
            try:
                checkpoint.read_shard(path)
            except checkpoint.SafetensorError as broken:
                raise PhaseFault(f"safetensors_rust.SafetensorError: {broken} ({path})") from broken
            now = time.monotonic()
            # Only rank 0 shows a progress bar in SGLang.
            if self._engine.is_leader and (now - said_at >= _PROGRESS_EVERY_S or done == len(names)):
                journal.progress(_progress_line(done, len(names), now - started))
                said_at = now
            # The pace is that of the whole load, so that reading time counts as part of it.
            await asyncio.sleep(max(0.0, started + pause_s * done - time.monotonic()))
        self.weight_load_s = time.monotonic() - started
        self._available_gb -= self._weights_gb
        self._say(
            f"Load weight end. elapsed={self.weight_load_s:.2f} s, type={self._engine.model.architecture}, "
            f"quant=fp8, avail mem={self._available_gb:.2f} GB, mem usage={self._weights_gb:.2f} GB."
        )

    def _verify_checksums(self) -> None:
        listing = self._engine.checksum_file
        if listing is not None:
            try:
                count = checkpoint.verify_checksums(self._engine.model_dir, listing)
            except checkpoint.IntegrityError as fault:
                raise PhaseFault(f"IntegrityError: {fault}") from fault
            journal.progress(f"[ModelFileVerifier] All {count} files verified successfully.")

    async def _allocate_kv(self) -> None:
        self.phase = "kv-cache"
        await asyncio.sleep(self._model.startup_s("kv_cache"))
        tokens = self.max_total_tokens // self._engine.attn_dp_size
        size_gb = tokens * self._model.kv_bytes_per_token / 1e9
        dtype = "torch.float8_e4m3fn" if "fp8" in self._engine.kv_cache_dtype else "torch.bfloat16"
        self._say(f"KV Cache is allocated. dtype: {dtype}, #tokens: {tokens}, KV size: {size_gb:.2f} GB")
        self._available_gb -= size_gb
        self._say(f"Memory pool end. avail mem={self._available_gb:.2f} GB")

    async def _warm_deep_gemm(self) -> None:
        self.phase = "deep-gemm"
        self._say("Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins)")
        await asyncio.sleep(self._model.startup_s("deep_gemm"))
        if self._engine.is_leader:
            journal.progress("DeepGEMM warmup: 100%|##########| 16384/16384")

    async def _capture_graphs(self) -> None:
        self.phase = "graphs"
        sizes = self._engine.decode_graph_sizes
        if not sizes:
            return
        self._say(
            f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs={list(sizes)}, "
            f"avail mem={self._available_gb:.2f} GB"
        )
        limit = self._engine.dispatch_tokens_per_rank
        if self._engine.low_latency_dispatch and max(sizes) > limit:
            raise PhaseFault(
                "Capture cuda graph failed: Failed: Assertion error deep_ep.cpp 'x.size(0) == topk_idx.size(0) and "
                f"x.size(0) <= num_max_dispatch_tokens_per_rank' (batch {max(sizes)}, limit {limit})"
            )
        await asyncio.sleep(self._model.startup_s("graphs"))
        self._available_gb -= 1.5
        self._say(
            f"Capture target decode CUDA graph end. elapsed={self._model.startup_s('graphs'):.2f} s, "
            f"mem usage=1.50 GB, avail mem={self._available_gb:.2f} GB."
        )


def _progress_line(done: int, total: int, elapsed_s: float) -> str:
    rate = done / max(elapsed_s, 1e-3)
    left_s = (total - done) / rate
    return (
        f"Loading safetensors checkpoint shards: {100 * done // total:3d}% Completed | {done}/{total} "
        f"[{_clock(elapsed_s)}<{_clock(left_s)}, {rate:.2f}it/s]"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
