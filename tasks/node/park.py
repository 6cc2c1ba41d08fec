"""`python -m tasks.node.park`: answers every request 503 + Retry-After, on purpose, while nothing serves.

Only the standard library: the pod must start where no engine image and no package is at hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass

_HEAD_LIMIT_BYTES = 64 * 1024
_IDLE_S = 75.0
_BODY_S = 60.0
_DRAIN_S = 2.0
_LAST_ANSWERS_S = 5.0


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    keep_alive: bool


class ParkingServer:
    """An HTTP server that says, in the form an OpenAI client reads, that the service is parked."""

    def __init__(self, host: str, port: int, *, retry_after_s: int) -> None:
        self.host, self.port = host, port
        self._retry_after_s = retry_after_s
        self._draining = False
        self._idle: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a port of 0 becomes the one that was given."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=_HEAD_LIMIT_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, *, drain_s: float = _DRAIN_S) -> None:
        """Answer on for a moment, then end.

        SIGTERM and the news that this pod is leaving set out at the same time: a request that arrives before every
        gateway has heard is still answered, and told not to use the connection again.
        """
        self._draining = True
        await asyncio.sleep(drain_s)
        if self._server is not None:
            self._server.close()
        for writer in self._idle:
            writer.close()
        if self._open:
            await asyncio.wait(self._open, timeout=_LAST_ANSWERS_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
            pass  # the other side is gone, or does not speak HTTP
        finally:
            writer.close()
            if task is not None:
                self._open.discard(task)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        self._idle.add(writer)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE_S)
        finally:
            self._idle.discard(writer)
        request = _parse(head)
        await asyncio.wait_for(_discard_body(reader, writer, request), _BODY_S)
        keep = request.keep_alive and not self._draining
        writer.write(self._answer(request, keep))
        await writer.drain()
        return keep

    def _answer(self, request: _Request, keep: bool) -> bytes:
        lines = ["Content-Type: application/json", f"Connection: {'keep-alive' if keep else 'close'}"]
        if request.path.partition("?")[0] == "/healthz":
            status, body = "200 OK", json.dumps({"status": "parked"}).encode()
        else:
            status, body = "503 Service Unavailable", parked_body(self._retry_after_s)
            lines.append(f"Retry-After: {self._retry_after_s}")
        lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()
        return head if request.method == "HEAD" else head + body


def parked_body(retry_after_s: int) -> bytes:
    """Return the error that an OpenAI client shows."""
    message = f"The service is parked on purpose while a release is under way. Try again in {retry_after_s} seconds."
    return json.dumps(
        {"error": {"message": message, "type": "service_unavailable", "param": None, "code": "parked"}}
    ).encode()


def _parse(head: bytes) -> _Request:
    """Read request line and headers.

    Raises:
        ValueError: they are not HTTP/1.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    connection = headers.get("connection", "").lower()
    keep = connection == "keep-alive" if version == "HTTP/1.0" else connection != "close"
    return _Request(method, path, headers, keep)


async def _discard_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: _Request) -> None:
    """Read the body away: an answer followed by a close with unread bytes would reach the client as a reset."""
    if request.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in request.headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            await _discard(reader, size + 2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return
    await _discard(reader, int(request.headers.get("content-length", "0")))


async def _discard(reader: asyncio.StreamReader, size_bytes: int) -> None:
    while size_bytes > 0:
        piece = await reader.read(min(size_bytes, _HEAD_LIMIT_BYTES))
        if not piece:
            raise EOFError
        size_bytes -= len(piece)


async def _run(host: str, port: int, retry_after_s: int, drain_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = ParkingServer(host, port, retry_after_s=retry_after_s)
    await server.start()
    print(f"parking at http://{server.host}:{server.port}: every request is answered 503", flush=True)
    await stop.wait()
    await server.stop(drain_s=drain_s)


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tasks.node.park", description=__doc__)
    parser.add_argument("--host", required=True, help="address to listen on, such as the pod's own")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--retry-after-s", type=int, default=30, help="what callers are told to wait")
    parser.add_argument("--drain-s", type=float, default=_DRAIN_S, help="how long to answer on after SIGTERM")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(arguments.host, arguments.port, arguments.retry_after_s, arguments.drain_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
