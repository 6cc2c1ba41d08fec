"""How the S3 adapter takes a blob's stream from servers that stall, drip, cut, lie, or send it elsewhere.

Whatever they do it ends, as an UnavailableError that names the object, and what was yielded until then is right.
"""

from __future__ import annotations

import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal.certificates import Authority
from tasks.adapters.byte_stream import BLOCK_BYTES
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.errors import After, Never, UnavailableError
from tests.contract.blocks import whole
from tests.contract.faulty_line import FaultyLine
from tests.contract.odd_server import odd_server, send

DATA = os.urandom(3 * BLOCK_BYTES + 12_345)
OBJECT = {"ETag": '"etag"', "Content_Type": "binary/octet-stream"}
Answer = Callable[[BaseHTTPRequestHandler], None]


def store(url: str, **changes: Any) -> S3Store:
    return S3Store(url, "b", StoreCredentials("an-access-key", "a-secret-key"), **changes)


def refusal(url: str, offset: int = 0, **changes: Any) -> tuple[UnavailableError, bytes]:
    """Return the error that reading an object ends with, and what came before it."""
    received = bytearray()
    with pytest.raises(UnavailableError) as caught:
        for block in store(url, **changes).open("t/x", offset):
            received += block
    error = caught.value
    assert error.where == f"{url}/b/t/x"
    assert "Signature" not in error.as_text()
    assert "an-access-key" not in error.as_text()
    return error, bytes(received)


