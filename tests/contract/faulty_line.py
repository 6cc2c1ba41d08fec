"""A TCP line between a client and a real server that cuts, holds, changes and loses what goes over it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

READ_BYTES = 64 * 1024


class FaultyLine:
    """Relays connections to a server; what it does wrong is set while it runs and holds for new bytes at once.

    Attributes:
        cut_after_bytes: a connection is reset when so many bytes of answers went over it.
        lost_answers: of so many requests the server's answer never arrives: the connection is reset in its place.
        changed: bytes of requests that arrive as other ones.
        held_after_bytes: a connection takes so many bytes of requests and then no more, until `release`.
        answers_held_after_bytes: so many bytes of answers come through on all connections together, and then no more
            until `release`.
        held: set while a connection is held.
    """

    def __init__(self, host: str, port: int) -> None:
        self.cut_after_bytes: int | None = None
        self.lost_answers = 0
        self.changed: tuple[bytes, bytes] | None = None
        self.held_after_bytes: int | None = None
        self.answers_held_after_bytes: int | None = None
        self.held = threading.Event()
        self._answered = 0
        self._server = (host, port)
        self._go_on = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients connect."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for side in left:
            _reset(side)

    def release(self) -> None:
        """Let held connections go on."""
        self.held_after_bytes = self.answers_held_after_bytes = None
        self._go_on.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            for relay, sides in ((self._up, (client, server)), (self._down, (server, client))):
                threading.Thread(target=self._relay, args=(relay, *sides), daemon=True).start()

    def _relay(self, relay: object, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, _CutError):
            relay(source, target)  # type: ignore[operator]
        for side in (source, target):
            _reset(side)
        with self._lock:
            self._open -= {source, target}

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        while data := client.recv(READ_BYTES):
            if self.changed is not None:
                data = data.replace(*self.changed)
            server.sendall(data)
            sent += len(data)
            if self.held_after_bytes is not None and sent >= self.held_after_bytes:
                self.held.set()
                self._go_on.wait(60)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        while data := server.recv(READ_BYTES):
            if self.lost_answers and not data.startswith(b"HTTP/1.1 100"):
                self.lost_answers -= 1
                raise _CutError
            if self.cut_after_bytes is not None:
                data = data[: self.cut_after_bytes - sent]
            self._answered += len(data)
            if self.answers_held_after_bytes is not None and self._answered > self.answers_held_after_bytes:
                self.held.set()
                self._go_on.wait(60)
            client.sendall(data)
            sent += len(data)
            if self.cut_after_bytes is not None and sent >= self.cut_after_bytes:
                raise _CutError


class _CutError(Exception):
    """This connection ends here."""


def _reset(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        side.close()
