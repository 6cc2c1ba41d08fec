"""Steps lock and pull: the Hub's word is checked, and what is in the store moves no byte."""

import json

import pytest

from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.steps.documents import get_lock
from tasks.steps.weights import blobs_present, lock_step, make_accepted_lock, pull_step
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.small_world import World, checkpoint, release

INDEX = "model.safetensors.index.json"


def world(**files):
    made = World()
    made.hub.files = {**checkpoint(), **files}
    return made


def pull(made):
    subject = made.subject(release())
    lock_step(made.ports(), REPO, REVISION)
    return pull_step(made.ports(), subject), subject.lock


def test_every_file_gets_our_own_digest_of_what_the_hub_lists():
    made = world()
    lock, small = make_accepted_lock(made.hub, REPO, REVISION)
    assert {f.path: f.sha256 for f in lock.files} == {p: sha256_hex(d) for p, d in made.hub.files.items()}
    assert set(small) == {"config.json", INDEX, "code.py"}
    assert made.hub.opened == []


def test_the_lock_is_kept_by_its_digest_and_made_twice_is_the_same():
    made = world()
    lock, data = lock_step(made.ports(), REPO, REVISION)
    assert get_lock(made.store, data["lock_digest"]) == lock
    assert lock_step(made.ports(), REPO, REVISION)[1] == data


def test_a_small_file_that_is_not_what_the_hub_lists_is_refused():
    made = world()
    made.hub.served["code.py"] = b"import os"
    with pytest.raises(IntegrityError) as caught:
        lock_step(made.ports(), REPO, REVISION)
    assert caught.value.code == "K2-INT-001"
    assert "code.py" in caught.value.where
    assert not [key for key in made.store.objects if key.startswith("locks/")]


@pytest.mark.parametrize(
    "index",
    [
        b"not json", b"[]", b"{}", b'{"weight_map": 3}', b"\xff\xfe",
        json.dumps({"weight_map": {"t": "model-1-of-2.safetensors"}}).encode(),
        json.dumps({"weight_map": {"t": "model-3-of-2.safetensors"}}).encode(),
    ],
)  # fmt: skip
def test_an_index_that_does_not_name_the_shards_is_an_input_error(index):
    with pytest.raises(InputError) as caught:
        lock_step(world(**{INDEX: index}).ports(), REPO, REVISION)
    assert caught.value.code == "K2-INP-004"


@pytest.mark.parametrize(
    ("take", "put", "code"),
    [(INDEX, {}, "K2-INP-004"), ("", {"../evil": b"x"}, "K2-INP-003"), ("", {".k2-staged.json": b"{}"}, "K2-INP-003")],
)
def test_a_revision_that_cannot_be_right_is_refused(take, put, code):
    made = world(**put)
    made.hub.files = {path: data for path, data in made.hub.files.items() if path != take}
    with pytest.raises(InputError) as caught:
        lock_step(made.ports(), REPO, REVISION)
    assert caught.value.code == code


@pytest.mark.parametrize("revision", ["main", "v1", "abc"])
def test_a_branch_is_never_locked(revision):
    with pytest.raises(InputError):
        lock_step(world().ports(), REPO, revision)


def test_pull_brings_what_is_missing_and_twice_nothing():
    made = world()
    first, lock = pull(made)
    assert first["bytes_fetched"] == lock.total_bytes
    assert all(blobs_present(made.store, lock).values())
    jobs = list(made.jobs_run)
    again, _ = pull(made)
    assert (again["outcome"], again["bytes_fetched"]) == ("unchanged", 0)
    assert made.jobs_run == jobs


@pytest.mark.parametrize("damage", ["no marker", "short", "gone"])
def test_a_blob_counts_only_with_its_marker_and_its_size(damage):
    made = world()
    _, lock = pull(made)
    key = f"blobs/{lock.files[0].sha256}"
    if damage == "short":
        made.store.objects[key] = made.store.objects[key][:-1]
    else:
        del made.store.objects[f"{key}.ok" if damage == "no marker" else key]
    present = blobs_present(made.store, lock)
    assert [sha for sha, there in present.items() if not there] == [lock.files[0].sha256]


def test_pullers_that_end_without_having_brought_everything_are_not_believed():
    made = world()
    subject = made.subject(release())
    lock_step(made.ports(), REPO, REVISION)
    made._program = lambda module, options: {"bytes_fetched": 1}
    with pytest.raises(UnavailableError) as caught:
        pull_step(made.ports(), subject)
    assert caught.value.code == "K2-UNA-003"


def test_a_puller_that_found_other_bytes_stops_the_release_with_the_file():
    made = world()
    error = IntegrityError("K2-INT-001", "Other bytes.", where="model-1-of-2.safetensors")
    made.broken_jobs["k2-pull-"] = error.as_data()
    with pytest.raises(IntegrityError) as caught:
        pull(made)
    assert caught.value.where == "model-1-of-2.safetensors"
