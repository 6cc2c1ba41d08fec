"""Every way in which a Hub can lie to a puller, or a store fail it: a table, and what has to hold after each.

However a case ends: what stands in the store with its `.ok` has the lock's bytes (all of it is hashed again here), a
failure leaves nothing with a blob's name that is wrong, and the same pull with an honest Hub and store ends with all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import ExitCode, K2Error
from tasks.core.identity import sha256_hex
from tasks.node.meter import Reports
from tasks.node.program import Stop
from tasks.node.puller import pull, share
from tasks.node.steady_stream import Pace
from tasks.node.transfer import Route
from tests.contract.odd_server import odd_server, send
from tests.contract.weights.conftest import BIG, FILES, FIRST, PART_BYTES, SECOND, STALL_S, Weights
from tests.contract.weights.lying_relay import (
    Answer,
    Lie,
    Request,
    body,
    compressed,
    cut,
    drip,
    flip,
    header,
    longer_than_announced,
    redirect,
    status,
)

OK, INTEGRITY, UNAVAILABLE, INPUT = ExitCode.DONE, ExitCode.INTEGRITY, ExitCode.UNAVAILABLE, ExitCode.INVALID_INPUT
ALWAYS, ONCE = 1_000_000, 1


def pull_all(weights: Weights, path: str = FIRST, *, token_file: str = "") -> ExitCode:
    """Pull with the real program's parts and return the exit code that it would have."""
    lock = weights.big_lock if path == BIG else weights.lock
    pace = Pace(stall_s=STALL_S, tries=3)
    route = Route(weights.hub_client(token_file), weights.client(), lock, weights.hub.url, PART_BYTES, pace)
    try:
        pull(route, share(lock, 0, 1), 3, Stop(), Reports(lambda line: None))
    except K2Error as error:
        assert error.where, error.as_text()
        return error.exit_code
    return ExitCode.DONE


def assert_nothing_wrong(weights: Weights, path: str = FIRST, *, whole: bool) -> None:
    """Assert that every blob that counts as verified has the lock's bytes, and that nothing wrong has a blob's name."""
    store = weights.client(lying=False)
    there = {item.key for item in store.list_objects("blobs/")}
    for file in (weights.big_lock if path == BIG else weights.lock).files:
        key = f"blobs/{file.sha256}"
        if key in there:
            assert sha256_hex(store.get(key)[0]) == file.sha256, file.path
        assert key in there or f"{key}.ok" not in there, file.path
        assert not whole or f"{key}.ok" in there, file.path
        assert not whole or store.unfinished_upload(key) is None, file.path


