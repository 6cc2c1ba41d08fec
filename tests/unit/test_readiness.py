"""Readiness: a phase for each rank, known causes named, and no green light by mistake."""

import json

import pytest

from tasks.core import readiness
from tasks.core.engine_log import SIGNATURES, find_cause, read_phase
from tasks.core.readiness import assess, needs_events, not_ready_error
from tasks.core.topology import placement_of


def group(role, size):
    return {
        "metadata": {"name": f"k2-ab12cd34-{role}", "labels": {"k2-release.io/role": role}},
        "spec": {"replicas": 1, "leaderWorkerTemplate": {"size": size}},
    }


def node(name, ready="True"):
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def running(ready=True, **more):
    return {
        "phase": "Running",
        "podIP": more.pop("ip", ""),
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "initContainerStatuses": [{"name": "marker-check", "state": {"terminated": {"exitCode": 0}}}],
        "containerStatuses": [{"name": "engine", "restartCount": 0, "state": {"running": {}}}],
        **more,
    }


def engine(role, rank, node_name, status, uid="u"):
    name = f"k2-ab12cd34-{role}-0" + (f"-{rank}" if rank else "")
    labels = {
        "k2-release.io/role": role,
        "leaderworkerset.sigs.k8s.io/name": f"k2-ab12cd34-{role}",
        "leaderworkerset.sigs.k8s.io/worker-index": str(rank),
    }
    spec = {"nodeName": node_name} if node_name else {}
    return {"metadata": {"name": name, "uid": f"{uid}-{name}", "labels": labels}, "spec": spec, "status": status}


def router(ready=True):
    return {
        "metadata": {"name": "k2-ab12cd34-router-x", "uid": "r", "labels": {"k2-release.io/role": "router"}},
        "spec": {"nodeName": "node-1"},
        "status": running(ready, ip="127.0.11.9"),
    }


GROUPS = [group("prefill", 1), group("decode", 2)]
NODES = [node("node-1"), node("node-2"), node("node-3")]
WORKERS = [
    {"url": "http://127.0.11.1:30000", "worker_type": "prefill", "is_healthy": True},
    {"url": "http://127.0.12.1:30000", "worker_type": "decode", "is_healthy": True},
]


def healthy_pods(**changed):
    pods = {
        "prefill-0": engine("prefill", 0, "node-1", running(ip="127.0.11.1")),
        "decode-0": engine("decode", 0, "node-2", running(ip="127.0.12.1")),
        "decode-1": engine("decode", 1, "node-3", running(ip="127.0.13.1")),
        "router": router(),
    }
    pods.update({key.replace("_", "-"): value for key, value in changed.items()})
    return [pod for pod in pods.values() if pod is not None]


def look(pods=None, workers=WORKERS, nodes=NODES, elapsed_s=100.0, logs=None, previous=None):
    return assess(GROUPS, healthy_pods() if pods is None else pods, nodes, workers, elapsed_s, logs, previous)


def phase_of(state, role, rank):
    return next(phase for phase in state.phases if (phase.role, phase.rank) == (role, rank))


def test_ready_when_every_pod_and_the_router_say_so():
    state = look()
    assert state.ready and state.diagnoses == ()
    assert state.summary == "prefill: 1 Ready; decode: 2 Ready; router: 1 Ready"


@pytest.mark.parametrize(
    "changed",
    [
        {"decode_1": None},
        {"router": None},
        {"router": router(ready=False)},
        {"decode_1": engine("decode", 1, "node-3", running(False))},
        {"decode_1": engine("decode", 1, "", {"phase": "Pending"})},
    ],
)
def test_not_ready_while_one_pod_is_not(changed):
    assert not look(healthy_pods(**changed)).ready


