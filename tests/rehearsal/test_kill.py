"""kill -9 of the flow in the middle of staging and again in the middle of the shift: same end, no failed request."""

from __future__ import annotations

from typing import Any

from tasks.core.ledger import STARTED
from tasks.steps.documents import get_live
from tasks.steps.journal import records, states
from tasks.steps.traffic import read_live_route
from tests.rehearsal.conftest import Site, wait_for

NEW = "k2-rehearsal-2"


def _begun(site: Site, ports: Any, step: str) -> bool:
    return any(r.step == step and r.event == STARTED for r in records(ports.store, NEW))


def test_killed_twice_ends_as_undisturbed(live: Site) -> None:
    ports = live.ports()

    first = live.start("release", NEW, "-y", "--json")
    wait_for("staging has begun", lambda: _begun(live, ports, "stage"))
    assert live.kill_flow() > 0
    assert first.wait(timeout=60) == 11, first.stderr.read() if first.stderr else ""
    assert read_live_route(ports)[0].candidate is None

    second = live.start("release", NEW, "-y", "--json")
    wait_for("10% of traffic", lambda: read_live_route(ports)[0].candidate_percent >= 10, 180)
    assert live.kill_flow() > 0
    assert second.wait(timeout=60) == 11
    half_way = read_live_route(ports)[0]
    assert 0 < half_way.candidate_percent < 100

    third = live.k2ctl("release", NEW, "-y", "--json")
    assert third.code == 0, third.err
    assert third.data()["outcome"] == "promoted"

    state, _ = read_live_route(ports)
    assert (state.stable.release, state.candidate, state.phase) == (NEW, None, "stable")
    assert state.generation > half_way.generation
    # As after an undisturbed run, the old set is taken down when its hold is over.
    wait_for("the old set is retired", lambda: read_live_route(ports)[0].previous is None, 90)
    assert states(ports.store, "k2-rehearsal-1")["promote"].outcome == "done"
    record, _ = get_live(ports.store)
    assert record is not None
    assert record["release"] == NEW
    assert live.k2ctl("receipt", NEW, "--verify").code == 0
    client = live.client()
    assert (client["failed"], client["cut_streams"]) == (0, 0), client["first_failures"]
    assert client["requests"] > 100
