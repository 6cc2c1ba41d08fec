"""Trust at first acceptance: one lock for a commit, from the store ever after, and never a second one."""

import copy
import json
import threading

import pytest

from tasks.core.errors import ConflictError, InputError, IntegrityError, UnavailableError
from tasks.core.lock import LockedFile, make_lock
from tasks.steps.acceptance import FoundLock, acceptance_key, find_lock, keep_lock, lock_step
from tasks.steps.capacity import make_release_plan
from tasks.steps.context import Subject
from tasks.steps.documents import get_lock
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.memory_hub import DownHub
from tests.fakes.memory_store import MemoryStore
from tests.fakes.pipeline import bring_up, make_live, promote
from tests.fakes.safetensors_files import shard
from tests.fakes.small_world import Death, Faults, World, checkpoint, release

KEY = f"accepted/{REPO}/{REVISION}.json"
NEW = release("k2-new-1")


def other_lock():
    """Return the lock of the same commit with another content of one file."""
    made = World()
    made.hub.files = {**checkpoint(), "code.py": b"import os"}
    return find_lock(made.ports(), REPO, REVISION).lock


def test_the_lock_of_a_commit_is_kept_by_digest_and_by_commit():
    world = World()
    lock, data = lock_step(world.ports(), REPO, REVISION)
    assert get_lock(world.store, data["lock_digest"]) == lock
    record = json.loads(world.store.objects[KEY])
    assert (record["repo"], record["revision"], record["lock_digest"]) == (REPO, REVISION, lock.digest)
    assert data["lock_source"] == record["source"] == "made from http://127.0.0.1:1"
    assert data["lock_source"] in data["note"]
    assert acceptance_key(REPO, REVISION) == KEY


def test_the_second_time_it_comes_from_the_store_and_the_hub_is_not_asked():
    world = World()
    lock, _ = lock_step(world.ports(), REPO, REVISION)
    world.hub, before = DownHub(), dict(world.store.objects)
    again, data = lock_step(world.ports(), REPO, REVISION)
    assert again == lock
    assert data["lock_source"] == "accepted before, made from http://127.0.0.1:1"
    assert world.hub.asked == []
    assert world.store.objects == before


def test_a_hub_that_is_down_before_the_first_acceptance_is_unavailable_and_leaves_nothing():
    world = World()
    world.hub = DownHub()
    with pytest.raises(UnavailableError):
        lock_step(world.ports(), REPO, REVISION)
    assert not [key for key in world.store.objects if key.startswith(("locks/", "accepted/"))]


def test_what_is_refused_is_not_accepted():
    world = World()
    world.hub.files = {**checkpoint(), "model-2-of-2.safetensors": shard({"x": ("U8", [3])})}
    with pytest.raises(InputError):
        lock_step(world.ports(), REPO, REVISION)
    assert not [key for key in world.store.objects if key.startswith(("locks/", "accepted/"))]
    world.hub.files = checkpoint()
    assert lock_step(world.ports(), REPO, REVISION)


def test_a_hub_that_says_something_else_later_is_not_believed():
    world = World()
    lock, _ = lock_step(world.ports(), REPO, REVISION)
    world.hub.files = {**checkpoint(), "code.py": b"import os"}
    assert lock_step(world.ports(), REPO, REVISION)[0] == lock
    anew = find_lock(world.ports(), REPO, REVISION, again=True)
    assert anew.lock == other_lock()
    with pytest.raises(IntegrityError) as caught:
        keep_lock(world.ports(), anew)
    assert caught.value.code == "K2-INT-005"
    assert anew.lock.digest in caught.value.got and lock.digest in caught.value.expected
    assert "code.py" in caught.value.where
    assert lock_step(world.ports(), REPO, REVISION)[0] == lock


def test_locks_of_other_commits_and_repositories_are_others():
    world = World()
    lock_step(world.ports(), REPO, REVISION)
    for repo, revision in (("moonshotai/Kimi-K2-Base", REVISION), (REPO, "a" * 40)):
        world.hub.repo, world.hub.revision = repo, revision
        lock, data = lock_step(world.ports(), repo, revision)
        assert (lock.repo, lock.revision) == (repo, revision)
        assert data["lock_source"].startswith("made from")


@pytest.mark.parametrize("revision", ["main", "v1", "abc"])
def test_a_branch_is_never_locked(revision):
    with pytest.raises(InputError):
        lock_step(World().ports(), REPO, revision)


class RacedStore(MemoryStore):
    """Lets another run be faster at one key."""

    def __init__(self, key, data):
        super().__init__()
        self._raced, self._data = key, data

    def put(self, key, data, *, if_absent=False, if_match=""):
        if key == self._raced and key not in self.objects:
            super().put(key, self._data)
        return super().put(key, data, if_absent=if_absent, if_match=if_match)


def test_two_runs_at_once_accept_the_same_lock():
    world, done = World(), World()
    expected, _ = lock_step(done.ports("run-0"), REPO, REVISION)
    world.store = RacedStore(KEY, done.store.objects[KEY])
    lock, _ = lock_step(world.ports("run-1"), REPO, REVISION)
    assert lock == expected
    assert json.loads(world.store.objects[KEY])["run"] == "run-0"


