"""Steps pull and stage where nodes exchange weights, or each pulls its own: the same barrier, labels and results."""

from dataclasses import replace

import pytest

from tasks.core.errors import CapacityError, IntegrityError, UnavailableError
from tasks.core.lock import LockedFile, make_lock
from tasks.core.render import staged_label
from tasks.core.spec import Staging
from tasks.core.standing import LEFT, WORKING, Note
from tasks.core.ways import bytes_to_pull, planned_topology, pulls_into_store, topology_of
from tasks.steps.acceptance import lock_step
from tasks.steps.staging import stage_step
from tasks.steps.weights import pull_step
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.pipeline import bring_up
from tests.fakes.small_world import World, release, site

CHOSEN, SPARES = ("node-1", "node-2"), ("node-3",)


def world(topology="exchange", **staging):
    made = World(nodes=3, staging=Staging(topology=topology, **staging))
    subject = made.subject(release())
    lock_step(made.ports(), REPO, REVISION)
    return made, subject


def labelled(made, subject):
    wanted = {staged_label(subject.lock.digest): "true"}
    return [node["metadata"]["name"] for node in made.cluster.list_objects("Node", wanted)]


def options(made, start):
    """The arguments of the Jobs whose names begin so, by the Job's node."""
    jobs = [job for (kind, name), job in made.cluster.objects.items() if kind == "Job" and name.startswith(start)]
    args = [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in jobs]
    return [dict(zip(a[::2], a[1::2], strict=True)) for a in args]


@pytest.mark.parametrize("topology", ["exchange", "hub"])
def test_nothing_is_pulled_into_the_store_and_every_node_is_verified_and_labelled(topology):
    made, subject = world(topology)
    pulled = pull_step(made.ports(), subject)
    assert (pulled["outcome"], pulled["bytes_fetched"]) == ("unchanged", 0)
    assert [key for key in made.store.objects if key.startswith("blobs/")] == []
    data = stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert [(row["node"], row["outcome"]) for row in data["nodes"] + data["spares"]] == [
        ("node-1", "verified"), ("node-2", "verified"), ("node-3", "verified")
    ]  # fmt: skip
    assert labelled(made, subject) == ["node-1", "node-2", "node-3"]
    assert data["bytes_written"] == 3 * subject.lock.total_bytes
    again = stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert (again["outcome"], again["bytes_written"]) == ("unchanged", 0)


def test_the_chosen_nodes_own_the_files_and_spares_are_guests_of_the_same_exchange():
    made, subject = world(exchange_origin="store")
    stage_step(made.ports(), subject, CHOSEN, SPARES)
    given = options(made, "k2-exchange-")
    assert {(o["--nodes"], o["--guests"], o["--origin"]) for o in given} == {("node-1,node-2", "node-3", "store")}
    assert len({o["--run"] for o in given}) == 1
    first = given[0]["--run"]
    stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert options(made, "k2-exchange-")[0]["--run"] != first


def test_each_node_is_alone_where_each_pulls_from_the_hub():
    made, subject = world("hub")
    stage_step(made.ports(), subject, CHOSEN, SPARES)
    given = options(made, "k2-exchange-")
    assert [(o["--node"], o["--nodes"], o["--origin"]) for o in given] == [
        (node, node, "hub") for node in (*CHOSEN, *SPARES)
    ]


def pod_of(made, node):
    name = next(
        n for kind, n in made.cluster.objects if kind == "Job" and n.startswith("k2-exchange") and n.endswith(node)
    )
    return made.cluster.objects["Job", name]["spec"]["template"]["spec"]


