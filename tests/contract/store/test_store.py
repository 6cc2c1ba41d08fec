"""What `ports.Store` promises, on the in-memory fake and on a real S3 server: the same cases."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tasks.core.errors import ConflictError, UnavailableError
from tasks.core.identity import sha256_hex, sha256_of_parts
from tasks.ports import UploadGoneError
from tests.contract.blocks import whole

PART = 5 * 1024 * 1024  # S3 takes no smaller parts but the last


def together(act: Callable[[int], None], count: int) -> None:
    """Call a function with each number at once, and wait for all."""
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_is_put_is_got(store: Any, key: str) -> None:
    etag = store.put(key, b"weights")
    assert store.get(key) == (b"weights", etag)
    assert store.head(key).size_bytes == 7
    assert store.head(key).etag == etag
    assert whole(store.open(key)) == b"weights"
    assert whole(store.open(key, 3)) == b"ghts"
    store.put(key, b"")
    assert store.get(key)[0] == whole(store.open(key)) == b""


def test_nothing_is_open_from_its_end_on(store: Any, key: str) -> None:
    store.put(key, b"weights")
    for offset in (7, 8):
        with pytest.raises(UnavailableError):
            list(store.open(key, offset))


def test_a_later_write_replaces_an_earlier_one(store: Any, key: str) -> None:
    etags = [store.put(key, data) for data in (b"one", b"two", b"one")]
    assert etags[0] == etags[2] != etags[1]
    assert store.get(key) == (b"one", etags[0])


def test_what_is_deleted_is_gone_and_may_be_deleted_again(store: Any, key: str) -> None:
    store.put(key, b"x")
    for _ in range(2):
        store.delete(key)
        assert store.head(key) is None
    assert store.list_objects(key) == []
    store.put(key, b"y", if_absent=True)


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

    together(write, 8)
    assert len(won) == 1
    assert store.get(key)[0] == b"%d" % won[0]


def test_of_many_who_change_it_each_builds_on_the_one_before(store: Any, key: str) -> None:
    store.put(key, b"0")

    def count(_: int) -> None:
        for _ in range(3):
            while True:
                data, etag = store.get(key)
                try:
                    store.put(key, b"%d" % (int(data) + 1), if_match=etag)
                    break
                except ConflictError:
                    continue

    together(count, 4)
    assert store.get(key)[0] == b"12"


def test_a_prefix_is_no_directory(store: Any, key: str) -> None:
    names = [f"{key}/{name}" for name in ("p", "p/q", "pq/r", "p q+r%2Fs", "p\u00e9", "o")]
    for name in names:
        store.put(name, name.encode())
    found = store.list_objects(f"{key}/p")
    assert [item.key for item in found] == sorted(names[:-1])
    assert [(item.size_bytes, item.etag) for item in found] == [
        (len(item.key.encode()), hashlib.md5(item.key.encode()).hexdigest()) for item in found
    ]
    assert all(store.get(item.key)[0] == item.key.encode() for item in found)


def test_a_listing_has_all_pages(store: Any, key: str) -> None:
    names = [f"{key}/{number:04}" for number in range(1005)]
    together(lambda first: [store.put(name, b"") for name in names[first::8]] and None, 8)
    assert [found.key for found in store.list_objects(f"{key}/")] == names


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
    assert whole(store.open(key)) == b"".join(data)


def test_a_finished_upload_has_one_etag_everywhere(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    data = b"a" * PART + b"b"
    parts = [store.put_part(key, upload, 1, data[:PART]), store.put_part(key, upload, 2, data[PART:])]
    store.finish_upload(key, upload, parts)
    digests = b"".join(hashlib.md5(block).digest() for block in (data[:PART], data[PART:]))
    etag = f"{hashlib.md5(digests).hexdigest()}-2"
    assert {store.head(key).etag, store.get(key)[1], store.list_objects(key)[0].etag} == {etag}
    store.put(key, data, if_match=etag)
    assert store.head(key).etag == hashlib.md5(data).hexdigest()


def test_an_upload_that_broke_off_is_taken_up_and_finished(store: Any, key: str) -> None:
    data = [b"a" * PART, b"b" * PART, b"c"]
    upload = store.start_upload(key)
    store.put_part(key, upload, 1, data[0])
    store.put_part(key, upload, 2, data[1])
    # Whoever takes it up knows nothing but the key, and the bytes as they come again.
    found, there = store.unfinished_upload(key)
    assert found == upload
    assert [(part.number, part.size_bytes, part.etag) for part in there] == [
        (number, PART, hashlib.md5(block).hexdigest()) for number, block in enumerate(data[:2], start=1)
    ]
    parts = [replace(part, sha256=hashlib.sha256(block).hexdigest()) for part, block in zip(there, data, strict=False)]
    store.finish_upload(key, upload, [*parts, store.put_part(key, upload, 3, data[2])])
    assert whole(store.open(key)) == b"".join(data)
    assert whole(store.open(key, 2 * PART - 1)) == b"bc"


def test_the_newest_upload_is_taken_up_and_only_of_this_key(store: Any, key: str) -> None:
    older = store.start_upload(key)
    store.put_part(key, older, 1, b"older")
    second = int(time.time())
    while int(time.time()) == second:  # dates of S3 have seconds only
        time.sleep(0.02)
    newest = store.start_upload(key)
    store.start_upload(key + "-other")
    assert store.unfinished_upload(key) == (newest, [])
    store.finish_upload(key, newest, [store.put_part(key, newest, 1, b"newer")])
    found, parts = store.unfinished_upload(key)
    assert (found, [part.size_bytes for part in parts]) == (older, [5])


def test_an_upload_may_be_finished_twice(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    parts = [store.put_part(key, upload, 1, b"bytes")]
    store.finish_upload(key, upload, parts)
    etag = store.head(key).etag
    store.finish_upload(key, upload, parts)  # the answer to the first one was lost
    assert store.head(key).etag == etag
    store.abort_upload(key, upload)
    assert store.get(key)[0] == b"bytes"


def test_an_upload_of_no_parts_in_disorder_or_too_small_is_refused(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    whole, last = store.put_part(key, upload, 1, b"a" * PART), store.put_part(key, upload, 2, b"b")
    small = store.put_part(key, upload, 3, b"c")
    for parts in ([], [last, whole], [whole, last, small]):
        with pytest.raises(UnavailableError):
            store.finish_upload(key, upload, parts)
    assert store.head(key) is None


def test_an_aborted_upload_leaves_nothing(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    store.put_part(key, upload, 1, b"x" * 10)
    for _ in range(2):
        store.abort_upload(key, upload)
        assert store.unfinished_upload(key) is None
    with pytest.raises(UploadGoneError):
        store.put_part(key, upload, 2, b"x")
    with pytest.raises(UnavailableError):
        store.finish_upload(key, upload, [])
    assert store.head(key) is None


def test_an_upload_that_somebody_else_ended_is_told_as_gone(store: Any, key: str) -> None:
    upload = store.start_upload(key)
    part = store.put_part(key, upload, 1, b"bytes")
    store.abort_upload(key, upload)
    with pytest.raises(UploadGoneError):
        store.finish_upload(key, upload, [part])
    assert store.head(key) is None


def test_the_store_states_the_checksum_of_what_it_holds(store: Any, key: str) -> None:
    store.put(key, b"weights")
    assert store.head(key).sha256 == sha256_hex(b"weights")
    upload = store.start_upload(key)
    data = [b"a" * PART, b"b"]
    store.finish_upload(key, upload, [store.put_part(key, upload, i, block) for i, block in enumerate(data, start=1)])
    assert store.head(key).sha256 == sha256_of_parts([sha256_hex(block) for block in data])
    store.put(key, b"other")
    assert store.head(key).sha256 == sha256_hex(b"other")


def test_a_part_tells_of_the_bytes_that_go_out(store: Any, key: str) -> None:
    pieces: list[int] = []
    store.put_part(key, store.start_upload(key), 1, b"x" * PART, pieces.append)
    assert sum(pieces) == PART


def test_all_unfinished_uploads_below_a_prefix_are_listed(store: Any, key: str) -> None:
    empty, begun = store.start_upload(f"{key}/a"), store.start_upload(f"{key}/b")
    store.put_part(f"{key}/b", begun, 1, b"a" * PART)
    store.put_part(f"{key}/b", begun, 2, b"bc")
    done = store.start_upload(f"{key}/c")
    store.finish_upload(f"{key}/c", done, [store.put_part(f"{key}/c", done, 1, b"x")])
    store.start_upload(f"{key}-other")
    found = {(u.key, u.upload_id): (u.parts, u.size_bytes) for u in store.unfinished_uploads(f"{key}/")}
    assert found == {(f"{key}/a", empty): (0, 0), (f"{key}/b", begun): (2, PART + 2)}
    assert store.unfinished_uploads(f"{key}/nothing") == []


def test_an_upload_is_idle_since_its_newest_part(store: Any, key: str) -> None:
    upload = store.start_upload(key)

    def idle_s() -> float:
        (found,) = store.unfinished_uploads(key)
        return float(found.idle_s)

    deadline = time.monotonic() + 20
    while (before := idle_s()) < 2.0:  # dates of S3 have seconds only
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    store.put_part(key, upload, 1, b"x")
    assert idle_s() <= min(before, time.monotonic() - began) + 1.0


def test_a_bucket_may_be_there_already(store: Any) -> None:
    store.ensure_bucket()
    store.ensure_bucket()


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
