"""Rights: read from the manifests, named by refusals, given back by a command that stands in the error."""

import json
import shlex
from dataclasses import replace

import pytest

from tasks.core.errors import ExitCode, Never, RightsError, UnavailableError
from tasks.core.permissions import (
    PIPELINE,
    Right,
    grant_command,
    refused_right,
    rights_error,
    rights_of,
    rights_of_rule,
    rules_for,
    service_account,
)
from tasks.core.render import render_base
from tasks.specs import load_base
from tests.fakes.small_world import site

PATCH_GROUPS = Right("leaderworkerset.x-k8s.io", "leaderworkersets", "patch", "k2")
LIST_NODES = Right("", "nodes", "list")
KUBE_SYSTEM = Right("", "namespaces", "get", "", "kube-system")
ACCOUNT = "system:serviceaccount:k2:k2-pipeline"


A = "system:serviceaccount:k2:a"


def role(kind="Role", name="r", namespace="k2", **rule):
    metadata = {"name": name, **({"namespace": namespace} if kind == "Role" else {})}
    return {"kind": kind, "metadata": metadata, "rules": [rule]}


def binding(kind="RoleBinding", role_kind="Role", name="r", namespace="k2", account="a", of="k2"):
    return {
        "kind": kind,
        "metadata": {"name": "b", **({"namespace": namespace} if kind == "RoleBinding" else {})},
        "roleRef": {"kind": role_kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": of}],
    }


PODS = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}


def test_rules_become_rights_where_they_are_bound():
    in_namespace = [Right("", r, v, "k2") for r in ("pods", "pods/log") for v in ("get", "list")]
    assert list(rights_of([role(**PODS), binding()], A)) == in_namespace
    everywhere = rights_of([role("ClusterRole", **PODS), binding("ClusterRoleBinding", "ClusterRole")], A)
    assert [r.namespace for r in everywhere] == [""] * 4
    # A ClusterRole that a RoleBinding gives holds in that namespace only.
    assert list(rights_of([role("ClusterRole", **PODS), binding(role_kind="ClusterRole")], A)) == in_namespace


@pytest.mark.parametrize("change", [{"account": "other"}, {"of": "default"}])
def test_what_is_bound_to_others_is_not_ours(change):
    assert rights_of([role(**PODS), binding(**change)], A) == ()


def test_a_user_is_bound_by_name():
    bound = binding() | {"subjects": [{"kind": "User", "name": "jane"}]}
    assert len(rights_of([role(**PODS), bound], "jane")) == 4


def test_a_binding_without_its_role_is_a_fault_of_the_manifests():
    with pytest.raises(ValueError, match="no role that is known"):
        rights_of([role(name="another", **PODS), binding()], A)


@pytest.mark.parametrize(
    "change", [{"verbs": ["*"]}, {"resources": ["*"]}, {"resourceNames": ["*"]}, {"nonResourceURLs": ["/metrics"]}]
)
def test_rules_that_cannot_be_asked_about_are_refused(change):
    with pytest.raises(ValueError, match="plain"):
        list(rights_of_rule(PODS | change, "k2"))


def test_the_pipelines_rights_follow_the_site_and_are_the_rules_of_the_manifests():
    rendered = render_base(load_base(), site(namespace="kimi"), "image")
    rights = rights_of(rendered, service_account(PIPELINE, "kimi"))
    assert {r.namespace for r in rights} == {"", "kimi"}
    assert Right("leaderworkerset.x-k8s.io", "leaderworkersets", "patch", "kimi") in rights
    assert LIST_NODES in rights
    written = sum(
        len(rule["apiGroups"]) * len(rule["resources"]) * len(rule["verbs"]) * len(rule.get("resourceNames", "x"))
        for obj in rendered
        if obj["kind"] in ("Role", "ClusterRole") and obj["metadata"]["name"] == PIPELINE
        for rule in obj["rules"]
    )
    assert len(rights) == written


def test_no_right_of_the_manifests_is_given_twice():
    """One that a wider rule gives as well could be taken away without anybody seeing it."""
    rights = rights_of(render_base(load_base(), site(), ""), ACCOUNT)
    assert [str(a) for a in rights for b in rights if a is not b and b.covers(a)] == []


