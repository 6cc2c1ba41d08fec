"""Files in a store: each object is read once, whole, and a stream that breaks hides no other file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest

from tasks.core.errors import After, InputError, Never, UnavailableError
from tasks.core.lock import Lock
from tasks.node.program import Stop
from tasks.node.stored_files import StoredFindings, parse_store_uri, read_stored
from tests.fakes.checkpoints import contents, fill, lock_of
from tests.fakes.memory_store import MemoryStore

FILES = contents(shards=2)
SHARD = "model-1-of-2.safetensors"


class OddStore(MemoryStore):
    """Its streams go through a function, which is told how often the key was opened before."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.change: Callable[[str, int, Iterator[bytes]], Iterator[bytes]] = lambda key, nth, blocks: blocks

    def open(self, key: str, offset: int = 0) -> Iterator[bytes]:
        self.opened.append(key)
        return self.change(key, self.opened.count(key), super().open(key, offset))


class Counted:
    def __init__(self) -> None:
        self.bytes = self.files = 0

    def advance(self, count_bytes: int) -> None:
        self.bytes += count_bytes

    def file_done(self) -> None:
        self.files += 1


@pytest.fixture
def store() -> OddStore:
    return OddStore()


@pytest.fixture
def lock(store: OddStore) -> Lock:
    return fill(store, FILES)


def key_of(path: str) -> str:
    return f"blobs/{hashlib.sha256(FILES[path]).hexdigest()}"


def read(store: MemoryStore, lock: Lock, prefix: str = "", tally: Counted | None = None) -> StoredFindings:
    return read_stored(store, prefix, lock, threads=2, stop=Stop(), tally=tally)


def wrong(found: StoredFindings) -> dict[str, tuple[str, str]]:
    return {problem.place: (problem.path, problem.verdict) for problem in found.findings.problems}


