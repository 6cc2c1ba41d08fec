"""Joins the processes of one engine into a group that lives and dies together, over plain TCP.

The leader (node rank 0) binds the port of ``--dist-init-addr`` on its own address; the others connect to it, say which
rank they are, and send a heartbeat. Lines of JSON both ways:
worker ``{"rank", "nnodes"}`` then ``{"phase"}`` (the heartbeat) · leader ``{"joined"}`` or
``{"refused"}``, then ``{"beat"}``, ``{"go"}`` once all are there, ``{"stop"}`` at the end.
Whoever loses the other side raises GroupLost, as a collective operation would.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.performance import GroupTimes

_REPLY_TIMEOUT_S = 2.0


class GroupLost(Exception):
    """Another member of the group is gone, or never came."""


class GroupStopped(Exception):
    """The leader told this worker to stop."""


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port``."""
    host, _, port = address.rpartition(":")
    return host, int(port)


class HostTable:
    """Resolves host names through the JSON file that K2_REHEARSAL_HOSTS names, else plainly."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("K2_REHEARSAL_HOSTS")
        self._path = Path(path) if path else None

    async def address(self, host: str, plainly: bool = False) -> str | None:
        """Answers the address of a host, None while it is not known; the file is read anew each time."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(self._path.read_text(encoding="utf-8")).get(host)
                if known:
                    return str(known)
            if not plainly:
                return None
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            found = await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo(host, None), timeout=_REPLY_TIMEOUT_S)
            return str(found[0][4][0])
        return None


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, timeout_s: float) -> dict[str, Any]:
    """Reads one message; raises ConnectionError at the end of the stream, TimeoutError when nothing comes."""
    line = await asyncio.wait_for(reader.readline(), timeout=timeout_s)
    if not line:
        raise ConnectionResetError("Connection closed by peer")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ConnectionResetError("not a message of this group")
    return message