def test_the_pipeline_has_no_secrets_and_cannot_enter_pods_or_change_rights():
    rights = rights_of(render_base(load_base(), site(), ""), ACCOUNT)
    names = {right.resource for right in rights}
    assert not names & {"secrets", "pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"}
    assert not {right.group for right in rights} & {"rbac.authorization.k8s.io"}


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (PATCH_GROUPS, "patch leaderworkersets.leaderworkerset.x-k8s.io in namespace k2"),
        (LIST_NODES, "list nodes cluster-wide"),
        (KUBE_SYSTEM, "get namespaces kube-system cluster-wide"),
        (Right("", "pods/log", "get", "k2"), "get pods/log in namespace k2"),
        (Right("apps", "deployments/scale", "patch", "k2"), "patch deployments.apps/scale in namespace k2"),
    ],
)
def test_a_right_in_words(right, said):
    assert str(right) == said


def test_a_wider_right_covers_a_narrower_one():
    inside = Right("", "pods", "list", "k2")
    everywhere = Right("", "pods", "list")
    assert everywhere.covers(inside) and inside.covers(inside)
    assert Right("", "namespaces", "get").covers(KUBE_SYSTEM)
    assert not KUBE_SYSTEM.covers(Right("", "namespaces", "get"))
    assert not inside.covers(everywhere) and not inside.covers(Right("", "pods", "list", "other"))
    assert not inside.covers(Right("", "pods", "get", "k2"))


@pytest.mark.parametrize(
    ("message", "right"),
    [
        (
            'leaderworkersets.leaderworkerset.x-k8s.io "x" is forbidden: User "u" cannot patch resource '
            '"leaderworkersets" in API group "leaderworkerset.x-k8s.io" in the namespace "k2"',
            PATCH_GROUPS,
        ),
        ('nodes is forbidden: User "u" cannot list resource "nodes" in API group "" at the cluster scope', LIST_NODES),
        (
            'pods "p" is forbidden: User "u" cannot get resource "pods/log" in API group "" in the namespace "k2": '
            'RBAC: role.rbac.authorization.k8s.io "x" not found',
            Right("", "pods/log", "get", "k2"),
        ),
        (
            'namespaces "kube-system" is forbidden: User "u" cannot get resource "namespaces" in API group "" in the '
            'namespace "kube-system"',
            KUBE_SYSTEM,
        ),
    ],
)
def test_a_refusal_names_the_right(message, right):
    assert refused_right(message) == ("u", right)


@pytest.mark.parametrize(
    "message",
    [
        "",
        'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1',
        'forbidden: User "u" cannot get path "/metrics"',
    ],
)
def test_another_403_names_none(message):
    assert refused_right(message) is None


def test_the_error_names_identity_rights_and_the_command():
    error = rights_error(ACCOUNT, [PATCH_GROUPS, LIST_NODES], "context c")
    assert (error.code, error.exit_code, error.retry) == ("K2-RGT-001", ExitCode.NOT_READY, Never())
    assert isinstance(error, RightsError) and isinstance(error, UnavailableError)
    assert error.as_text().splitlines() == [
        "error:    K2-RGT-001  system:serviceaccount:k2:k2-pipeline lacks 2 rights that the pipeline uses.",
        "where:    context c",
        "got:      no right to patch leaderworkersets.leaderworkerset.x-k8s.io in namespace k2; "
        "list nodes cluster-wide",
        "expected: the rules of manifests/base/20-rights.yaml",
        "next:     infra/runbooks/rights-missing.md; an administrator of the cluster runs: "
        "kubectl -n k2 patch role k2-pipeline --type=json -p "
        '\'[{"op":"add","path":"/rules/-","value":{"apiGroups":["leaderworkerset.x-k8s.io"],'
        '"resources":["leaderworkersets"],"verbs":["patch"]}}]\''
        " && kubectl patch clusterrole k2-pipeline --type=json -p "
        '\'[{"op":"add","path":"/rules/-","value":{"apiGroups":[""],"resources":["nodes"],"verbs":["list"]}}]\'',
    ]
    assert error.details["missing"] == [PATCH_GROUPS.as_data(), LIST_NODES.as_data()]
    one = rights_error(ACCOUNT, [LIST_NODES], "Node")
    assert one.summary == "system:serviceaccount:k2:k2-pipeline lacks the right to list nodes cluster-wide."