@pytest.mark.parametrize(
    "workers",
    [
        None,
        [],
        WORKERS[:1],
        [WORKERS[0], WORKERS[1] | {"is_healthy": False}],
        [*WORKERS, {"url": "http://127.0.99.1:30000", "worker_type": "decode", "is_healthy": True}],
        [WORKERS[0] | {"worker_type": "decode"}, WORKERS[1] | {"worker_type": "prefill"}],
    ],
)
def test_not_ready_unless_the_router_sees_exactly_the_leaders(workers):
    state = look(workers=workers)
    assert not state.ready
    assert {diagnosis.category for diagnosis in state.diagnoses} == {"router"}
    assert state.fatal == ()


def test_nothing_applied_yet_is_not_ready():
    state = look(pods=[], workers=None, elapsed_s=0)
    assert not state.ready
    assert [(phase.role, phase.phase) for phase in state.phases] == [
        ("prefill", readiness.MISSING),
        ("decode", readiness.MISSING),
        ("decode", readiness.MISSING),
        ("router", readiness.MISSING),
    ]


def test_no_groups_and_no_pods_is_not_ready():
    assert not assess([], [], [], [], 0.0).ready


def test_lost_node_is_named_and_fatal():
    state = look(nodes=[node("node-1"), node("node-2"), node("node-3", "Unknown")])
    assert not state.ready
    assert phase_of(state, "decode", 1).phase == readiness.NODE_LOST
    (diagnosis,) = state.fatal
    assert (diagnosis.node, diagnosis.rank, diagnosis.category) == ("node-3", 1, "node")
    error = not_ready_error(state, "K2-RDY-002", "The engines cannot become ready.")
    assert "node-3" in error.where and "node-3" in error.summary and "node-3" in error.hint


def test_node_that_left_the_cluster_is_lost_too():
    state = look(nodes=NODES[:2])
    assert state.fatal[0].node == "node-3" and "no longer" in state.fatal[0].summary


def test_router_may_run_outside_of_the_gpu_pool():
    outside = router()
    outside["spec"]["nodeName"] = "cpu-1"
    assert look(healthy_pods(router=outside)).ready


def test_router_on_a_lost_node_is_lost():
    state = look(healthy_pods(), nodes=[node("node-1", "Unknown"), *NODES[1:]])
    assert {diagnosis.pod for diagnosis in state.fatal} == {"k2-ab12cd34-prefill-0", "k2-ab12cd34-router-x"}


def pending(message):
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}]
    return {"phase": "Pending", "conditions": conditions}


def test_pending_carries_the_schedulers_words_and_silent_nodes():
    pods = healthy_pods(decode_1=engine("decode", 1, "", pending("0/3 nodes are available: 3 Insufficient gpu.")))
    state = look(pods, nodes=[*NODES[:2], node("node-3", "Unknown")])
    assert phase_of(state, "decode", 1).detail.startswith("0/3 nodes")
    (diagnosis,) = state.diagnoses
    assert "Insufficient gpu" in diagnosis.detail and "node-3" in diagnosis.detail
    assert not diagnosis.fatal


def test_a_pod_that_is_taken_away_is_no_crash_and_its_events_explain_what_came_of_it():
    pod = engine("decode", 1, "node-3", crashed(143))
    pod["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting"}
    pod["status"]["conditions"].append(target)
    first = look(healthy_pods(decode_1=pod))
    assert phase_of(first, "decode", 1).detail == "preempting"
    assert [(d.category, d.node, d.fatal) for d in first.diagnoses] == [("disruption", "node-3", False)]
    assert first.news == first.diagnoses[0].summary
    gone = engine("decode", 1, "", pending("0/3 nodes are available: 3 Insufficient gpu."), uid="v")
    about = {"kind": "Pod", "name": "k2-ab12cd34-decode-0-1", "uid": "u-k2-ab12cd34-decode-0-1"}
    event = {"metadata": {}, "reason": "Preempted", "message": "by pod x", "involvedObject": about}
    state = assess(GROUPS, healthy_pods(decode_1=gone), NODES, WORKERS, 100.0, events=[event])
    assert [d.category for d in state.diagnoses] == ["capacity", "disruption"]


