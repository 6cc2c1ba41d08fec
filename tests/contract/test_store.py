"""What `ports.Store` promises, on a real S3 server (SeaweedFS) and on the in-memory fake that other tests use."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.errors import After, ConflictError, InputError, Never, UnavailableError
from tests.fakes.memory_store import MemoryStore

PART = 5 * 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstore.ObjectStore]:
    with Supervisor(tmp_path_factory.mktemp("store")) as supervisor:
        yield objectstore.start(supervisor)


def connect(server: objectstore.ObjectStore, **changes: Any) -> S3Store:
    credentials = StoreCredentials(server.keys.access_key, server.keys.secret_key)
    return S3Store(server.endpoint, "k2-test", credentials, **changes)


@pytest.fixture(scope="module")
def s3(server: objectstore.ObjectStore) -> S3Store:
    store = connect(server)
    store.ensure_bucket()
    return store


@pytest.fixture(params=["seaweedfs", "memory"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("s3") if request.param == "seaweedfs" else MemoryStore()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return f"t/{hashlib.sha256(request.node.name.encode()).hexdigest()[:16]}"


def test_what_is_put_is_got(store: Any, key: str) -> None:
    etag = store.put(key, b"weights")
    assert store.get(key) == (b"weights", etag)
    assert store.head(key).size_bytes == 7
    assert store.head(key).etag == etag
    assert b"".join(store.open(key)) == b"weights"
    assert b"".join(store.open(key, 3)) == b"ghts"


def test_what_is_missing(store: Any, key: str) -> None:
    assert store.head(key) is None
    with pytest.raises(KeyError):
        store.get(key)
    with pytest.raises(UnavailableError):
        list(store.open(key))
    store.delete(key)
    assert store.unfinished_upload(key) is None
    store.abort_upload(key, "6f1d4cd2b6a547f4")


def test_if_absent_writes_once(store: Any, key: str) -> None:
    store.put(key, b"first", if_absent=True)
    with pytest.raises(ConflictError) as caught:
        store.put(key, b"second", if_absent=True)
    assert caught.value.code == "K2-CON-004"
    assert store.get(key)[0] == b"first"


def test_if_match_needs_the_etag_it_was_decided_on(store: Any, key: str) -> None:
    with pytest.raises(ConflictError):
        store.put(key, b"x", if_match="0" * 32)
    etag = store.put(key, b"one")
    newer = store.put(key, b"two", if_match=etag)
    with pytest.raises(ConflictError) as caught:
        store.put(key, b"three", if_match=etag)
    assert caught.value.code == "K2-CON-004"
    assert store.get(key) == (b"two", newer)


def test_of_many_writers_one_wins(store: Any, key: str) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        try:
            store.put(key, b"%d" % number, if_absent=True)
            won.append(number)
        except ConflictError:
            pass

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get(key)[0] == b"%d" % won[0]


def test_listing_is_in_key_order_and_whole(store: Any, key: str) -> None:
    names = [f"{key}/{name}" for name in ("b", "a/2", "a/1", "c")]
    for name in names:
        store.put(name, b"x")
    assert [found.key for found in store.list_objects(f"{key}/")] == sorted(names)
    assert store.list_objects(f"{key}/nothing") == []
    store.delete(names[0])
    assert len(store.list_objects(f"{key}/")) == 3


def test_an_upload_has_no_name_before_it_is_finished(store: Any, key: str) -> None:
    data = [os.urandom(PART), os.urandom(1000)]
    upload = store.start_upload(key)
    parts = [store.put_part(key, upload, i, block) for i, block in enumerate(data, start=1)]
    assert store.head(key) is None
    assert [part.etag for part in parts] == [hashlib.md5(block).hexdigest() for block in data]
    assert store.unfinished_upload(key) == (upload, parts)
    store.finish_upload(key, upload, parts)
    assert store.unfinished_upload(key) is None
    assert store.head(key).size_bytes == PART + 1000
    assert b"".join(store.open(key)) == b"".join(data)


def test_the_newest_upload_is_taken_up_and_only_of_this_key(store: Any, key: str) -> None:
    store.start_upload(key + "-other")
    store.start_upload(key)
    newest = store.start_upload(key)
    found = store.unfinished_upload(key)
    assert found is not None
    assert found[0] == newest or isinstance(store, S3Store)  # dates of S3 have seconds only
    assert found[1] == []


def test_an_aborted_upload_leaves_nothing(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    store.put_part(key, upload, 1, b"x" * 10)
    store.abort_upload(key, upload)
    assert store.unfinished_upload(key) is None
    assert store.head(key) is None


def test_an_upload_is_finished_with_the_named_bytes_or_not_at_all(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    mine = store.put_part(key, upload, 1, b"right bytes")
    store.put_part(key, upload, 1, b"other bytes")
    try:
        store.finish_upload(key, upload, [mine])
    except UnavailableError:
        assert store.head(key) is None  # S3: the part is the newer one
    else:
        assert store.get(key)[0] == b"right bytes"  # SeaweedFS: it has kept both


@pytest.mark.parametrize("change", [{"etag": "0" * 32}, {"sha256": "0" * 64}])
def test_an_upload_with_a_wrong_part_is_refused(store: Any, key: str, change: dict[str, str]) -> None:
    upload = store.start_upload(key)
    part = store.put_part(key, upload, 1, b"right bytes")
    with pytest.raises(UnavailableError):
        store.finish_upload(key, upload, [replace(part, **change)])
    assert store.head(key) is None


def test_listing_has_all_pages(s3: S3Store) -> None:
    names = [f"pages/{i:04}" for i in range(1005)]

    def write(share: list[str]) -> None:
        for name in share:
            s3.put(name, b"")

    threads = [threading.Thread(target=write, args=(names[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.key for found in s3.list_objects("pages/")] == names


def test_the_store_refuses_bytes_that_changed_on_the_way(
    s3: S3Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = S3Store.put.__globals__["_sha256"](b"other bytes")
    monkeypatch.setitem(S3Store.put.__globals__, "_sha256", lambda _: digest)
    with pytest.raises(UnavailableError):
        s3.put(key, b"these bytes")
    upload = s3.start_upload(key)
    with pytest.raises(UnavailableError):
        s3.put_part(key, upload, 1, b"these bytes")
    assert s3.head(key) is None


def test_the_bucket_may_be_there_already(s3: S3Store) -> None:
    s3.ensure_bucket()


def test_a_wrong_secret_is_final_and_not_shown(server: objectstore.ObjectStore) -> None:
    wrong = replace(server, keys=objectstore.S3Keys(server.keys.access_key, "not-the-secret"))
    store = connect(wrong)
    with pytest.raises(UnavailableError) as caught:
        store.put("t/x", b"")
    assert isinstance(caught.value.retry, Never)
    for text in (repr(store), caught.value.as_text(), repr(StoreCredentials("a-key", "not-the-secret"))):
        assert "not-the-secret" not in text
        assert "a-key" not in text


def test_nobody_there_says_try_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError) as caught:
            S3Store(url, "k2-test", StoreCredentials("a", "b"), tries=1).head("t/x")
    assert isinstance(caught.value.retry, After)


def test_credentials_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"access_key": "a", "secret_key": "b"}')
    environment = {"K2_STORE_ACCESS_KEY": "a", "K2_STORE_SECRET_KEY": "b"}
    assert StoreCredentials.from_file(path) == StoreCredentials.from_environment(environment)
    path.write_text('{"access_key": "hush"')
    for read in (lambda: StoreCredentials.from_file(path), lambda: StoreCredentials.from_environment({})):
        with pytest.raises(InputError) as caught:
            read()
        assert "hush" not in caught.value.as_text()