def test_many_missing_rights_are_all_in_the_details_and_few_on_the_line():
    missing = [Right("", f"things{n}", "get", "k2") for n in range(9)]
    error = rights_error(ACCOUNT, missing, "c")
    assert error.got.count("get things") == 6 and error.got.endswith("; and 3 more")
    assert len(error.details["missing"]) == 9
    assert error.hint.endswith("k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig")


def test_another_identity_that_has_nothing_is_bound_to_the_roles():
    elsewhere = replace(PATCH_GROUPS, namespace="kimi")
    in_namespace = [
        "kubectl", "-n", "kimi", "create", "rolebinding", "k2-pipeline-jane-example-com",
        "--role=k2-pipeline", "--user=jane@example.com",
    ]  # fmt: skip
    cluster_wide = [
        "kubectl", "create", "clusterrolebinding", "k2-pipeline-jane-example-com",
        "--clusterrole=k2-pipeline", "--user=jane@example.com",
    ]  # fmt: skip
    for missing, command in (
        ([elsewhere], in_namespace),
        ([LIST_NODES], cluster_wide),
        ([elsewhere, LIST_NODES], [*in_namespace[:-1], in_namespace[-1] + ";", *cluster_wide]),
    ):
        assert shlex.split(grant_command("jane@example.com", missing, [elsewhere, LIST_NODES])) == command
    # The pipeline of another namespace is somebody else here.
    assert "rolebinding" in grant_command(ACCOUNT, [elsewhere], [elsewhere])


def test_another_identity_that_lacks_some_rights_may_be_bound_to_an_older_role():
    list_pods = Right("", "pods", "list")
    bind = "kubectl create clusterrolebinding k2-pipeline-jane --clusterrole=k2-pipeline --user=jane"
    # It has the one, or was asked about nothing else, so that nobody knows.
    for asked in ([LIST_NODES, list_pods], []):
        command = grant_command("jane", [LIST_NODES], asked)
        assert command == f"k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig && {{ {bind}; }}"
    # All of the one scope, some of the other.
    mixed = grant_command("jane", [PATCH_GROUPS, LIST_NODES], [PATCH_GROUPS, LIST_NODES, list_pods])
    assert mixed.startswith(
        "k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig && { kubectl -n k2 create rolebinding "
    )
    assert mixed.endswith(f"; {bind}; }}")


def test_an_account_that_has_nothing_of_a_scope_lacks_the_binding_and_no_rule():
    list_pods = Right("", "pods", "list")
    asked = [PATCH_GROUPS, LIST_NODES, list_pods]
    for missing in ([PATCH_GROUPS], [LIST_NODES, list_pods], [PATCH_GROUPS, LIST_NODES], asked):
        assert (
            grant_command(ACCOUNT, missing, asked) == "k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig"
        )
    assert grant_command(ACCOUNT, [LIST_NODES], asked).startswith("kubectl patch clusterrole k2-pipeline")
    assert rights_error(ACCOUNT, [PATCH_GROUPS], "c", asked).hint.endswith(
        "k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig"
    )


def test_a_single_refusal_of_something_cluster_wide_may_be_a_missing_binding():
    assert grant_command(ACCOUNT, [KUBE_SYSTEM]).startswith("k2ctl site init")
    others = [replace(KUBE_SYSTEM, name="another")]
    assert grant_command(ACCOUNT, [KUBE_SYSTEM], [KUBE_SYSTEM, *others]).startswith("kubectl patch clusterrole")


def test_the_command_gives_rules_that_are_the_missing_rights():
    missing = [
        PATCH_GROUPS,
        Right("", "pods", "list", "k2"),
        Right("", "pods", "watch", "k2"),
        replace(KUBE_SYSTEM, namespace="k2"),
    ]
    words = shlex.split(grant_command(ACCOUNT, missing))
    rules = [step["value"] for step in json.loads(words[-1])]
    assert rules == rules_for(missing)
    assert {right for rule in rules for right in rights_of_rule(rule, "k2")} == set(missing)