def test_a_node_serves_on_its_pods_address_and_takes_secrets_by_reference():
    made, subject = world()
    stage_step(made.ports(), subject, CHOSEN, SPARES)
    container = pod_of(made, "node-1")["containers"][0]
    environment = {item["name"]: item for item in container["env"]}
    assert environment["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert environment["K2_STORE_SECRET_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "k2-store"
    assert container["ports"][0]["containerPort"] == 30070
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_dragonflys_socket_is_mounted_where_its_program_is_used_and_nowhere_else():
    for command in ("", "dfget"):
        made, subject = world("hub", p2p_command=command)
        stage_step(made.ports(), subject, CHOSEN, ())
        mounted = [volume["name"] for volume in pod_of(made, "node-1")["volumes"]]
        assert mounted == ["models", *(["dragonfly"] if command else [])]
        assert {o.get("--fetch-command", "") for o in options(made, "k2-exchange-")} == {command}


def test_a_chosen_node_that_fails_fails_the_step_after_the_others_have_ended():
    made, subject = world()
    error = CapacityError("K2-CAP-002", "The disk is full.", where="node-1")
    made.broken_jobs[f"k2-exchange-{subject.lock.digest[:8]}-node-1"] = error.as_data()
    with pytest.raises(CapacityError):
        stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert len([name for name in made.jobs_run if name.startswith("k2-exchange-")]) == 3
    assert labelled(made, subject) == []


def test_the_gravest_failure_is_raised_and_takes_the_labels_away():
    made, subject = world()
    stage_step(made.ports(), subject, CHOSEN, ())
    digest = subject.lock.digest[:8]
    made.broken_jobs[f"k2-exchange-{digest}-node-1"] = UnavailableError("K2-UNA-001", "Away.").as_data()
    made.broken_jobs[f"k2-exchange-{digest}-node-2"] = IntegrityError("K2-INT-001", "Other bytes.").as_data()
    with pytest.raises(IntegrityError):
        stage_step(made.ports(), subject, CHOSEN, ())
    assert labelled(made, subject) == []
    assert any(line.startswith("also: node-1: K2-UNA-001") for line in made.progress.lines)


def test_a_spare_that_fails_does_not_stop_the_release():
    made, subject = world()
    error = IntegrityError("K2-INT-002", "No.")
    made.broken_jobs[f"k2-exchange-{subject.lock.digest[:8]}-node-3"] = error.as_data()
    data = stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert [row["outcome"] for row in data["spares"]] == ["not staged"]
    assert labelled(made, subject) == ["node-1", "node-2"]


def test_a_spare_that_hangs_is_waited_for_some_minutes():
    made, subject = world()
    real = made._run_job
    made._run_job = lambda job: None if job["metadata"]["name"].endswith("node-3") else real(job)
    began = made.clock.at
    data = stage_step(made.ports(), subject, CHOSEN, SPARES)
    assert [row["outcome"] for row in data["spares"]] == ["not staged"]
    assert 590 < made.clock.at - began < 700


def test_notes_of_nodes_that_have_left_are_removed_and_others_not():
    made, subject = world()
    left, there = (
        Note(node, "r", "b", state, "http://127.0.0.1:1", "t")
        for node, state in (("node-1", LEFT), ("node-2", WORKING))
    )
    for note in (left, there):
        made.store.objects[f"exchange/{subject.lock.digest}/{note.node}.json"] = note.to_bytes()
        made.store.objects[f"exchange/{subject.lock.digest}/{note.node}.beat"] = b"1"
    stage_step(made.ports(), subject, CHOSEN, ())
    assert {key for key in made.store.objects if key.startswith("exchange/")} == {
        f"exchange/{subject.lock.digest}/node-2{kind}" for kind in (".json", ".beat")
    }


@pytest.mark.parametrize("topology", ["exchange", "hub"])
def test_a_whole_release_needs_no_blob_in_the_store_and_twice_moves_nothing(topology):
    made = World(staging=Staging(topology=topology))
    bring_up(made.ports(), release())
    assert [key for key in made.store.objects if key.startswith("blobs/")] == []
    writes = len([name for name in made.jobs_run if "exchange" in name])
    bring_up(made.ports(), release())
    assert len([name for name in made.jobs_run if "exchange" in name]) == 2 * writes
    assert not [name for name in made.jobs_run if "k2-pull" in name or "k2-stage" in name]


def test_the_site_file_counts_before_the_plan_and_the_plan_before_the_store():
    def of(topology, planned="", **more):
        at = site(staging=Staging(topology=topology, **more))
        return topology_of(at, planned), pulls_into_store(at, planned)

    assert of("auto") == ("store", True)
    assert of("auto", "exchange") == ("exchange", False)
    assert of("hub", "exchange") == ("hub", False)
    assert of("exchange", "store") == ("exchange", False)
    assert of("exchange", exchange_origin="store") == ("exchange", True)
    assert planned_topology({"transfers": {"topology": "hub"}}) == "hub"
    assert planned_topology({}) == planned_topology({"transfers": None}) == ""


def test_what_comes_from_the_hub_is_counted_by_topology():
    same = LockedFile("copy.safetensors", 100, "shard", sha256="a" * 64)
    lock = make_lock(
        REPO,
        REVISION,
        [replace(same, path="a.safetensors"), same, replace(same, path="b.safetensors", sha256="b" * 64)],
    )

    def pulled(topology, present=(), lacking=3, holding=0):
        there = dict.fromkeys(present, True)
        return bytes_to_pull(lock, site(staging=Staging(topology=topology)), there, lacking, holding)

    assert pulled("store") == 200
    assert pulled("store", ["a" * 64]) == 100
    assert pulled("exchange") == 200
    assert pulled("exchange", lacking=2, holding=1) == 0
    assert pulled("exchange", lacking=0, holding=3) == 0
    assert pulled("hub", ["a" * 64]) == 600
