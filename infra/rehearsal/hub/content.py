"""Sending a file or a part of it: byte ranges, pace, counted bytes, and two deliberate ways to go wrong."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PIECE_BYTES = 8 * 1024 * 1024
_LEAST_PIECE_BYTES = 16 * 1024
_PIECES_PER_S = 20


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes `start` to `end` (exclusive) of a file."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start


class RangeNotSatisfiableError(Exception):
    """The Range header asks for bytes that the file does not have."""


def requested_span(header: str | None, size_bytes: int) -> Span | None:
    """The part that a Range header asks for; None means the whole file.

    Several ranges, other units and malformed headers are ignored, as RFC 9110 allows.

    Raises:
        RangeNotSatisfiableError: The range starts at or after the end of the file.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        if int(last) == 0:
            raise RangeNotSatisfiableError
        return Span(max(0, size_bytes - int(last)), size_bytes)
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size_bytes:
        raise RangeNotSatisfiableError
    return Span(start, min(int(last) + 1, size_bytes) if last else size_bytes)


@dataclass
class Pace:
    """Holds all transfers together to `bytes_per_s`; None does not hold them at all."""

    bytes_per_s: int | None = None
    _free_at_s: float = 0.0

    @property
    def piece_bytes(self) -> int:
        """How much to send between two looks at the pace."""
        if self.bytes_per_s is None:
            return _PIECE_BYTES
        return max(_LEAST_PIECE_BYTES, min(_PIECE_BYTES, self.bytes_per_s // _PIECES_PER_S))

    async def admit(self, size_bytes: int) -> None:
        """Waits until `size_bytes` more may be sent."""
        if self.bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        await asyncio.sleep(start_s - now_s)


@dataclass
class PathTraffic:
    """What was asked and served under one path."""

    requests: int = 0
    ranged_requests: int = 0
    bytes_served: int = 0


@dataclass
class Traffic:
    """Counts requests, and bytes of file content (never of API answers), by path."""

    requests: int = 0
    bytes_served: int = 0
    by_path: dict[str, PathTraffic] = field(default_factory=dict)

    def asked(self, path: str, *, ranged: bool = False) -> None:
        """Counts a request."""
        self.requests += 1
        record = self.by_path.setdefault(path, PathTraffic())
        record.requests += 1
        record.ranged_requests += ranged

    def served(self, path: str, size_bytes: int) -> None:
        """Counts content bytes handed to the kernel."""
        self.bytes_served += size_bytes
        self.by_path.setdefault(path, PathTraffic()).bytes_served += size_bytes


@dataclass(frozen=True, slots=True)
class Body:
    """One answer's worth of a file.

    `flipped_byte` is the offset in the file of a byte whose lowest bit is served wrong; `cut_after_bytes` closes the
    connection after that much of this answer.
    """

    file: Path
    span: Span
    counted_as: str
    flipped_byte: int | None = None
    cut_after_bytes: int | None = None

    def pieces(self, piece_bytes: int) -> Iterator[Span]:
        """The span cut into pieces, so that a flipped byte is a piece of its own."""
        at = self.span.start
        flip = self.flipped_byte
        while at < self.span.end:
            end = min(at + piece_bytes, self.span.end)
            if flip is not None and at <= flip < end:
                end = flip if at < flip else flip + 1
            yield Span(at, end)
            at = end

    async def send(self, request: web.Request, response: web.StreamResponse, pace: Pace, traffic: Traffic) -> None:
        """Sends the span after the prepared headers, by sendfile wherever the bytes go out as they are."""
        budget = self.cut_after_bytes
        with self.file.open("rb", buffering=0) as file:
            for piece in self.pieces(pace.piece_bytes):
                if budget is not None:
                    piece = Span(piece.start, min(piece.end, piece.start + budget))
                    budget -= piece.length
                await pace.admit(piece.length)
                await self._send_piece(request, response, file, piece, traffic)
                if budget == 0:
                    hang_up(request)
                    return
        await response.write_eof()

    async def _send_piece(
        self, request: web.Request, response: web.StreamResponse, file: BinaryIO, piece: Span, traffic: Traffic
    ) -> None:
        if piece.length == 0:
            return
        file.seek(piece.start)
        if piece.start == self.flipped_byte:
            await response.write(bytes([file.read(1)[0] ^ 1]))
            traffic.served(self.counted_as, 1)
            return
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        try:
            loop = asyncio.get_running_loop()
            await loop.sendfile(request.transport, file, piece.start, piece.length)
        finally:
            # On a cut connection the file's position still tells how much went out.
            traffic.served(self.counted_as, file.tell() - piece.start)


def hang_up(request: web.Request) -> None:
    """Closes the connection of a request in the middle of its answer."""
    if request.transport is not None:
        request.transport.close()