class GroupLeader:
    """Rank 0's side: waits for every worker, then watches them."""

    def __init__(self, nnodes: int, times: GroupTimes, rank: str) -> None:
        self._nnodes = nnodes
        self._times = times
        self._rank = rank
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._phases: dict[int, str] = {}
        self._changed = asyncio.Condition()
        self._lost: GroupLost | None = None
        self._stopping = False

    async def bind(self, host: str, port: int) -> None:
        """Listens for workers; raises OSError when the address is taken."""
        self._server = await asyncio.start_server(self._serve, host, port)

    async def assemble(self) -> None:
        """Waits until every worker has connected."""
        await self._until(
            lambda: len(self._writers) == self._nnodes - 1,
            lambda: (
                f"Timed out after {self._times.assemble_s:.0f}s waiting for clients. "
                f"{len(self._writers) + 1}/{self._nnodes} clients joined; missing node ranks {self._missing()}"
            ),
        )
        for writer in self._writers.values():
            await _send(writer, {"go": True})

    async def wait_loaded(self) -> None:
        """Waits until every worker has finished its own start-up phases."""
        await self._until(
            lambda: all(self._phases.get(rank) == "loaded" for rank in range(1, self._nnodes)),
            lambda: (
                "TP rank 0 could finish the model loading, but there are other ranks that didn't finish loading. "
                "It is likely due to unexpected failures (e.g., OOM) or a slow node. Node ranks and their phases: "
                f"{self._phases}"
            ),
        )

    async def watch(self) -> None:
        """Waits for ever; raises GroupLost as soon as a worker is gone."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost is not None)
        assert self._lost is not None
        raise self._lost

    async def stop(self) -> None:
        """Tells every worker to stop and closes the port."""
        self._stopping = True
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                await asyncio.wait_for(_send(writer, {"stop": True}), timeout=1.0)
                writer.close()
        if self._server is not None:
            self._server.close()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._nnodes) if rank not in self._writers]

    async def _until(self, done: Callable[[], bool], complaint: Callable[[], str]) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._lost is not None or done()), timeout=self._times.assemble_s
                )
            except TimeoutError:
                raise GroupLost(complaint()) from None
        if self._lost is not None:
            raise self._lost

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await _receive(reader, self._times.heartbeat_timeout_s)
            rank = int(hello.get("rank", -1))
        except (ConnectionError, TimeoutError, ValueError):
            writer.close()  # a probe of the port, not a member
            return
        refusal = self._refusal(rank, hello)
        if refusal:
            journal.warning(f"Refused a client of the process group: {refusal}", self._rank)
            with contextlib.suppress(OSError):
                await _send(writer, {"refused": refusal})
            writer.close()
            return
        self._writers[rank] = writer
        with contextlib.suppress(OSError):  # _follow() sees the loss
            await _send(writer, {"joined": True})
        await self._notify()
        await self._follow(rank, reader, writer)

    def _refusal(self, rank: int, hello: Mapping[str, Any]) -> str | None:
        if hello.get("nnodes") != self._nnodes:
            return f"node rank {rank} was started with nnodes={hello.get('nnodes')}, this leader with {self._nnodes}"
        if not 0 < rank < self._nnodes:
            return f"node rank {rank} is outside of nnodes {self._nnodes}"
        if rank in self._writers:
            return f"node rank {rank} is already in the group"
        return None

    async def _follow(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await _receive(reader, self._times.heartbeat_timeout_s)
                if self._phases.get(rank) != message.get("phase"):
                    self._phases[rank] = str(message.get("phase"))
                    await self._notify()
                await _send(writer, {"beat": True})
        except (OSError, TimeoutError, ValueError) as fault:
            if not self._stopping:
                self._lost = GroupLost(
                    f"NCCL error: remote process exited or there was a network error. Lost node rank {rank} "
                    f"in phase '{self._phases.get(rank, 'distributed')}': {type(fault).__name__} {fault}"
                )
                await self._notify()
        finally:
            writer.close()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class GroupWorker:
    """The side of every other rank: connects to the leader and stays connected."""

    def __init__(self, rank: int, nnodes: int, times: GroupTimes, hosts: HostTable) -> None:
        self._rank = rank
        self._nnodes = nnodes
        self._times = times
        self._hosts = hosts
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._go = asyncio.Event()
        self.phase = "distributed"

    async def join(self, host: str, port: int) -> None:
        """Connects to the leader, trying until the group's deadline; ``watch`` has to run from then on."""
        deadline = time.monotonic() + self._times.assemble_s
        while True:
            late = deadline - time.monotonic() < self._times.assemble_s / 2
            address = await self._hosts.address(host, plainly=late)
            if address is not None and await self._try(address, port):
                return
            if time.monotonic() > deadline:
                raise GroupLost(
                    "The client socket has timed out after "
                    f"{self._times.assemble_s * 1000:.0f}ms while trying to connect to ({host}, {port})."
                )
            await asyncio.sleep(self._times.connect_retry_s)

    async def _try(self, address: str, port: int) -> bool:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout=2.0)
        except (OSError, TimeoutError):
            return False
        try:
            await _send(writer, {"rank": self._rank, "nnodes": self._nnodes})
            reply = await _receive(reader, _REPLY_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError):
            writer.close()
            return False
        if "refused" in reply:
            # The rank's earlier process may just not be buried yet.
            journal.warning(f"Refused by the leader: {reply['refused']}")
            writer.close()
            await asyncio.sleep(1.0)
            return False
        self._reader, self._writer = reader, writer
        return True

    async def watch(self) -> None:
        """Sends heartbeats for ever; raises GroupLost when the leader is gone, GroupStopped at its word."""
        assert self._reader is not None
        beats = asyncio.ensure_future(self._beat())
        try:
            while True:
                message = await _receive(self._reader, self._times.heartbeat_timeout_s)
                if message.get("stop"):
                    raise GroupStopped
                if message.get("go"):
                    self._go.set()
        except (OSError, TimeoutError, ValueError) as fault:
            raise GroupLost(
                "NCCL error: remote process exited or there was a network error. Lost node rank 0 (the leader): "
                f"{type(fault).__name__} {fault}"
            ) from None
        finally:
            beats.cancel()

    async def assembled(self) -> None:
        """Waits until the leader says that every rank has joined."""
        try:
            await asyncio.wait_for(self._go.wait(), timeout=self._times.assemble_s)
        except TimeoutError:
            raise GroupLost("Timed out waiting for the other ranks of the group") from None

    async def announce(self, phase: str) -> None:
        """Tells the leader which start-up phase this rank is in."""
        assert self._writer is not None
        self.phase = phase
        with contextlib.suppress(OSError):  # watch() sees the loss
            await _send(self._writer, {"phase": phase})

    async def _beat(self) -> None:
        while True:
            await self.announce(self.phase)
            await asyncio.sleep(self._times.heartbeat_s)
