"""Step pull: what is in the store moves no byte, and nobody's word is taken for it."""

import pytest

from tasks.core.errors import IntegrityError, UnavailableError
from tasks.steps.acceptance import lock_step
from tasks.steps.weights import blobs_present, pull_step
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.small_world import World, checkpoint, release


def world(**files):
    made = World()
    made.hub.files = {**checkpoint(), **files}
    return made


def pull(made):
    subject = made.subject(release())
    lock_step(made.ports(), REPO, REVISION)
    return pull_step(made.ports(), subject), subject.lock


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
