"""A release that changes nothing but its policy, as the flows carry it out: both gates judge what is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flows.promote import promote
from flows.release import release as release_flow
from tasks.core.errors import GateError, InputError
from tasks.core.ledger import STARTED
from tasks.core.spec import Limit, Release, Retention
from tasks.steps.documents import get_live, get_receipt
from tasks.steps.journal import records
from tests.fakes.site_files import write_release
from tests.fakes.small_world import World, release

OLD = release("k2-old-1")
POLICY = replace(OLD, id="k2-old-2", retention=Retention(10.0))


@pytest.fixture
def world(site: World, tmp_path: Path) -> World:
    write_release(tmp_path, OLD)
    release_flow(OLD.id)
    promote(OLD.id, "ann")
    return site


def started(world: World, what: Release) -> list[str]:
    return [record.step for record in records(world.store, what.id) if record.event == STARTED]


def test_both_gates_judge_the_stored_samples_and_no_request_is_sent(world: World, tmp_path: Path) -> None:
    write_release(tmp_path, POLICY)
    asked = len(world.engine.asked)
    assert release_flow(POLICY.id)["outcome"] == "gated"
    assert len(world.engine.asked) == asked
    assert started(world, POLICY) == ["lock", "plan", "smoke", "throughput"]
    promote(POLICY.id, "ann")
    assert get_live(world.store)[0]["release"] == POLICY.id  # type: ignore[index]
    assert set(get_receipt(world.store, POLICY.id)["gates"]) == {"smoke", "throughput"}


def test_a_policy_that_the_stored_samples_miss_ends_as_a_failed_gate(world: World, tmp_path: Path) -> None:
    limits = (Limit("e2e_output_tok_per_s", ">=", 1e6, "tok/s"),)
    write_release(tmp_path, replace(POLICY, gates=replace(OLD.gates, limits=limits)))
    with pytest.raises(GateError):
        release_flow(POLICY.id)


def test_a_promoted_file_that_was_edited_needs_a_new_id(world: World, tmp_path: Path) -> None:
    write_release(tmp_path, replace(OLD, retention=Retention(10.0)))
    receipt = world.store.objects[f"receipts/{OLD.id}.json"]
    with pytest.raises(InputError) as caught:
        release_flow(OLD.id)
    assert "new id" in caught.value.summary
    assert world.store.objects[f"receipts/{OLD.id}.json"] == receipt
