"""A lock made from the Hub: its word is checked as far as it can be without the shards' bytes, and only so far read."""

import json
import threading

import pytest

from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.core.lock import LockedFile
from tasks.steps.locking import make_accepted_lock
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.safetensors_files import INDEX, shard, sharded
from tests.fakes.small_world import RecordingProgress

SMALL = {"config.json": b"{}", "code/modeling.py": b"pass\n", "code/empty.py": b""}
ONE = {"model.safetensors": shard({"t": ("BF16", (4,))}), **SMALL}


def hub(*changes, take=()):
    """Return a Hub with a checkpoint of two shards, changed: files put and files taken away."""
    files = {**sharded(2), **SMALL}
    for change in changes:
        files |= change
    return MemoryHub(REPO, REVISION, {path: data for path, data in files.items() if path not in take})


def made(it):
    return make_accepted_lock(it, REPO, REVISION)


def refused(it, code="K2-INP-004"):
    with pytest.raises(InputError) as caught:
        made(it)
    assert caught.value.code == code
    assert str(caught.value).isprintable()
    return caught.value


FIRST, SECOND = sorted(path for path in sharded(2) if path != INDEX)


def test_every_file_gets_our_own_digest_of_what_the_hub_lists():
    it = hub()
    lock, small = made(it)
    assert {f.path: f.sha256 for f in lock.files} == {p: sha256_hex(d) for p, d in it.files.items()}
    assert set(small) == {*SMALL, INDEX}


@pytest.mark.parametrize("pattern", ["model-{n}-of-{count}.safetensors", "model-{n:05}-of-{count:06}.safetensors"])
@pytest.mark.parametrize("count", [61, 62])
def test_any_number_of_shards_is_read_by_its_headers_alone(count, pattern):
    it, progress = MemoryHub(REPO, REVISION, {**sharded(count, pattern), **SMALL}), RecordingProgress()
    lock, _ = make_accepted_lock(it, REPO, REVISION, progress)
    assert len(lock.shards) == count
    assert it.opened == []
    assert sorted(path for path, _, _ in it.ranges) == sorted(file.path for file in lock.shards)
    assert progress.lines[-1] == f"lock: {count + 4} of {count + 4} files "


def test_one_shard_needs_no_index():
    lock, _ = made(MemoryHub(REPO, REVISION, ONE))
    assert [file.path for file in lock.shards] == ["model.safetensors"]


def test_an_index_that_is_large_has_a_sha256_and_is_held_to_it():
    class LargeIndex(MemoryHub):
        def _entry(self, path):
            data = self.files[path]
            return LockedFile(path, len(data), "other", sha256_hex(data)) if path == INDEX else super()._entry(path)

    it = LargeIndex(REPO, REVISION, hub().files)
    assert made(it)[0].file(INDEX) == LockedFile(INDEX, len(it.files[INDEX]), "other", sha256_hex(it.files[INDEX]))
    it.served[INDEX] = it.files[INDEX].replace(b"1", b"2")
    with pytest.raises(IntegrityError) as caught:
        made(it)
    assert INDEX in caught.value.where


def test_shards_below_the_top_have_an_index_of_their_own_or_none():
    lock, _ = made(hub({f"eagle/{path}": data for path, data in sharded(3).items()}))
    assert len(lock.shards) == 5
    assert made(hub({"original/a.safetensors": ONE["model.safetensors"], "original/b.safetensors": shard({})}))
    assert (
        "eagle/"
        in refused(hub({f"eagle/{path}": data for path, data in sharded(3).items() if "-00002-" not in path})).where
    )


def test_a_small_file_that_is_not_what_the_hub_lists_is_refused():
    it = hub()
    it.served["code/modeling.py"] = b"import os"
    with pytest.raises(IntegrityError) as caught:
        made(it)
    assert caught.value.code == "K2-INT-001"
    assert "code/modeling.py" in caught.value.where


def test_every_shard_with_a_wrong_header_of_the_right_sha_is_found_and_named():
    """What no digest finds: the upload itself is wrong."""
    header_at, data = 20, bytearray(sharded(2)[SECOND])
    data[header_at] ^= 1
    error = refused(hub({SECOND: bytes(data)}))
    assert error.where == SECOND
    assert error.got and error.expected


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({FIRST: sharded(2)[SECOND], SECOND: sharded(2)[FIRST]}, FIRST),
        ({SECOND: sharded(2)[FIRST]}, SECOND),
        ({SECOND: sharded(2)[SECOND][:-1]}, SECOND),
        ({SECOND: sharded(2)[SECOND] + b"\0"}, SECOND),
        ({SECOND: bytes(len(sharded(2)[SECOND]))}, SECOND),
        ({SECOND: b""}, SECOND),
        ({SECOND: b"<html>not here</html>"}, SECOND),
        ({SECOND: shard({"other": ("U8", (1,))})}, SECOND),
        ({INDEX: sharded(3)[INDEX]}, INDEX),
        ({INDEX: b"not json"}, INDEX),
        ({"model-00003-of-000002.safetensors": shard({"x": ("U8", (1,))})}, INDEX),
        ({INDEX: sharded(2)[INDEX].replace(b'"total_size": ', b'"total_size": 1')}, INDEX),
    ],
)
def test_a_checkpoint_in_which_index_headers_and_sizes_disagree_is_refused(wrong, where):
    assert refused(hub(wrong)).where == where


