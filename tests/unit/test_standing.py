"""`k2ctl status` shows what can be read, also when the route was changed by hand or the store is down."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import pytest

from flows.console import standing
from tasks.core.errors import UnavailableError
from tasks.core.ledger import StepState
from tasks.core.route import LIVE_ROUTE
from tests.fakes.shifting_world import OLD, Shifting


class _DownStore:
    def __getattr__(self, name):
        def fail(*_args, **_kwargs):
            raise UnavailableError("K2-UNA-001", "The store did not answer.", where="http://store")

        return fail


@pytest.fixture
def it(monkeypatch):
    world = Shifting()
    monkeypatch.setattr(standing, "connect", lambda _args: world.world.ports())
    return world


def _status(capsys, **changes):
    code = standing.status(Namespace(**{"release": "", "json": True, **changes}))
    return code, json.loads(capsys.readouterr().out)


def test_a_quiet_site(it, capsys):
    code, data = _status(capsys)
    assert code == 0
    assert data["route"]["weights"] == {OLD.id: 100}
    assert data["live"]["release"] == OLD.id
    assert data["unread"] == []


def test_a_route_changed_by_hand_is_shown_as_it_is(it, capsys):
    route = it.world.cluster.get("HTTPRoute", LIVE_ROUTE)
    for rule in route["spec"]["rules"]:
        rule["backendRefs"] = [{"name": "k2-by-hand", "port": 80, "weight": 100}]
    it.world.cluster.replace(route)
    code, data = _status(capsys)
    assert code == 0
    assert "k2-by-hand" in data["route"]["now"]
    assert it.old.router_service in data["route"]["recorded"]
    standing.status(Namespace(release="", json=False))
    assert "changed by somebody else" in capsys.readouterr().out


def test_weights_are_shown_while_the_store_is_down(it, monkeypatch, capsys):
    ports = replace(it.world.ports(), store=_DownStore())
    monkeypatch.setattr(standing, "connect", lambda _args: ports)
    code, data = _status(capsys)
    assert code == 11
    assert data["route"]["weights"] == {OLD.id: 100}
    assert data["live"] is None
    assert data["unread"][0]["code"] == "K2-UNA-001"


def test_a_step_without_an_end_is_not_said_to_have_died(capsys):
    """The ledger alone cannot tell a step that runs from one whose flow was killed."""
    running = StepState("pull", "interrupted", 1, 0.0, {}, began_at=1_700_000_000.0)
    row = standing._step_row(running)
    assert (row["outcome"], row["began"], row["ended"]) == ("not ended", "2023-11-14 22:13:20Z", None)
    standing._print({"site": "s", "live": None, "unread": [], "route": None, "lease": None, "steps": [row]})
    out = capsys.readouterr().out
    assert "began 2023-11-14 22:13:20Z" in out and "it runs, or its flow has died" in out
