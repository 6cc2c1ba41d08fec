"""The S3 adapter on a real S3 server that is cut off, killed, full or overloaded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.errors import After, ConflictError, Never, UnavailableError
from tests.contract.blocks import whole
from tests.contract.faulty_line import FaultyLine
from tests.contract.odd_server import odd_server, send

PART = 5 * 1024 * 1024


@pytest.fixture
def line(seaweedfs: objectstore.ObjectStore) -> Iterator[FaultyLine]:
    with FaultyLine(seaweedfs.host, seaweedfs.port) as line:
        yield line


def test_bytes_that_changed_on_the_way_are_refused(line: FaultyLine, connect: Any, s3: S3Store, key: str) -> None:
    store = connect(endpoint=line.url, tries=1)
    line.changed = (b"these bytes", b"those bytes")
    with pytest.raises(UnavailableError):
        store.put(key, b"these bytes")
    upload = store.start_upload(key)
    with pytest.raises(UnavailableError):
        store.put_part(key, upload, 1, b"these bytes")
    assert s3.head(key) is None
    assert s3.unfinished_upload(key) == (upload, [])


def test_a_stream_that_is_cut_is_no_end_and_goes_on_where_it_broke(
    line: FaultyLine, connect: Any, s3: S3Store, key: str
) -> None:
    data = os.urandom(3_000_000)
    s3.put(key, data)
    store = connect(endpoint=line.url)
    line.cut_after_bytes = 1_000_000
    received = b""
    with pytest.raises(UnavailableError) as caught:
        for block in store.open(key):
            received += block
    assert isinstance(caught.value.retry, After)
    assert data.startswith(received)
    line.cut_after_bytes = None
    assert received + whole(store.open(key, len(received))) == data


def test_a_small_object_that_is_cut_is_not_taken_for_whole(
    line: FaultyLine, connect: Any, s3: S3Store, key: str
) -> None:
    s3.put(key, b"x" * 100_000)
    line.cut_after_bytes = 50_000
    with pytest.raises(UnavailableError):
        connect(endpoint=line.url).get(key)


def test_a_write_whose_answer_was_lost_has_won(line: FaultyLine, connect: Any, s3: S3Store, key: str) -> None:
    line.lost_answers = 1
    etag = connect(endpoint=line.url).put(key, b"mine", if_absent=True)
    assert line.lost_answers == 0
    assert s3.get(key) == (b"mine", etag)
    line.lost_answers = 1
    newer = connect(endpoint=line.url).put(key, b"mine again", if_match=etag)
    assert s3.get(key) == (b"mine again", newer)


def test_a_write_that_lost_has_lost_although_its_answer_did_not_come(
    line: FaultyLine, connect: Any, s3: S3Store, key: str
) -> None:
    s3.put(key, b"theirs")
    line.lost_answers = 1
    with pytest.raises(ConflictError):
        connect(endpoint=line.url).put(key, b"mine", if_absent=True)
    assert line.lost_answers == 0
    assert s3.get(key)[0] == b"theirs"


@pytest.mark.parametrize("wrong", [{"secret_key": "not-the-secret"}, {"access_key": "nobody-in-particular"}])
def test_wrong_keys_are_final_and_not_shown(connect: Any, wrong: dict[str, str]) -> None:
    store = connect(**wrong)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("t/x", b""), lambda: store.get("t/x"), lambda: store.list_objects("t/"),
        lambda: list(store.open("t/x")), lambda: store.start_upload("t/x"), lambda: store.delete("t/x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnavailableError) as caught:
            call()
        assert isinstance(caught.value.retry, Never)
        (secret,) = wrong.values()
        assert secret not in caught.value.as_text() + repr(store) + repr(StoreCredentials(secret, secret))


def test_nobody_there_says_try_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError) as caught:
            S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=1).head("t/x")
    assert isinstance(caught.value.retry, After)


@contextmanager
def answering(*answers: tuple[int, bytes], **headers: str) -> Iterator[str]:
    """Serve the answers in turn, the last one for good."""
    left = list(answers)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        status, body = left.pop(0) if len(left) > 1 else left[0]
        send(handler, status, body, ETag='"etag"', **headers)

    with odd_server(answer) as url:
        yield url


SLOW_DOWN = (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>")


def test_a_store_that_asks_to_slow_down_is_asked_again() -> None:
    with answering(SLOW_DOWN, SLOW_DOWN, (200, b"")) as url:
        assert S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=3).put("t/x", b"x") == "etag"


def test_a_store_that_is_overloaded_for_long_may_be_tried_later() -> None:
    with answering(SLOW_DOWN) as url, pytest.raises(UnavailableError, match="SlowDown") as caught:
        S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=2).put("t/x", b"x")
    assert isinstance(caught.value.retry, After)


def test_a_body_shorter_than_announced_is_found() -> None:
    with answering((200, b"short"), Content_Length="100") as url:
        store = S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=1)
        with pytest.raises(UnavailableError):
            list(store.open("t/x"))
        with pytest.raises(UnavailableError):
            store.get("t/x")


def _listing(handler: BaseHTTPRequestHandler) -> None:
    """List one upload with one part; an answer of http.server has a Date only if it is sent."""
    upload = b"<Upload><Key>t/x</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
    part = b"<Part><PartNumber>1</PartNumber><Size>7</Size><LastModified>2026-01-01T10:00:00Z</LastModified></Part>"
    of_parts = "uploadId" in handler.path
    name = b"ListPartsResult" if of_parts else b"ListMultipartUploadsResult"
    body = b"<%s>%s<IsTruncated>false</IsTruncated></%s>" % (name, part if of_parts else upload, name)
    handler.send_response_only(200)
    handler.send_header("Content-Length", str(len(body)))
    for value in getattr(handler, "dates", ()):
        handler.send_header("Date", value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize(
    ("dates", "idle_s"),
    [
        (("Thu, 01 Jan 2026 11:00:00 GMT",), 3600.0),
        (("Thu, 01 Jan 2026 09:00:00 GMT",), 0.0),  # a clock that jumps
        ((), 0.0),
        (("yesterday",), 0.0),
    ],
)
def test_age_is_told_by_the_clock_of_the_store_and_not_by_ours(dates: tuple[str, ...], idle_s: float) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.dates = dates  # type: ignore[attr-defined]
        _listing(handler)

    with odd_server(answer) as url:
        (found,) = S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=1).unfinished_uploads("t/")
    assert (found.parts, found.size_bytes, found.idle_s) == (1, 7, idle_s)


def test_a_store_that_says_nothing_is_given_up(key: str) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(UnavailableError, match="ReadTimeout") as caught:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=1, stall_s=0.3).head("t/x")
    assert isinstance(caught.value.retry, After)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Supervisor, objectstore.ObjectStore]]:
    """A server that these cases may kill."""
    with Supervisor(tmp_path_factory.mktemp("own-store")) as supervisor:
        yield supervisor, objectstore.start(supervisor)


def test_an_upload_outlives_a_kill_of_the_server(own: tuple[Supervisor, objectstore.ObjectStore]) -> None:
    supervisor, server = own
    credentials = StoreCredentials(server.keys.access_key, server.keys.secret_key)
    store = S3Store(server.endpoint, "k2-test", credentials)
    store.ensure_bucket()
    data = [os.urandom(PART), os.urandom(PART), b"end"]
    upload = store.start_upload("t/x")
    parts = [store.put_part("t/x", upload, 1, data[0])]
    errors: list[BaseException] = []

    def send_second(through: S3Store) -> None:
        try:
            through.put_part("t/x", upload, 2, data[1])
        except UnavailableError as error:
            errors.append(error)

    with FaultyLine(server.host, server.port) as line:
        line.held_after_bytes = PART // 2
        through = S3Store(line.url, "k2-test", credentials, tries=1)
        sending = threading.Thread(target=send_second, args=(through,))
        sending.start()
        assert line.held.wait(30)
        assert supervisor.restart("object-store", grace_s=0).alive()  # SIGKILL in the middle of the part
        line.release()
        sending.join(60)
    assert len(errors) == 1
    later = S3Store(server.endpoint, "k2-test", credentials)
    found = later.unfinished_upload("t/x")
    assert found == (upload, parts)
    parts += [later.put_part("t/x", upload, number, data[number - 1]) for number in (2, 3)]
    later.finish_upload("t/x", upload, parts)
    assert whole(later.open("t/x")) == b"".join(data)


def test_a_full_disk_refuses_writes_and_still_reads(
    own: tuple[Supervisor, objectstore.ObjectStore], tmp_path: Path
) -> None:
    supervisor, server = own
    store = S3Store(server.endpoint, "k2-test", StoreCredentials(server.keys.access_key, server.keys.secret_key))
    store.ensure_bucket()
    store.put("t/full", b"x" * 100_000)
    spec = supervisor.child("object-store").spec
    supervisor.stop("object-store")
    # Its own guard: with less than so much of the disk free it writes to no volume. No disk has all of it free.
    supervisor.start(replace(spec, argv=(*spec.argv, "-volume.minFreeSpace=100")))
    for act in (
        lambda: store.put("t/full", b"y" * 100_000),
        lambda: store.put("t/new", b"y" * 100_000, if_absent=True),
        lambda: store.put_part("t/new", store.start_upload("t/new"), 1, b"y" * PART),
    ):
        with pytest.raises(UnavailableError) as caught:
            act()
        assert isinstance(caught.value.retry, After)
    assert store.get("t/full")[0] == b"x" * 100_000
    assert store.head("t/new") is None