def test_a_wrong_total_alone_can_be_passed_over():
    it = hub({INDEX: sharded(2)[INDEX].replace(b'"total_size": ', b'"total_size": 1')})
    lock, _ = make_accepted_lock(it, REPO, REVISION, total_size=False)
    assert lock.file(INDEX).sha256 == sha256_hex(it.files[INDEX])


@pytest.mark.parametrize(
    ("it", "code"),
    [
        (hub(take=[INDEX]), "K2-INP-004"),
        (hub(take=[FIRST, SECOND, INDEX]), "K2-INP-004"),
        (MemoryHub(REPO, REVISION, {"model.safetensors": shard({}), **SMALL}), "K2-INP-004"),
        (hub({"../evil": b"x"}), "K2-INP-003"),
        (hub({".k2-staged.json": b"{}"}), "K2-INP-003"),
        (hub({"Config.json": b"{}"}), "K2-INP-003"),
        (hub({"config.json/x": b"{}"}), "K2-INP-003"),
        (hub({"tokenizer.py": b"code/modeling.py"}), "K2-INP-003"),
        (hub({"code/config.json": b"../config.json"}), "K2-INP-003"),
        (hub({"tiktoken.json": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n"}), "K2-INP-004"),
    ],
)
def test_a_revision_that_cannot_be_right_is_refused(it, code):
    refused(it, code)


@pytest.mark.parametrize("revision", ["main", "v1", "abc"])
def test_a_branch_is_never_locked(revision):
    with pytest.raises(InputError):
        make_accepted_lock(hub(), REPO, revision)


class OddHub(MemoryHub):
    """Answers the first calls of `read_range` for a path with `answers`: bytes, or an error."""

    def __init__(self, files, **answers):
        super().__init__(REPO, REVISION, files)
        self.answers = {SECOND: list(answers["answers"])}

    def read_range(self, repo, revision, path, offset, size_bytes):
        data = super().read_range(repo, revision, path, offset, size_bytes)
        if not self.answers.get(path):
            return data
        answer = self.answers[path].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer(data)


def flipped(data):
    return data[:12] + bytes([data[12] ^ 1]) + data[13:]


BROKEN = UnavailableError("K2-UNA-001", "cut")
LIMITED = UnavailableError("K2-UNA-001", "wait", details={"status": 429})


@pytest.mark.parametrize(
    "answers", [[BROKEN], [BROKEN, BROKEN], [lambda d: d[:-1]], [lambda d: b""], [flipped], [lambda d: bytes(len(d))]]
)
def test_a_fault_of_the_line_is_not_one_of_the_checkpoint(answers):
    assert made(OddHub(hub().files, answers=answers))[0] == made(hub())[0]


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ([LIMITED], 1),
        ([BROKEN] * 3, 3),
        ([lambda d: d[:-1]] * 3, 3),
        ([flipped, lambda d: d] * 3, 6),
        ([flipped, lambda d: bytes(len(d))] * 3, 6),
    ],
)
def test_a_hub_that_does_not_answer_or_not_twice_the_same_is_unavailable(answers, calls):
    it = OddHub(hub().files, answers=answers)
    with pytest.raises(UnavailableError):
        made(it)
    assert len([path for path, _, _ in it.ranges if path == SECOND]) == calls


def test_a_wrong_header_that_comes_twice_the_same_is_the_checkpoints():
    assert refused(OddHub(hub().files, answers=[flipped] * 2)).where == SECOND


def test_a_long_header_is_read_to_its_end_and_no_further():
    tensors = {f"model.layers.1.mlp.experts.{n}.up_proj.weight": ("F8_E4M3", (1,)) for n in range(8000)}
    big = shard({**tensors, "data": ("U8", (3_000_000,))})
    length = 8 + int.from_bytes(big[:8], "little")
    assert 512 * 1024 < length < len(big) - 1_000_000
    it = MemoryHub(REPO, REVISION, {"model.safetensors": big})
    made(it)
    assert it.ranges == [("model.safetensors", 0, 512 * 1024), ("model.safetensors", 512 * 1024, length - 512 * 1024)]


def test_of_an_empty_shard_nothing_is_asked_for():
    it = hub({SECOND: b""})
    assert refused(it).where == SECOND
    assert [path for path, _, _ in it.ranges] == [FIRST]


def test_headers_are_read_several_at_once_but_not_all():
    meet, most, now, guard = threading.Barrier(8, timeout=20), [0], [0], threading.Lock()

    class Counting(MemoryHub):
        def read_range(self, *where):
            with guard:
                now[0] += 1
                most[0] = max(most[0], now[0])
            meet.wait()
            with guard:
                now[0] -= 1
            return super().read_range(*where)

    made(Counting(REPO, REVISION, sharded(32)))
    assert most == [8]


def test_after_the_first_failure_what_has_not_begun_is_left():
    class Down(MemoryHub):
        asked = 0

        def read_range(self, *where):
            self.asked += 1
            raise LIMITED

    it = Down(REPO, REVISION, sharded(61))
    with pytest.raises(UnavailableError):
        made(it)
    assert it.asked < 61


def test_what_a_person_reads_of_it_is_the_shard_and_both_sides():
    text = refused(hub({SECOND: sharded(2)[SECOND][:-1]})).as_text()
    assert json.dumps(SECOND)[1:-1] in text
    assert f"{len(sharded(2)[SECOND]) - 1} bytes" in text and f"{len(sharded(2)[SECOND])} bytes" in text
