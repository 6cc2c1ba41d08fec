"""Serves SGLang's HTTP API of one engine group."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from infra.rehearsal.engine import ENGINE_VERSION, journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.dialects import (
    BadRequest,
    ChatExchange,
    CompletionExchange,
    Exchange,
    GenerateExchange,
)
from infra.rehearsal.engine.performance import PerformanceModel, RequestTimes
from infra.rehearsal.engine.scheduler import Scheduler
from infra.rehearsal.engine.transfer import TransferFault

_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/ping", "/metrics"})
_MAX_BODY_BYTES = 64 * 1024 * 1024
_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


def _error(message: str, status: int, kind: str = "BadRequestError") -> web.Response:
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return web.json_response(body, status=status)


class EngineServer:
    """The API of a group's first node."""

    def __init__(
        self,
        engine: EngineArguments,
        model: PerformanceModel,
        scheduler: Scheduler,
        times: RequestTimes,
        startup: Mapping[str, float],
    ) -> None:
        self._engine = engine
        self._model = model
        self._scheduler = scheduler
        self._times = times
        self._startup = dict(startup)
        self._runner: web.AppRunner | None = None
        self.status = "Starting"

    async def start(self) -> None:
        """Listens on the engine's host and port; raises OSError when the address is taken."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        get, post = web.get, web.post
        app.add_routes(
            [
                get("/ready", self._ready),
                get("/ping", self._ping),
                get("/health", self._health),
                get("/health_generate", self._health),
                get("/server_info", self._server_info),
                get("/get_server_info", self._server_info),
                get("/model_info", self._model_info),
                get("/get_model_info", self._model_info),
                get("/v1/models", self._models),
                get("/v1/loads", self._loads),
                get("/get_load", self._load),
                get("/metrics", self._metrics),
                get("/flush_cache", self._flush),
                post("/flush_cache", self._flush),
                post("/abort_request", self._abort),
                post("/generate", self._generate),
                post("/v1/completions", self._generate),
                post("/v1/chat/completions", self._generate),
            ]
        )
        # A client that goes away cancels its handler, and so its request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._engine.host, self._engine.port).start()

    async def drain(self) -> int:
        """Waits for requests in flight within the grace; answers how many were left."""
        self.status = "ShuttingDown"
        deadline = time.monotonic() + self._times.drain_s
        while self._scheduler.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self._scheduler.in_flight

    async def stop(self) -> None:
        """Closes the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self._engine.api_key
        if key and request.path not in _OPEN_PATHS and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    # Health and descriptions

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.status == "Up" else 503)

    async def _ping(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        if self.status != "Up":
            return web.Response(status=503)
        await asyncio.sleep(self._times.health_wait_s)
        return web.Response(status=200 if self.status == "Up" else 503)

    async def _server_info(self, request: web.Request) -> web.Response:
        state = {
            "dp_rank": 0,
            "last_gen_throughput": self._scheduler.decode.throughput,
            "memory_usage": {"token_capacity": self._scheduler.max_total_tokens},
            "effective_max_running_requests_per_dp": self._engine.max_running_requests // self._engine.attn_dp_size,
            "startup_time": self._startup,
        }
        body = {
            **self._engine.resolved,
            "launch_command": list(self._engine.launch_command),
            "version": ENGINE_VERSION,
            "frontend": "python",
            "status": "ready" if self.status == "Up" else self.status,
            "startup_time": self._startup,
            "max_total_num_tokens": self._scheduler.max_total_tokens,
            "max_req_input_len": self._engine.context_length - 1,
            "internal_states": [state],
            "simulated": True,
            "rehearsal": self._model.describe(),
        }
        return web.json_response(body)

    async def _model_info(self, request: web.Request) -> web.Response:
        resolved = self._engine.resolved
        return web.json_response(
            {
                "model_path": resolved["model_path"],
                "served_model_name": self._engine.served_model_name,
                "tokenizer_path": resolved["tokenizer_path"],
                "is_generation": True,
                "preferred_sampling_params": resolved["preferred_sampling_params"],
                "weight_version": resolved["weight_version"],
                "load_format": resolved["load_format"],
                "reasoning_parser": resolved["reasoning_parser"],
                "tool_call_parser": resolved["tool_call_parser"],
                "disaggregation_mode": self._engine.mode,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._engine.model.model_type,
                "architectures": [self._engine.model.architecture],
                "simulated": True,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        name = self._engine.served_model_name
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        card |= {"parent": None, "max_model_len": self._engine.context_length}
        return web.json_response({"object": "list", "data": [card]})

    # Load and metrics

    def _gauges(self) -> dict[str, float]:
        scheduler, link = self._scheduler, self._scheduler.link
        used = scheduler.used_tokens
        queues = scheduler.queues()
        return {
            "num_running_reqs": scheduler.running,
            "num_queue_reqs": scheduler.queued,
            "num_used_tokens": used,
            "kv_used_tokens": used,
            "max_total_num_tokens": scheduler.max_total_tokens,
            "token_usage": used / scheduler.max_total_tokens,
            "gen_throughput": scheduler.decode.throughput if scheduler.running else 0.0,
            "cache_hit_rate": 0.0,
            "num_retracted_reqs": 0,
            "num_prefill_bootstrap_queue_reqs": queues["prefill_bootstrap_queue_reqs"],
            "num_prefill_inflight_queue_reqs": queues["prefill_inflight_queue_reqs"],
            "num_decode_prealloc_queue_reqs": queues["decode_prealloc_queue_reqs"],
            "num_decode_transfer_queue_reqs": queues["decode_transfer_queue_reqs"],
            "kv_transfer_speed_gb_s": link.speed_gb_s,
            "kv_transfer_latency_ms": link.latency_ms,
            "kv_transfer_total_mb": link.total_mb,
            "startup_time_seconds": self._startup["total"],
            "weight_load_duration_seconds": self._startup["load"],
        }

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._engine.enable_metrics:
            return web.Response(status=404, text="metrics need --enable-metrics")
        return web.Response(text=self._scheduler.metrics.text(self._gauges()), content_type="text/plain")

    async def _load(self, request: web.Request) -> web.Response:
        # Gone from SGLang 0.5.23, but sglang-router 0.3.2 asks for it under power_of_two.
        scheduler = self._scheduler
        load = {
            "dp_rank": 0,
            "num_reqs": scheduler.in_flight,
            "num_waiting_reqs": scheduler.queued,
            "num_tokens": scheduler.used_tokens,
        }
        return web.json_response([load])

    async def _loads(self, request: web.Request) -> web.Response:
        include = set((request.query.get("include") or "all").replace(" ", "").split(","))
        if not include <= _SECTIONS:
            return _error(f"Invalid include sections: {include - _SECTIONS}", 400)
        load = self._load_of_group(include)
        if request.query.get("format") == "prometheus":
            return web.Response(text=_load_lines(load), content_type="text/plain")
        return web.json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": ENGINE_VERSION,
                "accelerator": None,
                "num_accelerators": self._engine.tp_size,
                "loads": [load],
            }
        )

    def _load_of_group(self, include: set[str]) -> dict[str, Any]:
        """Answers the load of the whole group as one data-parallel rank."""
        scheduler, link = self._scheduler, self._scheduler.link
        used = scheduler.used_tokens
        load: dict[str, Any] = {
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": scheduler.queued,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": scheduler.max_total_tokens,
            "max_running_requests": self._engine.max_running_requests,
            "token_usage": used / scheduler.max_total_tokens,
            "gen_throughput": scheduler.decode.throughput if scheduler.running else 0.0,
            "cache_hit_rate": 0.0,
            "utilization": scheduler.running / self._engine.max_running_requests,
        }
        if include & {"disagg", "all"}:
            load["disaggregation"] = {
                "mode": self._engine.mode,
                **scheduler.queues(),
                "kv_transfer_speed_gb_s": link.speed_gb_s,
                "kv_transfer_latency_ms": link.latency_ms,
            }
        if include & {"queues", "all"}:
            load["queues"] = {"waiting": scheduler.queued, "grammar": 0, "paused": 0, "retracted": 0}
        return load

    # Requests

    async def _flush(self, request: web.Request) -> web.Response:
        if self._scheduler.in_flight:
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting.\n")
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        if isinstance(body, web.Response):
            return body
        self._scheduler.abort(body.get("rid"), bool(body.get("abort_all")))
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        if isinstance(body, web.Response):
            return body
        form: type[ChatExchange] | type[CompletionExchange] | type[GenerateExchange] = GenerateExchange
        if request.path != "/generate":
            form = ChatExchange if "chat" in request.path else CompletionExchange
        engine = self._engine
        try:
            exchange = form.read(body, engine.served_model_name, engine.context_length, engine.bootstrap_port)
            self._check_pairing(exchange)
        except BadRequest as refused:
            return _error(str(refused), 400)
        try:
            if exchange.work.streaming:
                return await self._stream(request, exchange)
            return await self._whole(exchange)
        except TransferFault as fault:
            return _error(str(fault), 500, "InternalServerError")

    def _check_pairing(self, exchange: Exchange) -> None:
        work = exchange.work
        if self._engine.mode == "null" or self._engine.transfer_backend == "fake":
            return
        if work.bootstrap is None:
            raise BadRequest(f"Disaggregated request received without bootstrap room id. rid='{work.rid}'")

    async def _whole(self, exchange: Exchange) -> web.Response:
        parts: list[str] = []
        tokens, finish = 0, "abort"
        async with aclosing(self._scheduler.generate(exchange.work)) as generation:
            async for progress in generation:
                parts.append(progress.text)
                tokens, finish = progress.tokens, progress.finish or finish
        return web.json_response(exchange.answer("".join(parts), tokens, finish))

    async def _stream(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Streams events; the status line waits for the first token, so that a failed hand-over is a real 500."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        whole = ""
        async with aclosing(self._scheduler.generate(exchange.work)) as generation:
            async for progress in generation:
                events = exchange.event(progress.text, whole := whole + progress.text, progress.tokens, progress.finish)
                if not response.prepared:
                    await response.prepare(request)
                    events = [*exchange.opening(), *events]
                await response.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def set_up(self) -> None:
        """Lets health checks pass."""
        self.status = "Up"
        journal.info("The server is fired up and ready to roll!")


def _load_lines(load: Mapping[str, Any]) -> str:
    lines = []
    for key, value in load.items():
        if isinstance(value, int | float) and key != "dp_rank":
            lines += [f"# TYPE sglang_{key} gauge", f'sglang_{key}{{dp_rank="0"}} {value}']
    return "\n".join(lines) + "\n"


async def _json_object(request: web.Request) -> dict[str, Any] | web.Response:
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as broken:
        return _error(f"Invalid JSON: {broken}", 400)
    if not isinstance(body, dict):
        return _error("The request body must be a JSON object", 400)
    return body
