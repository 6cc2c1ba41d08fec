"""What may go is decided so that nothing goes that anybody may need: by examples, and for whatever there can be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.collection import (
    DELETE,
    KEEP,
    TRASH,
    Checkpoint,
    Claim,
    Inventory,
    Needs,
    Trashed,
    decide,
    locks_of,
    unfinished_claims,
)
from tasks.core.ledger import FAILED, FINISHED, STARTED, STEPS, Record
from tasks.core.mounts import Use, resolved, uses_of_groups, uses_of_pods
from tasks.core.store_collection import Blob, Upload, blobs_in, plan_store

ROOT, NAMESPACE = "/mnt/nvme/k2", "k2"
PATHS = [f"org--model-{m}/{digit * 40}" for m in "ab" for digit in "0123"]
NODES = ["node-1", "node-2"]
DIGESTS = [digit * 64 for digit in "0123456789abcdef"]
AGE_S, NOW = 86400.0, 1_800_000_000.0


def record(step: str, event: str, **data: Any) -> Record:
    return Record("r", step, event, "run", 0.0, data)


LOCKED = record("lock", FINISHED, lock_digest="a")


def why(*records: Record) -> list[str]:
    return [claim.lock_digest for claim in unfinished_claims("r", records)]


def test_a_release_claims_its_lock_from_the_lock_on_until_it_is_promoted_or_given_up() -> None:
    assert why() == []
    assert why(record("lock", STARTED)) == []
    assert why(LOCKED) == ["a"]
    assert why(LOCKED, record("stage", STARTED)) == ["a"]
    assert why(LOCKED, record("stage", FAILED)) == ["a"]
    assert why(LOCKED, record("promote", FAILED)) == ["a"]
    assert why(LOCKED, record("promote", FINISHED)) == []  # from here on the route tells
    assert why(LOCKED, record("retire", FINISHED)) == []
    assert why(LOCKED, record("promote", FINISHED), LOCKED) == ["a"]  # begun again
    assert why(LOCKED, record("lock", FINISHED, lock_digest="b")) == ["a", "b"]
    assert why(LOCKED, record("plan", FINISHED, plan={"lock_digest": "b"})) == ["a", "b"]


def test_a_claim_says_how_it_is_given_up() -> None:
    (claim,) = unfinished_claims("k2-x", [LOCKED, record("throughput", FAILED)])
    assert str(claim) == "k2-x: not promoted (throughput failed); if it is given up: k2ctl retire k2-x -y"


def pod(**changes: Any) -> dict[str, Any]:
    """Return an engine's pod of ours; `args` are its container's."""
    args = changes.pop("args", ["--model-path", f"/models/{PATHS[0]}"])
    labels = {"app.kubernetes.io/managed-by": "k2-release", "k2-release.io/role": "decode"}
    mount = {"name": "models", "mountPath": "/models"}
    container = {"name": "engine", "command": ["python"], "args": args, "volumeMounts": [mount]}
    return {
        "metadata": {"name": "p", "labels": changes.pop("labels", labels), "namespace": changes.pop("namespace", "k2")},
        "spec": {
            "nodeName": changes.pop("node", "node-1"),
            "containers": [container],
            "volumes": [{"name": "models", "hostPath": {"path": changes.pop("path", ROOT)}}],
        },
        "status": {"phase": changes.pop("phase", "Running")},
    }


def used(one: dict[str, Any]) -> list[tuple[str, str]]:
    return [(use.path, use.lock_digest) for use in uses_of_pods([one], ROOT, NAMESPACE)]


def test_a_pod_of_ours_uses_what_it_names() -> None:
    assert used(pod()) == [(PATHS[0], "")]
    assert used(pod(args=["--dir=/models/" + PATHS[1], "--lock-digest", DIGESTS[2]])) == [
        (PATHS[1], ""),
        ("", DIGESTS[2]),
    ]
    assert used(pod(args=["--root", "/models", "--lock-digest", DIGESTS[2]])) == [("", DIGESTS[2])]
    assert used(pod(args=["x:/models/" + PATHS[1] + "/config.json"])) == [(PATHS[1], "")]


def test_a_pod_of_which_nothing_is_known_uses_everything_on_its_node() -> None:
    everything = [("", "")]
    assert used(pod(args=["--root", "/models"])) == everything
    assert used(pod(args=[f"/models/{PATHS[0]}0"])) == everything  # 41 digits are no revision
    assert used(pod(labels={})) == everything
    assert used(pod(namespace="default")) == everything
    assert used(pod(labels={}, path=f"{ROOT}/org--model-a")) == [("org--model-a", "")]
    assert used(pod(path=f"{ROOT}/{PATHS[0]}", args=[])) == [(PATHS[0], "")]


def test_who_mounts_nothing_of_it_uses_nothing() -> None:
    assert used(pod(path="/")) == []  # monitors mount the whole host
    assert used(pod(path="/mnt/nvme")) == []
    assert used(pod(path=f"{ROOT}-other")) == []
    assert used(pod(phase="Succeeded")) == []
    assert used(pod(labels={}, phase="Failed")) == []
    looking = {"app.kubernetes.io/managed-by": "k2-release", "k2-release.io/role": "collect"}
    assert used(pod(labels=looking, args=["--root", "/models"])) == []


def test_a_group_uses_its_weights_also_while_it_has_no_pods() -> None:
    template = {key: pod()[key] for key in ("metadata", "spec")}
    template["spec"].pop("nodeName")
    group = {"metadata": {"name": "g"}, "spec": {"leaderWorkerTemplate": {"workerTemplate": template}}}
    (use,) = uses_of_groups([group], ROOT, NAMESPACE)
    assert (use.node, use.path) == ("", PATHS[0])


def test_a_lock_that_nobody_knows_is_everything() -> None:
    use = Use("node-1", "", DIGESTS[0], "pod")
    assert resolved([use], {DIGESTS[0]: PATHS[1]})[0].path == PATHS[1]
    assert resolved([use], {})[0].is_everything


CHECKPOINTS = st.builds(
    Checkpoint,
    st.sampled_from(PATHS),
    st.integers(0, 10**12),
    st.integers(0, 90),
    st.sampled_from(["", *DIGESTS]),
    st.just("token"),
    held=st.booleans(),
    in_use=st.sampled_from(["", "open in 7 (python)"]),
)
TRASHED = st.builds(
    Trashed,
    st.uuids().map(str),
    st.sampled_from(PATHS),
    st.integers(0, 10**12),
    moved_at=st.floats(NOW - 3 * AGE_S, NOW + AGE_S),
    node_age_s=st.floats(-AGE_S, 3 * AGE_S),
    in_use=st.sampled_from(["", "open in 7 (python)"]),
)
INVENTORIES = st.builds(
    Inventory,
    st.sampled_from(NODES),
    st.lists(CHECKPOINTS, max_size=8, unique_by=lambda found: found.path).map(tuple),
    st.lists(TRASHED, max_size=5).map(tuple),
    st.just(()),
    st.just(0),
    st.just(0),
)
CLAIMS = st.dictionaries(st.sampled_from(PATHS), st.just([Claim("a", "k2-1", "live")]), max_size=4)
ARGS = st.lists(
    st.one_of(
        st.sampled_from([f"/models/{path}" for path in PATHS]),
        st.sampled_from(["--root", "/models", "--lock-digest", *DIGESTS[:2], "x"]),
    ),
    max_size=4,
)
PODS = st.builds(
    lambda args, node, ours, path, phase: pod(
        args=args, node=node, path=path, phase=phase, **({} if ours else {"labels": {}})
    ),
    ARGS,
    st.sampled_from(["", *NODES]),
    st.booleans(),
    st.sampled_from([ROOT, f"{ROOT}/{PATHS[0]}", f"{ROOT}/org--model-b", "/", "/elsewhere"]),
    st.sampled_from(["Running", "Pending", "Succeeded"]),
)


@settings(max_examples=100, deadline=None)
@given(INVENTORIES, CLAIMS, st.lists(PODS, max_size=4))
def test_nothing_goes_that_anybody_needs(inventory: Inventory, claims: Any, pods: list[Any]) -> None:
    """I10, for whatever stands on the node, whoever claims it and whatever pods there are."""
    known = {DIGESTS[0]: PATHS[3]}
    needs = Needs(claims, resolved(uses_of_pods(pods, ROOT, NAMESPACE), known))
    decisions = decide(inventory, needs, AGE_S, NOW)
    assert len(decisions) == len(inventory.checkpoints) + len(inventory.trash)
    here = [
        one for one in pods if one["spec"]["nodeName"] in ("", inventory.node) and one["status"]["phase"] != "Succeeded"
    ]
    for decision in decisions:
        if decision.action == KEEP:
            assert decision.why
            continue
        assert decision.path not in claims
        for one in here:
            mounted = one["spec"]["volumes"][0]["hostPath"]["path"]
            if mounted in ("/", "/elsewhere"):
                continue
            words = one["spec"]["containers"][0]["args"]
            assert f"/models/{decision.path}" not in words or mounted != ROOT
            assert not f"{ROOT}/{decision.path}".startswith(mounted + "/") or mounted == ROOT
            assert f"{ROOT}/{decision.path}" != mounted
            if mounted == ROOT:
                assert one["metadata"]["labels"], "a pod of somebody else mounts everything"
                named = [word for word in words if word.removeprefix("/models/") in PATHS]
                digests = [b for a, b in pairwise(words) if a == "--lock-digest" and b in DIGESTS]
                assert named or digests, "a pod that names nothing mounts everything"
                assert DIGESTS[1] not in digests, "a lock that nobody knows"
                assert DIGESTS[0] not in digests or decision.path != PATHS[3]
    for decision, found in zip(decisions, (*inventory.checkpoints, *inventory.trash), strict=True):
        if decision.action == TRASH:
            assert isinstance(found, Checkpoint)
            assert not found.held
            assert not found.in_use
        if decision.action == DELETE:
            assert isinstance(found, Trashed)
            assert not found.in_use
            assert min(NOW - found.moved_at, found.node_age_s) >= AGE_S


@settings(max_examples=60, deadline=None)
@given(INVENTORIES)
def test_what_nobody_needs_goes(inventory: Inventory) -> None:
    for decision, found in zip(
        decide(inventory, Needs({}, []), AGE_S, NOW), (*inventory.checkpoints, *inventory.trash), strict=True
    ):
        if isinstance(found, Checkpoint):
            assert (decision.action == TRASH) is not (found.held or bool(found.in_use))
        else:
            old = min(NOW - found.moved_at, found.node_age_s) >= AGE_S
            assert (decision.action == DELETE) is (old and not found.in_use)


EVENTS = st.lists(
    st.one_of(
        st.builds(lambda d: record("lock", FINISHED, lock_digest=d), st.sampled_from("ab")),
        st.builds(record, st.sampled_from(STEPS), st.sampled_from([STARTED, FINISHED, FAILED])),
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_a_lock_is_claimed_exactly_from_its_record_to_the_end_of_its_release(events: list[Record]) -> None:
    ends = [n for n, e in enumerate(events) if e.event == FINISHED and e.step in ("promote", "retire")]
    after = events[max(ends, default=-1) + 1 :]
    assert (
        set(why(*events))
        == set(locks_of(after))
        == {str(e.data["lock_digest"]) for e in after if "lock_digest" in e.data}
    )


def test_a_name_that_is_no_checkpoints_stays() -> None:
    odd = Checkpoint("lost+found/x", 1, 1, "", "token")
    (decision,) = decide(Inventory("node-1", (odd,), (), (), 0, 0), Needs({}, []), AGE_S, NOW)
    assert (decision.action, decision.why) == (KEEP, "not a checkpoint's name")


BLOBS = st.lists(
    st.builds(Blob, st.sampled_from(DIGESTS), st.integers(0, 100), st.booleans()), unique_by=lambda b: b.sha256
)
TIMES = st.dictionaries(st.sampled_from(DIGESTS), st.floats(NOW - 3 * AGE_S, NOW + AGE_S))
UPLOADS = st.lists(
    st.builds(
        Upload,
        st.sampled_from([f"blobs/{DIGESTS[0]}", f"blobs/{DIGESTS[1]}", "other/key"]),
        st.uuids().map(str),
        st.integers(0, 100),
        st.floats(0, 3 * AGE_S),
    )
)


@settings(max_examples=100, deadline=None)
@given(BLOBS, UPLOADS, st.sets(st.sampled_from(DIGESTS)), TIMES, TIMES, st.sampled_from([0.0, AGE_S]))
def test_nothing_of_the_store_goes_that_is_needed_or_not_long_enough_buried(
    blobs: list[Blob], uploads: list[Upload], needed: set[str], tombstones: Any, used_at: Any, age_s: float
) -> None:
    plan = plan_store(blobs, uploads, needed, tombstones, used_at, age_s, NOW)
    for blob in plan.delete:
        assert blob.sha256 not in needed
        assert NOW - tombstones[blob.sha256] >= age_s  # and it has one, of an earlier run
        assert NOW - used_at.get(blob.sha256, 0.0) >= age_s
    for blob in plan.bury:
        assert blob.sha256 not in needed
        assert blob.sha256 not in tombstones
    assert {b.sha256 for b in (*plan.bury, *plan.delete)} | needed | plan.waiting.keys() >= {b.sha256 for b in blobs}
    there = {blob.sha256 for blob in blobs}
    for sha256 in plan.unearth:
        assert sha256 in needed or sha256 not in there
    assert not needed & tombstones.keys() - set(plan.unearth)
    for upload in plan.abort:
        assert upload.key.removeprefix("blobs/") not in needed
        assert upload.key != "other/key"
        assert upload.idle_s >= 3600


def test_a_file_of_the_store_is_buried_first_also_where_the_trash_has_no_age() -> None:
    blob = Blob(DIGESTS[0], 5, True)
    first = plan_store([blob], [], set(), {}, {}, 0.0, NOW)
    assert (first.bury, first.delete) == ((blob,), ())
    later = plan_store([blob], [], set(), {blob.sha256: NOW - 1}, {}, 0.0, NOW)
    assert (later.bury, later.delete) == ((), (blob,))


def test_a_blob_is_known_by_either_of_its_keys() -> None:
    sizes = {f"blobs/{DIGESTS[0]}": 5, f"blobs/{DIGESTS[0]}.ok": 1, f"blobs/{DIGESTS[1]}": 7}
    sizes |= {f"blobs/{DIGESTS[2]}.ok": 1, "blobs/readme": 3, f"blobs/{DIGESTS[3]}.tmp": 4}
    assert blobs_in(sizes) == [Blob(DIGESTS[0], 5, True), Blob(DIGESTS[1], 7, False), Blob(DIGESTS[2], 0, True)]
