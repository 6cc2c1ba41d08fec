"""The HTTPS server of each node that `kubectl logs` reaches through the API server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp import web

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.nodes.machines import LOG_PORT, Machine

_CHUNK_BYTES = 64 * 1024
_FOLLOW_S = 0.25


@dataclass(frozen=True)
class LogSource:
    """One container's log file, and whether more may come."""

    path: Path
    growing: Callable[[], bool]


class LogFinder(Protocol):
    """Knows the logs and the pods of the nodes."""

    def find_log(self, namespace: str, pod: str, container: str, *, previous: bool) -> LogSource | None:
        """Return a container's log; None when there is no such container or run."""

    def pods_of(self, node: str) -> list[JsonObject]:
        """Return the pods bound to a node."""


class LogServer:
    """Serves the logs of all nodes, each node on its own address and on the kubelet's port."""

    def __init__(self, machines: Sequence[Machine], finder: LogFinder, tls: ssl.SSLContext) -> None:
        self._by_address = {machine.address: machine for machine in machines}
        self._finder = finder
        self._tls = tls
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on every node's address."""
        app = web.Application(middlewares=[self._refuse_lost])
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/pods", self._pods)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_route("*", "/{anything:.*}", _not_here)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        for address in self._by_address:
            await web.TCPSite(self._runner, address, LOG_PORT, ssl_context=self._tls, backlog=16).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _machine(self, request: web.Request) -> Machine:
        name = request.transport.get_extra_info("sockname") if request.transport else None
        return self._by_address[name[0] if name else request.host.partition(":")[0]]

    @web.middleware
    async def _refuse_lost(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._machine(request).lost:
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPServiceUnavailable
        return await handler(request)

    async def _pods(self, request: web.Request) -> web.Response:
        items = self._finder.pods_of(self._machine(request).name)
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        part, query = request.match_info, request.query
        previous = query.get("previous", "false") in ("true", "1")
        source = self._finder.find_log(part["namespace"], part["pod"], part["container"], previous=previous)
        if source is None:
            which = "previous terminated container" if previous else "container"
            raise web.HTTPNotFound(text=f'{which} "{part["container"]}" in pod "{part["pod"]}" not found\n')
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        follow = query.get("follow", "false") in ("true", "1")
        tail = int(query["tailLines"]) if "tailLines" in query else None
        limit = int(query["limitBytes"]) if "limitBytes" in query else None
        since_s = float(query["sinceSeconds"]) if "sinceSeconds" in query else None
        # Whoever follows a log goes away when he has seen enough.
        with contextlib.suppress(ConnectionResetError):
            async for chunk in read_log(source, tail_lines=tail, follow=follow, since_s=since_s):
                if limit is not None:
                    chunk, limit = chunk[:limit], limit - len(chunk)
                await response.write(chunk)
                if limit is not None and limit <= 0:
                    break
            await response.write_eof()
        return response


async def read_log(
    source: LogSource, *, tail_lines: int | None = None, follow: bool = False, since_s: float | None = None
) -> AsyncIterator[bytes]:
    """Yield a log from its last lines (or its beginning) to its end, and go on while the container runs.

    Lines carry no time of their own: `since_s` leaves out a file that was not written to for so long, as a whole.
    """
    if not source.path.exists():
        if not follow:
            return
        while source.growing() and not source.path.exists():
            await asyncio.sleep(_FOLLOW_S)
        if not source.path.exists():
            return
    with source.path.open("rb") as file:
        if since_s is not None and time.time() - source.path.stat().st_mtime > since_s:
            file.seek(0, 2)
        elif tail_lines is not None:
            file.seek(tail_offset(source.path, tail_lines))
        while True:
            growing = source.growing()
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            if not (follow and growing):
                return
            await asyncio.sleep(_FOLLOW_S)


def tail_offset(path: Path, lines: int) -> int:
    """Return where the last lines of a file begin, reading backwards."""
    with path.open("rb") as file:
        position = end = file.seek(0, 2)
        if lines <= 0:
            return end
        # A newline at the very end closes the last line and opens none.
        wanted = lines
        first = True
        while position > 0:
            step = min(_CHUNK_BYTES, position)
            position -= step
            file.seek(position)
            block = file.read(step)
            at = len(block)
            if first and block.endswith(b"\n"):
                at -= 1
            first = False
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
                if wanted == 0:
                    return position + at + 1
    return 0


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _not_here(request: web.Request) -> web.Response:
    return web.Response(status=501, text=f"the rehearsal's nodes serve logs only, not {request.path}\n")
