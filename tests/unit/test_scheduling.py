"""Why no node takes a pod: the scheduler's message is taken apart, and the nodes that it only counts are named."""

import pytest

from tasks.core.node_state import engine_tolerations, suits, unmet_labels, why_unusable
from tasks.core.scheduling import AFFINITY, CORDON, OTHER, PODS, RESOURCE, TAINT, read_verdict, unschedulable
from tasks.specs import load_templates
from tests.fakes.kube_messages import FULL, LOW, MIXED


def refusals(message):
    return [(r.kind, r.nodes, r.what) for r in read_verdict(message).refusals]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (FULL, [(RESOURCE, 16, "memory"), (RESOURCE, 16, "nvidia.com/gpu")]),
        (
            MIXED,
            [
                (TAINT, 1, ""),
                (AFFINITY, 11, ""),
                (RESOURCE, 2, "memory"),
                (RESOURCE, 2, "nvidia.com/gpu"),
                (CORDON, 2, ""),
            ],
        ),
        ("0/3 nodes are available: 3 Insufficient gpu.", [(RESOURCE, 3, "gpu")]),
        ("0/3 nodes are available: 3 Insufficient gpu", [(RESOURCE, 3, "gpu")]),
        ("0/2 nodes are available: 2 node(s) had untolerated taint {repair: disk}.", [(TAINT, 2, "repair")]),
        ("0/2 nodes are available: 2 node(s) had untolerated taint {a.b/c: }. preemption: x", [(TAINT, 2, "a.b/c")]),
        ("0/2 nodes are available: 1 Too many pods, 1 node(s) didn't match pod anti-affinity rules.", [
            (PODS, 1, ""), (OTHER, 1, "")
        ]),
    ],
)  # fmt: skip
def test_reasons_are_counted(message, expected):
    assert refusals(message) == expected


def test_what_became_of_preemption_is_kept():
    assert read_verdict(FULL).preemption == "not eligible due to preemptionPolicy=Never"
    assert read_verdict(LOW).preemption.endswith("4 No preemption victims found for incoming pod")
    assert read_verdict("0/3 nodes are available: 3 Insufficient gpu.").preemption == ""


@pytest.mark.parametrize("message", ["", "no nodes available to schedule pods", "pod has unbound claims"])
def test_another_message_is_no_verdict(message):
    assert read_verdict(message) is None


def test_the_summary_is_for_a_person():
    assert read_verdict(MIXED).summary == (
        "Of 16 nodes 1 have a taint that it does not tolerate, 11 do not carry the labels that it wants, "
        "2 have too little memory left, 2 have too little nvidia.com/gpu left, 2 are cordoned."
    )
    assert read_verdict("0/1 nodes are available: 1 out of luck.").summary == "Of 1 nodes 1: out of luck."


def node(name, ready="True", labels=None, **spec):
    conditions = [{"type": "Ready", "status": ready, "reason": "NodeStatusUnknown"}]
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec, "status": {"conditions": conditions}}


def wanting(*expressions, tolerations=()):
    required = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"metadata": {"name": "p"}, "spec": {"affinity": affinity, "tolerations": list(tolerations)}}


STAGED = {"key": "staged", "operator": "In", "values": ["true"]}
REPAIR = {"key": "repair", "value": "disk", "effect": "NoSchedule"}


def test_closed_nodes_are_named_where_they_matter_with_what_opens_them():
    nodes = [
        node("node-1", labels={"staged": "true"}),
        node("node-2", labels={"staged": "true"}, unschedulable=True),
        node("node-3", labels={"staged": "true"}, taints=[REPAIR]),
        node("node-4", "Unknown", labels={"staged": "true"}),
        node("node-9", unschedulable=True),
    ]
    summary, detail, resolution = unschedulable(wanting(STAGED), MIXED, nodes)
    assert summary.startswith("The scheduler finds no node for a pod. Of 16 nodes 1 have a taint")
    assert detail == (
        f"{MIXED} Closed: node-2: cordoned, node-3: tainted repair, node-4: not Ready (NodeStatusUnknown)."
    )
    assert "kubectl uncordon node-2, " in resolution and "kubectl taint node node-3 repair-" in resolution
    assert "kubectl describe node node-4" in resolution and "node-9" not in detail + resolution
    assert "retire" in resolution and "labels" not in resolution


