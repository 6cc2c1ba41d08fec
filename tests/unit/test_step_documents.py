"""Documents by digest: what comes back is what was written, or an integrity error."""

import json

import pytest

from tasks.core.errors import ConflictError, InputError, IntegrityError
from tasks.steps.documents import (
    LIVE_KEY,
    find_receipt,
    get_by_digest,
    get_live,
    get_lock,
    get_receipt,
    live_release,
    put_by_digest,
    put_live,
    put_lock,
    put_receipt,
)
from tests.fakes.checkpoints import contents, lock_of
from tests.fakes.memory_store import MemoryStore

LOCK = lock_of(contents())
LIVE = {"release": "r", "serving_digest": "s", "policy_digest": "p", "lock_digest": "l", "serving_data": {"a": 1}}


def test_a_document_is_kept_once_under_its_digest():
    store = MemoryStore()
    digest = put_by_digest(store, "samples", {"b": (1, 2), "a": None})
    assert put_by_digest(store, "samples", {"a": None, "b": [1, 2]}) == digest
    assert len(store.calls) == 1
    assert get_by_digest(store, "samples", digest) == {"a": None, "b": [1, 2]}


def test_other_bytes_under_the_name_are_an_integrity_error():
    store = MemoryStore()
    digest = put_lock(store, LOCK)
    assert digest == LOCK.digest
    assert get_lock(store, digest) == LOCK
    store.objects[f"locks/{digest}.json"] = LOCK.to_bytes().replace(b'"kind":"shard"', b'"kind":"other"')
    with pytest.raises(IntegrityError) as caught:
        get_lock(store, digest)
    assert caught.value.code == "K2-INT-003"


def test_a_document_that_is_not_there_is_an_input_error():
    with pytest.raises(InputError):
        get_by_digest(MemoryStore(), "locks", "0" * 64)


def test_live_moves_only_from_what_was_read():
    store = MemoryStore()
    assert get_live(store) == (None, "")
    assert live_release(store) is None
    put_live(store, LIVE, "")
    with pytest.raises(ConflictError) as caught:
        put_live(store, LIVE, "")
    assert caught.value.code == "K2-CON-004"
    _, etag = get_live(store)
    put_live(store, {**LIVE, "release": "other"}, etag)
    with pytest.raises(ConflictError):
        put_live(store, LIVE, etag)
    found = live_release(store)
    assert found is not None
    assert (found.release, found.serving_data) == ("other", {"a": 1})


def test_a_newer_record_of_what_is_live_is_refused():
    store = MemoryStore()
    store.objects[LIVE_KEY] = json.dumps({**LIVE, "version": 2}).encode()
    with pytest.raises(InputError) as caught:
        live_release(store)
    assert caught.value.code == "K2-INP-006"


def test_the_first_receipt_of_a_release_stays():
    store = MemoryStore()
    for approver in ("ann", "ann", "bob"):
        assert put_receipt(store, "r", {"approver": approver}) == "receipts/r.json"
    assert get_receipt(store, "r") == find_receipt(store, "r") == {"approver": "ann"}
    assert find_receipt(store, "another") is None


def test_a_receipt_carries_its_own_digest():
    store = MemoryStore()
    key = put_receipt(store, "r", {"a": (1, 2)})
    assert key == "receipts/r.json"
    assert get_receipt(store, "r") == {"a": [1, 2]}
    store.objects[key] = store.objects[key].replace(b"[1,2]", b"[1,3]")
    with pytest.raises(IntegrityError):
        get_receipt(store, "r")
    with pytest.raises(InputError):
        get_receipt(store, "another")
