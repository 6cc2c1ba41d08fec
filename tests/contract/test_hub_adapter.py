"""The Hub adapter: real huggingface_hub against the rehearsal's Hub server, and against servers that misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal.hub import publish
from tasks.adapters.hub import HfHub
from tasks.core.errors import After, InputError, Never, UnavailableError
from tasks.core.identity import git_blob_sha1_hex
from tasks.core.lock import LockedFile

REPO = "moonshotai/Kimi-K2-Instruct"
SHARD = "model-1-of-2.safetensors"
FILES = {
    SHARD: random.Random(1).randbytes(3_000_000),
    "model-2-of-2.safetensors": b"two",
    "config.json": b'{"architectures": []}',
    "code/modeling_k2.py": b"pass\n",
    **{f"extra/{i:02}.txt": b"%d" % i for i in range(30)},
}
TOKEN = "hf_only_for_this_test"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("hub")
    checkpoint = directory / "checkpoint"
    for path, data in FILES.items():
        (checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / path).write_bytes(data)
    commit = publish(directory / "root", REPO, checkpoint)
    publish(directory / "root", "moonshotai/Gated", checkpoint, gated=True)
    inject = directory / "inject"
    inject.mkdir()
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(directory / "root"), "--host", "127.0.0.1"]
    command += ["--port", "0", "--inject-dir", str(inject), "--token", TOKEN, "--page-size", "10"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    yield {"url": url, "commit": commit, "inject": inject}
    process.terminate()
    process.wait(30)


@contextmanager
def fault(site: dict[str, Any], name: str, **parameters: Any) -> Iterator[None]:
    path: Path = site["inject"] / f"{name}.json"
    path.write_text(json.dumps(parameters))
    try:
        yield
    finally:
        path.unlink()


@pytest.fixture
def hub(site: dict[str, Any]) -> HfHub:
    return HfHub(site["url"], stall_s=30.0)


def test_a_branch_becomes_a_commit(hub: HfHub, site: dict[str, Any]) -> None:
    assert hub.resolve(REPO, "main") == site["commit"]
    assert hub.resolve(REPO, site["commit"]) == site["commit"]


def test_the_list_has_all_pages_with_sizes_and_digests(hub: HfHub, site: dict[str, Any]) -> None:
    listed = hub.list_revision(REPO, site["commit"])
    assert [file.path for file in listed.files] == sorted(FILES)
    by_path = {file.path: file for file in listed.files}
    shard = FILES[SHARD]
    assert by_path[SHARD] == LockedFile(SHARD, len(shard), "shard", sha256=hashlib.sha256(shard).hexdigest())
    code = "code/modeling_k2.py"
    assert by_path[code] == LockedFile(code, len(FILES[code]), "code", git_sha1=git_blob_sha1_hex(FILES[code]))


@pytest.mark.parametrize("offset", [0, 1, 1_234_567, 2_999_999])
def test_bytes_come_from_an_offset_on(hub: HfHub, site: dict[str, Any], offset: int) -> None:
    assert b"".join(hub.open_file(REPO, site["commit"], SHARD, offset)) == FILES[SHARD][offset:]


def test_small_files_are_read_up_to_a_limit(hub: HfHub, site: dict[str, Any]) -> None:
    assert hub.read_file(REPO, site["commit"], "config.json", 1000) == FILES["config.json"]
    with pytest.raises(InputError) as caught:
        hub.read_file(REPO, site["commit"], SHARD, 1000)
    assert caught.value.where.endswith(SHARD)


def test_what_does_not_exist_is_wrong_input(hub: HfHub, site: dict[str, Any]) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hub.resolve("moonshotai/Nothing", "main"),
        lambda: hub.resolve(REPO, "no-such-branch"),
        lambda: hub.list_revision(REPO, "f" * 40),
        lambda: hub.list_revision(REPO, "main"),
        lambda: list(hub.open_file(REPO, site["commit"], "nothing.bin", 0)),
        lambda: hub.read_file("moonshotai/Gated", site["commit"], "config.json", 100),
        lambda: hub.resolve("../etc", "main"),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert isinstance(caught.value.retry, Never)


def test_the_token_is_read_at_each_call_and_never_shown(site: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "token"
    hub = HfHub(site["url"], token_file=str(path))
    with pytest.raises(InputError, match="token"):
        hub.read_file("moonshotai/Gated", site["commit"], "config.json", 100)
    path.write_text(f"{TOKEN}\n")
    assert hub.read_file("moonshotai/Gated", site["commit"], "config.json", 100) == FILES["config.json"]
    path.write_text("hf_wrong_one")
    with pytest.raises((InputError, UnavailableError)) as caught:
        hub.read_file("moonshotai/Gated", site["commit"], "config.json", 100)
    assert "hf_wrong_one" not in caught.value.as_text() + repr(hub) + json.dumps(caught.value.as_data())


@pytest.mark.parametrize("text", [f"{TOKEN}\nsecond line", f"{TOKEN} # mine", f"{TOKEN}\x00", f"{TOKEN}\xe9"])
def test_a_token_that_is_no_single_word_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InputError, match="token") as caught:
        HfHub("http://127.0.0.1:1", token_file=str(path)).resolve(REPO, "main")
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert str(path) in caught.value.where


def test_a_token_of_the_environment(site: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2_TEST_TOKEN", TOKEN)
    hub = HfHub(site["url"], token_variable="K2_TEST_TOKEN")
    assert hub.read_file("moonshotai/Gated", site["commit"], "config.json", 100) == FILES["config.json"]


def test_a_rate_limit_says_how_long_to_wait(hub: HfHub, site: dict[str, Any]) -> None:
    with fault(site, "hub-429", retry_after_s=17):
        calls: list[Callable[[], Any]] = [
            lambda: hub.resolve(REPO, "main"),
            lambda: list(hub.open_file(REPO, site["commit"], SHARD, 0)),
        ]
        for call in calls:
            before = time.monotonic()
            with pytest.raises(UnavailableError) as caught:
                call()
            assert caught.value.retry == After(17.0)
            assert time.monotonic() - before < 17  # the wait is the caller's


def test_an_error_of_the_hub_may_be_tried_again(hub: HfHub, site: dict[str, Any]) -> None:
    with fault(site, "hub-5xx"), pytest.raises(UnavailableError, match="503") as caught:
        hub.list_revision(REPO, site["commit"])
    assert isinstance(caught.value.retry, After)


def test_a_cut_stream_is_no_end_of_file(hub: HfHub, site: dict[str, Any]) -> None:
    received = 0
    with fault(site, "hub-cut", path=SHARD, after_bytes=1_000_000), pytest.raises(UnavailableError):
        for block in hub.open_file(REPO, site["commit"], SHARD, 0):
            received += len(block)
    assert 0 < received <= 1_000_000


def test_wrong_bytes_are_handed_on_for_the_caller_to_find(hub: HfHub, site: dict[str, Any]) -> None:
    with fault(site, "shard-bitflip", path=SHARD, offset=1000):
        data = b"".join(hub.open_file(REPO, site["commit"], SHARD, 0))
    assert len(data) == len(FILES[SHARD])
    assert data != FILES[SHARD]


@contextmanager
def odd_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve every GET with a function."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    headers.setdefault("Content_Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def test_a_server_that_ignores_ranges_is_read_from_the_offset() -> None:
    with odd_server(lambda handler: send(handler, 200, b"0123456789")) as url:
        assert b"".join(HfHub(url).open_file(REPO, "a" * 40, "x.bin", 4)) == b"456789"


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


def test_reading_starts_quickly() -> None:
    """Node programs read files only: the library's large API module is not imported for that."""
    code = (
        "import sys; from tasks.adapters.hub import HfHub\n"
        "try: list(HfHub(sys.argv[1]).open_file('a/b', 'a' * 40, 'x', 0))\n"
        "except Exception as error: assert type(error).__name__ == 'UnavailableError', error\n"
        "assert 'huggingface_hub.hf_api' not in sys.modules"
    )
    with nobody() as url:
        command = [sys.executable, "-c", code, url]
        subprocess.run(command, check=True, timeout=60, env={**os.environ, "HF_HUB_OFFLINE": "0"})
