"""Steps warm, smoke and throughput: verdicts on real answers, used again only where nothing has changed."""

import json
import math
from dataclasses import replace

import pytest

from tasks.core.errors import GateError, NotReadyError, UnavailableError
from tasks.core.gates import SMOKE_PROMPTS
from tasks.core.ledger import FINISHED, Record
from tasks.core.samples import LoadSample
from tasks.core.spec import Limit, Workload
from tasks.steps.documents import get_by_digest, put_by_digest
from tasks.steps.gating import (
    read_baseline,
    rejudge_smoke_step,
    rejudge_throughput_step,
    reused,
    smoke_step,
    throughput_step,
    warm_step,
    workload_digest,
)
from tasks.steps.journal import append, recorded, states
from tests.fakes.pipeline import bring_up, make_live, promote
from tests.fakes.small_world import World, release


class Up:
    """A world with a set that runs and is gated."""

    def __init__(self, what=None):
        self.world = World()
        self.what = what or release()
        self.subject = bring_up(self.world.ports(), self.what)
        self.set = self.world.engine.sets[self.subject.serving]

    @property
    def ports(self):
        return self.world.ports()


@pytest.fixture
def up():
    return Up()


def test_warm_waits_for_the_path_and_asks_longer_and_longer_prompts(up):
    up.set.status = 503
    up.world.clock.on_sleep.append(
        lambda now: setattr(up.set, "status", 200) if len(up.world.clock.slept) > 9 else None
    )
    assert warm_step(up.ports, up.subject)["requests"] == 4


def test_warm_survives_a_gateway_that_does_not_answer_yet(up):
    answers, real = iter([UnavailableError("K2-UNA-001", "Refused.")] * 3), up.world.engine.ask

    def ask(*args, **kwargs):
        if (error := next(answers, None)) is not None:
            raise error
        return real(*args, **kwargs)

    up.world.engine.ask = ask
    assert warm_step(up.ports, up.subject)["requests"] == 4


def test_warm_gives_up_with_the_last_answer(up):
    up.set.status = 503
    with pytest.raises(NotReadyError) as caught:
        warm_step(up.ports, up.subject)
    assert (caught.value.code, caught.value.got) == ("K2-RDY-003", "HTTP 503")


def test_warm_notices_a_probe_route_that_leads_elsewhere(up):
    real = up.world.engine.ask
    up.world.engine.ask = lambda *a, **k: replace(real(*a, **k), served_by="another")
    with pytest.raises(NotReadyError) as caught:
        warm_step(up.ports, up.subject)
    assert "another release" in caught.value.summary


def test_smoke_passes_streamed_and_not_and_keeps_the_answers(up):
    data = smoke_step(up.ports, up.subject)
    assert data["verdict"]["outcome"] == "pass"
    kept = get_by_digest(up.world.store, "samples", data["samples"])
    assert len(kept["graded"]) == 2 * len(SMOKE_PROMPTS)
    assert (data["policy"], data["pods"]) == (up.what.policy_digest, data["pods"])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"garbage": True}, "K2-GAT-001"),
        ({"status": 500}, "K2-GAT-001"),
        ({"counts": False}, "K2-GAT-002"),
    ],
)
def test_smoke_that_does_not_pass_is_a_gate_error_with_its_verdict(up, change, code):
    vars(up.set).update(change)
    with pytest.raises(GateError) as caught:
        smoke_step(up.ports, up.subject)
    assert caught.value.code == code
    assert caught.value.details["verdict"]["outcome"] in ("fail", "inconclusive")
    assert caught.value.details["samples"]
    assert up.world.progress.tables["gate-smoke"]


def test_requests_that_did_not_go_through_decode_fail_although_every_answer_is_right(up):
    real = up.world.engine.counters
    up.world.engine.counters = lambda s: {**real(s), "decode:sglang_num_requests_total": 5.0}
    with pytest.raises(GateError) as caught:
        smoke_step(up.ports, up.subject)
    assert "did not go through decode" in caught.value.got


def test_a_counter_that_is_no_number_is_inconclusive(up):
    real = up.world.engine.counters
    up.world.engine.counters = lambda s: {**real(s), "decode:sglang_num_requests_total": math.nan}
    with pytest.raises(GateError) as caught:
        smoke_step(up.ports, up.subject)
    assert caught.value.code == "K2-GAT-002"


