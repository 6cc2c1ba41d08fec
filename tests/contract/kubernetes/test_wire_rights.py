"""Rights on a real API server with RBAC: each verb of the pipeline is taken away once, and the finding names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.rehearsal import apiserver
from infra.rehearsal.apiserver import ApiConnection, ApiError, ControlPlane
from infra.rehearsal.processes import Supervisor
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.mirror import WatchTimes
from tasks.core.errors import After, ExitCode, K2Error, Never, RightsError, UnavailableError
from tasks.core.permissions import Right
from tasks.core.render import render_base, render_live_route, render_serving
from tasks.core.route import LIVE_ROUTE, PARKING, RouteState, to_annotations
from tasks.specs import load_base
from tasks.steps.capacity import plan_step, preflight_step
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import put_lock
from tasks.steps.rights import check_rights
from tasks.wiring import pipeline_rights
from tests.contract.kubernetes.sides import client
from tests.fakes import small_world
from tests.fakes.small_world import TEMPLATES, World, release

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

SITE = small_world.site()
RIGHTS = pipeline_rights(SITE)
PIPELINE = "system:serviceaccount:k2:k2-pipeline"
EVERYWHERE, IN_NAMESPACE = "clusterroles", "namespaces/k2/roles"
EFFECT_WITHIN_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def accounts(plane: ControlPlane) -> None:
    """The accounts of the manifests with their rights, on the shared control plane."""
    for obj in render_base(load_base(), SITE, ""):
        if obj["kind"] in ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
            client(plane).apply(obj)


@pytest.fixture(scope="module")
def admin(plane: ControlPlane) -> KubeCluster:
    return client(plane)


def token_of(plane: ControlPlane, account: str) -> str:
    """A fresh token of a ServiceAccount, as anybody who may could ask for."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    path = f"/api/v1/namespaces/k2/serviceaccounts/{account}/token"
    return str(plane.admin.request("POST", path, body)["status"]["token"])


def cluster_as(plane: ControlPlane, account: str, directory: Path, **options: Any) -> KubeCluster:
    path = directory / f"{account}.kubeconfig"
    path.write_text(json.dumps(apiserver.kubeconfig(plane.url, plane.ca_path, account, token_of(plane, account))))
    return client(plane, path, **options)


