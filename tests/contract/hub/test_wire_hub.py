"""The Hub adapter, real huggingface_hub, against the rehearsal's Hub server with faults and servers that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tasks.adapters.hub import HfHub
from tasks.core.errors import After, InputError, Never, UnavailableError
from tests.contract.hub.conftest import FILES, GATED, REPO, SHARD, TOKEN, HubSite
from tests.contract.odd_server import odd_server, send


@contextmanager
def fault(site: HubSite, name: str, **parameters: Any) -> Iterator[None]:
    path = site.inject / f"{name}.json"
    path.write_text(json.dumps(parameters))
    try:
        yield
    finally:
        path.unlink()


def test_a_gated_repository_is_wrong_input(hub: HfHub, site: HubSite) -> None:
    with pytest.raises(InputError) as caught:
        hub.read_file(GATED, site.commit, "config.json", 100)
    assert isinstance(caught.value.retry, Never)


def test_the_token_is_read_at_each_call_and_never_shown(site: HubSite, tmp_path: Path) -> None:
    path = tmp_path / "token"
    hub = HfHub(site.url, token_file=str(path))
    with pytest.raises(InputError, match="token"):
        hub.read_file(GATED, site.commit, "config.json", 100)
    path.write_text(f"{TOKEN}\n")
    assert hub.read_file(GATED, site.commit, "config.json", 100) == FILES["config.json"]
    path.write_text("hf_wrong_one")
    with pytest.raises((InputError, UnavailableError)) as caught:
        hub.read_file(GATED, site.commit, "config.json", 100)
    assert "hf_wrong_one" not in caught.value.as_text() + repr(hub) + json.dumps(caught.value.as_data())


def test_a_token_of_the_environment(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2_TEST_TOKEN", TOKEN)
    hub = HfHub(site.url, token_variable="K2_TEST_TOKEN")
    assert hub.read_file(GATED, site.commit, "config.json", 100) == FILES["config.json"]


def test_a_rate_limit_says_how_long_to_wait(hub: HfHub, site: HubSite) -> None:
    with fault(site, "hub-429", retry_after_s=17):
        calls: list[Callable[[], Any]] = [
            lambda: hub.resolve(REPO, "main"),
            lambda: list(hub.open_file(REPO, site.commit, SHARD, 0)),
        ]
        for call in calls:
            before = time.monotonic()
            with pytest.raises(UnavailableError) as caught:
                call()
            assert caught.value.retry == After(17.0)
            assert time.monotonic() - before < 17  # the wait is the caller's


def test_an_error_of_the_hub_may_be_tried_again(hub: HfHub, site: HubSite) -> None:
    with fault(site, "hub-5xx"), pytest.raises(UnavailableError, match="503") as caught:
        hub.list_revision(REPO, site.commit)
    assert isinstance(caught.value.retry, After)


def test_a_cut_stream_is_no_end_of_file(hub: HfHub, site: HubSite) -> None:
    received = 0
    with fault(site, "hub-cut", path=SHARD, after_bytes=1_000_000), pytest.raises(UnavailableError):
        for block in hub.open_file(REPO, site.commit, SHARD, 0):
            received += len(block)
    assert 0 < received <= 1_000_000


def test_wrong_bytes_are_handed_on_for_the_caller_to_find(hub: HfHub, site: HubSite) -> None:
    with fault(site, "shard-bitflip", path=SHARD, offset=1000):
        data = b"".join(hub.open_file(REPO, site.commit, SHARD, 0))
    assert len(data) == len(FILES[SHARD])
    assert data != FILES[SHARD]


@pytest.mark.parametrize("status", [500, 504])
def test_an_error_about_what_is_listed_stays_an_error_of_the_server(status: int) -> None:
    """What olah answers to a file that it does not have; only its list tells the one from the other."""
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        listed = b'[{"type": "file", "path": "x.bin", "size": 1, "oid": "%s"}]' % (b"a" * 40)
        send(handler, *((200, listed) if "/tree/" in handler.path else (status, b"")))

    with odd_server(answer) as url:
        with pytest.raises(UnavailableError, match=str(status)) as caught:
            list(HfHub(url).open_file(REPO, "a" * 40, "x.bin", 0))
        assert isinstance(caught.value.retry, After)
        with pytest.raises(InputError):
            list(HfHub(url).open_file(REPO, "a" * 40, "y.bin", 0))
    assert len(asked) == 4


def test_an_error_of_a_server_that_lists_nothing_stays_one() -> None:
    with odd_server(lambda handler: send(handler, 500, b"")) as url:
        for call in (lambda: HfHub(url).resolve(REPO, "a" * 40), lambda: HfHub(url).resolve(REPO, "main")):
            with pytest.raises(UnavailableError, match="500"):
                call()


def test_a_kept_connection_that_the_server_has_closed_is_no_failure() -> None:
    """The first answer keeps the connection open and the next request finds it closed without a word."""
    requests: list[str] = []

    def answer(connection: socket.socket) -> None:
        with connection:
            while connection.recv(64 * 1024):
                requests.append("")
                if len(requests) == 2:
                    return
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsome")

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                answer(server.accept()[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        hub = HfHub(f"http://127.0.0.1:{server.getsockname()[1]}")
        for _ in range(2):
            assert hub.read_file(REPO, "a" * 40, "x.bin", 100) == b"some"
        assert len(requests) == 3


def test_a_server_that_always_hangs_up_is_given_up() -> None:
    asked: list[str] = []

    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        handler.connection.shutdown(socket.SHUT_RDWR)

    with odd_server(hang_up) as url, pytest.raises(UnavailableError) as caught:
        HfHub(url).resolve(REPO, "main")
    assert isinstance(caught.value.retry, After)
    assert len(asked) == 2


def test_a_server_that_ignores_ranges_is_read_from_the_offset() -> None:
    with odd_server(lambda handler: send(handler, 200, b"0123456789")) as url:
        assert b"".join(HfHub(url).open_file(REPO, "a" * 40, "x.bin", 4)) == b"456789"


def endless(status: int, sent: list[int], **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return an answer that does not end until the client leaves; `sent` counts its bytes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(17 * 10**9), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        try:
            while sum(sent) < 10**9:
                sent.append(handler.wfile.write(b"0123456789abcdef" * 4096))
        except OSError:
            sent.append(0)

    return answer


@pytest.mark.parametrize("status", [200, 206])
def test_of_a_server_that_sends_the_whole_shard_only_what_was_asked_for_is_taken(status: int) -> None:
    sent: list[int] = []
    with odd_server(endless(status, sent, Content_Range="bytes 0-16999999999/17000000000")) as url:
        data = HfHub(url).read_range(REPO, "a" * 40, "x.safetensors", 0, 100_000)
    assert data == (b"0123456789abcdef" * 6250)
    assert sum(sent) < 50_000_000  # what fits into the buffers between the two


def test_a_part_is_asked_for_by_its_range() -> None:
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers["Range"])
        send(handler, 206, b"0123456789", Content_Range="bytes 5-14/100")

    with odd_server(answer) as url:
        assert HfHub(url).read_range(REPO, "a" * 40, "x.safetensors", 5, 10) == b"0123456789"
    assert asked == ["bytes=5-14"]


@pytest.mark.parametrize("told", ["bytes 0-9/100", "bytes 50-59/100", "bytes */100", "items 5-14/100", ""])
@pytest.mark.parametrize("call", ["range", "open"])
def test_another_part_than_was_asked_for_is_refused(told: str, call: str) -> None:
    headers = {"Content_Range": told} if told else {}
    with odd_server(lambda handler: send(handler, 206, b"0123456789", **headers)) as url:
        hub = HfHub(url)
        with pytest.raises(UnavailableError) as caught:
            if call == "range":
                hub.read_range(REPO, "a" * 40, "x.safetensors", 5, 10)
            else:
                list(hub.open_file(REPO, "a" * 40, "x.safetensors", 5))
    assert isinstance(caught.value.retry, After)


def test_a_server_that_drips_is_given_up() -> None:
    """Each byte comes in time for the timeout of a read; all of them would take for ever."""
    done = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        ranged = "Range" in handler.headers
        handler.send_response(206 if ranged else 200)
        handler.send_header("Content-Length", "100000")
        if ranged:
            handler.send_header("Content-Range", "bytes 0-99999/100000")
        handler.end_headers()
        try:
            while not done.wait(0.05):
                handler.wfile.write(b"x")
                handler.wfile.flush()
        except OSError:
            pass

    with odd_server(drip) as url:
        hub, began = HfHub(url, stall_s=0.4), time.monotonic()
        for call in (
            lambda: hub.read_range(REPO, "a" * 40, "x", 0, 100_000),
            lambda: hub.read_file(REPO, "a" * 40, "x", 10**6),
        ):
            with pytest.raises(UnavailableError, match="slowly"):
                call()
        done.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["symlink", "commit", "unknown", "", 3, None])
def test_an_entry_that_is_no_file_and_no_directory_is_refused_and_not_left_out(kind: Any) -> None:
    listed = [
        {"type": "directory", "path": "code", "oid": "a" * 40, "size": 0},
        {"type": "file", "path": "x.json", "size": 1, "oid": "a" * 40},
        {"type": kind, "path": "link", "size": 1, "oid": "a" * 40},
    ]
    with (
        odd_server(lambda handler: send(handler, 200, json.dumps(listed).encode())) as url,
        pytest.raises(InputError) as caught,
    ):
        HfHub(url).list_revision(REPO, "a" * 40)
    assert (caught.value.code, caught.value.where) == ("K2-INP-003", "'link'")


def test_a_stream_without_bytes_is_a_stall() -> None:
    release = threading.Event()

    def stall(handler: BaseHTTPRequestHandler) -> None:
        send(handler, 200, b"some", Content_Length="100")
        release.wait(60)  # after that the stream ends, which is another error

    with odd_server(stall) as url:
        with pytest.raises(UnavailableError, match="ReadTimeout"):
            list(HfHub(url, stall_s=0.3).open_file(REPO, "a" * 40, "x.bin", 0))
        release.set()


def test_a_short_body_is_found() -> None:
    short = odd_server(lambda handler: send(handler, 200, b"some", Content_Length="100"))
    with short as url, pytest.raises(UnavailableError):
        list(HfHub(url).open_file(REPO, "a" * 40, "x.bin", 0))


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'[{"type": "file"}]', b'{"sha": "short"}'])
def test_answers_that_make_no_sense(body: bytes) -> None:
    with odd_server(lambda handler: send(handler, 200, body)) as url:
        hub = HfHub(url)
        calls: list[Callable[[], Any]] = [lambda: hub.resolve(REPO, "main"), lambda: hub.list_revision(REPO, "a" * 40)]
        for call in calls:
            with pytest.raises(UnavailableError):
                call()


def test_the_token_does_not_follow_a_link_to_another_host(tmp_path: Path) -> None:
    seen: list[str | None] = []
    (tmp_path / "token").write_text(TOKEN)
    with odd_server(lambda h: (seen.append(h.headers["Authorization"]), send(h, 200, b"[]"))[1]) as elsewhere:
        for answer in (
            lambda h: send(h, 200, b"[]", Link=f'<{elsewhere}/next>; rel="next"'),
            lambda h: send(h, 302, b"", Location=f"{elsewhere}/cdn"),
        ):
            with odd_server(answer) as url:
                hub = HfHub(url, token_file=str(tmp_path / "token"))
                try:
                    hub.list_revision(REPO, "a" * 40)
                    list(hub.open_file(REPO, "a" * 40, "x.bin", 0))
                except UnavailableError:
                    pass
    assert not any(seen)


def test_no_token_of_the_users_home_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with odd_server(lambda h: (seen.append(h.headers["Authorization"]), send(h, 200, b"x"))[1]) as url:
        list(HfHub(url).open_file(REPO, "a" * 40, "x.bin", 0))
    assert seen == [None]


@contextmanager
def nobody() -> Iterator[str]:
    """Keep a port on which nobody listens, so that nobody else does either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_nobody_there_may_be_tried_again() -> None:
    with nobody() as url, pytest.raises(UnavailableError) as caught:
        HfHub(url).resolve(REPO, "main")
    assert isinstance(caught.value.retry, After)
