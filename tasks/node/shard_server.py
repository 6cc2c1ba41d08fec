"""Serves verified files of a checkpoint to the other nodes of an exchange: read-only, by sha256, to who has the token.

An HTTP server of the standard library, whose bytes go from the page cache to the network by sendfile. What it answers
to `GET /<sha256>` (with or without one range):

200, 206  the bytes of a file that was verified on this node and is still the very file: same size, mtime and inode
503       this node is getting the file; ask again
404       this node does not have it, and is not getting it: it is another one's turn
410       this node has tried to get it and could not
401       no token, a wrong one, or one whose time is over; nothing else is told

Names come from a table of digests and never from the network, so no path can be asked for. Neither who asks nor with
what is logged.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tasks.core.errors import UnavailableError
from tasks.core.marker import StagedFile
from tasks.node.verified_file import READ_BLOCK_BYTES

if TYPE_CHECKING:
    from tasks.core.lock import LockedFile
    from tasks.ports import Block

TOKEN_LIFETIME_S = 900.0
_IDLE_S = 30.0
_MAX_CONNECTIONS = 256
_PIECE_BYTES = 64 * 1024 * 1024
_RETRY_AFTER_S = 1
_NAME = re.compile(r"/([0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Tokens:
    """Short-lived bearer tokens: a new one each half of a lifetime; the one before is good until its time is over."""

    def __init__(self, lifetime_s: float = TOKEN_LIFETIME_S, now: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s = lifetime_s
        self._now = now
        self._lock = threading.Lock()
        self._known: list[tuple[bytes, float]] = []

    def current(self) -> str:
        """Return a token that is good for at least half a lifetime more."""
        with self._lock:
            now = self._now()
            self._known = [(token, until) for token, until in self._known if until > now]
            if not self._known or self._known[-1][1] - now < self._lifetime_s / 2:
                self._known.append((secrets.token_urlsafe(32).encode(), now + self._lifetime_s))
            return self._known[-1][0].decode()

    def accepts(self, given: bytes) -> bool:
        """Say whether a token is good now; takes as long for a wrong one as for a right one."""
        with self._lock:
            now, known = self._now(), list(self._known)
        good = False
        for token, until in known:
            good |= hmac.compare_digest(token, given) and now < until
        return good


class Outlook(Enum):
    """What becomes of a blob that a node does not have, as the HTTP status that says so."""

    COMING = HTTPStatus.SERVICE_UNAVAILABLE
    ABSENT = HTTPStatus.NOT_FOUND
    FAILED = HTTPStatus.GONE


class Holdings:
    """Files of a lock that were verified on this node. Implements `ports.Source` on them, for second copies."""

    name = "disk"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._held: dict[str, StagedFile] = {}
        self._outlook: Callable[[str], Outlook] = lambda _: Outlook.ABSENT

    def expect(self, outlook: Callable[[str], Outlook]) -> None:
        """Take who says what becomes of a blob that is not here."""
        self._outlook = outlook

    def holds(self, file: StagedFile) -> None:
        """Note a file that was just verified, or that the marker vouches for."""
        with self._lock:
            self._held[file.sha256] = file

    def drop(self, sha256: str) -> None:
        """Vouch for a blob no more."""
        with self._lock:
            self._held.pop(sha256, None)

    def has(self, sha256: str) -> bool:
        """Say whether a file with these bytes was verified here."""
        with self._lock:
            return sha256 in self._held

    def outlook(self, sha256: str) -> Outlook:
        """Return what becomes of a blob that is not here."""
        return self._outlook(sha256)

    def find(self, sha256: str) -> BinaryIO | None:
        """Return the open file of a blob if it is still the one that was verified, else None."""
        with self._lock:
            file = self._held.get(sha256)
        if file is None:
            return None
        try:
            fd = os.open(self._directory / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        found = os.fstat(fd)
        same = (found.st_size, found.st_mtime_ns, found.st_ino) == (file.size_bytes, file.mtime_ns, file.inode)
        if not same or not stat.S_ISREG(found.st_mode):
            os.close(fd)
            return None
        return os.fdopen(fd, "rb", buffering=0)

    def open(self, file: LockedFile) -> Iterator[Block]:
        """Yield the bytes of a blob that is here under another name; UnavailableError if it is not."""
        found = self.find(file.sha256)
        if found is None:
            raise UnavailableError("K2-UNA-001", "The other copy is not what it was.", where=file.path)
        with found:
            view = memoryview(bytearray(READ_BLOCK_BYTES))
            while count := found.readinto(view):  # type: ignore[attr-defined]
                yield view[:count]


@dataclass
class Served:
    """What a server has given out so far."""

    bytes_served: int = 0
    active: int = 0


class ShardServer:
    """Serves holdings on one address while its context is open."""

    def __init__(self, host: str, port: int, holdings: Holdings, tokens: Tokens) -> None:
        self._served = Served()
        handler = _handler(holdings, tokens, self._served, threading.Lock())
        self._server = _Server((host, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> ShardServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_IDLE_S)

    @property
    def url(self) -> str:
        """Where others reach it."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    @property
    def bytes_served(self) -> int:
        """The bytes of files that it has sent."""
        return self._served.bytes_served

    @property
    def is_sending(self) -> bool:
        """Whether it is in the middle of an answer."""
        return self._served.active > 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service who we are, which can take seconds.
        import socketserver

        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever left in the middle asks again."""


def _handler(
    holdings: Holdings, tokens: Tokens, served: Served, counting: threading.Lock
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "k2", ""
        timeout = _IDLE_S

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if not tokens.accepts(_bearer(self.headers.get("Authorization", ""))):
                self._refuse(HTTPStatus.UNAUTHORIZED)
                return
            name = _NAME.fullmatch(self.path)
            if name is None:
                self._refuse(HTTPStatus.NOT_FOUND)
                return
            file = holdings.find(name[1])
            if file is None:
                self._refuse(holdings.outlook(name[1]).value)
                return
            with file:
                self._send(file, name[1], with_body=with_body)

        def _refuse(self, status: HTTPStatus, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            if status is HTTPStatus.SERVICE_UNAVAILABLE:
                headers = ("Retry-After", str(_RETRY_AFTER_S)), *headers
            for name, value in (*headers, ("Content-Length", "0"), ("Connection", "close")):
                self.send_header(name, value)
            self.end_headers()

        def _send(self, file: BinaryIO, sha256: str, *, with_body: bool) -> None:
            size_bytes = os.fstat(file.fileno()).st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            start, end = (int(asked[1]), int(asked[2] or size_bytes - 1) + 1) if asked else (0, size_bytes)
            end = min(end, size_bytes)
            if asked and start >= end:
                self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, ("Content-Range", f"bytes */{size_bytes}"))
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size_bytes}")
            self.send_header("ETag", f'"{sha256}"')
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if with_body:
                self._send_body(file, start, end)

        def _send_body(self, file: BinaryIO, start: int, end: int) -> None:
            with counting:
                served.active += 1
            try:
                while start < end:
                    sent = self.connection.sendfile(file, start, min(_PIECE_BYTES, end - start))
                    if not sent:
                        self.close_connection = True  # cut under us: the other side sees a short body
                        return
                    start += sent
                    with counting:
                        served.bytes_served += sent
            finally:
                with counting:
                    served.active -= 1

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def _bearer(header: str) -> bytes:
    kind, _, token = header.partition(" ")
    return token.strip().encode("latin-1", "replace") if kind == "Bearer" else b""