@contextmanager
def saying(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """Serve one answer, whatever is asked."""
    with odd_server(lambda handler: send(handler, status, body, **headers)) as url:
        yield url


def begin(handler: BaseHTTPRequestHandler, *, length: int = len(DATA)) -> None:
    send(handler, 200, b"", **OBJECT, Content_Length=str(length))


def test_a_stream_comes_whole_and_from_any_offset_on() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range", "")
        offset = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        part = {"Content_Range": f"bytes {offset}-{len(DATA) - 1}/{len(DATA)}"} if asked else {}
        send(handler, 206 if asked else 200, DATA[offset:], **OBJECT, **part)

    with odd_server(answer) as url:
        for offset in (0, 1, BLOCK_BYTES, len(DATA) - 1):
            assert whole(store(url).open("t/x", offset)) == DATA[offset:]


def test_a_stream_that_stalls_is_given_up() -> None:
    over = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        handler.wfile.write(DATA[: BLOCK_BYTES + 1])
        over.wait(30)

    with odd_server(answer) as url:
        error, received = refusal(url, stall_s=0.3)
        over.set()
    assert "stalls: no answer for 0.3 s" in error.summary
    assert isinstance(error.retry, After)
    assert received == DATA[:BLOCK_BYTES]


@pytest.mark.parametrize("head", [True, False])
def test_a_stream_that_drips_is_given_up(head: bool) -> None:
    """No byte is late here, but at this rate a shard would take years."""
    given_up = threading.Event()

    def drip(handler: BaseHTTPRequestHandler, text: bytes) -> None:
        with pytest.raises(OSError):
            while not given_up.wait(0.02):
                handler.wfile.write(text)
            while True:  # until the other side is gone
                handler.wfile.write(text)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if head:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Much: ")
        else:
            begin(handler)
        drip(handler, b"x")

    with odd_server(answer) as url:
        error, received = refusal(url, stall_s=0.3, least_bytes_per_s=1000)
        given_up.set()
    assert "less than 1000 a second" in error.summary
    assert received == b""


def test_a_reader_that_takes_its_time_is_no_stall() -> None:
    with saying(200, DATA, **OBJECT) as url:
        received = b""
        for block in store(url, stall_s=0.2, least_bytes_per_s=1e9).open("t/x"):
            received += block
            time.sleep(0.1)
    assert received == DATA


@pytest.mark.parametrize("tenth", range(10))
def test_a_stream_that_is_cut_at_any_tenth_is_no_end(tenth: int) -> None:
    cut = len(DATA) * tenth // 10

    def answer(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        handler.wfile.write(DATA[:cut])

    with odd_server(answer) as url:
        error, received = refusal(url)
        assert received == DATA[:cut]
        assert (error.got, error.expected) == (f"{cut} bytes", f"{len(DATA)} bytes")


def test_a_stream_that_is_reset_is_no_end() -> None:
    with saying(200, DATA, **OBJECT) as behind:
        host, port = behind.removeprefix("http://").split(":")
        with FaultyLine(host, int(port)) as line:
            line.cut_after_bytes = 2 * BLOCK_BYTES
            _, received = refusal(line.url)
    assert DATA.startswith(received)
    assert len(received) < len(DATA)


def test_signals_in_the_middle_lose_no_byte() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    with saying(200, DATA, **OBJECT) as url:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            assert whole(store(url).open("t/x")) == DATA
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert heard


def test_no_more_than_the_announced_bytes_are_taken() -> None:
    with saying(200, DATA + b"and more", **OBJECT, Content_Length=str(len(DATA))) as url:
        assert whole(store(url).open("t/x")) == DATA


@pytest.mark.parametrize(
    "status, said, length",
    [
        (200, "", 90),  # all of it from its beginning: the range was ignored
        (206, "", 90),
        (206, "bytes 0-89/100", 90),
        (206, "bytes 11-99/100", 89),
        (206, "bytes 10-98/100", 89),
        (206, "bytes 10-99/100", 91),
        (206, "bytes 10-99/*", 90),
        (206, "10-99/100", 90),
    ],
)
def test_another_part_than_was_asked_for_is_refused(status: int, said: str, length: int) -> None:
    headers = {**OBJECT, "Content_Length": str(length)} | ({"Content_Range": said} if said else {})
    with saying(status, b"x" * length, **headers) as url:
        error, received = refusal(url, offset=10)
    assert received == b""
    assert error.expected in ("bytes from 10 on", "bytes 10 to the end")


def test_a_part_that_nobody_asked_for_is_refused() -> None:
    with saying(206, b"x" * 90, **OBJECT, Content_Range="bytes 0-89/100") as url:
        assert refusal(url)[0].expected == "all"


@pytest.mark.parametrize("headers", [{"Content_Type": "text/html; charset=utf-8", "ETag": '"e"'}, {}])
def test_a_page_with_status_200_is_no_object(headers: dict[str, str]) -> None:
    with saying(200, b"<html>Bad gateway</html>", **headers) as url:
        assert refusal(url)[1] == b""


def test_a_redirect_is_not_followed() -> None:
    asked: list[str] = []

    def other(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        send(handler, 200, b"bytes", **OBJECT)

    with (
        odd_server(other) as elsewhere,
        saying(307, b"", Location=f"{elsewhere.replace('127.0.0.1', 'localhost')}/b/t/x?X-Amz-Signature=kept") as url,
    ):
        error, _ = refusal(url)
    assert asked == []
    assert (error.got, error.retry) == ("http://localhost", Never())


@pytest.mark.parametrize(
    "status, body, final",
    [
        (401, b"", True),
        (403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>", True),
        (404, b"<Error><Code>NoSuchKey</Code></Error>", True),
        (404, b"<html>not here</html>", True),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", True),
        (416, b"<Error><Code>InvalidRange</Code></Error>", False),
        (429, b"", False),
        (500, b"<html>oops</html>", False),
        (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>", False),
    ],
)
def test_what_an_error_status_means(status: int, body: bytes, final: bool) -> None:
    with saying(status, body) as url:
        error, received = refusal(url)
    assert received == b""
    assert isinstance(error.retry, Never if final else After)


@contextmanager
def raw(text: bytes) -> Iterator[str]:
    """Answer with these very bytes, headers and all."""
    with odd_server(lambda handler: handler.wfile.write(text) and None) as url:
        yield url


CHUNKED = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nTransfer-Encoding: chunked\r\n\r\n'


def test_a_body_in_chunks_has_its_own_end() -> None:
    with raw(CHUNKED + b"4\r\nthis\r\n6\r\n is it\r\n0\r\n\r\n") as url:
        assert whole(store(url).open("t/x")) == b"this is it"


@pytest.mark.parametrize(
    "text",
    [
        CHUNKED + b"4\r\nthis\r\n",
        CHUNKED + b"4\r\nthi",
        CHUNKED + b"4\r\nthis\r\nwhat?\r\n",
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\n\r\nwithout a length',
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: -5\r\n\r\nthese',
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"",
    ],
)
def test_what_is_no_whole_answer_is_refused(text: bytes) -> None:
    with raw(text) as url:
        assert isinstance(refusal(url)[0].retry, After)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@contextmanager
def over_tls(authority: Authority, answer: Answer) -> Iterator[str]:
    pair = authority.issue("store", common_name="store", addresses=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with odd_server(answer, tls=context) as url:
        yield url


def test_over_tls_a_server_is_trusted_by_its_authority_only(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with over_tls(authority, lambda handler: send(handler, 200, DATA, **OBJECT)) as url:
        error, _ = refusal(url)
        assert "certificate is not trusted" in error.summary
        assert error.retry == Never()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.pair.certificate))
        assert whole(store(url).open("t/x")) == DATA
        by_name = url.replace("127.0.0.1", "localhost")
        assert "not trusted" in refusal(by_name)[0].summary


def test_over_tls_too_a_stream_that_drips_or_stalls_is_given_up(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.pair.certificate))
    over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        while not over.wait(0.02):
            handler.wfile.write(b"x")

    def stall(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        over.wait(30)

    for answer, summary in ((drip, "less than 1000 a second"), (stall, "no answer for 0.3 s")):
        over.clear()
        with over_tls(authority, answer) as url:
            assert summary in refusal(url, stall_s=0.3, least_bytes_per_s=1000)[0].summary
            over.set()


def test_a_plain_server_is_no_tls_server() -> None:
    with saying(200, DATA, **OBJECT) as url:
        assert isinstance(refusal(url.replace("http:", "https:"))[0].retry, After)
