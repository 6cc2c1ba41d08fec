"""Ways in which a Hub, a mirror or something before it lies or dies: what the pull makes of each, over real HTTP."""

from __future__ import annotations

import gzip
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal.certificates import Authority
from tasks.adapters import hub_answers
from tasks.adapters.hub import HfHub
from tasks.core.errors import After, InputError, IntegrityError, K2Error, Never, UnavailableError
from tasks.node.steady_stream import Pace
from tests.contract.hub.lying_hub import COMMIT, DATA, KEY, PATH, REPO, Answer, cut, lying_hub, offset_of, right
from tests.contract.odd_server import odd_server, send

TOKEN = "hf_only_for_this_test"
FLIPPED = bytes([DATA[0] ^ 1]) + DATA[1:]
SHA = KEY.removeprefix("blobs/")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.node.steady_stream.backoff_s", lambda asked_s, failures: min(asked_s, 0.01))


def first(lie: Answer) -> Answer:
    """Lie once, and be honest from then on."""
    return lambda handler, nth: lie(handler, nth) if nth == 1 else right(handler, nth)


def resumed(lie: Answer) -> Answer:
    """Break off in the middle, lie to whoever wants to go on, and be honest from then on."""

    def answer(handler: BaseHTTPRequestHandler, nth: int) -> None:
        (cut(handler, 100_000) if nth == 1 else lie(handler, nth) if nth == 2 else right(handler, nth))

    return answer


def sending(status: int, body: bytes, **headers: str) -> Answer:
    return lambda handler, nth: send(handler, status, body, **headers)


