"""The server of verified files: who is let in, what can be asked for, and that a file that changed is not served."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tasks.core.lock import LockedFile
from tasks.node.peer_source import NeverError, NotHeldError, NotYetError, PeerSource
from tasks.node.shard_server import Holdings, Outlook, ShardServer, Tokens
from tasks.node.verified_file import staged_file
from tests.contract.faulty_line import FaultyLine

DATA = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(DATA).hexdigest()
EMPTY = hashlib.sha256(b"").hexdigest()
ABSENT = "0" * 64


class Clock:
    now_s = 1000.0

    def now(self) -> float:
        return self.now_s


@dataclass
class Served:
    server: ShardServer
    tokens: Tokens
    holdings: Holdings
    directory: Path
    clock: Clock

    def ask(self, path: str = f"/{SHA256}", method: str = "GET", token: str | None = "", **headers: str):
        place = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self.tokens.current()}"
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body, response.headers


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "model.safetensors").write_bytes(DATA)
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "unverified").write_bytes(b"secret")
    clock, holdings = Clock(), Holdings(tmp_path)
    tokens = Tokens(lifetime_s=900.0, now=clock.now)
    holdings.holds(staged_file(tmp_path, "model.safetensors", SHA256))
    holdings.holds(staged_file(tmp_path, "empty.py", EMPTY))
    with ShardServer("127.0.0.1", 0, holdings, tokens) as server:
        yield Served(server, tokens, holdings, tmp_path, clock)


def test_a_verified_file_is_served_whole_and_in_parts(served: Served) -> None:
    status, body, headers = served.ask()
    assert (status, body, headers["ETag"]) == (200, DATA, f'"{SHA256}"')
    assert served.ask(method="HEAD")[:2] == (200, b"")
    status, body, headers = served.ask(Range="bytes=1000-1999")
    assert (status, body) == (206, DATA[1000:2000])
    assert headers["Content-Range"] == f"bytes 1000-1999/{len(DATA)}"
    assert served.ask(Range="bytes=1279999-")[:2] == (206, DATA[-1:])
    assert served.ask(Range="bytes=5-99999999")[1] == DATA[5:]
    status, _, headers = served.ask(Range=f"bytes={len(DATA)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")
    assert served.ask(f"/{EMPTY}")[:2] == (200, b"")


@pytest.mark.parametrize("token", [None, "wrong", "é", "x" * 5000])
def test_nobody_is_told_anything_without_the_token(served: Served, token: str | None) -> None:
    for path in (f"/{SHA256}", f"/{ABSENT}", "/"):
        status, body, _ = served.ask(path, token=token)
        assert (status, body) == (401, b"")


def test_a_token_is_good_for_its_time_and_the_next_one_overlaps(served: Served) -> None:
    first = served.tokens.current()
    served.clock.now_s += 449
    assert served.tokens.current() == first
    served.clock.now_s += 2
    second = served.tokens.current()
    assert second != first
    assert [served.ask(token=token)[0] for token in (first, second)] == [200, 200]
    served.clock.now_s += 450
    assert [served.ask(token=token)[0] for token in (first, second)] == [401, 200]


@pytest.mark.parametrize(
    "path",
    [
        "/model.safetensors",
        "/../unverified",
        f"/{SHA256}/../../etc/passwd",
        f"/{SHA256}?x",
        f"/{SHA256.upper()}",
        f"/%2e%2e/{SHA256}",
        f"/{ABSENT}",
        "/",
    ],
)
def test_only_digests_of_verified_files_have_names(served: Served, path: str) -> None:
    assert served.ask(path)[:2] == (404, b"")


def test_nothing_can_be_written(served: Served) -> None:
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        assert served.ask(method=method)[0] == 501


def test_a_file_that_is_not_the_verified_one_any_more_is_not_served(served: Served) -> None:
    path = served.directory / "model.safetensors"
    os.utime(path, ns=(1, 1))
    assert served.ask()[0] == 404
    path.unlink()
    assert served.ask()[0] == 404
    (served.directory / "copy").write_bytes(DATA)
    path.symlink_to(served.directory / "copy")
    assert served.ask()[0] == 404


def test_what_is_not_there_has_an_outlook(served: Served) -> None:
    outlook = Outlook.COMING
    served.holdings.expect(lambda _: outlook)
    file = LockedFile("m.safetensors", 1, "shard", sha256=ABSENT)
    source = PeerSource("node-1", served.server.url, served.tokens.current())
    with pytest.raises(NotYetError):
        source.open(file)
    outlook = Outlook.ABSENT
    with pytest.raises(NotHeldError):
        source.open(file)
    outlook = Outlook.FAILED
    with pytest.raises(NeverError):
        source.open(file)


def test_garbage_does_not_end_the_server(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    place = urlsplit(served.server.url)
    for garbage in (b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000 + b"\r\n\r\n", b""):
        with socket.create_connection((place.hostname or "", place.port), 10) as client:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass
    assert served.ask()[0] == 200
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_stream_that_is_cut_goes_on_where_it_was_cut(served: Served) -> None:
    """The line is cut after a part of each answer; the ranges put the file together."""
    place = urlsplit(served.server.url)
    with FaultyLine(place.hostname or "", place.port or 0) as line:
        line.cut_after_bytes = 500_000
        source = PeerSource("node-1", line.url, served.tokens.current())
        data = b"".join(bytes(block) for block in source.open(LockedFile("m", len(DATA), "shard", sha256=SHA256)))
    assert data == DATA
