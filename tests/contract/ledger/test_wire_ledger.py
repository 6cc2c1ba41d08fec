"""The ledger over a real store whose answers are lost, cut off, or that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store
from tasks.core.errors import InputError, UnavailableError
from tasks.core.ledger import FINISHED, STARTED, Record
from tasks.steps.journal import append, recorded, records, states
from tests.contract.faulty_line import FaultyLine
from tests.contract.ledger.conftest import adapter
from tests.fakes.small_world import World


@pytest.fixture
def line(seaweedfs: objectstore.ObjectStore) -> Iterator[FaultyLine]:
    with FaultyLine(seaweedfs.host, seaweedfs.port) as line:
        yield line


def test_an_append_whose_answer_was_lost_is_one_record(
    line: FaultyLine, seaweedfs: objectstore.ObjectStore, s3: S3Store, release: str
) -> None:
    one = Record(release, "pull", STARTED, "run", 1.0)
    store = adapter(seaweedfs, line.url)
    assert records(store, release) == []  # its connection is open: the next answer is that of the listing
    put = store.put

    def losing(*arguments: Any, **options: Any) -> str:
        line.lost_answers = 1
        return put(*arguments, **options)

    store.put = losing  # type: ignore[method-assign]
    assert append(store, one) == f"ledger/{release}/00000.json"
    assert line.lost_answers == 0
    assert records(s3, release) == [one]


def test_a_record_that_is_cut_on_the_way_is_not_read_by_halves(
    line: FaultyLine, seaweedfs: objectstore.ObjectStore, s3: S3Store, release: str
) -> None:
    append(s3, Record(release, "pull", FINISHED, "run", 1.0, {"note": "x" * 100_000}))
    line.cut_after_bytes = 50_000
    with pytest.raises(UnavailableError):
        states(adapter(seaweedfs, line.url), release)


def test_a_ledger_outlives_a_kill_of_the_store(tmp_path_factory: pytest.TempPathFactory, release: str) -> None:
    with Supervisor(tmp_path_factory.mktemp("killed-store")) as supervisor:
        server = objectstore.start(supervisor)
        store = adapter(server)
        store.ensure_bucket()
        written = [Record(release, "pull", event, "run", 1.0) for event in (STARTED, FINISHED)]
        for one in written:
            append(store, one)
        supervisor.restart("object-store", grace_s=0)
        assert records(store, release) == written
        assert append(store, Record(release, "stage", STARTED, "run", 2.0)) == f"ledger/{release}/00002.json"


def test_a_store_that_is_away_does_not_hide_why_a_step_failed(seaweedfs: objectstore.ObjectStore, release: str) -> None:
    with FaultyLine(seaweedfs.host, seaweedfs.port) as line:
        store = adapter(seaweedfs, line.url)
        ports = replace(World().ports(), store=store)

        def fail() -> dict[str, Any]:
            line.lost_answers = 1000
            raise InputError("K2-INP-001", "The reason.", where="here")

        with pytest.raises(InputError, match="The reason"):
            recorded(ports, release, "pull", fail)
        line.lost_answers = 0
        assert states(store, release)["pull"].outcome == "interrupted"