@pytest.fixture(scope="module")
def pipeline(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> KubeCluster:
    """The cluster as the pipeline's account sees it; every right has effect."""
    ours = cluster_as(plane, "k2-pipeline", tmp_path_factory.mktemp("pipeline"), watch_times=WatchTimes(1.0, 0.5, 3.0))
    wait_for("every right", lambda: ours.missing_rights(RIGHTS) == [])
    return ours


@pytest.fixture(scope="module")
def ports(pipeline: KubeCluster) -> Ports:
    return replace(World().ports(), cluster=pipeline)


@pytest.fixture(scope="module")
def subject(ports: Ports) -> Subject:
    world = World()
    what = world.subject(release())
    put_lock(ports.store, what.lock)
    return what


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """The authorizer learns of a changed role by a watch: within milliseconds, and not at once."""
    deadline = time.monotonic() + EFFECT_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {EFFECT_WITHIN_S} s: {what}"
        time.sleep(0.01)


def without(rules: list[dict[str, Any]], right: Right) -> list[dict[str, Any]]:
    """Rules split so that one verb on one resource can be left out."""
    kept = []
    for rule in rules:
        for resource in rule["resources"]:
            hit = resource == right.resource and right.group in rule["apiGroups"]
            verbs = [verb for verb in rule["verbs"] if not (hit and verb == right.verb)]
            if verbs:
                kept.append({**rule, "resources": [resource], "verbs": verbs})
    return kept


@contextmanager
def taken_away(plane: ControlPlane, pipeline: KubeCluster, *rights: Right) -> Iterator[None]:
    """Take rights out of the live roles, wait for the effect, and put the roles back."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for right in rights:
        scope = IN_NAMESPACE if right.namespace else EVERYWHERE
        path = f"/apis/rbac.authorization.k8s.io/v1/{scope}/k2-pipeline"
        rules = plane.admin.request("GET", path)["rules"]
        kept.setdefault(path, rules)
        fewer = without(rules, right)
        assert fewer != without(rules, Right("", "", "")), f"{right} is in no rule"
        set_rules(plane, path, fewer)
    try:
        wait_for("the rights are gone", lambda: len(pipeline.missing_rights(rights)) == len(rights))
        yield
    finally:
        for path, rules in kept.items():
            set_rules(plane, path, rules)
        wait_for("the rights are back", lambda: pipeline.missing_rights(rights) == [])


def set_rules(plane: ControlPlane, path: str, rules: list[dict[str, Any]]) -> None:
    plane.admin.request("PATCH", path, {"rules": rules}, content_type="application/merge-patch+json")


def found(error: RightsError) -> set[Right]:
    return {Right(*missing.values()) for missing in error.details["missing"]}


@pytest.mark.parametrize("right", RIGHTS, ids=str)
def test_each_verb_that_is_taken_away_is_found_and_no_other(
    plane: ControlPlane, pipeline: KubeCluster, ports: Ports, subject: Subject, right: Right
) -> None:
    with taken_away(plane, pipeline, right):
        with pytest.raises(RightsError) as caught:
            preflight_step(ports, subject, ["node-1"])
        assert found(caught.value) == {right}
        assert caught.value.summary == f"{PIPELINE} lacks the right to {right}."
        assert (caught.value.exit_code, caught.value.retry) == (ExitCode.NOT_READY, Never())


def test_with_every_right_the_check_passes(ports: Ports) -> None:
    assert check_rights(ports) == f"all {len(RIGHTS)} rights there"
    assert ports.cluster.identity() == PIPELINE


SPARE = Right("batch", "jobs", "delete", "k2")
GROUPS = "leaderworkersets"


def lease(holder: str) -> dict[str, Any]:
    metadata = {"name": "k2-traffic"}
    spec = {"holderIdentity": holder, "leaseTransitions": 1}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def job(name: str) -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "registry.example.com/none:1"}]}
    metadata = {"name": name}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": {"spec": spec}}}


def rendered(subject: Subject, kind: str) -> dict[str, Any]:
    objects = render_serving(subject.release, subject.lock, SITE, TEMPLATES)
    return next(obj for obj in objects if obj["kind"] == kind)


def live_route() -> dict[str, Any]:
    state = to_annotations(RouteState(stable=PARKING))
    return render_live_route(TEMPLATES["live-route"], [("k2-parking", 100, "parking")], state, "k2")


Act = Callable[[KubeCluster, Subject], Any]
PREPARED: dict[str, Act] = {
    "leases": lambda c, _: anew(c, lease("a")),
    "httproutes": lambda c, _: anew(c, live_route()),
}


def anew(cluster: KubeCluster, obj: dict[str, Any]) -> None:
    """Make an object in place of what other cases have left."""
    cluster.delete(obj["kind"], obj["metadata"]["name"])
    cluster.create(obj)


def replaced(kind: str, name: str) -> Act:
    """Read an object and write it again."""
    return lambda c, _: c.replace(c.get(kind, name) or {})


def watched(kind: str) -> Act:
    """Follow a kind until the refused watch is told: what was listed is shown as long as it may be true."""

    def act(pipeline: KubeCluster, _: Subject) -> None:
        with pipeline.mirror(kind) as mirror:
            wait_for("the watch is refused", lambda: mirror.objects() is None)

    return act


CALLS: dict[Right, Act] = {
    Right("leaderworkerset.x-k8s.io", GROUPS, "list", "k2"): lambda c, _: c.list_objects("LeaderWorkerSet"),
    Right("leaderworkerset.x-k8s.io", GROUPS, "create", "k2"): lambda c, s: c.apply(rendered(s, "LeaderWorkerSet")),
    Right("leaderworkerset.x-k8s.io", GROUPS, "patch", "k2"): lambda c, s: c.apply(rendered(s, "LeaderWorkerSet")),
    Right("leaderworkerset.x-k8s.io", GROUPS, "delete", "k2"): lambda c, _: c.delete("LeaderWorkerSet", "x"),
    Right("apps", "deployments", "list", "k2"): lambda c, _: c.list_objects("Deployment"),
    Right("apps", "deployments", "create", "k2"): lambda c, s: c.apply(rendered(s, "Deployment"), dry_run=True),
    Right("apps", "deployments", "patch", "k2"): lambda c, s: c.apply(rendered(s, "Deployment"), dry_run=True),
    Right("apps", "deployments", "delete", "k2"): lambda c, _: c.delete("Deployment", "x"),
    Right("", "services", "list", "k2"): lambda c, _: c.list_objects("Service"),
    Right("", "services", "create", "k2"): lambda c, s: c.apply(rendered(s, "Service"), dry_run=True),
    Right("", "services", "patch", "k2"): lambda c, s: c.apply(rendered(s, "Service"), dry_run=True),
    Right("", "services", "delete", "k2"): lambda c, _: c.delete("Service", "x"),
    Right("batch", "jobs", "get", "k2"): lambda c, _: c.get("Job", "x"),
    Right("batch", "jobs", "list", "k2"): lambda c, _: c.list_objects("Job"),
    Right("batch", "jobs", "create", "k2"): lambda c, _: c.create(job("made")),
    Right("batch", "jobs", "delete", "k2"): lambda c, _: c.delete("Job", "made"),
    Right("gateway.networking.k8s.io", "httproutes", "get", "k2"): lambda c, _: c.get("HTTPRoute", LIVE_ROUTE),
    Right("gateway.networking.k8s.io", "httproutes", "list", "k2"): lambda c, _: c.list_objects("HTTPRoute"),
    Right("gateway.networking.k8s.io", "httproutes", "create", "k2"): lambda c, s: c.apply(
        rendered(s, "HTTPRoute"), dry_run=True
    ),
    Right("gateway.networking.k8s.io", "httproutes", "patch", "k2"): lambda c, s: c.apply(
        rendered(s, "HTTPRoute"), dry_run=True
    ),
    Right("gateway.networking.k8s.io", "httproutes", "update", "k2"): replaced("HTTPRoute", LIVE_ROUTE),
    Right("gateway.networking.k8s.io", "httproutes", "delete", "k2"): lambda c, _: c.delete("HTTPRoute", "x"),
    Right("coordination.k8s.io", "leases", "get", "k2"): lambda c, _: c.get("Lease", "k2-traffic"),
    Right("coordination.k8s.io", "leases", "create", "k2"): lambda c, _: c.create(lease("b")),
    Right("coordination.k8s.io", "leases", "update", "k2"): replaced("Lease", "k2-traffic"),
    Right("", "pods", "list"): lambda c, _: c.list_objects("Pod", everywhere=True),
    Right("", "pods/log", "get", "k2"): lambda c, _: c.pod_log("x", "engine", 1),
    Right("", "nodes", "list"): lambda c, _: c.list_objects("Node"),
    Right("", "namespaces", "get", "", "kube-system"): lambda c, _: c.get("Namespace", "kube-system"),
    Right("", "resourcequotas", "list", "k2"): lambda c, _: c.list_objects("ResourceQuota"),
    Right("", "events", "list", "k2"): lambda c, _: c.list_objects("Event"),
    Right("leaderworkerset.x-k8s.io", GROUPS, "watch", "k2"): watched("LeaderWorkerSet"),
    Right("batch", "jobs", "watch", "k2"): watched("Job"),
    Right("", "pods", "watch", "k2"): watched("Pod"),
    Right("", "nodes", "watch"): watched("Node"),
    Right("", "nodes", "patch"): lambda c, _: c.merge_patch("Node", "x", {"metadata": {"labels": {"a": "b"}}}),
}


def test_every_right_has_a_call_that_uses_it() -> None:
    assert set(CALLS) == set(RIGHTS)


@pytest.mark.parametrize("right", CALLS, ids=str)
def test_a_call_without_its_right_names_the_rule_and_not_a_bare_403(
    plane: ControlPlane, pipeline: KubeCluster, admin: KubeCluster, subject: Subject, right: Right
) -> None:
    if right.resource in PREPARED:
        PREPARED[right.resource](admin, subject)
    with taken_away(plane, pipeline, right), pytest.raises(RightsError) as caught:
        CALLS[right](pipeline, subject)
    error = caught.value
    assert found(error) == {right}
    assert error.details["identity"] == PIPELINE
    assert str(right) in error.summary and "manifests/base/20-rights.yaml" in error.expected
    assert isinstance(error.retry, Never)
    kind = right.resource.partition("/")[0].rstrip("s")
    assert kind in error.where.lower().replace("/", " "), error.where


def test_a_plan_that_may_not_read_nodes_lists_all_that_is_missing(
    plane: ControlPlane, pipeline: KubeCluster, admin: KubeCluster, ports: Ports, subject: Subject
) -> None:
    anew(admin, live_route())
    missing = {Right("", "nodes", "list"), SPARE}
    with taken_away(plane, pipeline, *missing), pytest.raises(RightsError) as caught:
        plan_step(ports, subject)
    assert found(caught.value) == missing


def test_the_command_of_the_error_gives_the_rights_back(
    plane: ControlPlane, pipeline: KubeCluster, ports: Ports
) -> None:
    missing = (Right("leaderworkerset.x-k8s.io", GROUPS, "patch", "k2"), Right("", "nodes", "list"))
    with taken_away(plane, pipeline, *missing):
        with pytest.raises(RightsError) as caught:
            check_rights(ports)
        run_command(plane, caught.value)
        wait_for("the rights that the command gives", lambda: pipeline.missing_rights(missing) == [])


def test_another_identity_is_given_its_rights_by_the_command(plane: ControlPlane, ports: Ports, tmp_path: Path) -> None:
    somebody = cluster_as(plane, "default", tmp_path)
    theirs = replace(ports, cluster=somebody)
    with pytest.raises(RightsError, match="k2:default lacks") as caught:
        check_rights(theirs)
    assert found(caught.value) == set(RIGHTS)
    run_command(plane, caught.value)
    wait_for("the rights of the other identity", lambda: somebody.missing_rights(RIGHTS) == [])
    name = "k2-pipeline-system-serviceaccount-k2-default"
    for scope in ("clusterrolebindings", "namespaces/k2/rolebindings"):
        plane.admin.request("DELETE", f"/apis/rbac.authorization.k8s.io/v1/{scope}/{name}")
    wait_for("they are gone again", lambda: somebody.missing_rights(RIGHTS) == list(RIGHTS))


def run_command(plane: ControlPlane, error: RightsError) -> None:
    """Run what the error's next line says, as an administrator."""
    command = error.hint.partition("runs: ")[2]
    assert command.startswith("kubectl "), error.hint
    env = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-ec", command], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_server_that_refuses_to_be_asked_says_so(plane: ControlPlane, ports: Ports) -> None:
    """`system:basic-user` is taken from everybody, as on a cluster that was locked down."""
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:basic-user"
    rules = plane.admin.request("GET", path)["rules"]
    set_rules(plane, path, [])
    try:
        asking = Right("authorization.k8s.io", "selfsubjectaccessreviews", "create")

        def refused() -> bool:
            try:
                check_rights(ports)
            except RightsError as error:
                return found(error) == {asking} and "the right to" in error.where
            return False

        wait_for("the question itself is refused", refused)
    finally:
        set_rules(plane, path, rules)
    wait_for("it is answered again", lambda: ports.cluster.missing_rights(RIGHTS) == [])


def test_an_admission_that_forbids_is_no_missing_right(admin: KubeCluster) -> None:
    spec = {"serviceAccountName": "nobody", "containers": [{"name": "a", "image": "registry.example.com/none:1"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-nobody"}, "spec": spec}
    with pytest.raises(UnavailableError, match=r"forbids it: .*service account k2/nobody") as caught:
        admin.create(pod)
    assert not isinstance(caught.value, RightsError)
    assert isinstance(caught.value.retry, Never)
    assert "admission" in caught.value.hint


def test_a_token_that_is_not_known_is_no_missing_right(plane: ControlPlane, tmp_path: Path) -> None:
    config = apiserver.kubeconfig(plane.url, plane.ca_path, "nobody", "wrong")
    (tmp_path / "kc").write_text(yaml.safe_dump(config))
    nobody = KubeCluster(str(tmp_path / "kc"), "k2-rehearsal", "k2")
    for call in (lambda: nobody.get("Job", "x"), lambda: nobody.missing_rights(RIGHTS)):
        with pytest.raises(UnavailableError) as caught:
            call()
        assert not isinstance(caught.value, RightsError)
        assert "token" in caught.value.hint


@pytest.mark.parametrize("account", ["k2-engine", "k2-stager"])
def test_engines_and_stagers_can_do_nothing(plane: ControlPlane, tmp_path: Path, account: str) -> None:
    """Even with a token, which no pod of theirs is given: what a brand-new account may, and nothing else."""
    make_account(plane, "brand-new")
    assert rules_of(plane, account) == rules_of(plane, "brand-new")
    theirs = cluster_as(plane, account, tmp_path)
    assert theirs.missing_rights(RIGHTS) == list(RIGHTS)
    connection = ApiConnection(plane.url, plane.ca_path, token_of(plane, account))
    for path in ("namespaces/k2/pods", "namespaces/k2/secrets/k2-store", "namespaces/k2/configmaps", "nodes"):
        with pytest.raises(ApiError) as caught:
            connection.request("GET", f"/api/v1/{path}")
        assert caught.value.status == 403
    pod = {"metadata": {"name": f"of-{account}"}, "spec": {"serviceAccountName": account}}
    pod["spec"] |= {"containers": [{"name": "a", "image": "registry.example.com/none:1"}]}
    made = plane.admin.request(
        "POST", "/api/v1/namespaces/k2/pods?dryRun=All", {"apiVersion": "v1", "kind": "Pod", **pod}
    )
    assert "volumes" not in made["spec"]


def make_account(plane: ControlPlane, name: str) -> None:
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "k2"}}
    plane.admin.apply(f"/api/v1/namespaces/k2/serviceaccounts/{name}", body)


def rules_of(plane: ControlPlane, account: str) -> dict[str, Any]:
    """Everything that an account may, as the API server says it itself."""
    connection = ApiConnection(plane.url, plane.ca_path, token_of(plane, account))
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": "k2"}}
    answer = connection.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)["status"]
    assert not answer["incomplete"]
    groups = {group for rule in answer["resourceRules"] for group in rule["apiGroups"]}
    assert groups <= {"authorization.k8s.io", "authentication.k8s.io"}, answer
    return {kind: sorted(map(_sorted_rule, answer[kind])) for kind in ("resourceRules", "nonResourceRules")}


def _sorted_rule(rule: dict[str, list[str]]) -> str:
    """A rule as text: the server lists those of several roles in no certain order."""
    return json.dumps({key: sorted(values) for key, values in rule.items()}, sort_keys=True)


def test_a_server_that_starts_refuses_nobody_for_good(supervisor: Supervisor, plane: ControlPlane) -> None:
    """After kill -9 it answers 403 until it has read the roles: seen for up to 1.5 s on a busy machine."""
    clusters = [cluster_as(plane, "k2-pipeline", supervisor.site_dir, tries=1) for _ in range(3)]
    supervisor.stop("kube-apiserver", grace_s=0.0)
    outcomes: list[Exception | None] = []
    done = threading.Event()

    def look(pipeline: KubeCluster) -> None:
        while not done.wait(0.02):
            try:
                pipeline.list_objects("Job")
                outcomes.append(RightsError("K2-RGT-001", "rights") if pipeline.missing_rights(RIGHTS) else None)
            except K2Error as error:
                outcomes.append(error)

    threads = [threading.Thread(target=look, args=(cluster,)) for cluster in clusters]
    for thread in threads:
        thread.start()
    try:
        supervisor.start(plane.apiserver.spec)
        wait_for("it answers everybody", lambda: outcomes[-3:] == [None] * 3)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    refused = [error for error in outcomes if error is not None and not isinstance(error.retry, After)]
    assert [str(error) for error in refused] == []
    assert any(isinstance(error, UnavailableError) for error in outcomes)
