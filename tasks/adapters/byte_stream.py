"""One GET over HTTP, its body read into one buffer that is used again: for what is too large to pass through a client.

The standard library's client: no retry, no redirect, no proxy. What would be waited for without end elsewhere has an
end here: a connection, a byte (`stall_s`), and a number of bytes in a time (`least_bytes_per_s`), headers included.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tasks.core.errors import After, InputError, K2Error, Never, Retry, UnavailableError

BLOCK_BYTES = 1024 * 1024
_SOON = After(1.0)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server.

    `connect_s`: for a connection. `stall_s`: for a byte. `least_bytes_per_s`: less than that in `stall_s` of waiting
    is as good as nothing. Only time spent waiting for bytes counts, so a reader that takes them slowly is no stall.
    """

    connect_s: float = 5.0
    stall_s: float = 30.0
    least_bytes_per_s: float = 64 * 1024


class Answer:
    """What a server answered: the head is there, the body comes as it is read."""

    def __init__(self, response: http.client.HTTPResponse, whose: str, where: str) -> None:
        self._response = response
        self._whose = whose
        self._where = where

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._response.status

    def header(self, name: str) -> str:
        """Return a header, or an empty string."""
        return str(self._response.headers.get(name, ""))

    def beginning(self, limit_bytes: int = 4096) -> bytes:
        """Return the first bytes of the body: what an error says of itself."""
        return self._response.read(limit_bytes)

    def blocks(self, offset: int = 0) -> Iterator[memoryview]:
        """Yield the body from an offset of the object on, in blocks; each holds until the next one is asked for.

        UnavailableError: the body is not that of the object from this offset on, or ends before its length.
        """
        announced = self._check_head(offset)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        received = 0
        while count := self._response.readinto(buffer):
            received += count
            yield buffer[:count]
        if announced is not None and received != announced:
            raise self.error("stream ended early", got=f"{received} bytes", expected=f"{announced} bytes")

    def error(
        self, what: str, *, got: str = "", expected: str = "", hint: str = "", retry: Retry = _SOON
    ) -> UnavailableError:
        """Return the error that says what is wrong with this answer."""
        return UnavailableError("K2-UNA-001", f"{self._whose}'s {what}.", self._where, got, expected, hint, retry)

    def _check_head(self, offset: int) -> int | None:
        """Return the announced length of the body, None for one that comes in chunks, which have an end of their own.

        A page of HTML is what something in front of the server says when it has no better status.
        """
        if self.header("Content-Type").partition(";")[0].strip().lower() == "text/html":
            raise self.error("answer is a page for people", got="text/html", expected="the bytes of the object")
        length = self._response.length
        if length is None and not self._response.chunked:
            raise self.error("answer announces no length, so that its end cannot be told from a cut")
        if (self.status == 206) != bool(offset):
            got = "a part" if self.status == 206 else "the whole object"
            raise self.error(
                "answer is not what was asked for", got=got, expected=f"bytes from {offset} on" if offset else "all"
            )
        if offset:
            self._check_range(offset, length)
        return length

    def _check_range(self, offset: int, length: int | None) -> None:
        said = self.header("Content-Range")
        match = _CONTENT_RANGE.fullmatch(said.strip())
        first, last, size = map(int, match.groups()) if match else (-1, -1, -1)
        if (first, last + 1) != (offset, size) or (length is not None and length != size - offset):
            got = f"{said[:100] or 'no Content-Range'}, {'in chunks' if length is None else f'{length} bytes'}"
            raise self.error("answer is another part", got=got, expected=f"bytes {offset} to the end")


