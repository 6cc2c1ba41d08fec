"""Step stage: every chosen node's marker is read and right, or no node is labelled (I2); a death changes nothing."""

import json
from dataclasses import replace

import pytest

from tasks.core.errors import CapacityError, IntegrityError, K2Error, NotReadyError
from tasks.core.marker import marker_from_data
from tasks.core.render import staged_label
from tasks.core.spec import Staging
from tasks.steps.acceptance import lock_step
from tasks.steps.staging import require_markers, stage_step
from tasks.steps.weights import pull_step
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.small_world import Death, Faults, World, release

CHOSEN, SPARES = ("node-1", "node-2"), ("node-3",)


class Staged:
    """A world in which everything before the step `stage` is done."""

    def __init__(self):
        self.world = World(nodes=3)
        self.subject = self.world.subject(release())
        self.lock = self.subject.lock
        lock_step(self.world.ports(), REPO, REVISION)
        pull_step(self.world.ports(), self.subject)

    def stage(self, faults=None, nodes=CHOSEN, spares=SPARES):
        return stage_step(self.world.ports(faults=faults), self.subject, nodes, spares)

    def labelled(self):
        wanted = {staged_label(self.lock.digest): "true"}
        return [node["metadata"]["name"] for node in self.world.cluster.list_objects("Node", wanted)]

    def marker_key(self, node):
        return f"markers/{node}/{self.lock.digest}.json"

    def end_state(self):
        return self.labelled(), {k: v for k, v in self.world.store.objects.items() if not k.startswith("ledger/")}


def test_nodes_and_spares_are_staged_and_labelled():
    staged = Staged()
    data = staged.stage()
    assert staged.labelled() == ["node-1", "node-2", "node-3"]
    assert [(row["node"], row["outcome"]) for row in data["nodes"] + data["spares"]] == [
        ("node-1", "verified"), ("node-2", "verified"), ("node-3", "verified")
    ]  # fmt: skip
    assert data["bytes_written"] == 3 * staged.lock.total_bytes
    marker = marker_from_data(json.loads(staged.world.store.objects[staged.marker_key("node-1")]))
    assert data["nodes"][0]["marker_content_sha256"] == marker.content_digest


def test_twice_writes_no_byte():
    staged = Staged()
    staged.stage()
    writes = [write for write in staged.world.cluster.writes if "Node/" in write]
    data = staged.stage()
    assert (data["outcome"], data["bytes_written"]) == ("unchanged", 0)
    assert [write for write in staged.world.cluster.writes if "Node/" in write] == writes


def damage_marker(staged, node, how):
    key = staged.marker_key(node)
    data = json.loads(staged.world.store.objects.get(key, b"{}"))
    if how == "gone":
        del staged.world.store.objects[key]
        return
    if how == "not json":
        staged.world.store.objects[key] = b"oops"
        return
    if how == "other node":
        data["node"] = "node-9"
    elif how == "other machine":
        data["node_uid"] = "uid-of-a-machine-that-was-replaced"
    elif how == "other lock":
        data["lock_digest"] = "0" * 64
    elif how == "file missing":
        data["files"] = data["files"][1:]
    elif how == "other digest":
        data["files"][0]["sha256"] = "0" * 64
    staged.world.store.objects[key] = json.dumps(data).encode()


DAMAGES = ["gone", "not json", "other node", "other machine", "other lock", "file missing", "other digest"]


@pytest.mark.parametrize("how", DAMAGES)
def test_the_barrier_reads_every_marker(how):
    staged = Staged()
    staged.stage()
    require_markers(staged.world.ports(), staged.lock, CHOSEN)
    damage_marker(staged, "node-2", how)
    with pytest.raises(IntegrityError) as caught:
        require_markers(staged.world.ports(), staged.lock, CHOSEN)
    assert "node-2" in caught.value.where


@pytest.mark.parametrize("how", DAMAGES)
def test_a_stager_that_says_ok_is_believed_only_with_its_marker(how):
    staged = Staged()
    honest = staged.world._program

    def lying(module, options):
        message = honest(module, options)
        if options.get("--node") == "node-2":
            damage_marker(staged, "node-2", how)
        return message

    staged.world._program = lying
    with pytest.raises(IntegrityError):
        staged.stage()
    assert "node-2" not in staged.labelled()


def test_a_node_whose_marker_went_bad_loses_its_label():
    staged = Staged()
    staged.stage()
    honest = staged.world._program
    staged.world._program = lambda module, options: {**honest(module, options), "marker_sha256": "0" * 64}
    with pytest.raises(IntegrityError):
        staged.stage()
    assert "node-1" not in staged.labelled()


def test_a_node_with_wrong_bytes_stops_the_step_and_labels_nobody():
    staged = Staged()
    error = IntegrityError("K2-INT-002", "Other bytes.", where="node-2: model-1")
    staged.world.broken_jobs[f"k2-stage-{staged.lock.digest[:8]}-node-2"] = error.as_data()
    with pytest.raises(IntegrityError) as caught:
        staged.stage()
    assert caught.value.where == "node-2: model-1"
    assert staged.labelled() == []


@pytest.mark.parametrize("cls", [IntegrityError, CapacityError])
def test_a_spare_that_fails_does_not_stop_the_release(cls):
    staged = Staged()
    error = cls({IntegrityError: "K2-INT-002", CapacityError: "K2-CAP-002"}[cls], "No.")
    staged.world.broken_jobs[f"k2-stage-{staged.lock.digest[:8]}-node-3"] = error.as_data()
    data = staged.stage()
    assert [row["outcome"] for row in data["spares"]] == ["not staged"]
    assert staged.labelled() == ["node-1", "node-2"]


