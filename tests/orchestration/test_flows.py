"""The flows under a real Prefect server: the order of steps, what is recorded, and what a failure leaves behind."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)

from flows.console import releasing
from flows.promote import promote
from flows.release import release as release_flow
from flows.retire import retire
from tasks.core.errors import After, ConflictError, InputError, IntegrityError, K2Error, RevertedError, UnavailableError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record
from tasks.order import END
from tasks.steps.documents import get_live, get_receipt
from tasks.steps.journal import records, states
from tests.fakes.memory_hub import DownHub
from tests.fakes.site_files import write_release
from tests.fakes.small_world import World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})
TOKEN = "hf_0123456789secret"


@pytest.fixture
def world(site: World, tmp_path: Path) -> World:
    for what in (OLD, NEW):
        write_release(tmp_path, what)
    return site


def started(world: World, release_id: str) -> list[str]:
    return [record.step for record in records(world.store, release_id) if record.event == STARTED]


def last_end(world: World, release_id: str) -> Record:
    return [record for record in records(world.store, release_id) if record.step == END][-1]


def test_release_and_promote_take_every_step_in_order_and_again_change_nothing(world: World) -> None:
    gated = release_flow(OLD.id)
    assert gated["outcome"] == "gated"
    assert world.live_weights() == {"k2-parking": 100}
    assert started(world, OLD.id) == [
        "lock", "plan", "preflight", "pull", "stage", "rollout", "warm", "smoke", "throughput"
    ]  # fmt: skip
    done = promote(OLD.id, "ann", comment="go")
    assert (done["outcome"], done["receipt"]) == ("promoted", f"receipts/{OLD.id}.json")
    assert started(world, OLD.id)[-3:] == ["approve", "shift", "promote"]
    assert get_receipt(world.store, OLD.id)["approver"] == "ann"
    end = last_end(world, OLD.id)
    assert (end.event, end.data["flow"], end.data["outcome"]) == (FINISHED, "promote", "promoted")
    writes, jobs = list(world.cluster.writes), list(world.jobs_run)
    again = release_flow(OLD.id)
    assert again["outcome"] == "unchanged"
    assert (world.cluster.writes, world.jobs_run) == (writes, jobs)
    assert started(world, OLD.id)[-2:] == ["lock", "plan"]


def test_a_second_release_goes_over_the_first_and_retire_takes_the_first_down(world: World) -> None:
    for what in (OLD, NEW):
        release_flow(what.id)
        promote(what.id, "ann")
    assert get_live(world.store)[0]["release"] == NEW.id  # type: ignore[index]
    with pytest.raises(ConflictError):
        retire(OLD.id)
    assert last_end(world, OLD.id).data["error"]["code"] == "K2-CON-006"
    world.clock.sleep(1000)
    assert len(retire(OLD.id)["removed"]) == 5


def test_a_release_whose_weights_are_in_the_store_goes_all_the_way_without_the_hub(world: World) -> None:
    release_flow(OLD.id)
    promote(OLD.id, "ann")
    world.hub = DownHub()  # type: ignore[assignment]
    assert release_flow(NEW.id)["outcome"] == "gated"
    assert promote(NEW.id, "ann")["outcome"] == "promoted"
    assert world.hub.asked == []
    lock = states(world.store, NEW.id)["lock"]
    assert lock.data["lock_source"] == "accepted before, made from http://127.0.0.1:1"


def test_a_failed_step_leaves_an_end_with_its_error_and_the_next_run_goes_on(world: World) -> None:
    error = IntegrityError("K2-INT-001", "Other bytes.", where="model-1-of-2.safetensors", got="a", expected="b")
    world.broken_jobs["k2-pull-"] = error.as_data()
    with pytest.raises(IntegrityError) as caught:
        release_flow(OLD.id)
    assert caught.value.as_data() == error.as_data()
    end = last_end(world, OLD.id)
    assert (end.event, end.data["outcome"], end.data["error"]) == (FAILED, "failed", error.as_data())
    assert not world.cluster.list_objects("LeaderWorkerSet")
    assert started(world, OLD.id).count("pull") == 1  # a static cause is not tried again
    world.broken_jobs.clear()
    assert release_flow(OLD.id)["outcome"] == "gated"


def test_a_cause_that_may_go_away_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import staging

    monkeypatch.setattr(staging.deliver, "retry_delay_seconds", 0.1)
    real, failures = world.store.list_objects, [UnavailableError("K2-UNA-001", "No.", retry=After(0.1))]

    def flaky(prefix: str) -> Any:
        if prefix == "blobs/" and failures and "pull" in started(world, OLD.id):
            raise failures.pop()
        return real(prefix)

    monkeypatch.setattr(world.store, "list_objects", flaky)
    assert release_flow(OLD.id)["outcome"] == "gated"
    assert states(world.store, OLD.id)["pull"].attempts == 2


def test_promote_refuses_a_release_that_is_not_gated(world: World) -> None:
    with pytest.raises(ConflictError):
        promote(OLD.id, "ann")
    assert world.live_weights() == {"k2-parking": 100}
    assert last_end(world, OLD.id).data["error"]["code"] == "K2-CON-006"
    assert started(world, OLD.id) == ["approve"]


def test_a_reverted_shift_is_the_end_of_the_run_and_is_not_promoted(world: World) -> None:
    release_flow(OLD.id)
    promote(OLD.id, "ann")
    release_flow(NEW.id)
    candidate = next(s for s in world.engine.sets if not world.subject(OLD).serving.startswith(s))
    world.clock.on_sleep.append(
        lambda now: (
            setattr(world.engine.sets[candidate], "garbage", True)
            if world.live_weights().get(f"k2-{candidate[:8]}-router", 0) >= 50
            else None
        )
    )
    with pytest.raises(RevertedError):
        promote(NEW.id, "ann")
    assert world.live_weights()[world.subject(OLD).router_service] == 100
    end = last_end(world, NEW.id)
    assert (end.data["error"]["exit_code"], end.data["error"]["code"]) == (10, "K2-REV-001")
    assert get_live(world.store)[0]["release"] == OLD.id  # type: ignore[index]
    assert started(world, NEW.id)[-1] == "shift"


def test_an_unknown_release_and_an_unknown_site_stop_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        release_flow("k2-nobody-1")
    with pytest.raises(InputError):
        release_flow(OLD.id, site=str(tmp_path / "none.yaml"))


def test_a_release_that_a_worker_cannot_read_leaves_an_end_for_whoever_waits(world: World) -> None:
    with pytest.raises(InputError):
        release_flow("k2-nobody-1")
    end = last_end(world, "k2-nobody-1")
    assert (end.event, end.data["error"]["code"]) == (FAILED, "K2-INP-007")
    state = what_state(end.run)
    assert "K2-INP-007" in state  # what k2ctl reads where there is no record


def test_a_store_that_is_down_at_the_end_does_not_hide_why_a_flow_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = IntegrityError("K2-INT-001", "Other bytes.", where="model-1-of-2.safetensors", got="a", expected="b")
    world.broken_jobs["k2-pull-"] = error.as_data()
    real = world.store.put

    def put(key: str, data: bytes, **conditions: Any) -> str:
        if b'"step":"end"' in data:
            raise UnavailableError("K2-UNA-001", "The store is down.")
        return real(key, data, **conditions)

    monkeypatch.setattr(world.store, "put", put)
    with pytest.raises(IntegrityError) as caught:
        release_flow(OLD.id)
    assert caught.value.as_data() == error.as_data()


def test_a_store_that_answers_again_gets_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = world.store.put, [1, 1]

    def put(key: str, data: bytes, **conditions: Any) -> str:
        if b'"step":"end"' in data and refusals:
            refusals.pop()
            raise UnavailableError("K2-UNA-001", "The store is down.")
        return real(key, data, **conditions)

    monkeypatch.setattr(world.store, "put", put)
    assert release_flow(OLD.id)["outcome"] == "gated"
    assert last_end(world, OLD.id).data["outcome"] == "gated"


def test_what_stands_behind_an_error_of_ours_is_not_in_the_runs_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(repo: str, revision: str) -> None:
        try:
            raise ValueError(f"403 for https://cdn/x?X-Amz-Signature={TOKEN}")
        except ValueError as cause:
            raise InputError("K2-INP-002", "The Hub refuses this repository.") from cause

    monkeypatch.setattr(world.hub, "list_revision", refuse)
    with pytest.raises(InputError) as caught:
        release_flow(OLD.id)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    said = what_prefect_knows(last_end(world, OLD.id).run)
    assert "The Hub refuses this repository" in said
    for secret in (TOKEN, "X-Amz", "ValueError"):
        assert secret not in said


def test_no_secret_gets_into_ledger_or_the_ends_of_a_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(repo: str, revision: str) -> None:
        raise ValueError(f"401 for https://user:{TOKEN}@hub")

    monkeypatch.setattr(world.hub, "list_revision", leak)
    with pytest.raises(K2Error) as caught:
        release_flow(OLD.id)
    assert caught.value.code == "K2-UNX-001"
    assert TOKEN.encode() not in b"".join(world.store.objects.values())
    assert last_end(world, OLD.id).data["error"]["summary"].endswith("ValueError.")
    said = what_prefect_knows(last_end(world, OLD.id).run)
    assert "ValueError" in said
    for secret in ("access_key", "secret_key", TOKEN):
        assert secret not in said


def what_state(run_id: str) -> str:
    """Return the message of a flow run's last state."""
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(run_id)).state
    return str(state.message) if state else ""