def ending_early(handler: BaseHTTPRequestHandler, nth: int) -> None:
    """Say nothing of a length, and end in the middle as if that were all."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(DATA[:100_000])


def hanging_up(handler: BaseHTTPRequestHandler, nth: int) -> None:
    handler.close_connection = True


PAGE = sending(200, b"<html>maintenance</html>", Content_Type="text/html; charset=utf-8")
PART_OF_ANOTHER = sending(206, DATA[7:], Content_Range=f"bytes 7-{len(DATA) - 1}/{len(DATA)}")


def twice(lie: Answer) -> Answer:
    """Lie until the request that is made again at once has been lied to as well."""
    return lambda handler, nth: lie(handler, nth) if nth < 3 else right(handler, nth)


def babbling(handler: BaseHTTPRequestHandler, nth: int) -> None:
    handler.wfile.write(b"\x16\x03\x01\r\n\r\n")


def compressed(handler: BaseHTTPRequestHandler, nth: int) -> None:
    right(handler, data=gzip.compress(DATA), Content_Encoding="gzip")


ONCE: dict[str, tuple[Answer, str]] = {
    "web page with 200": (first(PAGE), "got: a web page"),
    "web page to whoever goes on": (resumed(PAGE), "got: a web page"),
    "compressed on the way": (first(compressed), "Content-Encoding gzip"),
    "said to be compressed": (first(lambda h, n: right(h, Content_Encoding="br")), "Content-Encoding br"),
    "part that nobody asked for": (first(PART_OF_ANOTHER), "Content-Range bytes 7-"),
    "part from elsewhere": (resumed(PART_OF_ANOTHER), "expected: from byte 100000"),
    "part from nowhere": (resumed(sending(206, DATA[100_000:])), "Content-Range not stated"),
    "part in another unit": (resumed(sending(206, DATA[100_000:], Content_Range="items 1-2/3")), "items 1-2/3"),
    "nothing with 204": (first(sending(204, b"")), "HTTP 204"),
    "500": (first(sending(500, b"")), "HTTP 500"),
    "502 with a page": (first(sending(502, b"<html>", Content_Type="text/html")), "HTTP 502"),
    "503": (first(sending(503, b"", Retry_After="1")), "HTTP 503"),
    "504": (first(sending(504, b"")), "HTTP 504"),
    "408": (first(sending(408, b"")), "HTTP 408"),
    "429": (first(sending(429, b"")), "limits the rate"),
    "416 of a shorter file": (resumed(sending(416, b"", Content_Range="bytes */50000")), "shorter than the place"),
    "end without a length": (first(ending_early), "ended early"),
    "short body": (first(sending(200, DATA[:9], Content_Length=str(len(DATA)))), "RemoteProtocolError"),
    "no answer": (twice(hanging_up), "RemoteProtocolError"),
    "answer of no HTTP": (twice(babbling), "RemoteProtocolError"),
}  # fmt: skip


@pytest.mark.parametrize("lie", ONCE)
def test_a_lie_that_is_told_once_costs_a_try_and_no_byte_of_it_is_kept(lie: str) -> None:
    answer, seen = ONCE[lie]
    with lying_hub(answer) as hub:
        meter = hub.pull()
        assert seen in meter.line()["last_error"]
        hub.assert_right()
        assert meter.hub_bytes == len(DATA)


def zeros(handler: BaseHTTPRequestHandler, nth: int) -> None:
    right(handler, data=bytes(len(DATA)))


ALWAYS: dict[str, tuple[Answer, type[K2Error], int, str]] = {
    "web page": (PAGE, UnavailableError, 11, "got: a web page"),
    "compressed": (compressed, UnavailableError, 11, "Content-Encoding gzip"),
    "wrong byte": (lambda h, n: right(h, data=FLIPPED), IntegrityError, 5, f"expected: sha256 {SHA}"),
    "wrong byte, right ETag": (
        lambda h, n: right(h, data=FLIPPED, ETag=f'"{SHA}"', X_Linked_Etag=f'"{SHA}"', X_Linked_Size=str(len(DATA))),
        IntegrityError, 5, f"expected: sha256 {SHA}",
    ),
    "zeros of full length": (zeros, IntegrityError, 5, f"expected: sha256 {SHA}"),
    "shorter file": (lambda h, n: right(h, data=DATA[:-1]), IntegrityError, 5, "got: 299999 bytes"),
    "longer file": (lambda h, n: right(h, data=DATA + b"x"), IntegrityError, 5, "got: 300001 bytes or more"),
    "empty file": (sending(200, b""), IntegrityError, 5, "got: 0 bytes"),
    "another file": (lambda h, n: right(h, data=DATA[::-1]), IntegrityError, 5, f"expected: sha256 {SHA}"),
    "401": (sending(401, b""), InputError, 2, "refuses access (HTTP 401)"),
    "403": (sending(403, b""), InputError, 2, "refuses access (HTTP 403)"),
    "404": (sending(404, b""), InputError, 2, "no such file"),
    "410": (sending(410, b""), InputError, 2, "no such file"),
    "400": (sending(400, b""), UnavailableError, 11, "HTTP 400"),
    "gated": (sending(403, b"", X_Error_Code="GatedRepo"), InputError, 2, "gated or disabled"),
    "503": (sending(503, b"", X_Error_Message="busy"), UnavailableError, 11, "HTTP 503"),
    "hanging up": (hanging_up, UnavailableError, 11, "RemoteProtocolError"),
    "circles": (lambda h, n: send(h, 302, b"", Location=h.path), UnavailableError, 11, "redirects without end"),
    "growing address": (lambda h, n: send(h, 307, b"", Location=h.path + "x"), UnavailableError, 11, "without end"),
    "redirect to nothing": (sending(302, b""), UnavailableError, 11, "to nothing"),
    "redirect to a file": (sending(302, b"", Location="file:///etc/passwd"), UnavailableError, 11, "to nothing"),
    "redirect to no host": (sending(302, b"", Location="http://[half"), UnavailableError, 11, "to nothing"),
}  # fmt: skip


@pytest.mark.parametrize("lie", ALWAYS)
def test_a_lie_that_stays_ends_the_pull_by_its_name_and_nothing_is_named(lie: str) -> None:
    answer, kind, code, seen = ALWAYS[lie]
    with lying_hub(answer) as hub:
        with pytest.raises(kind) as caught:
            hub.pull()
        assert caught.value.exit_code == code
        assert seen in str(caught.value)
        hub.assert_nothing_named()
        assert hub.store.uploads == {} or code != 5
        assert len(hub.asked) <= 16
        if code == 2:
            assert len(hub.asked) == 1


def test_a_stream_that_is_cut_at_each_tenth_is_put_together() -> None:
    with lying_hub(lambda handler, nth: cut(handler, 30_000)) as hub:
        meter = hub.pull()
        hub.assert_right()
        assert [offset for offset, _, _ in hub.asked] == list(range(0, 300_000, 30_000))
        assert (meter.streams, meter.hub_bytes) == (10, len(DATA))


def test_a_range_that_is_ignored_is_read_over() -> None:
    def answer(handler: BaseHTTPRequestHandler, nth: int) -> None:
        cut(handler, 100_000) if nth == 1 else send(handler, 200, DATA)

    with lying_hub(answer) as hub:
        meter = hub.pull()
        hub.assert_right()
        assert [offset for offset, _, _ in hub.asked] == [0, 100_000]
        assert meter.hub_bytes == len(DATA)


def test_the_etag_is_no_evidence_against_right_bytes() -> None:
    with lying_hub(lambda h, n: right(h, ETag='"%s"' % ("0" * 64), X_Linked_Etag='"%s"' % ("0" * 64))) as hub:
        hub.pull()
        hub.assert_right()


def test_a_drip_is_broken_off_and_goes_on_from_its_byte() -> None:
    def drip(handler: BaseHTTPRequestHandler, nth: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(DATA)))
        handler.end_headers()
        for i in range(300):
            try:
                handler.wfile.write(DATA[i : i + 1])
            except OSError:
                return
            time.sleep(0.02)

    with lying_hub(first(drip)) as hub:
        hub.pace = Pace(stall_s=0.3, min_bytes_per_s=10_000, tries=4)
        meter = hub.pull()
        assert "only drips" in meter.line()["last_error"]
        hub.assert_right()
        assert 0 < hub.asked[1][0] < 300


def on_another_host(answer: Callable[[BaseHTTPRequestHandler], None]) -> Any:
    return odd_server(answer)


def test_the_token_does_not_go_to_the_host_that_has_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    seen: list[str | None] = []

    def content(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Authorization"))
        cut(handler, 200_000)

    with on_another_host(content) as cdn, lying_hub(sending(302, b"", Location=f"{cdn}/signed?key=1")) as hub:
        hub.pull(token_file=str(tmp_path / "token"))
        hub.assert_right()
        assert seen == [None, None]
        assert [token for _, token, _ in hub.asked] == [f"Bearer {TOKEN}"] * 2


def test_the_token_does_not_come_back_by_a_way_over_another_host(tmp_path: Path) -> None:
    """Back at the Hub it is the Hub that asks; in between nobody saw it."""
    (tmp_path / "token").write_text(TOKEN)
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler, nth: int) -> None:
        if handler.path == "/back":
            right(handler)
        else:
            send(handler, 302, b"", Location=f"{other[0]}/there")

    def there(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Authorization"))
        send(handler, 302, b"", Location=f"{hub.url}/back")

    other: list[str] = []
    with on_another_host(there) as url, lying_hub(answer) as hub:
        other.append(url)
        hub.pull(token_file=str(tmp_path / "token"))
        hub.assert_right()
    assert seen == [None]


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_signed_address_that_is_over_is_asked_for_anew(status: int) -> None:
    signatures: list[str] = []

    def content(handler: BaseHTTPRequestHandler) -> None:
        signatures.append(handler.path)
        right(handler) if handler.path == "/signed-2" else send(handler, status, b"expired")

    with (
        on_another_host(content) as cdn,
        lying_hub(lambda h, n: send(h, 302, b"", Location=f"{cdn}/signed-{n}")) as hub,
    ):
        meter = hub.pull()
        hub.assert_right()
        assert f"HTTP {status}" in meter.line()["last_error"]
    assert signatures == ["/signed-1", "/signed-2"]


def test_a_token_that_is_replaced_meanwhile_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hf_old")

    def answer(handler: BaseHTTPRequestHandler, nth: int) -> None:
        if handler.headers["Authorization"] == "Bearer hf_old":
            path.write_text("hf_new\n")
            send(handler, 401, b"", X_Error_Message="Invalid credentials in Authorization header")
        else:
            right(handler)

    with lying_hub(answer) as hub:
        hub.pull(token_file=str(path))
        hub.assert_right()
        assert [token for _, token, _ in hub.asked] == ["Bearer hf_old", "Bearer hf_new"]


@pytest.fixture
def over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """Have the Hub's client trust an authority of this test alone; yield what a server of it needs."""
    import httpx2
    from huggingface_hub import set_client_factory

    authority = Authority.create(tmp_path)
    pair = authority.issue("hub", "hub", addresses=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    trusting = ssl.create_default_context(cafile=str(authority.pair.certificate))
    set_client_factory(lambda: httpx2.Client(verify=trusting, follow_redirects=True, timeout=None))
    yield context
    from huggingface_hub.utils._http import default_client_factory

    set_client_factory(default_client_factory)


def test_from_https_to_plain_http_is_not_followed(over_tls: ssl.SSLContext) -> None:
    asked: list[str] = []
    with (
        odd_server(lambda h: (asked.append(h.path), send(h, 200, DATA))[1]) as plain,
        odd_server(lambda h: send(h, 302, b"", Location=f"{plain}/x?signature=s3cret"), tls=over_tls) as url,
    ):
        assert url.startswith("https://")
        with pytest.raises(UnavailableError, match="from https to plain http") as caught:
            list(HfHub(url).open_file(REPO, COMMIT, PATH, 0))
    assert isinstance(caught.value.retry, Never)
    assert "s3cret" not in caught.value.as_text()
    assert asked == []


def test_from_https_to_https_is_followed_without_the_token(over_tls: ssl.SSLContext, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    seen: list[str | None] = []
    with (
        odd_server(lambda h: (seen.append(h.headers["Authorization"]), right(h))[1], tls=over_tls) as cdn,
        odd_server(lambda h: send(h, 302, b"", Location=f"{cdn}/x"), tls=over_tls) as url,
    ):
        assert b"".join(HfHub(url, token_file=str(tmp_path / "token")).open_file(REPO, COMMIT, PATH, 0)) == DATA
    assert seen == [None]


def at(seconds: float) -> str:
    return format_datetime(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds), usegmt=True)


WAITS: dict[str, tuple[dict[str, str], float, str]] = {
    "seconds": ({"Retry-After": "17"}, 17.0, "17 s"),
    "seconds with space": ({"Retry-After": " 17 "}, 17.0, "17 s"),
    "date by the server's clock": ({"Retry-After": at(90), "Date": at(0)}, 90.0, "90 s"),
    "date that is over": ({"Retry-After": at(0), "Date": at(90)}, 0.0, "0 s"),
    "window": ({"RateLimit": '"resolvers";r=0;t=55', "RateLimit-Policy": '"resolvers";q=3000;w=300'}, 55.0, "55 s"),
    "window with something left": ({"RateLimit": '"api";r=3;t=55'}, 60.0, "60 s"),
    "both: the longer": ({"RateLimit": '"api";r=0;t=55', "Retry-After": "70"}, 70.0, "70 s"),
    "a day": ({"Retry-After": "86400"}, 600.0, "86400 s. That is too long"),
    "a year by date": ({"Retry-After": at(3e7), "Date": at(0)}, 600.0, "3e+07 s. That is too long"),
    "without end": ({"Retry-After": "9" * 400}, 600.0, "inf s. That is too long"),
    "window without end": ({"RateLimit": '"api";r=0;t=%s' % ("9" * 30)}, 600.0, "That is too long"),
    "negative": ({"Retry-After": "-5"}, 60.0, "60 s"),
    "nonsense": ({"Retry-After": "tomorrow", "RateLimit": "r=x"}, 60.0, "60 s"),
    "nothing": ({}, 60.0, "60 s"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAITS)
def test_a_rate_limit_is_waited_for_as_long_as_it_says_and_not_for_ever(way: str) -> None:
    headers, wait_s, said = WAITS[way]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response_only(429)
        for name, value in {"Content-Length": "0", "Connection": "close", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()

    with odd_server(answer) as url, pytest.raises(UnavailableError) as caught:
        list(HfHub(url).open_file(REPO, COMMIT, PATH, 0))
    assert caught.value.retry == After(wait_s)
    assert said in caught.value.summary
    assert caught.value.details["status"] == 429


def test_a_list_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.adapters.hub._MAX_PAGE_BYTES", 1_000_000)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"[" * 100_000)
        except OSError:
            pass

    with odd_server(answer) as url, pytest.raises(UnavailableError, match="does not end"):
        HfHub(url).list_revision(REPO, COMMIT)


def test_an_error_without_end_is_not_read() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(503)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 100_000)
        except OSError:
            pass

    with odd_server(answer) as url, pytest.raises(UnavailableError, match="503"):
        list(HfHub(url).open_file(REPO, COMMIT, PATH, 0))


def test_a_refused_address_is_told_without_its_query() -> None:
    for error in (
        hub_answers.in_circles("https://cdn/x?Signature=s3cret", 5),
        *[_refused("https://cdn/x?Signature=s3cret", to) for to in ("http://cdn/x?Signature=s3cret", "ftp://x", "")],
    ):
        assert "s3cret" not in error.as_text()


def _refused(url: str, location: str) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        hub_answers.redirected(302, {"Location": location} if location else {}, url)
    return caught.value


def test_a_page_is_the_file_where_the_file_is_a_page() -> None:
    with odd_server(lambda h: send(h, 200, b"<html>", Content_Type="text/html")) as url:
        assert b"".join(HfHub(url).open_file(REPO, COMMIT, "docs/index.html", 0)) == b"<html>"


def test_what_is_asked_for_is_never_a_compressed_form() -> None:
    seen: list[tuple[str | None, int]] = []
    with odd_server(lambda h: (seen.append((h.headers["Accept-Encoding"], offset_of(h))), right(h))[1]) as url:
        list(HfHub(url).open_file(REPO, COMMIT, PATH, 5))
    assert seen == [("identity", 5)]
