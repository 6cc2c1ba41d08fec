"""An HTTP relay to a real server that lies about what it serves: a test sets one lie, and for which requests."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_TIMEOUT_S = 30.0
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass
class Answer:
    """What the real server said, for a lie to change.

    Attributes:
        body: the bytes that are sent; `announced` is the Content-Length that goes before them (None: their count).
        cut_after: the connection is reset after so many bytes of the body.
        drip_s: the body goes out a byte at a time with so long a pause before each.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    announced: int | None = None
    cut_after: int | None = None
    drip_s: float = 0.0


@dataclass
class Request:
    """A request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


Lie = Callable[[Request, Answer], None]


@dataclass
class LyingRelay:
    """Relays to a server; `lie` is told of every answer whose request `about` matches, `times` times at most.

    `hook` is called with every request before it is relayed: for what is to happen in the middle of something.
    """

    target: str
    url: str = ""
    lie: Lie | None = None
    about: re.Pattern[str] = re.compile("")
    method: str = "GET"
    times: int = 1_000_000
    told: int = 0
    hook: Callable[[Request], None] = lambda request: None
    alter: Callable[[Request], None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, lie: Lie, about: str, *, times: int = 1_000_000, method: str = "GET") -> None:
        """Lie so from now on."""
        self.lie, self.about, self.times, self.method, self.told = lie, re.compile(about), times, method, 0

    def be_honest(self) -> None:
        """Relay what the server says."""
        self.lie = None
        self.hook = self.alter = lambda request: None

    def asked(self, about: str, method: str = "GET") -> list[Request]:
        """Return the requests so far for paths that match."""
        return [r for r in self.requests if r.method == method and re.search(about, r.path)]

    def answer(self, request: Request) -> Answer:
        """Ask the real server and return its answer, as it is or as the lie has it."""
        with self._lock:
            self.requests.append(request)
        self.hook(request)
        self.alter(request)
        parts = urlsplit(self.target)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(request.body)
            response = connection.getresponse()
            body = response.read()
            answer = Answer(response.status, dict(response.getheaders()), body)
        with self._lock:
            lies = (
                self.lie is not None
                and request.method == self.method
                and self.told < self.times
                and bool(self.about.search(request.path))
                and answer.status not in _REDIRECTS  # of what has the bytes, and not of who says where they are
            )
            self.told += lies
        if lies and self.lie is not None:
            self.lie(request, answer)
        return answer


@contextlib.contextmanager
def lying_relay(target: str) -> Iterator[LyingRelay]:
    """Yield a relay to a server that is honest until it is told not to be."""
    relay = LyingRelay(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def take(self) -> None:
            body = _read_body(self)
            request = Request(self.command, self.path, dict(self.headers.items()), body)
            try:
                answer = relay.answer(request)
            except (OSError, http.client.HTTPException):
                self.close_connection = True  # the server is away: so is this one
                return
            _send(self, answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = take

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    relay.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield relay
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are the point of these tests."""


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if "chunked" in handler.headers.get("Transfer-Encoding", ""):
        body = b""
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            body += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return body
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    handler.send_response_only(answer.status)
    announced = len(answer.body) if answer.announced is None else answer.announced
    for name, value in answer.headers.items():
        if name.lower() not in ("content-length", "connection", "transfer-encoding"):
            handler.send_header(name, value)
    if handler.command == "HEAD":
        announced = int(answer.headers.get("Content-Length", announced))
    handler.send_header("Content-Length", str(announced))
    handler.end_headers()
    body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
    with contextlib.suppress(OSError):
        if answer.drip_s:
            for at in range(len(body)):
                time.sleep(answer.drip_s)
                handler.wfile.write(body[at : at + 1])
                handler.wfile.flush()
        elif handler.command != "HEAD":
            handler.wfile.write(body)
    if answer.cut_after is not None or len(body) != announced:
        handler.close_connection = True


# Lies that a table names.


def flip(at: float) -> Lie:
    """One bit is another one, at a share of the body."""

    def lie(request: Request, answer: Answer) -> None:
        body = bytearray(answer.body)
        if body:
            body[min(len(body) - 1, int(len(body) * at))] ^= 1
        answer.body = bytes(body)

    return lie


def cut(at: float) -> Lie:
    """The connection breaks at a share of the body."""

    def lie(request: Request, answer: Answer) -> None:
        answer.announced, answer.cut_after = len(answer.body), int(len(answer.body) * at)

    return lie


def body(change: Callable[[bytes], bytes]) -> Lie:
    """Another body, of its own announced length."""

    def lie(request: Request, answer: Answer) -> None:
        answer.body = change(answer.body)

    return lie


def status(code: int, **headers: str) -> Lie:
    """Another status with a body in HTML."""

    def lie(request: Request, answer: Answer) -> None:
        answer.status, answer.body = code, b"<html><body>error</body></html>"
        answer.headers = {"Content-Type": "text/html"} | {k.replace("_", "-"): v for k, v in headers.items()}

    return lie


def header(name: str, value: str) -> Lie:
    """One header says something else."""

    def lie(request: Request, answer: Answer) -> None:
        answer.headers = {k: v for k, v in answer.headers.items() if k.lower() != name.lower()} | {name: value}

    return lie


def redirect(to: str) -> Lie:
    """Go and ask somebody else."""
    return status(302, Location=to)


def drip(pause_s: float) -> Lie:
    """A byte now and then: never silent for long, never done."""

    def lie(request: Request, answer: Answer) -> None:
        answer.drip_s = pause_s

    return lie


def longer_than_announced(request: Request, answer: Answer) -> None:
    """More bytes than the length that went before them."""
    answer.announced = len(answer.body)
    answer.body += b"and more"


def compressed(request: Request, answer: Answer) -> None:
    """Compressed although nobody asked for it."""
    answer.body = gzip.compress(answer.body, 1)
    answer.headers["Content-Encoding"] = "gzip"
