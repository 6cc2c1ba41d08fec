"""Two proxies that stand between a client and the API server and fail as networks and proxies do.

`TcpProxy` passes TLS through and knows bytes and connections only: it refuses, cuts, holds and drips them.
`HttpProxy` ends TLS with a certificate of the same CA and knows requests: each gets the next fault of a script.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from infra.rehearsal.apiserver import ControlPlane

HOST = "127.0.0.1"
_BLOCK_BYTES = 65536
_TIMEOUT_S = 60.0


@dataclass
class _Link:
    """One connection of a client and its counterpart to the server."""

    client: socket.socket
    server: socket.socket
    held: bool = False
    left_bytes: int | None = None
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class TcpProxy:
    """Forwards connections to an address. What is told to it holds for all open connections and all later ones.

    A connection that was held stays held when the proxy forwards again, as a half-open one does.
    """

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (str(target.hostname), int(target.port or 443))
        self._listener: socket.socket | None = None
        self._port = 0
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self._hold = False
        self._cut_after: int | None = None
        self._pause_s = 0.0
        self.accepted = 0
        """How many connections were accepted."""

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.refuse()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"https://{HOST}:{self._port}"

    def forward(self) -> None:
        """Forward what comes from now on, as a proxy should."""
        with self._lock:
            self._hold, self._cut_after, self._pause_s = False, None, 0.0
        if self._listener is None:
            self._listen()

    def hold(self) -> None:
        """Accept, and pass nothing more to any client."""
        with self._lock:
            self._hold = True
            for link in self._links:
                link.held = True

    def cut(self) -> None:
        """Cut all open connections; new ones are forwarded."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close()

    def cut_after(self, count_bytes: int) -> None:
        """Cut each connection from now on after this many bytes to the client."""
        with self._lock:
            self._cut_after = count_bytes

    def drip(self, bytes_per_s: float) -> None:
        """Pass a byte at a time to the clients."""
        with self._lock:
            self._pause_s = 1.0 / bytes_per_s

    def refuse(self) -> None:
        """Cut all open connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def _listen(self) -> None:
        listener = socket.create_server((HOST, self._port), backlog=64)
        self._port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                link = _Link(client, server, self._hold, self._cut_after)
                self._links.append(link)
            threading.Thread(target=self._up, args=(link,), daemon=True).start()
            threading.Thread(target=self._down, args=(link,), daemon=True).start()

    def _up(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while block := link.client.recv(_BLOCK_BYTES):
                link.server.sendall(block)
        link.close()

    def _down(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while block := link.server.recv(_BLOCK_BYTES):
                if not self._pass(link, block):
                    break
        if not link.held:  # of a held connection the client must not even see the end
            link.close()

    def _pass(self, link: _Link, block: bytes) -> bool:
        """Pass bytes to the client as the proxy is told to; False when the connection ends with them."""
        while block and not link.held:
            size = 1 if self._pause_s else len(block)
            if link.left_bytes is not None:
                size = min(size, link.left_bytes)
                link.left_bytes -= size
                if size == 0:
                    return False
            link.client.sendall(block[:size])
            block = block[size:]
            if self._pause_s:
                link.closed.wait(self._pause_s)
        return True


@dataclass(frozen=True)
class Exchange:
    """One request at the `HttpProxy`.

    Attributes:
        method, path, body: of the request.
        forward: sends it to the API server and returns the whole answer as bytes.
        wait: waits until the proxy is closed.
    """

    method: str
    path: str
    body: bytes
    forward: Callable[[], bytes]
    wait: Callable[[], object]


Fault = Callable[[Exchange], Iterator[bytes]]
"""Yields what the client gets; the connection is closed behind it."""


def passed(exchange: Exchange) -> Iterator[bytes]:
    """Do what a proxy should."""
    yield exchange.forward()


def answered(status: int, body: bytes = b"{}", headers: Mapping[str, str] | None = None) -> Fault:
    """Answer without asking the server."""

    def fault(exchange: Exchange) -> Iterator[bytes]:
        yield http_answer(status, body, headers or {})

    return fault


def lost(exchange: Exchange) -> Iterator[bytes]:
    """Close the connection: the server never sees the request."""
    yield b""


def done_and_lost(exchange: Exchange) -> Iterator[bytes]:
    """Have the server do it, and close the connection without a word."""
    exchange.forward()
    yield b""


def cut_in_headers(exchange: Exchange) -> Iterator[bytes]:
    """Have the server do it, and cut its answer in the headers."""
    yield exchange.forward()[:40]


def cut_in_body(exchange: Exchange) -> Iterator[bytes]:
    """Have the server do it, and cut its answer in the body."""
    answer = exchange.forward()
    yield answer[: answer.index(b"\r\n\r\n") + 4 + 20]


def cut_short(exchange: Exchange) -> Iterator[bytes]:
    """Pass half of the body with a length that says that this is all."""
    head, _, body = exchange.forward().partition(b"\r\n\r\n")
    yield http_answer(int(head.split()[1]), body[: len(body) // 2], {})


def held(exchange: Exchange) -> Iterator[bytes]:
    """Take the request and never say anything."""
    exchange.wait()
    yield b""


def dripped(bytes_per_s: float) -> Fault:
    """Pass the body a byte at a time."""

    def fault(exchange: Exchange) -> Iterator[bytes]:
        head, _, body = exchange.forward().partition(b"\r\n\r\n")
        yield head + b"\r\n\r\n"
        for number in range(len(body)):
            time.sleep(1.0 / bytes_per_s)
            yield body[number : number + 1]

    return fault


def after(act: Callable[[], object]) -> Fault:
    """Do something at the moment of the request, then pass it."""

    def fault(exchange: Exchange) -> Iterator[bytes]:
        act()
        yield exchange.forward()

    return fault


def http_answer(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return an answer as it goes over the wire."""
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close", **headers}
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class HttpProxy:
    """Gives each request the next fault of its script, and passes all requests after the last.

    Attributes:
        seen: the requests in order, as `METHOD path`.
        statuses: the answers that began, by their status.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._script: list[Fault] = []
        self._closed = threading.Event()
        self.seen: list[str] = []
        self.statuses: list[int] = []
        pair = plane.authority.issue("faulty-proxy", "faulty-proxy", addresses=[HOST])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that go are no news
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"https://{HOST}:{self._server.server_port}"

    def script(self, *faults: Fault) -> None:
        """Have the next requests fail like this, in order."""
        self._script[:] = faults
        self.seen.clear()
        self.statuses.clear()

    def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        target = urlsplit(self._plane.url)
        context = ssl.create_default_context(cafile=str(self._plane.ca_path))
        connection = http.client.HTTPSConnection(str(target.hostname), target.port, timeout=_TIMEOUT_S, context=context)
        with contextlib.closing(connection):
            connection.request(method, path, body=body or None, headers=dict(headers))
            answer = connection.getresponse()
            kept = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
            return http_answer(answer.status, answer.read(), kept)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.seen.append(f"{self.command} {self.path}")
                fault = proxy._script.pop(0) if proxy._script else passed
                headers = {name: self.headers[name] for name in self.headers if name not in ("Connection", "Host")}
                exchange = Exchange(
                    self.command,
                    self.path,
                    body,
                    lambda: proxy._forward(self.command, self.path, headers, body),
                    proxy._closed.wait,
                )
                self.close_connection = True
                for part in fault(exchange):
                    if part.startswith(b"HTTP/1.1 "):
                        proxy.statuses.append(int(part.split()[1]))
                    self.wfile.write(part)
                    self.wfile.flush()

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def kubeconfig(url: str, plane: ControlPlane, user: Mapping[str, Any] | None = None) -> str:
    """Return a kubeconfig of the administrator, or of another user, that reaches the API server by a URL."""
    name = "c"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": url, "certificate-authority": str(plane.ca_path)}}],
            "users": [{"name": name, "user": user or {"token": plane.admin.token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        }
    )
