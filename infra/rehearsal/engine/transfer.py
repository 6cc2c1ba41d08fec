"""Hands the KV cache of a bootstrap room from a prefill to a decode engine, as far as timing and failure go.

A prefill leader keeps the rooms and serves them on its bootstrap port. A decode asks for a room by a long poll: that is
the handshake, and the answer is the transferred KV. Neither side answers its client before the other was there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
_CONNECT_TIMEOUT_S = 5.0


class TransferFault(Exception):
    """A hand-over that failed; the text is SGLang's KVTransferError."""

    def __init__(self, room: int, reason: str) -> None:
        super().__init__(f"KVTransferError(bootstrap_room={room}): {reason}")


class BootstrapFault(TransferFault):
    """A room whose other side never came."""


class Room:
    """One request's meeting point."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.prefill_present = False
        self.decode_joined = asyncio.Event()
        self.outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # A failed room may have nobody left to read why.
        self.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())

    def fail(self, reason: str) -> None:
        """Ends the room for both sides."""
        if not self.outcome.done():
            self.outcome.set_exception(TransferFault(self.number, reason))

    def check(self) -> None:
        """Raises the room's fault if it has one."""
        if self.outcome.done():
            self.outcome.result()


class Rooms:
    """The rooms of one prefill leader."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def open(self, number: int) -> Room:
        """Takes the prefill's side of a room."""
        room = self._rooms.setdefault(number, Room(number))
        if room.prefill_present:
            raise TransferFault(number, "Duplicate bootstrap room")
        room.prefill_present = True
        return room

    async def wait_for_decode(self, room: Room, timeout_s: float) -> None:
        """Waits until the decode side of a room has asked for it."""
        try:
            await asyncio.wait_for(room.decode_joined.wait(), timeout=timeout_s)
        except TimeoutError:
            raise BootstrapFault(
                room.number, f"Request {room.number} timed out after {timeout_s:.1f}s in KVPoll.Bootstrapping"
            ) from None
        room.check()

    async def take(self, number: int) -> dict[str, Any]:
        """Takes the decode's side of a room and waits for its KV; raises TransferFault."""
        room = self._rooms.setdefault(number, Room(number))
        if room.decode_joined.is_set():
            raise TransferFault(number, "Duplicate decode bootstrap room")
        room.decode_joined.set()
        try:
            return await asyncio.shield(room.outcome)
        except asyncio.CancelledError:
            room.fail("Decode instance could be dead, remote session closed")
            raise
        finally:
            if not room.prefill_present:
                self._rooms.pop(number, None)

    def close(self, room: Room) -> None:
        """Gives the prefill's side of a room up; unfinished, it fails for the decode."""
        room.fail("Aborted by AbortReq.")
        self._rooms.pop(room.number, None)


class BootstrapServer:
    """The prefill leader's HTTP server for decodes."""

    def __init__(self, rooms: Rooms, description: Mapping[str, Any]) -> None:
        self._rooms = rooms
        self._description = dict(description)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens; raises OSError when the address is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/route", self._route),
                web.post("/rehearsal/rooms/{room}", self._room),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Closes the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _route(self, request: web.Request) -> web.Response:
        return web.json_response(self._description)

    async def _room(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(await self._rooms.take(int(request.match_info["room"])))
        except TransferFault as fault:
            return web.json_response({"reason": str(fault)}, status=409)
        except ValueError:
            return web.json_response({"reason": "not a room"}, status=400)


class DecodeLink:
    """The decode's side: asks prefill leaders for rooms."""

    def __init__(self, description: Mapping[str, Any], timeout_s: float) -> None:
        self._description = dict(description)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.waiting = 0
        self.speed_gb_s = 0.0
        self.latency_ms = 0.0
        self.total_mb = 0.0

    async def fetch(self, host: str, port: int, room: int) -> dict[str, Any]:
        """Waits for a room's KV; raises TransferFault when the prefill is gone, refuses, or does not come in time."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self.waiting += 1
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(self._session, host, port, room)
        except TimeoutError:
            raise BootstrapFault(
                room, f"Request {room} timed out after {time.monotonic() - started:.1f}s in KVPoll.WaitingForInput"
            ) from None
        finally:
            self.waiting -= 1

    async def _ask(self, session: aiohttp.ClientSession, host: str, port: int, room: int) -> dict[str, Any]:
        where = f"http://{host}:{port}/rehearsal/rooms/{room}"
        try:
            async with session.post(where, json=self._description) as reply:
                found: dict[str, Any] = await reply.json()
        except (aiohttp.ClientError, ValueError) as fault:
            raise TransferFault(
                room,
                f"Losing connection with prefill instance (bootstrap_addr: {host}:{port}): {type(fault).__name__}",
            ) from fault
        if reply.status != 200:
            raise TransferFault(room, str(found.get("reason", reply.status)))
        self._note(found)
        return found

    def _note(self, found: Mapping[str, Any]) -> None:
        seconds = max(float(found["seconds"]), 1e-6)
        self.speed_gb_s = float(found["bytes"]) / seconds / 1e9
        self.latency_ms = seconds * 1000
        self.total_mb = float(found["bytes"]) / 1e6

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
