"""Unfinished uploads of dead pulls: which are ended, which never, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core.errors import Never, UnavailableError
from tasks.core.lock import make_lock
from tasks.node.orphans import Sweep, sweep
from tasks.node.puller import concerns, share
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of
from tests.fakes.memory_store import MemoryStore

HOUR = 3600.0
KEY = f"blobs/{'a' * 64}"
OTHER = f"blobs/{'b' * 64}"


class Site:
    """A store whose clock stands, with one upload in it."""

    def __init__(self, key: str = KEY, data: bytes = b"12345") -> None:
        self.store = MemoryStore(min_part_bytes=1)
        self.clock = 1_000_000.0
        self.store.now = lambda: self.clock
        self.upload = self.store.start_upload(key)
        self.store.put_part(key, self.upload, 1, data)

    def sweep(self, how: Sweep | None = None, taken_up: tuple[str, ...] = (), wanted: tuple[str, ...] = ()) -> Any:
        return sweep(self.store, how or Sweep(), taken_up, wanted)


NOTHING = {"uploads": 0, "bytes": 0}
ENDED = {"uploads": 1, "bytes": 5}


@pytest.mark.parametrize(("idle_h", "result"), [(0, NOTHING), (23.9, NOTHING), (24, ENDED)])
def test_one_that_somebody_might_go_on_with_is_left_for_a_day(idle_h: float, result: Any) -> None:
    site = Site()
    site.clock += idle_h * HOUR
    assert site.sweep() == result
    assert bool(site.store.uploads) == (result == NOTHING)


@pytest.mark.parametrize(("idle_h", "result"), [(0, NOTHING), (1.9, NOTHING), (2, ENDED)])
@pytest.mark.parametrize("why", ["the blob is there", "this run has another upload"])
def test_one_that_nobody_will_go_on_with_is_left_for_two_hours(why: str, idle_h: float, result: Any) -> None:
    site = Site()
    if why == "the blob is there":
        site.store.objects |= {KEY: b"12345", f"{KEY}.ok": b"{}"}
    site.clock += idle_h * HOUR
    assert site.sweep(wanted=() if why == "the blob is there" else (KEY,)) == result


def test_a_blob_without_its_statement_is_no_blob() -> None:
    site = Site()
    site.store.objects[KEY] = b"12345"
    site.clock += 3 * HOUR
    assert site.sweep() == NOTHING


def test_a_living_puller_writes_and_is_let_alone() -> None:
    site = Site()
    for number in range(2, 40):
        site.clock += 1.5 * HOUR
        assert site.sweep(wanted=(KEY,)) == NOTHING
        site.store.put_part(KEY, site.upload, number, b"12345")
    site.clock += 24 * HOUR
    assert site.sweep() == {"uploads": 1, "bytes": 39 * 5}


def test_the_one_that_is_about_to_be_gone_on_with_is_kept_whatever_its_age() -> None:
    site = Site()
    site.clock += 1000 * HOUR
    assert site.sweep(taken_up=(site.upload,), wanted=(KEY,)) == NOTHING
    assert site.upload in site.store.uploads


@pytest.mark.parametrize("key", ["blobs/readme", "backup/x", f"{KEY}.ok", f"blobs/{'A' * 64}"])
def test_what_is_no_blob_is_not_ours(key: str) -> None:
    site = Site(key)
    site.clock += 1000 * HOUR
    assert site.sweep() == NOTHING


def test_a_clock_that_stands_before_the_start_ends_nothing() -> None:
    site = Site()
    site.clock -= 1000 * HOUR
    assert site.sweep() == NOTHING


@pytest.mark.parametrize("call", ["unfinished_uploads", "abort_upload", "head"])
def test_a_store_that_refuses_ends_no_pull(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.clock += 3 * HOUR

    def refuse(*arguments: Any) -> Any:
        raise UnavailableError("K2-UNA-001", "AccessDenied", retry=Never())

    monkeypatch.setattr(site.store, call, refuse)
    assert site.sweep(wanted=(KEY,) if call == "abort_upload" else ()) == {**NOTHING, "error": "AccessDenied"}


def test_each_upload_is_the_concern_of_one_puller() -> None:
    lock = lock_of(contents(shards=5))
    assert make_lock(REPO, REVISION, lock.files).digest == lock.digest
    concerned = [concerns(lock, index, 3) for index in range(3)]
    for index in range(3):
        for file in share(lock, index, 3):
            assert [of(f"blobs/{file.sha256}") for of in concerned] == [n == index for n in range(3)]
    assert [of(OTHER) for of in concerned] == [True, False, False]
    site = Site()
    site.clock += 1000 * HOUR
    assert site.sweep(Sweep(concerns(lock, 1, 3))) == NOTHING
    assert site.sweep(Sweep(concerns(lock, 0, 3))) == ENDED
