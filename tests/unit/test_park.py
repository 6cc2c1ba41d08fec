"""The parking server answers everything, the way HTTP clients and gateways need it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from infra.rehearsal.addresses import free_ports
from tasks.node.park import ParkingServer

HOST = "127.0.0.1"


def parked(check: Callable[[ParkingServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ParkingServer(HOST, 0, retry_after_s=30)
        await server.start()
        await check(server)
        await server.stop(drain_s=0)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_every_request_is_503_and_says_when_to_come_back(method: str) -> None:
    async def check(server: ParkingServer) -> None:
        url = f"http://{HOST}:{server.port}/v1/chat/completions?x=1"
        async with aiohttp.ClientSession() as session, session.request(method, url, data=b"x" * 300_000) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            text = await response.text()
        if method == "HEAD":
            assert text == ""
            return
        error = json.loads(text)["error"]
        assert (error["code"], error["type"]) == ("parked", "service_unavailable")
        assert "on purpose" in error["message"]

    parked(check)


def test_health_is_200() -> None:
    async def check(server: ParkingServer) -> None:
        async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{server.port}/healthz") as response:
            assert response.status == 200

    parked(check)


def test_connection_is_used_again_after_bodies_of_both_forms() -> None:
    async def check(server: ParkingServer) -> None:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        sized = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
        chunked = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n"
        for request in (sized, chunked, sized):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"Connection: keep-alive" in head
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
        writer.write(b"not http\r\n\r\n")
        assert await reader.read() == b""
        writer.close()

    parked(check)


def test_stop_answers_to_the_end_and_closes_what_is_idle() -> None:
    async def check(server: ParkingServer) -> None:
        idle, _ = await asyncio.open_connection(HOST, server.port)
        busy, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe")
        while not (len(server._open) == 2 and len(server._idle) == 1):  # both accepted, one with a request begun
            await asyncio.sleep(0.005)
        stopping = asyncio.create_task(server.stop(drain_s=0))
        assert await idle.read() == b""
        writer.write(b"llo")
        answer = await busy.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Connection: close" in answer
        await stopping

    parked(check)


def test_program_ends_on_sigterm() -> None:
    port = free_ports(1, HOST)[0]
    command = [sys.executable, "-m", "tasks.node.park", "--host", HOST, "--port", str(port), "--drain-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert str(port) in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 0
