"""Two LeaderWorkerSets or one DisaggregatedSet: what ADR 0016 rests on, seen on the real manager.

A test that turns red with a newer manager is a reason to read that decision again.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.rehearsal.apiserver import ApiError
from tasks.specs import load_base
from tests.contract.agent_site import NAMESPACE, NODES, Site, agent_site, condition, wait_for
from tests.contract.release_groups import Object, as_one_set, rendered

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

GROUPS = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{NAMESPACE}/leaderworkersets"
SETS = f"/apis/disaggregatedset.x-k8s.io/v1/namespaces/{NAMESPACE}/disaggregatedsets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NAME = "k2-ab12cd34"
ROLE, RANK = "k2-release.io/role", "leaderworkerset.sigs.k8s.io/worker-index"
MERGE = "application/merge-patch+json"
QUIET_S = 3.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with agent_site(tmp_path_factory.mktemp("site"), groups=True) as started:
        yield started


@pytest.fixture(scope="module")
def groups(site: Site) -> list[Object]:
    """The two groups of a release, on a site whose nodes are staged and chosen for it."""
    admin = site.plane.admin
    _, found, labels = rendered(site.directory)
    paths = {
        "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
        "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    }
    for obj in load_base():
        if obj["kind"] in paths:
            admin.apply(f"{paths[obj['kind']]}/{obj['metadata']['name']}", obj)
    for index in range(1, NODES + 1):
        (site.directory / f"nodes/node-{index}/mnt/nvme/k2").mkdir(parents=True)
        patch = {"metadata": {"labels": labels}}
        admin.request("PATCH", f"/api/v1/nodes/node-{index}", patch, content_type=MERGE)
    return found


def items(site: Site, path: str) -> list[Object]:
    return list(site.get(path)["items"])


def apply(site: Site, path: str, obj: Object) -> Object:
    return site.plane.admin.apply(f"{path}/{obj['metadata']['name']}", obj, field_manager="k2-release")


def all_available(site: Site, count: int = 2) -> bool:
    found = items(site, GROUPS)
    return len(found) == count and all(condition(group, "Available") == "True" for group in found)


def ended(site: Site, path: str, *names: str) -> None:
    for name in names:
        site.delete(f"{path}/{name}")
    wait_for("nothing left", lambda: not items(site, GROUPS) and not items(site, PODS))


@pytest.fixture
def one_set(site: Site, groups: list[Object]) -> Iterator[Object]:
    """The release as one DisaggregatedSet, available."""
    obj = as_one_set(groups, NAME)
    apply(site, SETS, obj)
    wait_for("available", lambda: all_available(site))
    yield obj
    ended(site, SETS, NAME)


def by_rank(site: Site) -> dict[tuple[str, str], str]:
    """Return what each rank's pod is made of, without the names that come from the objects' own."""
    found = {}
    for pod in items(site, PODS):
        labels = pod["metadata"]["labels"]
        spec = {key: value for key, value in pod["spec"].items() if key not in ("nodeName", "hostname", "subdomain")}
        text = json.dumps(spec, sort_keys=True).replace(labels["leaderworkerset.sigs.k8s.io/name"], "NAME")
        found[labels[ROLE], labels[RANK]] = text
    return found


def uids(site: Site) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in items(site, PODS)}


def test_both_shapes_give_the_same_pods(site: Site, groups: list[Object]) -> None:
    for group in groups:
        apply(site, GROUPS, group)
    wait_for("two sets available", lambda: all_available(site))
    of_two = by_rank(site)
    ended(site, GROUPS, *(group["metadata"]["name"] for group in groups))
    apply(site, SETS, as_one_set(groups, NAME))
    wait_for("one set available", lambda: all_available(site))
    assert sorted(of_two) == [("decode", "0"), ("decode", "1"), ("prefill", "0")]
    assert by_rank(site) == of_two
    ended(site, SETS, NAME)


def test_its_groups_have_names_that_only_the_manager_knows(site: Site, one_set: Object) -> None:
    found = {group["metadata"]["labels"][ROLE]: group for group in items(site, GROUPS)}
    revision = found["decode"]["metadata"]["labels"]["disaggregatedset.x-k8s.io/revision"]
    assert {role: group["metadata"]["name"] for role, group in found.items()} == {
        role: f"{NAME}-{revision}-{role}" for role in ("prefill", "decode")
    }
    managers = {entry["manager"] for group in found.values() for entry in group["metadata"]["managedFields"]}
    assert managers == {"lws"}, "our field manager owns nothing of the groups"
    assert [entry["manager"] for entry in site.get(f"{SETS}/{NAME}")["metadata"]["managedFields"]] == ["k2-release"]


def test_it_says_nothing_of_its_state(site: Site, one_set: Object) -> None:
    time.sleep(QUIET_S)
    assert "status" not in site.get(f"{SETS}/{NAME}")


def test_what_is_outside_of_the_templates_is_copied_once(site: Site, one_set: Object) -> None:
    changed = copy.deepcopy(one_set)
    for role in changed["spec"]["roles"]:
        role["metadata"]["annotations"]["k2-release.io/release"] = "another"
    apply(site, SETS, changed)
    time.sleep(QUIET_S)
    told = {group["metadata"]["annotations"]["k2-release.io/release"] for group in items(site, GROUPS)}
    assert told == {"k2-both-1"}
    # A hand on a group is not taken back either.
    group = items(site, GROUPS)[0]["metadata"]["name"]
    drift: dict[str, Any] = {"spec": {"leaderWorkerTemplate": {"restartPolicy": "None"}}}
    site.plane.admin.request("PATCH", f"{GROUPS}/{group}", drift, content_type=MERGE)
    time.sleep(QUIET_S)
    assert site.get(f"{GROUPS}/{group}")["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_a_group_that_dies_leaves_the_other_role_alone(site: Site, one_set: Object) -> None:
    before = uids(site)
    worker = next(name for name in before if name.endswith("decode-0-1"))
    os.kill(site.processes(worker)[0]["pid"], signal.SIGKILL)

    def renewed() -> bool:
        now = uids(site)
        return {name for name in before if now.get(name) != before[name]} == {worker, worker[: -len("-1")]}

    wait_for("the decode group alone", lambda: renewed() and len(uids(site)) == len(before) and all_available(site))


def test_a_change_of_one_role_takes_both_old_groups_away_before_new_ones_are_ready(site: Site, one_set: Object) -> None:
    """There are no nodes for a surge: the old pair goes at once, users or not, and nothing is left to go back to."""
    old = {group["metadata"]["name"] for group in items(site, GROUPS)}
    changed = copy.deepcopy(one_set)
    templates = changed["spec"]["roles"][1]["spec"]["leaderWorkerTemplate"]
    for template in (templates["leaderTemplate"], templates["workerTemplate"]):
        template["spec"]["containers"][0]["env"].append({"name": "CHANGED", "value": "1"})
    apply(site, SETS, changed)

    def old_gone() -> list[Object] | None:
        found = items(site, GROUPS)
        return found if found and not old & {group["metadata"]["name"] for group in found} else None

    left = wait_for("the old groups gone", old_gone)
    assert sum(group.get("status", {}).get("readyReplicas", 0) for group in left) == 0
    wait_for("the new ones", lambda: all_available(site))


def test_what_the_groups_webhook_refuses_it_accepts_in_silence(site: Site, groups: list[Object]) -> None:
    bad = as_one_set(groups, "bad")
    for role in bad["spec"]["roles"]:
        role["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] = {"maxUnavailable": 0, "maxSurge": 0}
    with pytest.raises(ApiError, match="vleaderworkerset"):
        apply(site, GROUPS, {**groups[0], "spec": bad["spec"]["roles"][0]["spec"]})
    apply(site, SETS, bad)
    time.sleep(QUIET_S)
    events = items(site, f"/api/v1/namespaces/{NAMESPACE}/events")
    assert not items(site, GROUPS) and "status" not in site.get(f"{SETS}/bad")
    assert [event for event in events if event["involvedObject"]["name"] == "bad"] == []
    site.delete(f"{SETS}/bad")


def test_one_role_cannot_be_stopped_alone(site: Site, one_set: Object) -> None:
    stopped = copy.deepcopy(one_set)
    stopped["spec"]["roles"][0]["spec"]["replicas"] = 0
    with pytest.raises(ApiError, match="replicas must be zero for all roles"):
        apply(site, SETS, stopped)