@contextmanager
def answered(
    url: str,
    headers: Mapping[str, str],
    *,
    whose: str,
    where: str,
    patience: Patience,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Answer]:
    """Make a GET on a connection of its own and hand out the answer, whatever its status; close it at the end.

    Args:
        url: where; only here, as its query may be a signature.
        headers: of the request.
        whose: the server in sentences: "The store".
        where: the place for errors.
        patience: how long to wait.
        tls: for https; the system's authorities if None.

    Raises:
        UnavailableError: no connection, no answer, a stream that stalls, drips, or breaks; a redirect, which is not
            followed: what the request carries is for this server alone.
    """
    try:
        with closing(_connection(url, patience, tls)) as connection:
            parts = urlsplit(url)
            connection.request("GET", parts._replace(scheme="", netloc="", fragment="").geturl() or "/", None, headers)
            # A connection that the answer ends is dropped when its head is read, and the answer keeps the socket.
            with closing(connection.getresponse()) as response:
                answer = Answer(response, whose, where)
                _refuse_redirect(answer)
                yield answer
    except K2Error:
        raise
    except ssl.SSLCertVerificationError as error:
        raise UnavailableError(
            "K2-UNA-001",
            f"{whose}'s certificate is not trusted: {error.verify_message}.",
            where,
            hint="Give the authority that signed it: AWS_CA_BUNDLE=/path/to/ca.pem.",
            retry=Never(),
        ) from error
    except TimeoutError as error:
        waited = str(error) if isinstance(error, _TooSlowError) else f"no answer for {patience.stall_s:g} s"
        raise UnavailableError("K2-UNA-001", f"{whose} stalls: {waited}.", where, retry=_SOON) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(
            "K2-UNA-001", f"{whose}'s stream broke: {type(error).__name__}.", where, retry=_SOON
        ) from error


def trusting(authorities: str) -> ssl.SSLContext:
    """Return the TLS settings of who trusts the authorities in a PEM file; InputError if it cannot be read."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise InputError("K2-INP-001", f"The authorities to trust cannot be read: {error}.", authorities) from error


def _refuse_redirect(answer: Answer) -> None:
    if 300 <= answer.status < 400:
        target = urlsplit(answer.header("Location"))
        raise answer.error(
            f"answer is a redirect (HTTP {answer.status}), which is not followed",
            got=f"{target.scheme}://{target.hostname}" if target.hostname else "another path",
            expected="the object",
            hint="Name the address that it sends to as the endpoint, if that is the right server.",
            retry=Never(),
        )


def _connection(url: str, patience: Patience, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        context = tls or ssl.create_default_context()
        context.sslsocket_class = _TlsSocket
        return _TlsConnection(host, parts.port, patience, context)
    return _PlainConnection(host, parts.port, patience)


class _TooSlowError(TimeoutError):
    """Bytes come, but too few."""


class _Watch:
    """Adds up what came and how long it was waited for."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._waited_s = 0.0
        self._received = 0

    def count(self, received: int, waited_s: float) -> None:
        """Count one read; _TooSlowError if too little came in all the time that a stall may last."""
        self._received += received
        self._waited_s += waited_s
        if self._waited_s < self._patience.stall_s:
            return
        if self._received < self._waited_s * self._patience.least_bytes_per_s:
            least = f"less than {self._patience.least_bytes_per_s:g} a second"
            raise _TooSlowError(f"{self._received} bytes in {self._waited_s:.1f} s, {least}")
        self._waited_s, self._received = 0.0, 0


class _Watched:
    """A socket whose reads are counted: http.client reads all it reads by this method."""

    watch: _Watch

    def recv_into(self, *arguments: Any) -> int:
        """Receive as the socket does."""
        began = time.monotonic()
        received: int = super().recv_into(*arguments)  # type: ignore[misc]
        self.watch.count(received, time.monotonic() - began)
        return received


class _PlainSocket(_Watched, socket.socket):
    pass


class _TlsSocket(_Watched, ssl.SSLSocket):
    pass


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int | None, patience: Patience) -> None:
        super().__init__(host, port, timeout=patience.connect_s)
        self._patience = patience

    def connect(self) -> None:
        super().connect()
        self.sock = _PlainSocket(fileno=self.sock.detach())
        self.sock.watch = _Watch(self._patience)
        self.sock.settimeout(self._patience.stall_s)


class _TlsConnection(http.client.HTTPSConnection):
    def __init__(self, host: str, port: int | None, patience: Patience, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=patience.connect_s, context=context)
        self._patience = patience

    def connect(self) -> None:
        super().connect()
        assert isinstance(self.sock, _TlsSocket)
        self.sock.watch = _Watch(self._patience)
        self.sock.settimeout(self._patience.stall_s)
