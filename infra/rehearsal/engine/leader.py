"""Runs the first node of a group: gathers the others, starts up, serves the API, drains, leaves."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.group import GroupLeader, HostTable, split_address
from infra.rehearsal.engine.injection import Injections
from infra.rehearsal.engine.lifetime import TERMINATED_EARLY, distributed, either
from infra.rehearsal.engine.performance import PerformanceModel, RequestTimes
from infra.rehearsal.engine.phases import Startup
from infra.rehearsal.engine.scheduler import Scheduler
from infra.rehearsal.engine.server import EngineServer
from infra.rehearsal.engine.transfer import BootstrapServer


async def lead(
    engine: EngineArguments, model: PerformanceModel, env: Mapping[str, str], terminated: asyncio.Event
) -> int:
    """Lives until SIGTERM; answers the exit code. Raises GroupLost when a worker goes away."""
    born = time.monotonic()
    leader = GroupLeader(engine.nnodes, model.parameters.group, engine.rank)
    if engine.nnodes > 1:
        assert engine.dist_init_addr is not None
        host, port = split_address(engine.dist_init_addr)
        own = env.get("POD_IP") or await HostTable(env).address(host, plainly=True)
        await leader.bind(own or host, port)
    startup = Startup(engine, model)

    async def start_up() -> None:
        await distributed(engine, model, leader.assemble())
        await startup.run()
        await leader.wait_loaded()

    if await either(terminated, start_up(), leader.watch()):
        return TERMINATED_EARLY
    return await _serve(engine, model, env, terminated, leader, startup, born)


async def _serve(
    engine: EngineArguments,
    model: PerformanceModel,
    env: Mapping[str, str],
    terminated: asyncio.Event,
    leader: GroupLeader,
    startup: Startup,
    born: float,
) -> int:
    times = _request_times(model, env)
    scheduler = Scheduler(engine, model, times, Injections(env), startup.max_total_tokens)
    seconds = {"load": startup.weight_load_s, "total": time.monotonic() - born + model.startup_s("warmup")}
    server = EngineServer(engine, model, scheduler, times, seconds)
    bootstrap = BootstrapServer(scheduler.rooms, _parallel_info(engine))
    if engine.mode == "prefill":
        await bootstrap.start(engine.host, engine.bootstrap_port)
    await server.start()

    async def serve() -> None:
        if engine.mode != "null":
            journal.info("Start of pd disaggregation warmup ...")
        await asyncio.sleep(model.startup_s("warmup"))
        if engine.mode != "null":
            journal.info(f"Disaggregation warmup requests completed for all {engine.attn_dp_size} DP ranks")
            journal.info("End of disaggregation warmup")
        server.set_up()
        # What was made until now lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        await scheduler.decode.run()

    loop = asyncio.ensure_future(serve())
    watch = asyncio.ensure_future(leader.watch())
    drain = asyncio.ensure_future(_drain(server, terminated))
    done, _ = await asyncio.wait({loop, watch, drain}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    await leader.stop()
    await server.stop()
    await bootstrap.stop()
    await scheduler.link.close()
    for task in (loop, watch):
        task.cancel()
    await asyncio.gather(loop, watch, return_exceptions=True)
    return 0


async def _drain(server: EngineServer, terminated: asyncio.Event) -> None:
    await terminated.wait()
    journal.info("SIGTERM received. Draining requests and shutting down...")
    left = await server.drain()
    journal.info(f"Gracefully exiting... remaining number of requests {left}")


def _request_times(model: PerformanceModel, env: Mapping[str, str]) -> RequestTimes:
    times = model.parameters.requests
    bootstrap = env.get("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT")
    waiting = env.get("SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    return replace(
        times,
        bootstrap_timeout_s=float(bootstrap) if bootstrap else times.bootstrap_timeout_s,
        waiting_timeout_s=float(waiting) if waiting else times.waiting_timeout_s,
    )


def _parallel_info(engine: EngineArguments) -> dict[str, Any]:
    return {
        "attn_tp_size": engine.tp_size // engine.attn_dp_size,
        "attn_cp_size": 1,
        "dp_size": engine.attn_dp_size,
        "pp_size": 1,
        "page_size": engine.page_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "follow_bootstrap_room": True,
        "prefill_http_port": engine.port,
    }