def test_missing_labels_are_counted_when_no_node_has_all():
    nodes = [node("node-1", labels={"staged": "true"}), node("node-2")]
    placed = {"key": "placed", "operator": "In", "values": ["true"]}
    only = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    _, detail, resolution = unschedulable(wanting(STAGED, placed), only, nodes)
    assert detail == f"{only} Wanted labels, and how many of 2 nodes lack them: placed=true 2, staged=true 1."
    assert "run the release again" in resolution


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("0/1 nodes are available: 1 Insufficient memory.", "lower what the profile asks for"),
        ("0/1 nodes are available: 1 Too many pods.", "delete ended Jobs"),
        ("0/1 nodes are available: 1 out of luck.", "kubectl describe pod p"),
        ("no nodes available to schedule pods", "kubectl describe pod p"),
    ],
)
def test_each_reason_has_its_own_remedy(message, word):
    _, detail, resolution = unschedulable(wanting(), message, [node("node-1")])
    assert word in resolution and detail == message and "retire" not in resolution


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"key": "repair", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "repair", "value": "disk"}, True),
        ({"key": "repair", "operator": "Equal", "value": "fan"}, False),
        ({"key": "repair", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "repair", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_taints_are_matched_as_kubernetes_matches_them(toleration, tolerated):
    assert why_unusable(node("n", taints=[REPAIR]), [toleration]) == ("" if tolerated else "tainted repair")


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ({"key": "a", "operator": "In", "values": ["1", "2"]}, True),
        ({"key": "a", "operator": "In", "values": ["2"]}, False),
        ({"key": "a", "operator": "NotIn", "values": ["2"]}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, False),
        ({"key": "b", "operator": "NotIn", "values": ["1"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "b", "operator": "Exists"}, False),
        ({"key": "b", "operator": "DoesNotExist"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
        ({"key": "a", "operator": "Gt", "values": ["5"]}, True),
    ],
)
def test_required_labels_are_matched_as_kubernetes_matches_them(expression, holds):
    one = node("n", labels={"a": "1"})
    assert suits(one, wanting(expression)["spec"]) is holds
    assert bool(unmet_labels(one, wanting(expression)["spec"])) is not holds


def test_a_node_selector_and_a_name_are_required_too():
    one = node("n", labels={"a": "1"})
    assert suits(one, {"nodeSelector": {"a": "1"}}) and not suits(one, {"nodeSelector": {"a": "2"}})
    assert unmet_labels(one, {"nodeSelector": {"a": "2"}}) == ("a=2",)
    for name, fits in (("n", True), ("m", False)):
        field = {"key": "metadata.name", "operator": "In", "values": [name]}
        required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        spec = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
        assert suits(one, spec) is fits


def test_one_suitable_term_is_enough():
    spec = wanting(STAGED)["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    terms.append({"matchExpressions": [{"key": "a", "operator": "Exists"}]})
    assert suits(node("n", labels={"a": "1"}), spec)


def test_everything_that_runs_on_gpu_nodes_tolerates_the_same_taints():
    """The plan asks with the engines' tolerations: a node that it chooses has to take the Jobs as well."""
    templates = load_templates("sglang")
    tolerations = list(engine_tolerations(templates))
    assert (
        tolerations
        and why_unusable(
            node("n", taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]), tolerations
        )
        == ""
    )
    groups = [templates[role]["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in ("prefill", "decode")]
    names = ("probe-job", "stage-job", "exchange-job", "verify-job", "scrub-job", "collect-job")
    jobs = [templates[job]["spec"]["template"] for job in names]
    assert [pod["spec"]["tolerations"] for pod in (*groups, *jobs)] == [tolerations] * (2 + len(names))
