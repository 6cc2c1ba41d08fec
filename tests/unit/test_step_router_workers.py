"""The workers that a router knows, held against the pods: no ghost gets a request, no living worker is dropped."""

from __future__ import annotations

import pytest

from tasks.core.errors import NotReadyError, UnavailableError
from tasks.core.route import PARKING, SHIFTING, Backend, RouteState
from tasks.core.router_view import stale_workers
from tasks.steps.gating import smoke_step
from tasks.steps.holder import holding
from tasks.steps.rollout import rollout_step
from tasks.steps.router_workers import SETTLE_S, settle_workers
from tasks.steps.traffic import read_live_route, write_live_route
from tests.fakes.pipeline import bring_up
from tests.fakes.shifting_world import edit_weights
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

    def router_uid(self):
        pods = self.world.cluster.list_objects("Pod", {"k2-release.io/role": "router"})
        (uid,) = [pod["metadata"]["uid"] for pod in pods]
        return uid


@pytest.fixture
def up():
    return Up()


def test_a_ghost_ends_with_a_new_router_before_smoke(up):
    before = up.router_uid()
    up.engine.stale[up.serving] = [dict(GHOST)]
    smoke_step(up.world.ports(), up.subject)
    assert "ghost" not in up.workers()
    assert up.router_uid() != before
    assert sum("127.9.9.9" in line and "is restarted" in line for line in up.world.progress.lines) == 1


def test_a_router_that_is_only_late_is_left_alone(up):
    before, gone_at = up.router_uid(), up.world.clock.at + 8
    up.engine.stale[up.serving] = [dict(GHOST)]
    up.world.clock.on_sleep.append(lambda now: up.engine.stale.clear() if now >= gone_at else None)
    settle_workers(up.world.ports(), up.serving)
    assert up.router_uid() == before


def test_a_ghost_keeps_a_rollout_from_being_ready_until_the_router_is_new(up):
    before = up.router_uid()
    up.engine.stale[up.serving] = [dict(GHOST), {**GHOST, "id": "second"}]
    rollout_step(up.world.ports(), up.subject, [seat["node"] for seat in _seats(up)])
    assert up.router_uid() != before
    assert len(up.workers()) == 2


def test_one_that_gets_no_requests_restarts_nothing(up):
    before = up.router_uid()
    up.engine.stale[up.serving] = [{**GHOST, "is_healthy": False}]
    settle_workers(up.world.ports(), up.serving)
    assert up.router_uid() == before


@pytest.mark.parametrize(("percent", "as_stable"), [(1, False), (100, True)])
def test_a_router_with_users_is_not_restarted(up, percent, as_stable):
    """The set is the candidate of a shift, or the stable one; what is wrong is told, and a person decides."""
    mine = Backend(up.subject.router_service, up.serving, up.subject.release.id)
    state = RouteState(mine) if as_stable else RouteState(PARKING, mine, candidate_percent=percent, phase=SHIFTING)
    write(up, state)
    left_alone(up)
    assert any("has users and is left alone" in line for line in up.world.progress.lines)


def test_a_router_whose_route_a_person_wrote_is_not_restarted(up):
    write(up, RouteState(PARKING, Backend(up.subject.router_service, up.serving, up.subject.release.id)))
    edit_weights(up.world, 50, 50)
    left_alone(up)


def left_alone(up):
    before = up.router_uid()
    up.engine.stale[up.serving] = [dict(GHOST)]
    with pytest.raises(NotReadyError) as caught:
        settle_workers(up.world.ports(), up.serving)
    assert caught.value.code == "K2-RDY-001"
    assert "127.9.9.9" in caught.value.got
    assert up.router_uid() == before


def write(up, state):
    ports = up.world.ports("a-hand")
    holding(ports, lambda holder: write_live_route(ports, state, read_live_route(ports)[1], holder))


def test_a_new_router_that_lists_a_ghost_again_is_not_restarted_for_ever(up):
    real, patched = up.world.cluster.merge_patch, []

    def merge_patch(kind, name, patch):
        patched.append((kind, name))
        return real(kind, name, patch)

    up.world.cluster.merge_patch = merge_patch
    up.engine.workers = lambda serving, real=up.engine.workers: [*real(serving), dict(GHOST)]
    with pytest.raises(NotReadyError):
        settle_workers(up.world.ports(), up.serving)
    assert patched == [("Deployment", up.subject.router_service)]


def test_an_old_router_on_its_way_out_is_waited_for(up):
    labels = {"k2-release.io/role": "router", "k2-release.io/serving": up.serving}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "old-router", "labels": labels}, "spec": {}}
    up.world.cluster.create(pod)
    until = up.world.clock.at + 20
    up.world.clock.on_sleep.append(lambda now: up.world.cluster.delete("Pod", "old-router") if now >= until else None)
    settle_workers(up.world.ports(), up.serving)
    assert up.world.clock.at >= until


def _seats(up):
    pods = up.world.cluster.list_objects("Pod", {"k2-release.io/serving": up.serving})
    engines = [pod for pod in pods if pod["metadata"]["labels"]["k2-release.io/role"] != "router"]
    return [{"node": pod["spec"]["nodeName"]} for pod in engines]


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