HUB_LIES: list[tuple[str, str, Lie, int, ExitCode]] = [
    ("a-bit-of-the-first-byte", FIRST, flip(0.0), ALWAYS, INTEGRITY),
    ("a-bit-in-the-middle", BIG, flip(0.5), ALWAYS, INTEGRITY),
    ("a-bit-of-the-last-byte", BIG, flip(1.0), ALWAYS, INTEGRITY),
    ("a-bit-of-a-small-file", "config.json", flip(0.5), ALWAYS, INTEGRITY),
    ("a-bit-once", FIRST, flip(0.5), ONCE, OK),
    ("short-and-says-so", FIRST, body(lambda data: data[:-1]), ALWAYS, INTEGRITY),
    ("long-and-says-so", BIG, body(lambda data: data + b"x"), ALWAYS, INTEGRITY),
    ("longer-than-announced", FIRST, longer_than_announced, ALWAYS, OK),
    ("empty", FIRST, body(lambda data: b""), ALWAYS, INTEGRITY),
    ("zeros-in-full-length", FIRST, body(lambda data: bytes(len(data))), ALWAYS, INTEGRITY),
    ("second-half-zeros", FIRST, body(lambda data: data[: len(data) // 2].ljust(len(data), b"\0")), ALWAYS, INTEGRITY),
    ("another-shard-of-the-same-size", FIRST, body(lambda data: FILES[SECOND]), ALWAYS, INTEGRITY),
    ("html-with-200", FIRST, status(200), ALWAYS, UNAVAILABLE),
    ("compressed-unasked", FIRST, compressed, ALWAYS, UNAVAILABLE),
    ("etag-of-something-else", FIRST, header("ETag", f'"{"0" * 64}"'), ALWAYS, OK),
    *((f"cut-once-at-{tenth}0-percent", FIRST, cut(tenth / 10), ONCE, OK) for tenth in range(10)),
    ("cut-in-the-second-part", BIG, cut(0.7), ONCE, OK),
    ("cut-always-at-the-first-byte", FIRST, cut(0.0), ALWAYS, UNAVAILABLE),
    ("a-byte-now-and-then", FIRST, drip(0.2), ALWAYS, UNAVAILABLE),
    *((f"status-{code}-once", FIRST, status(code), ONCE, OK) for code in (429, 500, 502, 503, 504)),
    *((f"status-{code}", FIRST, status(code), ALWAYS, UNAVAILABLE) for code in (416, 429, 500, 503)),
    *((f"status-{code}", FIRST, status(code), ALWAYS, INPUT) for code in (401, 403)),
    ("status-404", FIRST, status(404), ALWAYS, INPUT),
    ("redirect-to-nobody", FIRST, redirect("http://127.0.0.1:9/"), ALWAYS, UNAVAILABLE),
]


@pytest.mark.parametrize(("path", "lie", "times", "code"), [row[1:] for row in HUB_LIES], ids=[r[0] for r in HUB_LIES])
def test_a_lying_hub(empty: Weights, path: str, lie: Lie, times: int, code: ExitCode) -> None:
    empty.hub.tell(lie, f"/{path}", times=times)
    assert pull_all(empty, path) in (code if isinstance(code, set) else {code})
    assert empty.hub.told >= 1
    assert_nothing_wrong(empty, path, whole=code == OK)
    empty.hub.be_honest()
    assert pull_all(empty, path) == OK
    assert_nothing_wrong(empty, path, whole=True)


def _ranges_ignored(request: Request, answer: Answer) -> None:
    if answer.status == 206:
        answer.status, answer.body = 200, FILES[FIRST]
        answer.headers = {k: v for k, v in answer.headers.items() if k.lower() != "content-range"}


def _wrong_range(request: Request, answer: Answer) -> None:
    if answer.status == 206:
        answer.body = FILES[FIRST][: len(answer.body)]  # from the beginning, and it says so
        answer.headers["Content-Range"] = f"bytes 0-{len(answer.body) - 1}/{len(FILES[FIRST])}"


def _range_lies(request: Request, answer: Answer) -> None:
    if answer.status == 206:
        answer.body = FILES[FIRST][: len(answer.body)]  # and it says that it is what was asked for


@pytest.mark.parametrize(
    ("lie", "codes"),
    [(_ranges_ignored, {OK}), (_wrong_range, {OK, INTEGRITY, UNAVAILABLE}), (_range_lies, {OK, INTEGRITY})],
    ids=["ignored", "another-than-asked", "says-what-is-not-so"],
)
def test_a_stream_that_goes_on_in_the_wrong_place(empty: Weights, lie: Lie, codes: set[ExitCode]) -> None:
    first = [True]

    def cut_then_lie(request: Request, answer: Answer) -> None:
        if first.pop() if first else False:
            answer.announced, answer.cut_after = len(answer.body), len(answer.body) // 2
        else:
            lie(request, answer)

    empty.hub.tell(cut_then_lie, f"/{FIRST}")
    assert pull_all(empty) in codes
    assert_nothing_wrong(empty, whole=False)
    empty.hub.be_honest()
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


def test_the_token_does_not_follow_a_redirect(empty: Weights, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(empty.token)
    came: list[dict[str, str]] = []
    with odd_server(lambda h: (came.append(dict(h.headers)), send(h, 200, FILES[FIRST]))[1]) as elsewhere:
        url = elsewhere.replace("127.0.0.1", "localhost")  # another host
        empty.hub.tell(redirect(f"{url}/blob"), f"/{FIRST}")
        assert pull_all(empty, token_file=str(tmp_path / "token")) == OK
    assert came
    assert not [headers for headers in came if empty.token in str(headers)]
    assert [r for r in empty.hub.asked("resolve/") if empty.token in str(r.headers)]
    assert_nothing_wrong(empty, whole=True)


STORE_FAILURES: list[tuple[str, str, Lie, int, ExitCode]] = [
    ("put-500-once", "PUT", status(500), ONCE, OK),
    ("put-503", "PUT", status(503), ALWAYS, UNAVAILABLE),
    ("put-403", "PUT", status(403), ALWAYS, UNAVAILABLE),
    ("head-503-once", "HEAD", status(503), ONCE, OK),
]


@pytest.mark.parametrize(
    ("method", "lie", "times", "code"), [row[1:] for row in STORE_FAILURES], ids=[row[0] for row in STORE_FAILURES]
)
def test_a_failing_store(empty: Weights, method: str, lie: Lie, times: int, code: ExitCode) -> None:
    empty.store.tell(lie, "blobs/", times=times, method=method)
    assert pull_all(empty) == code
    assert empty.store.told >= 1
    assert_nothing_wrong(empty, whole=code == OK)
    empty.store.be_honest()
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


def test_a_store_that_stores_other_bytes(empty: Weights) -> None:
    """What was sent arrives changed: the checksum that goes with it is the store's to refuse."""

    def alter(request: Request) -> None:
        if request.method == "PUT" and "blobs/" in request.path and not request.path.endswith(".ok") and request.body:
            changed = bytearray(request.body)
            changed[len(changed) // 2] ^= 1
            request.body = bytes(changed)

    empty.store.alter = alter
    assert pull_all(empty) == UNAVAILABLE
    assert_nothing_wrong(empty, whole=False)
    empty.store.be_honest()
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


def test_a_store_that_says_yes_and_stores_nothing(empty: Weights) -> None:
    real = empty.store.answer

    def swallow(request: Request) -> Answer:
        key = request.path.partition("?")[0]
        if request.method == "PUT" and key.endswith(empty.lock.file(FIRST).sha256):
            return Answer(200, {"ETag": '"0"'}, b"")
        return real(request)

    empty.store.answer = swallow  # type: ignore[method-assign]
    assert pull_all(empty) == UNAVAILABLE
    assert_nothing_wrong(empty, whole=False)
    empty.store.answer = real  # type: ignore[method-assign]
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


def test_two_pullers_of_the_same_share_at_once(empty: Weights) -> None:
    codes: list[ExitCode] = []
    threads = [threading.Thread(target=lambda: codes.append(pull_all(empty))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(codes) <= {OK, UNAVAILABLE}
    assert_nothing_wrong(empty, whole=False)
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


@pytest.mark.parametrize("left", [b"", FILES[SECOND], FILES[FIRST][:1000]], ids=["empty", "wrong-bytes", "short"])
def test_a_blob_that_nobody_vouches_for(empty: Weights, left: bytes) -> None:
    """Without its `.ok` it was never verified, whatever its name says."""
    store = empty.client(lying=False)
    store.put(empty.blob(FIRST), left)
    assert pull_all(empty) == OK
    assert_nothing_wrong(empty, whole=True)


KILLED_AT: dict[str, Callable[[Request], bool]] = {
    "the-first-part": lambda r: "partNumber=1" in r.path,
    "the-second-part": lambda r: "partNumber=2" in r.path,
    "the-end-of-the-upload": lambda r: r.method == "POST" and "uploadId=" in r.path,
    "the-statement": lambda r: r.method == "PUT" and r.path.endswith(".ok"),
}


@pytest.mark.parametrize("at", KILLED_AT)
def test_killed_at(empty: Weights, at: str) -> None:
    """SIGKILL of a real puller when it sends that request."""
    import os
    import signal
    import subprocess
    import sys

    dead = threading.Event()

    def kill(request: Request) -> None:
        if not dead.is_set() and KILLED_AT[at](request):
            dead.set()
            os.killpg(process.pid, signal.SIGKILL)

    environment = {
        **os.environ,
        "K2_STORE_ENDPOINT": empty.store.url,
        "K2_STORE_BUCKET": empty.bucket,
        "K2_STORE_ACCESS_KEY": empty.keys.access_key,
        "K2_STORE_SECRET_KEY": empty.keys.secret_key,
        "HF_ENDPOINT": empty.hub.url,
    }
    empty.store.hook = kill
    arguments = ["--lock-digest", empty.big_lock.digest, "--puller", "0", "--of", "1", "--part-bytes", str(PART_BYTES)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.node.pull", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.wait(60) == -9
    assert dead.is_set()
    empty.store.be_honest()
    assert_nothing_wrong(empty, BIG, whole=False)
    assert pull_all(empty, BIG) == OK
    assert_nothing_wrong(empty, BIG, whole=True)
