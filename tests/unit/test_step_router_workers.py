"""The workers that a router knows, held against the pods: no ghost gets a request, no living worker is dropped."""

from __future__ import annotations

import pytest

from tasks.core.errors import NotReadyError, UnavailableError
from tasks.core.router_view import stale_workers
from tasks.steps.gating import smoke_step
from tasks.steps.rollout import rollout_step
from tasks.steps.router_workers import SETTLE_S, forget_stale_workers, settle_workers
from tests.fakes.pipeline import bring_up
from tests.fakes.small_world import World, release

GHOST = {"id": "ghost", "url": "http://127.9.9.9:30000", "worker_type": "decode", "is_healthy": True}


class Up:
    def __init__(self) -> None:
        self.world = World()
        self.subject = bring_up(self.world.ports(), release())
        self.serving = self.subject.serving
        self.engine = self.world.engine

    def workers(self):
        return {worker["id"] for worker in self.engine.workers(self.serving)}


@pytest.fixture
def up():
    return Up()


def test_a_ghost_is_forgotten_before_smoke(up):
    up.engine.stale[up.serving] = [dict(GHOST)]
    smoke_step(up.world.ports(), up.subject)
    assert up.engine.forgotten == {"ghost"}
    assert any("127.9.9.9" in line for line in up.world.progress.lines)


def test_a_ghost_keeps_a_rollout_from_being_ready_until_it_is_forgotten(up):
    up.engine.stale[up.serving] = [{**GHOST, "is_healthy": False}, {**GHOST, "id": "second"}]
    rollout_step(up.world.ports(), up.subject, [seat["node"] for seat in _seats(up)])
    assert "second" in up.engine.forgotten


def refuse(up, times):
    """Have the router refuse so many requests to forget a worker."""
    real, left = up.engine.forget_worker, [times]

    def forget(serving, worker_id):
        if left[0]:
            left[0] -= 1
            raise UnavailableError("K2-UNA-001", "The router does not forget a worker: HTTP 503.")
        real(serving, worker_id)

    up.engine.forget_worker = forget


def test_a_router_that_refuses_for_a_while_to_forget_is_asked_again(up):
    up.engine.stale[up.serving] = [dict(GHOST)]
    refuse(up, 3)
    settle_workers(up.world.ports(), up.serving)
    assert up.engine.forgotten == {"ghost"}
    assert sum("not forgotten yet" in line for line in up.world.progress.lines) == 3


def test_a_refusal_does_not_keep_the_router_from_forgetting_the_others_nor_ends_a_rollout(up):
    up.engine.stale[up.serving] = [dict(GHOST), {**GHOST, "id": "second"}]
    refuse(up, 1)
    rollout_step(up.world.ports(), up.subject, [seat["node"] for seat in _seats(up)])
    assert up.engine.forgotten == {"ghost", "second"}


def test_a_ghost_that_is_never_forgotten_ends_smoke_with_what_the_router_knows(up):
    up.engine.stale[up.serving] = [dict(GHOST)]
    refuse(up, 10**6)
    with pytest.raises(NotReadyError) as caught:
        smoke_step(up.world.ports(), up.subject)
    assert caught.value.code == "K2-RDY-001"
    assert "127.9.9.9" in caught.value.got


def _seats(up):
    pods = up.world.cluster.list_objects("Pod", {"k2-release.io/serving": up.serving})
    engines = [pod for pod in pods if pod["metadata"]["labels"]["k2-release.io/role"] != "router"]
    return [{"node": pod["spec"]["nodeName"]} for pod in engines]


def test_a_worker_that_is_new_is_never_dropped_by_a_list_that_is_old(up):
    """What counts is what the API server says now, not what a caller knew before it asked the router."""
    known = up.engine.workers(up.serving)
    assert forget_stale_workers(up.world.ports(), up.serving, known) == []
    assert up.engine.forgotten == set()


def test_a_router_that_finds_its_workers_late_is_waited_for(up):
    real, until = up.engine.workers, up.world.clock.at + 65

    def late(serving):
        return real(serving) if up.world.clock.at >= until else []

    up.engine.workers = late
    settle_workers(up.world.ports(), up.serving)
    assert 65 <= sum(up.world.clock.slept[-66:]) <= 67


def test_a_router_that_does_not_find_them_is_said_with_both_lists(up):
    up.engine.workers = lambda serving: []
    before = up.world.clock.at
    with pytest.raises(NotReadyError) as caught:
        settle_workers(up.world.ports(), up.serving)
    assert caught.value.code == "K2-RDY-001"
    assert caught.value.got == "{}"
    assert "decode" in caught.value.expected
    assert "rollout restart" in caught.value.hint
    assert SETTLE_S <= up.world.clock.at - before <= SETTLE_S + 3


def test_a_router_that_does_not_answer_is_said(up):
    def silent(serving):
        raise UnavailableError("K2-UNA-001", "No.")

    up.engine.workers = silent
    with pytest.raises(NotReadyError) as caught:
        settle_workers(up.world.ports(), up.serving)
    assert caught.value.got == "no answer"


def test_stale_is_what_belongs_to_no_leader():
    labels = {"k2-release.io/role": "decode", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    leader = {"metadata": {"name": "d-0", "labels": labels}, "status": {"podIP": "127.9.0.1"}}
    worker = {"id": "1", "url": "http://127.9.0.1:30000/", "worker_type": "decode", "is_healthy": True}
    assert stale_workers([leader], [worker, GHOST]) == [GHOST]
    assert stale_workers([], [worker]) == [worker]
    assert stale_workers([leader], []) == []