def test_counters_that_come_late_are_waited_for(up):
    real, calls = up.world.engine.counters, []

    def late(serving):
        calls.append(1)
        return {**real(serving), "decode:sglang_num_requests_total": 99.0 if len(calls) > 4 else 5.0}

    up.world.engine.counters = late
    assert smoke_step(up.ports, up.subject)["verdict"]["outcome"] == "pass"


def test_throughput_keeps_samples_figures_and_scope(up):
    data = throughput_step(up.ports, up.subject)
    assert data["figures"]["e2e_output_tok_per_s"] == pytest.approx(1000.0)
    assert "24 GPUs" in data["scope"]
    assert len(get_by_digest(up.world.store, "samples", data["samples"])) == 20
    assert data["workload"] == workload_digest(up.what)


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        ([], "K2-GAT-002"),
        ([LoadSample(0.0, 0.1, 0.2, 64, 16, True)] * 19, "K2-GAT-002"),
        ([LoadSample(0.0, math.nan, math.nan, 64, 16, True)] * 20, "K2-GAT-002"),
        ([LoadSample(0.0, 0.1, 0.2, 64, 16, False, "HTTP 500")] * 20, "K2-GAT-001"),
        ([LoadSample(0.0, 50.0, 100.0, 64, 16, True)] * 20, "K2-GAT-001"),
    ],
)
def test_a_load_without_usable_data_never_passes(up, samples, code):
    up.world.engine.run_load = lambda serving, workload, progress: samples
    with pytest.raises(GateError) as caught:
        throughput_step(up.ports, up.subject)
    assert caught.value.code == code


def test_a_verdict_is_used_again_only_on_the_same_pods_under_the_same_policy(up):
    assert reused(up.ports, up.subject, "smoke") is not None
    other = replace(up.subject, release=replace(up.what, gates=replace(up.what.gates, baseline_ratio=0.9)))
    assert reused(up.ports, other, "smoke") is None
    assert reused(up.ports, replace(up.subject, release=replace(up.what, id="another")), "smoke") is None
    pod = f"k2-{up.subject.serving[:8]}-decode-0"
    status = up.world.cluster.objects["Pod", pod]["status"]
    up.world.cluster.set_status("Pod", pod, {**status, "containerStatuses": [{"restartCount": 1}]})
    assert reused(up.ports, up.subject, "smoke") is None


def test_a_pod_that_was_replaced_is_another_pod(up):
    name = f"k2-{up.subject.serving[:8]}-decode-0"
    pod = up.world.cluster.objects["Pod", name]
    up.world.cluster.delete("Pod", name)
    up.world.cluster.create(pod)
    up.world.cluster.set_status("Pod", name, pod["status"])
    assert reused(up.ports, up.subject, "throughput") is None


def test_a_verdict_that_did_not_pass_is_never_used_again(up):
    up.set.garbage = True
    with pytest.raises(GateError):
        recorded(up.ports, up.what.id, "smoke", lambda: smoke_step(up.ports, up.subject))
    assert reused(up.ports, up.subject, "smoke") is None


def test_a_verdict_survives_a_death_of_the_run_that_wanted_to_use_it_again(up):
    append(up.world.store, Record(up.what.id, "smoke", "started", "run-2", 1.0))
    found = reused(up.ports, up.subject, "smoke")
    assert found is not None
    assert found["outcome"] == "unchanged"
    assert found["verdict"]["outcome"] == "pass"


def test_a_step_that_was_never_taken_is_not_used_again(up):
    assert reused(up.ports, up.subject, "warm") is None


class Live(Up):
    """A world with a live release, and policy releases over it."""

    def __init__(self):
        self.world = World()
        self.what = release("k2-live-1")
        self.subject = make_live(self.world.ports(), self.what)

    def policy(self, **gates):
        what = replace(self.what, id="k2-live-2", gates=replace(self.what.gates, **gates))
        return replace(self.subject, release=what)


def test_a_policy_release_judges_the_stored_samples_by_its_own_limits():
    live = Live()
    sent = len(live.world.engine.asked)
    keeps = live.policy(limits=(Limit("e2e_output_tok_per_s", ">=", 900.0, "tok/s"),))
    data = rejudge_throughput_step(live.ports, keeps)
    assert data["samples"] == states(live.world.store, "k2-live-1")["throughput"].data["samples"]
    misses = live.policy(limits=(Limit("e2e_output_tok_per_s", ">=", 1100.0, "tok/s"),))
    with pytest.raises(GateError) as caught:
        rejudge_throughput_step(live.ports, misses)
    assert caught.value.code == "K2-GAT-001"
    assert len(live.world.engine.asked) == sent


