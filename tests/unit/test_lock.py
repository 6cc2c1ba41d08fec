"""The lock: canonical, complete, and nothing in it that a Hub could do harm with."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import InputError
from tasks.core.lock import (
    LockedFile,
    accept_small_files,
    check_accepted,
    classify,
    first_difference,
    lock_from_data,
    make_lock,
)

REPO, REVISION = "moonshotai/Kimi-K2-Instruct", "ab" * 20
SHA, GIT = "c" * 64, "d" * 40
SHARD = LockedFile("model-1-of-1.safetensors", 10, "shard", sha256=SHA)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.from_regex(r"([a-z]{1,4}/){0,2}[a-z][a-z0-9_-]{0,8}(\.safetensors|\.py|\.json)", fullmatch=True)
FILES = st.dictionaries(NAMES, st.tuples(st.integers(0, 2**50), HEX), max_size=8).map(
    lambda files: [LockedFile(path, size, classify(path), sha256=sha) for path, (size, sha) in files.items()]
)


def lock(*files):
    return make_lock(REPO, REVISION, [SHARD, *files])


@given(FILES)
def test_a_lock_comes_back_from_its_bytes_with_its_digest(files):
    made = lock(*[f for f in files if f.path != SHARD.path])
    again = lock_from_data(json.loads(made.to_bytes()))
    assert again == made
    assert again.digest == made.digest
    assert again.to_bytes() == made.to_bytes()


@given(FILES, st.randoms())
def test_the_order_of_the_listing_does_not_matter(files, dice):
    files = [*[f for f in files if f.path != SHARD.path], SHARD]
    shuffled = list(files)
    dice.shuffle(shuffled)
    assert make_lock(REPO, REVISION, shuffled) == make_lock(REPO, REVISION, files)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (LockedFile("../evil", 1, "other", sha256=SHA), "K2-INP-003"),
        (LockedFile(".k2-staged.json", 1, "other", sha256=SHA), "K2-INP-003"),
        (LockedFile("a.json", -1, "other", sha256=SHA), "K2-INP-004"),
        (LockedFile("a.json", 1, "other"), "K2-INP-004"),
        (LockedFile("b.safetensors", 1, "shard", git_sha1=GIT), "K2-INP-004"),
        (LockedFile("a.json", 1, "other", sha256="../live.json"), "K2-INP-004"),
        (LockedFile("a.json", 1, "other", sha256=SHA.upper()), "K2-INP-004"),
        (LockedFile("a.json", 1, "other", git_sha1="main"), "K2-INP-004"),
        (SHARD, "K2-INP-003"),
        (LockedFile(SHARD.path.upper(), 1, "other", sha256=SHA), "K2-INP-003"),
        (LockedFile(f"{SHARD.path}/a", 1, "other", sha256=SHA), "K2-INP-003"),
    ],
)
def test_a_wrong_file_is_refused(file, code):
    with pytest.raises(InputError) as caught:
        lock(file)
    assert caught.value.code == code


def test_a_revision_without_shards_and_a_branch_are_refused():
    with pytest.raises(InputError):
        make_lock(REPO, REVISION, [LockedFile("a.json", 1, "other", sha256=SHA)])
    with pytest.raises(InputError):
        make_lock(REPO, "main", [SHARD])


def test_names_of_file_and_directory():
    made = lock()
    assert made.file_name == "moonshotai--Kimi-K2-Instruct@abababab.lock.json"
    assert made.model_dir == f"moonshotai--Kimi-K2-Instruct/{REVISION}"
    assert made.file(SHARD.path) == SHARD
    with pytest.raises(KeyError):
        made.file("none")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d.update(version=2), "K2-INP-006"),
        (lambda d: d.pop("version"), "K2-INP-006"),
        (lambda d: d.pop("files"), "K2-INP-001"),
        (lambda d: d["files"][0].pop("size_bytes"), "K2-INP-001"),
        (lambda d: d["files"][0].update(size_bytes="many"), "K2-INP-001"),
        (lambda d: d["files"][0].update(size_bytes=10.5), "K2-INP-001"),
        (lambda d: d["files"][0].update(size_bytes=True), "K2-INP-001"),
        (lambda d: d["files"][0].update(path=3), "K2-INP-001"),
        (lambda d: d["files"].append(d["files"][0]), "K2-INP-003"),
        (lambda d: d.update(total_bytes=11), "K2-INP-001"),
        (lambda d: d.update(files=3), "K2-INP-001"),
        (lambda d: d.update(revision="main"), "K2-INP-002"),
    ],
)
def test_a_damaged_lock_file_is_an_input_error(change, code):
    data = lock().to_data()
    change(data)
    with pytest.raises(InputError) as caught:
        lock_from_data(data)
    assert caught.value.code == code


def test_a_lock_file_that_is_no_object_is_an_input_error():
    with pytest.raises(InputError):
        lock_from_data([1])


def test_accepting_small_files_adds_our_digest_and_keeps_theirs():
    made = accept_small_files(lock(LockedFile("a.json", 1, "other", git_sha1=GIT)), {"a.json": SHA})
    assert made.file("a.json") == LockedFile("a.json", 1, "other", SHA, GIT)
    assert made.file(SHARD.path) == SHARD


def test_a_lock_with_a_file_that_was_never_hashed_is_not_accepted():
    made = lock(LockedFile("a.json", 1, "other", git_sha1=GIT))
    with pytest.raises(InputError) as caught:
        check_accepted(made)
    assert (caught.value.code, caught.value.where) == ("K2-INP-004", "a.json")
    assert check_accepted(accept_small_files(made, {"a.json": SHA})).file("a.json").sha256 == SHA


@pytest.mark.parametrize(
    ("other", "path", "words"),
    [
        ([LockedFile("a.json", 2, "other", sha256=SHA)], "a.json", "1 bytes"),
        ([LockedFile("a.json", 1, "other", sha256="e" * 64)], "a.json", SHA),
        ([], "a.json", SHA),
        ([LockedFile("a.json", 1, "other", sha256=SHA), LockedFile("b", 1, "other", sha256=SHA)], "b", "no such file"),
    ],
)
def test_the_first_file_that_differs_is_named(other, path, words):
    mine = lock(LockedFile("a.json", 1, "other", sha256=SHA))
    where, here, _ = first_difference(mine, lock(*other))
    assert where == path
    assert words in here
    assert first_difference(mine, mine) == ("", "", "")