def test_two_runs_at_once_that_saw_different_hubs_do_not_both_go_on():
    world, other = World(), World()
    keep_lock(other.ports("run-0"), FoundLock(other_lock(), "made elsewhere"))
    world.store = RacedStore(KEY, other.store.objects[KEY])
    world.store.objects[f"locks/{other_lock().digest}.json"] = other_lock().to_bytes()
    with pytest.raises(IntegrityError) as caught:
        lock_step(world.ports("run-1"), REPO, REVISION)
    assert caught.value.code == "K2-INT-005"
    assert other_lock().digest in caught.value.expected


def test_many_runs_at_once_agree():
    world, made, start = World(), [], threading.Barrier(8, timeout=20)

    def run(number):
        start.wait()
        made.append(lock_step(world.ports(f"run-{number}"), REPO, REVISION)[0].digest)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 8 and len(set(made)) == 1


def test_a_put_whose_answer_was_lost_is_ours():
    class Lost(MemoryStore):
        lost = False

        def put(self, key, data, *, if_absent=False, if_match=""):
            etag = super().put(key, data, if_absent=if_absent, if_match=if_match)
            if key == KEY and not self.lost:
                self.lost = True
                raise ConflictError("K2-CON-004", "It is there already.", where=key)
            return etag

    world = World()
    world.store = Lost()
    assert lock_step(world.ports(), REPO, REVISION)[1]["lock_source"].startswith("made from")


def test_a_death_at_any_call_of_a_port_leaves_what_a_second_run_finishes():
    start = World()
    undisturbed = copy.deepcopy(start)
    expected, _ = lock_step(undisturbed.ports(), REPO, REVISION)
    faults = Faults(10**9)
    lock_step(copy.deepcopy(start).ports("run-0", faults), REPO, REVISION)
    assert faults.calls > 8
    for at in range(1, faults.calls + 1):
        world = copy.deepcopy(start)
        with pytest.raises(Death):
            lock_step(world.ports("run-1", Faults(at)), REPO, REVISION)
        if KEY in world.store.objects:
            assert get_lock(world.store, json.loads(world.store.objects[KEY])["lock_digest"]) == expected
        assert lock_step(world.ports("run-2"), REPO, REVISION)[0] == expected
        assert set(world.store.objects) == set(undisturbed.store.objects)


def test_a_lock_that_the_store_has_lost_is_made_again_and_has_to_be_the_same():
    world = World()
    lock, _ = lock_step(world.ports(), REPO, REVISION)
    key = f"locks/{lock.digest}.json"
    del world.store.objects[key]
    assert lock_step(world.ports(), REPO, REVISION)[0] == lock
    assert world.store.objects[key] == lock.to_bytes()
    del world.store.objects[key]
    world.hub.files = {**checkpoint(), "code.py": b"import os"}
    with pytest.raises(IntegrityError) as caught:
        lock_step(world.ports(), REPO, REVISION)
    assert caught.value.code == "K2-INT-005"
    assert other_lock().digest in caught.value.got and lock.digest in caught.value.expected


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda o: o.update({KEY: b"<html>"}), "K2-INT-003"),
        (lambda o: o.update({KEY: b"[]"}), "K2-INT-003"),
        (lambda o: o.update({KEY: b"{}"}), "K2-INT-003"),
        (lambda o: o.update({KEY: o[KEY].replace(REVISION.encode(), b"a" * 40)}), "K2-INT-003"),
        (lambda o: o.update({KEY: o[KEY].replace(b'"version":1', b'"version":2')}), "K2-INP-006"),
        (lambda o: o.update({key: b"{}" for key in o if key.startswith("locks/")}), "K2-INT-003"),
    ],
)
def test_a_damaged_acceptance_is_never_passed_over_for_the_hub(damage, code):
    world = World()
    lock_step(world.ports(), REPO, REVISION)
    damage(world.store.objects)
    with pytest.raises((InputError, IntegrityError)) as caught:
        lock_step(world.ports(), REPO, REVISION)
    assert caught.value.code == code


def test_a_record_that_names_the_lock_of_another_commit_is_not_believed():
    world = World()
    lock, _ = lock_step(world.ports(), REPO, REVISION)
    foreign = make_lock(REPO, "a" * 40, lock.files)
    keep_lock(world.ports(), FoundLock(foreign, "read from a file"))
    objects = world.store.objects
    objects[KEY] = objects[KEY].replace(lock.digest.encode(), foreign.digest.encode())
    with pytest.raises(IntegrityError) as caught:
        lock_step(world.ports(), REPO, REVISION)
    assert caught.value.code == "K2-INT-003"


def test_a_lock_with_a_file_that_nobody_hashed_is_not_accepted():
    world = World()
    lock = find_lock(world.ports(), REPO, REVISION).lock
    bare = make_lock(REPO, REVISION, [*lock.files, LockedFile("x", 1, "other", git_sha1="a" * 40)])
    with pytest.raises(InputError):
        keep_lock(world.ports(), FoundLock(bare, "read from a file"))
    assert KEY not in world.store.objects


def test_a_whole_release_and_its_plan_need_no_hub_once_everything_is_in_the_store():
    world = World()
    make_live(world.ports("run-0"), release("k2-old-1"))
    world.hub = DownHub()
    changed = release("k2-new-2", args={"decode-log-interval": 7})
    lock = find_lock(world.ports(), REPO, REVISION)
    assert lock.source.startswith("accepted before")
    bring_up(world.ports("run-1"), changed)
    promote(world.ports("run-1"), changed)
    assert json.loads(world.store.objects["live.json"])["release"] == "k2-new-2"
    assert make_release_plan(world.ports(), Subject(changed, lock.lock)).change == "none"
    assert world.hub.asked == []