def test_a_spare_that_fails_keeps_no_other_spare_from_being_used():
    staged = Staged()
    error = CapacityError("K2-CAP-002", "No.")
    staged.world.broken_jobs[f"k2-stage-{staged.lock.digest[:8]}-node-3"] = error.as_data()
    data = staged.stage(nodes=("node-1",), spares=("node-2", "node-3"))
    assert [row["outcome"] for row in data["spares"]] == ["verified", "not staged"]
    assert staged.labelled() == ["node-1", "node-2"]


def hang(staged, *nodes):
    """The stagers of these nodes start and never end."""
    real = staged.world._run_job

    def run_job(job):
        if not job["metadata"]["name"].endswith(nodes):
            real(job)

    staged.world._run_job = run_job


def test_a_spare_that_hangs_is_waited_for_some_minutes_and_keeps_no_other_from_being_used():
    staged = Staged()
    hang(staged, "node-2")
    began = staged.world.clock.at
    data = staged.stage(nodes=("node-1",), spares=("node-2", "node-3"))
    assert [row["outcome"] for row in data["spares"]] == ["not staged", "verified"]
    assert staged.labelled() == ["node-1", "node-3"]
    assert staged.world.clock.at - began < 700


@pytest.mark.parametrize("node", ["node-2", "node-3"])
def test_a_node_that_is_lost_while_it_is_staged_is_found_out_soon(node):
    staged = Staged()
    hang(staged, node)
    status = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    staged.world.cluster.set_status("Node", node, status)
    began = staged.world.clock.at
    if node in CHOSEN:
        with pytest.raises(NotReadyError) as caught:
            staged.stage()
        assert (caught.value.code, caught.value.where) == ("K2-RDY-002", node)
        assert staged.labelled() == []
    else:
        assert [row["outcome"] for row in staged.stage()["spares"]] == ["not staged"]
    assert staged.world.clock.at - began < 60


def test_a_node_that_is_gone_is_named():
    staged = Staged()
    with pytest.raises(NotReadyError) as caught:
        staged.stage(nodes=("node-1", "node-9"))
    assert caught.value.where == "node-9"


def undisturbed():
    staged = Staged()
    faults = Faults(10**9)
    staged.stage(faults)
    return staged.end_state(), faults.calls


def test_a_death_at_any_call_and_a_second_run_give_the_same_end():
    expected, calls = undisturbed()
    assert calls > 20
    for at in range(1, calls + 1):
        staged = Staged()
        with pytest.raises(Death):
            staged.stage(Faults(at))
        try:
            staged.stage()
        except K2Error as error:
            pytest.fail(f"after a death at call {at}: {error}")
        assert staged.end_state() == expected, f"after a death at call {at}"


def engine_on(staged, node):
    """Somebody's pod that uses a GPU of a node."""
    container = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"nodeName": node, "containers": [container]}
    staged.world.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"on-{node}"}, "spec": spec})


def arguments(staged, node):
    job = staged.world.cluster.objects["Job", f"k2-stage-{staged.lock.digest[:8]}-{node}"]
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("mode", ["keep", "drop"])
def test_a_node_whose_gpus_are_in_use_is_staged_slowly_and_beside_its_page_cache(mode):
    staged = Staged()
    staged.world.site = replace(staged.world.site, staging=Staging(cache_mode=mode, beside_engine_bytes_per_s=7))
    for node in ("node-2", "node-3"):
        engine_on(staged, node)
    staged.stage()
    found = {node: arguments(staged, node) for node in (*CHOSEN, *SPARES)}
    assert [found[node]["--cache-mode"] for node in found] == [mode, "drop", "drop"]
    assert [found[node].get("--limit-bytes-per-s") for node in found] == [None, "7", "7"]


def test_without_a_rate_in_the_site_file_there_is_no_limit():
    staged = Staged()
    engine_on(staged, "node-1")
    staged.stage()
    assert "--limit-bytes-per-s" not in arguments(staged, "node-1")
    assert arguments(staged, "node-1")["--cache-mode"] == "drop"


def test_what_a_stager_says_of_its_work_is_recorded_and_its_worst_file_shown():
    staged = Staged()
    honest = staged.world._program
    worst = {"path": "model-1", "bytes": 9, "seconds": 4.5, "attempts": 2, "source": "store s"}
    told = {"seconds": 7.5, "attempts": 6, "quarantined": 1, "moved": [{"path": "x", "got": "y"}], "worst": [worst]}
    staged.world._program = lambda module, options: {**honest(module, options), **told}
    data = staged.stage()
    assert data["work"] == [{"node": node, **told} for node in (*CHOSEN, *SPARES)]
    assert not [row for row in data["nodes"] + data["spares"] if "worst" in row]  # a receipt carries evidence only
    assert data["note"].endswith(", 3 wrong files in quarantine")
    shown = staged.world.progress.tables["staging"][0]
    assert (shown["worst"], shown["seconds"]) == ("model-1: 4.5 s, 2 tries, store s", 7.5)


def test_the_flow_never_reads_a_blob():
    staged = Staged()
    staged.stage()
    assert not [call for call in staged.world.store.calls if call.startswith("open ")]
    assert staged.world.hub.opened == []
