"""Runs a node other than the first: joins the leader, starts up, answers its health, leaves with the leader.

Most processes of a large group are of this kind, so nothing here needs an HTTP library.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Mapping

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.group import GroupStopped, GroupWorker, HostTable, split_address
from infra.rehearsal.engine.lifetime import TERMINATED_EARLY, distributed, either
from infra.rehearsal.engine.performance import PerformanceModel
from infra.rehearsal.engine.phases import Startup

_HEALTH_PATHS = frozenset({"/ping", "/health", "/health_generate"})
_REQUEST_TIMEOUT_S = 5.0


class HealthServer:
    """What a node other than the first answers: 200 on /health, as SGLang's dummy server does."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens; raises OSError when the address is taken."""
        self._server = await asyncio.start_server(self._answer, host, port)

    def stop(self) -> None:
        """Closes the port."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=_REQUEST_TIMEOUT_S)
            path = head.split(b" ", 2)[1].decode("latin-1").split("?")[0]
            status = b"200 OK" if path in _HEALTH_PATHS else b"404 Not Found"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


async def follow(
    engine: EngineArguments, model: PerformanceModel, env: Mapping[str, str], terminated: asyncio.Event
) -> int:
    """Lives until the leader says stop; answers the exit code. Raises GroupLost when the leader goes away."""
    assert engine.dist_init_addr is not None
    host, port = split_address(engine.dist_init_addr)
    worker = GroupWorker(engine.node_rank, engine.nnodes, model.parameters.group, HostTable(env))
    if await either(terminated, worker.join(host, port)):
        return TERMINATED_EARLY
    startup = Startup(engine, model)
    health = HealthServer()

    async def live() -> None:
        await distributed(engine, model, worker.assembled())
        await worker.announce("load")
        await startup.run()
        await worker.announce("loaded")
        await health.start(engine.host, engine.port)
        gc.collect()
        gc.freeze()
        await asyncio.Event().wait()

    # One reader for the whole life: a cancelled one could swallow the leader's last word.
    watch = asyncio.ensure_future(worker.watch())
    try:
        if await either(terminated, live(), asyncio.shield(watch)):
            await _await_release(engine, model, watch)
    except GroupStopped:
        pass
    finally:
        watch.cancel()
        health.stop()
    return 0


async def _await_release(engine: EngineArguments, model: PerformanceModel, watch: asyncio.Future[None]) -> None:
    """Waits after SIGTERM for the leader, which may still have requests to finish."""
    journal.warning(
        f"SIGTERM received on node_rank {engine.node_rank}; waiting for the rank-0 ShutdownReq broadcast to stop "
        "the schedulers."
    )
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(watch, timeout=model.parameters.requests.drain_s + 5)
