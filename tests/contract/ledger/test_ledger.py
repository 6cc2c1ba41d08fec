"""The ledger over the store: nobody overwrites anybody, and what is read is what was written or refused."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from tasks.core.errors import InputError, IntegrityError, K2Error, UnavailableError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record, ledger_prefix, receipt
from tasks.core.spec import plain
from tasks.steps.documents import find_receipt, get_receipt, put_receipt
from tasks.steps.journal import append, recorded, records, states
from tests.fakes.small_world import World


def record(release: str, step: str = "pull", event: str = STARTED, at: float = 1.0, **data: Any) -> Record:
    return Record(release, step, event, "run", at, data)


def keys(store: Any, release: str) -> list[str]:
    return [found.key.removeprefix(ledger_prefix(release)) for found in store.list_objects(ledger_prefix(release))]


def test_records_come_back_in_order_each_under_its_number(store: Any, release: str) -> None:
    written = [
        record(release),
        record(release, event=FINISHED, bytes=7, note="sieben: \u2713"),
        record(release, "stage"),
        record(release, "stage", FAILED, error={"code": "K2-UNA-001"}),
    ]
    assert [append(store, one) for one in written] == [f"ledger/{release}/{number:05d}.json" for number in range(4)]
    assert records(store, release) == written
    assert keys(store, release) == ["00000.json", "00001.json", "00002.json", "00003.json"]


def test_a_release_without_records_has_done_nothing(store: Any, release: str) -> None:
    assert records(store, release) == []
    assert states(store, release) == {}


def test_releases_whose_names_begin_alike_are_apart(store: Any, release: str) -> None:
    append(store, record(release))
    append(store, record(f"{release}0", "lock"))
    assert [one.step for one in records(store, release)] == ["pull"]


def test_the_order_is_that_of_numbers_however_many_digits(store: Any, release: str) -> None:
    store.put(f"ledger/{release}/99999.json", json.dumps(plain(record(release))).encode())
    assert append(store, record(release, "end", FAILED)) == f"ledger/{release}/100000.json"
    assert [one.step for one in records(store, release)] == ["pull", "end"]


def test_records_of_an_older_tool_are_read_in_their_place(store: Any, release: str) -> None:
    old = [record(release), record(release, event=FINISHED), record(release, "stage")]
    for number, one in enumerate(old):
        store.put(f"ledger/{release}/{number:05d}-{one.step}-{one.event}.json", json.dumps(plain(one)).encode())
    assert append(store, record(release, "end", FAILED)) == f"ledger/{release}/00003.json"
    assert records(store, release) == [*old, record(release, "end", FAILED)]


def test_writers_at_once_leave_every_record_once_and_no_gap(store: Any, release: str) -> None:
    barrier, errors = threading.Barrier(4), []

    def write(writer: int) -> None:
        try:
            barrier.wait(30)
            for number in range(5):
                append(store, record(release, "pull", at=float(number), writer=writer))
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert errors == []
    assert keys(store, release) == [f"{number:05d}.json" for number in range(20)]
    written = records(store, release)
    for writer in range(4):
        assert [one.at for one in written if one.data["writer"] == writer] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_record_that_is_there_is_not_written_again(store: Any, release: str) -> None:
    """Two runs in the same second write the same event: each is a record of its own, none replaces the other."""
    first = append(store, record(release))
    second = append(store, record(release))
    assert first != second
    assert len(records(store, release)) == 2


def test_the_fold_tells_what_each_step_came_to(store: Any, release: str) -> None:
    for one in (
        record(release, at=1.0),
        record(release, event=FAILED, at=2.0, error={"code": "K2-UNA-001"}),
        record(release, at=3.0),
        record(release, event=FINISHED, at=7.0, outcome="done", bytes=7),
        record(release, "stage", at=8.0),
    ):
        append(store, one)
    found = states(store, release)
    assert (found["pull"].outcome, found["pull"].attempts, found["pull"].seconds) == ("done", 2, 4.0)
    assert found["pull"].data["bytes"] == 7
    assert found["stage"].outcome == "interrupted"


def test_a_receipt_is_written_once_from_the_records(store: Any, release: str) -> None:
    for event, at in ((STARTED, 1.0), (FINISHED, 4.0)):
        append(store, record(release, "lock", event, at))
    assert find_receipt(store, release) is None
    body = receipt({"id": release}, records(store, release), {"approver": "somebody"})
    assert body["steps"] == [{"name": "lock", "outcome": "done", "attempts": 1, "seconds": 3.0}]
    put_receipt(store, release, body)
    put_receipt(store, release, {**body, "approver": "somebody else"})
    assert get_receipt(store, release) == body


def test_a_receipt_whose_bytes_changed_is_refused(store: Any, release: str) -> None:
    key = put_receipt(store, release, {"approver": "somebody"})
    data, _ = store.get(key)
    store.put(key, data.replace(b"somebody", b"nobody!!"))
    with pytest.raises(IntegrityError) as caught:
        get_receipt(store, release)
    assert caught.value.code == "K2-INT-003"


def test_a_record_of_a_newer_version_is_refused(store: Any, release: str) -> None:
    append(store, record(release))
    newer = append(store, replace(record(release, event=FINISHED), version=2))
    with pytest.raises(InputError) as caught:
        records(store, release)
    assert (caught.value.code, caught.value.got, caught.value.expected) == ("K2-INP-006", "2", "<= 1")
    assert release in caught.value.where
    # What a newer tool wrote is not written over either.
    assert append(store, record(release, "end", FAILED)) > newer


UNREADABLE = {
    "empty": b"",
    "text": b"not json",
    "half": b'{"version": 1, "release": "r", "st',
    "list": b"[1]",
    "short": b'{"version": 1}',
    "version": b'{"version": "one", "release": "r", "step": "pull", "event": "started", "run": "r", "at": 1}',
    "time": b'{"version": 1, "release": "r", "step": "pull", "event": "started", "run": "r", "at": null}',
    "data": b'{"version": 1, "release": "r", "step": "pull", "event": "started", "run": "r", "at": 1, "data": 7}',
    "binary": b"\xff\xfe",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_record_that_cannot_be_read_is_refused_and_named(store: Any, release: str, what: str) -> None:
    release = f"{release}-{what}"
    append(store, record(release))
    key = f"ledger/{release}/00001.json"
    store.put(key, UNREADABLE[what])
    with pytest.raises(IntegrityError) as caught:
        states(store, release)
    assert caught.value.code == "K2-INT-003"
    assert caught.value.where == key
    assert caught.value.hint


def test_an_object_that_is_no_record_is_refused_and_named(store: Any, release: str) -> None:
    store.put(f"ledger/{release}/README.md", b"my notes")
    for act in (lambda: records(store, release), lambda: append(store, record(release))):
        with pytest.raises(IntegrityError) as caught:
            act()
        assert caught.value.where == f"ledger/{release}/README.md"


def test_a_step_is_recorded_between_its_records(store: Any, release: str) -> None:
    ports = replace(World().ports("run-7"), store=store)
    recorded(ports, release, "pull", lambda: {"bytes": 7})

    def fail() -> dict[str, Any]:
        raise UnavailableError("K2-UNA-001", "The Hub did not answer.", where="somewhere")

    with pytest.raises(K2Error):
        recorded(ports, release, "stage", fail)
    written = records(store, release)
    assert [(one.step, one.event, one.run) for one in written] == [
        ("pull", STARTED, "run-7"), ("pull", FINISHED, "run-7"), ("stage", STARTED, "run-7"), ("stage", FAILED, "run-7")
    ]  # fmt: skip
    assert written[1].data == {"bytes": 7, "outcome": "done"}
    assert written[3].data["error"]["code"] == "K2-UNA-001"