def test_events_are_wanted_where_they_may_explain_something():
    deleted = engine("decode", 1, "node-3", running())
    deleted["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    assert not needs_events(GROUPS, healthy_pods())
    for change in (
        {"decode_1": None},
        {"router": None},
        {"decode_1": deleted},
        {"decode_1": engine("decode", 1, "", {"phase": "Pending"})},
    ):
        assert needs_events(GROUPS, healthy_pods(**change)), change


def test_a_router_that_is_missing_is_said_to_be():
    state = look(healthy_pods(router=None))
    assert state.summary == "prefill: 1 Ready; decode: 2 Ready; router: 1 Missing"
    assert state.news == ""


def test_pending_is_no_diagnosis_at_once():
    pods = healthy_pods(decode_1=engine("decode", 1, "", pending("0/3 nodes are available")))
    assert look(pods, elapsed_s=5.0).diagnoses == ()


def failed_init(code, message):
    terminated = {"exitCode": code, "reason": "Error", "message": message}
    return {
        "phase": "Pending",
        "initContainerStatuses": [{"name": "marker-check", "restartCount": 0, "state": {"terminated": terminated}}],
        "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }


def test_marker_check_that_fails_is_integrity_with_its_own_words():
    said = {
        "code": "K2-INT-002",
        "summary": "A staged file is not the one that was verified.",
        "where": "node-2: model-7-of-61.safetensors",
        "got": "size 1",
        "expected": "size 2",
        "next": "do this",
    }
    state = look(healthy_pods(decode_0=engine("decode", 0, "node-2", failed_init(5, json.dumps(said)))))
    (diagnosis,) = state.fatal
    assert (diagnosis.category, diagnosis.summary, diagnosis.resolution) == ("integrity", said["summary"], "do this")
    assert "model-7-of-61" in diagnosis.detail


def test_marker_check_that_dies_without_words_is_still_integrity():
    state = look(healthy_pods(decode_0=engine("decode", 0, "node-2", failed_init(5, ""))))
    assert state.fatal[0].category == "integrity"


def crashed(code, restarts=1, reason="Error"):
    last = {"terminated": {"exitCode": code, "reason": reason}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "engine", "restartCount": restarts, "state": waiting, "lastState": last}
    return running(False, containerStatuses=[container])


@pytest.mark.parametrize(
    ("status", "log", "category", "fatal"),
    [
        (crashed(2), "", "arguments", True),
        (crashed(1), "boom", "crash", False),
        (crashed(1, restarts=2), "boom", "crash", True),
        (crashed(137, reason="OOMKilled"), "", "memory", True),
        (crashed(1), "torch.OutOfMemoryError: CUDA out of memory. Tried", "memory", True),
        (crashed(1), "ibv_modify_qp failed with error 110", "network", False),
    ],
)
def test_crashes(status, log, category, fatal):
    pods = healthy_pods(prefill_0=engine("prefill", 0, "node-1", status))
    state = look(pods, logs={"k2-ab12cd34-prefill-0": log})
    assert phase_of(state, "prefill", 0).phase == readiness.CRASHED
    (diagnosis,) = state.diagnoses
    assert (diagnosis.category, diagnosis.fatal, diagnosis.node) == (category, fatal, "node-1")


def test_image_that_does_not_come():
    waiting = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
    state = look(healthy_pods(decode_1=engine("decode", 1, "node-3", running(False, containerStatuses=[waiting]))))
    assert phase_of(state, "decode", 1).phase == readiness.PULLING
    assert state.diagnoses[0].category == "image" and not state.diagnoses[0].fatal


def test_deleted_pod_is_not_ready_although_it_says_so():
    pod = engine("decode", 1, "node-3", running(ip="127.0.13.1"))
    pod["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    state = look(healthy_pods(decode_1=pod))
    assert not state.ready and phase_of(state, "decode", 1).phase == readiness.TERMINATING


def test_group_made_anew_twice_is_a_static_fault():
    first = look(healthy_pods(decode_0=engine("decode", 0, "node-2", crashed(1))), logs={"k2-ab12cd34-decode-0": "x"})
    again = healthy_pods(decode_0=engine("decode", 0, "node-2", running(False), uid="v"))
    second = look(again, previous=first)
    assert second.deaths == {"k2-ab12cd34-decode": 1} and not second.fatal
    assert "exit code 1" in second.diagnoses[0].detail
    third = look(healthy_pods(decode_0=engine("decode", 0, "node-2", running(False), uid="w")), previous=second)
    assert third.fatal[0].summary.startswith("Group k2-ab12cd34-decode was made anew 2 times")


@pytest.mark.parametrize(
    ("line", "phase", "detail"),
    [
        ("Init torch distributed begin.", "Connecting ranks", ""),
        ("[2026 TP0] Load weight begin. avail mem=139.30 GB", "Loading", "0%"),
        (
            "Loading safetensors checkpoint shards:  12% Completed | 7/61 [00:03<00:20, 2.1it/s]",
            "Loading",
            "12% (7 of 61 shards)",
        ),
        ("[TP0] Load weight end. elapsed=3.00 s", "Allocating KV cache", "weights loaded"),
        ("KV Cache is allocated. dtype: torch.bfloat16", "Allocating KV cache", ""),
        ("Entering DeepGEMM JIT Pre-Compile session. It may take a long time", "Compiling kernels", ""),
        ("DeepGEMM warmup:  40%|####", "Compiling kernels", "40%"),
        ("Capture target decode CUDA graph begin. backend=full", "Capturing graphs", ""),
        ("Capturing batches (bs=480)", "Capturing graphs", "Capturing batches (bs=480)"),
        ("Capture target decode CUDA graph end. elapsed=1 s", "Warming", "graphs captured"),
        ("The server is fired up and ready to roll!", "Warming", "server is up"),
    ],
)  # fmt: skip
def test_phases_are_read_from_the_newest_known_line(line, phase, detail):
    log = f"Load weight begin. avail mem=1 GB\n{line}\nsomething else\n"
    assert (read_phase(log).phase, read_phase(log).detail) == (phase, detail)
    pods = healthy_pods(decode_0=engine("decode", 0, "node-2", running(False)))
    assert phase_of(look(pods, logs={"k2-ab12cd34-decode-0": log}), "decode", 0).phase == phase


def test_progress_bars_are_read_over_carriage_returns():
    log = "".join(f"\rLoading safetensors checkpoint shards:  {n}% Completed | {n}/61 [" for n in (3, 50))
    assert read_phase(log).detail == "50% (50 of 61 shards)"


def test_unknown_lines_have_no_phase_and_no_cause():
    assert read_phase("hello\nworld") is None
    assert find_cause("KeyError: 'x'") is None


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("launch_server.py: error: unrecognized arguments: --enable-deepep-moe", "arguments"),
        ("error: ambiguous option: --cuda-graph-bs could match", "arguments"),
        ("AssertionError: num_physical_experts % ep_size == 0 failed: (384 + 95) % 96 = 95", "arguments"),
        ("x.size(0) <= num_max_dispatch_tokens_per_rank", "arguments"),
        ("safetensors_rust.SafetensorError: Error while deserializing header", "integrity"),
        ("OSError: [Errno 98] Address already in use", "node"),
        ("failed to register to bootstrap server", "network"),
        ("Watchdog caught collective operation timeout: WorkNCCL", "network"),
    ],
)
def test_known_causes(line, category):
    assert find_cause(f"first\n{line}\nlast").signature.category == category


def test_causes_say_what_to_do():
    assert all(signature.summary and signature.resolution for signature in SIGNATURES)


def test_placement_names_ranks_of_each_node():
    seats = placement_of([*healthy_pods(), engine("decode", 2, "", pending("none"))], 8)
    assert [(s.role, s.node_rank, s.node, s.first_gpu_rank, s.last_gpu_rank) for s in seats] == [
        ("prefill", 0, "node-1", 0, 7),
        ("decode", 0, "node-2", 0, 7),
        ("decode", 1, "node-3", 8, 15),
    ]