def broken(after: int, retry: After | Never) -> Callable[[str, int, Iterator[bytes]], Iterator[bytes]]:
    def change(key: str, nth: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        if key != key_of(SHARD) or nth > after:
            yield from blocks
            return
        yield next(blocks)
        raise UnavailableError("K2-UNA-001", "The store's stream broke.", where=key, retry=retry)

    return change


def test_every_object_is_read_and_right(store: OddStore, lock: Lock) -> None:
    tally = Counted()
    found = read(store, lock, tally=tally)
    assert (found.findings.problems, found.layout, found.without_statement) == ((), "blobs", ())
    assert found.findings.read_bytes == lock.total_bytes == tally.bytes
    assert sorted(store.opened) == sorted(key_of(path) for path in FILES)


def test_wrong_missing_short_and_long_objects_are_named_by_key(store: OddStore, lock: Lock) -> None:
    second, config, code = key_of("model-2-of-2.safetensors"), key_of("config.json"), key_of("code/modeling.py")
    store.objects[key_of(SHARD)] = b"\xff" + FILES[SHARD][1:]
    store.objects[second] = FILES["model-2-of-2.safetensors"][:-1]
    store.objects[config] += b"x"
    del store.objects[code]
    tally = Counted()
    found = read(store, lock, tally=tally)
    assert wrong(found) == {
        key_of(SHARD): (SHARD, "differs"),
        second: ("model-2-of-2.safetensors", "differs"),
        config: ("config.json", "differs"),
        code: ("code/modeling.py", "missing"),
    }
    assert not {second, config, code} & set(store.opened)
    assert (tally.bytes, tally.files) == (lock.total_bytes, len(lock.files))


def test_a_blob_without_its_statement_is_said_and_is_no_wrong_blob(store: OddStore, lock: Lock) -> None:
    del store.objects[f"{key_of(SHARD)}.ok"]
    found = read(store, lock)
    assert (found.findings.problems, found.without_statement) == ((), (key_of(SHARD),))


def test_a_stream_that_breaks_is_read_again_from_its_first_byte(store: OddStore, lock: Lock) -> None:
    store.change = broken(2, After(0.0))
    tally = Counted()
    found = read(store, lock, tally=tally)
    assert (found.findings.problems, tally.bytes) == ((), lock.total_bytes)
    assert store.opened.count(key_of(SHARD)) == 3


@pytest.mark.parametrize(("retry", "times"), [(After(0.0), 4), (Never(), 1)])
def test_a_stream_that_stays_broken_is_a_file_that_cannot_be_read(
    store: OddStore, lock: Lock, retry: After | Never, times: int
) -> None:
    store.change = broken(99, retry)
    found = read(store, lock)
    assert wrong(found) == {key_of(SHARD): (SHARD, "unreadable")}
    assert not found.findings.differs
    assert store.opened.count(key_of(SHARD)) == times


@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_stream_of_another_length_than_was_listed_is_wrong(
    store: OddStore, lock: Lock, cut: Callable[[bytes], bytes]
) -> None:
    store.change = lambda key, nth, blocks: iter([cut(b"".join(blocks))]) if key == key_of(SHARD) else blocks
    assert wrong(read(store, lock)) == {key_of(SHARD): (SHARD, "differs")}


def test_two_paths_with_one_content_are_one_object(store: OddStore) -> None:
    files = FILES | {"code/again.py": FILES["code/modeling.py"]}
    lock = fill(store, files)
    found = read(store, lock)
    assert store.opened.count(key_of("code/modeling.py")) == 1
    assert found.findings.read_bytes == lock.total_bytes - len(FILES["code/modeling.py"])
    del store.objects[key_of("code/modeling.py")]
    assert [problem.path for problem in read(store, lock).findings.problems] == ["code/again.py", "code/modeling.py"]


def test_blobs_below_a_prefix(store: OddStore, lock: Lock) -> None:
    for key in [key for key in store.objects if key.startswith("blobs/")]:
        store.objects[f"kept/k2/{key}"] = store.objects.pop(key)
    found = read(store, lock, "kept/k2/")
    assert (found.findings.problems, found.layout, found.without_statement) == ((), "blobs", ())
    assert len(read(store, lock).findings.problems) == len(lock.files)


def test_a_plain_tree_below_a_prefix(store: OddStore) -> None:
    lock = lock_of(FILES)
    for path, data in FILES.items():
        store.objects[f"models/k2/{path}"] = data
    store.objects |= {"models/k2/extra.bin": b"x", "models/k2/.git/HEAD": b"x", "models/k2/": b""}
    found = read(store, lock, "models/k2/")
    assert (found.findings.problems, found.layout, found.without_statement) == ((), "paths", ())
    assert (found.findings.extra, found.findings.ignored) == (("extra.bin",), (".git",))
    store.objects["models/k2/config.json"] = b"[]\n"
    assert wrong(read(store, lock, "models/k2/")) == {"models/k2/config.json": ("config.json", "differs")}


def test_an_empty_store_holds_nothing_of_it(store: OddStore) -> None:
    found = read(store, lock_of(FILES), "nothing/")
    assert {verdict for _, verdict in wrong(found).values()} == {"missing"}
    assert found.findings.differs


@pytest.mark.parametrize(
    ("uri", "where"),
    [
        ("", ("k2", "")),
        ("s3://other", ("other", "")),
        ("s3://other/", ("other", "")),
        ("s3://k2/a/b", ("k2", "a/b/")),
        ("s3://k2/a/b/", ("k2", "a/b/")),
    ],
)
def test_the_address_of_a_store(uri: str, where: tuple[str, str]) -> None:
    assert parse_store_uri(uri, "k2") == where


@pytest.mark.parametrize("uri", ["k2", "http://host/k2", "s3://", "s3:///a", "/mnt/x"])
def test_another_address_is_refused(uri: str) -> None:
    with pytest.raises(InputError):
        parse_store_uri(uri, "k2")