def test_a_policy_release_judges_the_stored_answers_by_its_own_share():
    live = Live()
    sent = len(live.world.engine.asked)
    before = states(live.world.store, "k2-live-1")["smoke"].data
    data = rejudge_smoke_step(live.ports, live.policy(smoke_min_correct_share=0.9))
    assert (data["samples"], data["verdict"]["outcome"]) == (before["samples"], "pass")
    assert data["policy"] == live.policy(smoke_min_correct_share=0.9).release.policy_digest
    assert len(live.world.engine.asked) == sent


def test_answers_that_were_good_enough_before_fail_a_stricter_share():
    live = Live()
    record = states(live.world.store, "k2-live-1")["smoke"].data
    kept = get_by_digest(live.world.store, "samples", record["samples"])
    kept["graded"][0][1]["text"] = "blah"
    digest = put_by_digest(live.world.store, "samples", kept)
    append(live.world.store, Record("k2-live-1", "smoke", FINISHED, "run", 1.0, {**record, "samples": digest}))
    assert rejudge_smoke_step(live.ports, live.policy(smoke_min_correct_share=0.9))
    with pytest.raises(GateError) as caught:
        rejudge_smoke_step(live.ports, live.policy(smoke_min_correct_share=1.0))
    assert caught.value.code == "K2-GAT-001"


@pytest.mark.parametrize("judge", [rejudge_smoke_step, rejudge_throughput_step])
def test_samples_are_found_by_the_receipt_where_the_ledger_has_none(judge):
    live = Live()
    for key in [key for key in live.world.store.objects if key.startswith("ledger/k2-live-1/")]:
        del live.world.store.objects[key]
    assert judge(live.ports, live.policy(baseline_ratio=0.1))["verdict"]["outcome"] == "pass"


@pytest.mark.parametrize("workload", [Workload(8000, 16, 20, 4), Workload(64, 16, 10, 4), Workload(64, 16, 20, 1)])
def test_samples_of_another_workload_say_nothing(workload):
    live = Live()
    with pytest.raises(GateError) as caught:
        rejudge_throughput_step(live.ports, live.policy(workload=workload))
    assert caught.value.code == "K2-GAT-002"


def test_without_a_live_release_or_its_samples_there_is_nothing_to_judge():
    world = World()
    with pytest.raises(GateError) as caught:
        rejudge_throughput_step(world.ports(), world.subject(release()))
    assert caught.value.code == "K2-GAT-002"
    live = Live()
    append(live.world.store, Record("k2-live-1", "throughput", FINISHED, "run", 1.0, {"outcome": "done"}))
    with pytest.raises(GateError):
        rejudge_throughput_step(live.ports, live.policy(baseline_ratio=0.1))


def test_the_next_policy_release_judges_the_same_samples_again():
    live = Live()
    for release_id in ("k2-live-2", "k2-live-3"):
        what = replace(live.what, id=release_id, gates=replace(live.what.gates, baseline_ratio=0.1))
        bring_up(live.ports, what)
        promote(live.ports, what)
    assert json.loads(live.world.store.objects["live.json"])["release"] == "k2-live-3"


def test_the_baseline_is_of_the_same_workload_and_of_the_last_promoted_release():
    live = Live()
    assert read_baseline(live.ports, live.what)["release"] == "k2-live-1"
    other = replace(live.what, gates=replace(live.what.gates, workload=Workload(1, 1, 1, 1)))
    assert read_baseline(live.ports, other) is None


def test_a_candidate_slower_than_the_baseline_allows_fails():
    live = Live()
    what = release("k2-new-1", args={"decode-log-interval": 7})
    real = live.world.engine.run_load

    def slow(serving, workload, progress):
        live.world.engine.sets[serving].load_tok_per_s = 400.0
        return real(serving, workload, progress)

    live.world.engine.run_load = slow
    with pytest.raises(GateError) as caught:
        bring_up(live.ports, what)
    assert "baseline: got 0.400, expected >= 0.5" in caught.value.got
