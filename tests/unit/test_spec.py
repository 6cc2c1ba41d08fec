"""Digests of a release: what changes a pod changes the serving digest, what does not does not."""

import json
from dataclasses import replace

import pytest

from tasks.core.identity import digest_of
from tasks.core.spec import GatePolicy, Images, Limit, Profile, Retention, TrafficPlan, Workload, plain, serving_form
from tests.fakes.small_world import IMAGES, PROFILE, release

LOCK = "a" * 64
BASE = release()


def profile(**changes) -> Profile:
    return replace(BASE.profile, **changes)


@pytest.mark.parametrize(
    "changed",
    [
        replace(BASE, images=replace(IMAGES, engine="other@sha256:" + "9" * 64)),
        replace(BASE, images=replace(IMAGES, router="other@sha256:" + "9" * 64)),
        release(args={"context-length": 8192}),
        replace(BASE, profile=profile(router_args={})),
        replace(BASE, profile=profile(gpus_per_node=4)),
        replace(BASE, profile=profile(host_memory_gib=1)),
        replace(BASE, profile=profile(engine_version="0.0.1")),
        replace(BASE, profile=profile(served_model_name="other")),
        replace(BASE, profile=profile(groups=tuple(replace(g, env={"A": "1"}) for g in PROFILE.groups))),
        replace(BASE, profile=profile(groups=tuple(replace(g, nodes=3) for g in PROFILE.groups))),
    ],
)
def test_what_the_pods_are_made_of_changes_the_serving_digest(changed):
    assert changed.serving_digest(LOCK) != BASE.serving_digest(LOCK)
    assert changed.policy_digest == BASE.policy_digest


@pytest.mark.parametrize(
    "changed",
    [
        release("another-id"),
        replace(BASE, images=replace(IMAGES, tool="newer@sha256:" + "9" * 64)),
        replace(BASE, profile=profile(name="renamed", ready_deadline_s=1.0)),
    ],
)
def test_what_they_are_not_made_of_does_not(changed):
    assert changed.serving_digest(LOCK) == BASE.serving_digest(LOCK)


@pytest.mark.parametrize(
    "changed",
    [
        replace(BASE, retention=Retention(1.0)),
        replace(BASE, traffic=TrafficPlan((100,), 1.0, 1.0, 1, 0.0, 1.0)),
        replace(BASE, gates=GatePolicy(1.0, Workload(1, 1, 1, 1), (Limit("a", ">=", 1.0, "s"),), 0.5)),
    ],
)
def test_policy_changes_the_policy_digest_alone(changed):
    assert changed.policy_digest != BASE.policy_digest
    assert changed.serving_digest(LOCK) == BASE.serving_digest(LOCK)


def test_other_weights_are_another_serving_set():
    assert BASE.serving_digest("b" * 64) != BASE.serving_digest(LOCK)


def test_both_digests_can_be_computed_again_from_a_release_that_went_through_json():
    data = json.loads(json.dumps(plain(BASE)))
    assert digest_of(serving_form(data, LOCK)) == BASE.serving_digest(LOCK)
    assert digest_of({key: data[key] for key in ("gates", "traffic", "retention")}) == BASE.policy_digest


def test_the_order_in_which_arguments_are_written_does_not_matter():
    groups = tuple(replace(g, args=dict(reversed(g.args.items()))) for g in BASE.profile.groups)
    assert replace(BASE, profile=profile(groups=groups)).serving_digest(LOCK) == BASE.serving_digest(LOCK)


def test_plain_makes_json_data():
    assert plain({"images": Images("a", "b", "c"), "t": (1, [2])}) == {
        "images": {"engine": "a", "router": "b", "tool": "c"},
        "t": [1, [2]],
    }


def test_a_profile_knows_its_groups():
    assert PROFILE.nodes == 3
    assert PROFILE.group("decode").nodes == 2
    with pytest.raises(KeyError):
        PROFILE.group("encode")