def what_prefect_knows(run_id: str) -> str:
    """Return all text of a flow run at the server: parameters, states, task runs and log lines."""
    run = UUID(run_id)
    with get_client(sync_client=True) as client:
        began = time.monotonic()
        while not (lines := client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])), limit=200)):
            assert time.monotonic() - began < 20, "no log line came"
            time.sleep(0.2)
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
        known = [client.read_flow_run(run), *tasks, *lines]
    return "\n".join(one.model_dump_json() for one in known)


def test_what_is_staged_beside_the_pull_is_in_the_runs_log_and_its_table_belongs_to_the_run(world: World) -> None:
    release_flow(OLD.id)
    steps = states(world.store, OLD.id)
    assert steps["stage"].began_at >= steps["pull"].began_at
    run = last_end(world, OLD.id).run
    began = time.monotonic()
    while "stage: done" not in (said := what_prefect_knows(run)):
        assert time.monotonic() - began < 20, said[-2000:]
        time.sleep(0.2)
    assert "pull: done" in said
    assert "stage: started" in said
    with get_client(sync_client=True) as client:
        tables = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["k2-staging"])))
    assert run in {str(table.flow_run_id) for table in tables}


def test_a_flow_in_this_process_that_is_told_to_end_says_how_to_go_on(
    site: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect takes the signal while the flow runs, and sends it again when that has ended."""
    what = release("k2-ended-1")
    write_release(tmp_path, what)
    monkeypatch.setattr(releasing, "use_server_for", lambda site: None)
    site.engine.on_ask = lambda serving: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt, match="run the same command again"):
            releasing._run_here(site.site, "release", {"release": what.id})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert states(site.store, what.id)["warm"].outcome == "failed"
