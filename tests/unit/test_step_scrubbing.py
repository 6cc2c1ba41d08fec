"""Step scrub: which nodes are read when, what comes of each, and that a release always comes first."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ConflictError, InputError, IntegrityError, UnavailableError
from tasks.core.ledger import CARE
from tasks.core.marker import MARKER_FILE
from tasks.core.scrub_order import AT_ONCE, next_batch, units_of
from tasks.core.worker_jobs import render_stage_job
from tasks.node.marker_check import check_directory
from tasks.steps.audit import verify_receipt
from tasks.steps.caretaker import caring
from tasks.steps.context import Ports
from tasks.steps.documents import get_receipt
from tasks.steps.holder import TrafficHolder
from tasks.steps.journal import recorded, records
from tasks.steps.node_holder import NodeHolder
from tasks.steps.scrubbing import scrub_step
from tasks.steps.weights_needed import read_needed
from tests.fakes.disk_world import DiskWorld, quick_disks
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.pipeline import make_live
from tests.fakes.small_world import REPO, checkpoint, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", revision="b" * 40)
SHARD = "model-1-of-2.safetensors"


class Site:
    """A site on which a release is live, on three of four nodes; the last one is a spare."""

    def __init__(self, world: DiskWorld) -> None:
        self.world = world
        self.lock = make_live(world.ports("run-old"), OLD).lock

    def scrub(self, *named: str, run: str = "scrub-1") -> dict[str, Any]:
        return caring(
            self.world.ports(run), lambda ports: recorded(ports, CARE, "scrub", lambda: scrub_step(ports, named))
        )

    def rot(self, node: str, path: str = SHARD) -> None:
        """Flip a bit, keeping size and time."""
        file = self.world.directory(node, self.lock) / path
        was = file.stat()
        content = bytearray(file.read_bytes())
        content[7] ^= 1
        file.chmod(0o644)
        with file.open("r+b") as opened:
            opened.write(content)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        file.chmod(0o444)

    def lose(self, path: str = SHARD) -> None:
        """Take a file's blob out of the store."""
        self.world.store.objects.pop(f"blobs/{self.lock.file(path).sha256}")

    def bring_back(self, path: str = SHARD) -> None:
        self.world.store.objects[f"blobs/{self.lock.file(path).sha256}"] = checkpoint()[path]

    def scrubs(self) -> list[str]:
        return [name for name in self.world.jobs_run if name.startswith("k2-scrub-")]


@pytest.fixture(scope="module")
def kept() -> Iterator[Site]:
    with quick_disks() as disks:
        yield Site(DiskWorld(disks, nodes=4))


@pytest.fixture
def site(kept: Site) -> Iterator[Site]:
    """A copy of the site with disks of its own: inodes are others, so every file counts as touched."""
    made = copy.deepcopy(kept)
    made.world.cluster.controllers = [made.world._control]
    with quick_disks() as disks:
        for node in sorted(path.name for path in kept.world.disks.iterdir()):
            shutil.copytree(kept.world.root(node), disks / node)
        made.world.disks = disks
        made.scrub(run="first")  # which gives each node a marker of the copy's inodes
        made.world.jobs_run.clear()
        yield made


def test_every_node_that_holds_it_is_read_and_nothing_changes(site: Site) -> None:
    before = dict(site.world.store.objects)
    data = site.scrub()
    assert data["outcome"] == "done"
    assert [(row["node"], row["outcome"]) for row in data["nodes"]] == [(f"node-{n}", "right") for n in range(1, 5)]
    assert data["bytes_read"] == 4 * site.lock.total_bytes
    assert len(site.scrubs()) == 4
    changed = {key for key, value in site.world.store.objects.items() if before.get(key) != value}
    assert {key.split("/")[0] for key in changed} == {"ledger", "scrubs"}
    assert site.world.progress.tables["scrub"][0]["outcome"] == "right"


def test_a_flipped_bit_is_repaired_and_the_receipt_still_holds(site: Site) -> None:
    site.rot("node-2")
    data = site.scrub()
    assert data["outcome"] == "repaired"
    (row,) = [row for row in data["nodes"] if row["outcome"] == "repaired"]
    assert row["node"] == "node-2"
    assert [(p["path"], p["problem"], p["repaired"]) for p in row["problems"]] == [(SHARD, "content", True)]
    assert any(line == f"scrub: node-2: {SHARD} (content) was put right" for line in site.world.progress.lines)
    check_directory(site.world.directory("node-2", site.lock), site.lock.digest)
    assert site.lock.digest[:12] in site.world.labels("node-2")
    assert verify_receipt(site.world.ports(), get_receipt(site.world.store, OLD.id))


def test_rot_that_stays_takes_the_label_and_every_node_is_read_all_the_same(site: Site) -> None:
    site.rot("node-2")
    site.lose()
    with pytest.raises(IntegrityError) as caught:
        site.scrub()
    error = caught.value
    assert (error.code, error.exit_code, error.where) == ("K2-INT-002", 5, "node-2")
    assert SHARD in error.got
    assert "k2ctl scrub --node node-2" in error.hint
    outcomes = {row["node"]: row["outcome"] for row in error.details["nodes"]}
    assert outcomes == {**{f"node-{n}": "right" for n in range(1, 5)}, "node-2": "wrong"}
    assert site.world.labels("node-2") == set()
    assert site.world.labels("node-3") == {site.lock.digest[:12]}
    assert not (site.world.directory("node-2", site.lock) / MARKER_FILE).exists()
    assert f"markers/node-2/{site.lock.digest}.json" not in site.world.store.objects
    last = records(site.world.store, CARE)[-1]
    assert (last.step, last.event) == ("scrub", "failed")


def test_a_named_node_gets_its_label_back_when_it_is_right_again(site: Site) -> None:
    site.rot("node-4")
    site.lose()
    with pytest.raises(IntegrityError):
        site.scrub()
    site.bring_back()
    assert "node-4" not in [row["node"] for row in site.scrub()["nodes"]]  # a spare without its label: nobody's
    data = site.scrub("node-4")
    assert [(row["node"], row["outcome"]) for row in data["nodes"]] == [("node-4", "repaired")]
    assert site.world.labels("node-4") == {site.lock.digest[:12]}


def test_a_node_that_engines_run_on_is_read_without_its_label_too(site: Site) -> None:
    site.world.cluster.merge_patch(
        "Node", "node-1", {"metadata": {"labels": {f"staged.k2-release.io/{site.lock.digest[:12]}": None}}}
    )
    assert "node-1" in [row["node"] for row in site.scrub()["nodes"]]
    assert site.world.labels("node-1") == {site.lock.digest[:12]}


def test_a_node_without_the_directory_loses_its_label(site: Site) -> None:
    shutil.rmtree(site.world.root("node-4"))
    with pytest.raises(IntegrityError) as caught:
        site.scrub()
    assert caught.value.where == "node-4"
    assert site.world.labels("node-4") == set()


def test_what_rollback_goes_to_is_read_as_well(site: Site) -> None:
    for name in ("node-5", "node-6"):
        site.world.add_node(name)
    site.world.hub = MemoryHub(REPO, NEW.revision, checkpoint("b"))
    new = make_live(site.world.ports("run-new"), NEW).lock
    site.world.jobs_run.clear()
    data = site.scrub()
    assert {row["lock_digest"] for row in data["nodes"]} == {site.lock.digest, new.digest}
    assert [row["releases"] for row in data["nodes"]][:1] == [[NEW.id]]
    assert len(data["nodes"]) == 4 + 6


def test_nothing_live_is_nothing_to_scrub(tmp_path: Path) -> None:
    world = DiskWorld(tmp_path)
    data = caring(world.ports(), scrub_step)
    assert (data["outcome"], data["nodes"]) == ("unchanged", [])
    assert world.jobs_run == []


def test_a_node_that_is_not_of_the_pool_is_refused(site: Site) -> None:
    with pytest.raises(InputError, match="no such node"):
        site.scrub("node-1", "nodo-2")
    assert site.scrubs() == []


def test_a_cordoned_node_is_skipped_and_said_so(site: Site) -> None:
    site.world.cluster.merge_patch("Node", "node-4", {"spec": {"unschedulable": True}})
    rows = {row["node"]: row for row in site.scrub()["nodes"]}
    assert (rows["node-4"]["outcome"], rows["node-4"]["why"]) == ("skipped", "cordoned")
    assert len(site.scrubs()) == 3


def test_what_was_cut_off_is_tried_once_more_and_then_told(site: Site) -> None:
    error = UnavailableError("K2-UNA-003", "Cut off.", where="node-3")
    stopped = {**error.as_data(), "retry_after_s": 0.0}
    site.world.broken_jobs[f"k2-scrub-{site.lock.digest[:8]}-node-3"] = stopped
    with pytest.raises(UnavailableError) as caught:
        site.scrub()
    assert caught.value.where == "node-3"
    assert len([name for name in site.scrubs() if name.endswith("node-3")]) == 2
    assert site.world.labels("node-3") == {site.lock.digest[:12]}  # nothing is known to be wrong


def test_a_job_whose_marker_is_not_the_stores_is_not_believed(site: Site) -> None:
    real = site.world._program

    def lie(module: str, options: Any) -> Any:
        message = real(module, options)
        return {**message, "marker_sha256": "0" * 64} if options.get("--node") == "node-3" else message

    site.world._program = lie  # type: ignore[method-assign]
    with pytest.raises(IntegrityError) as caught:
        site.scrub()
    assert caught.value.where == "node-3"
    assert site.world.labels("node-3") == set()


def at_once(site: Site) -> list[set[str]]:
    """Return which nodes were scrubbed together, by what is said when a batch begins."""
    said = [line for line in site.world.progress.lines if line.startswith("scrub: node-") and ": lock " in line]
    return [set(line.removeprefix("scrub: ").partition(":")[0].split(", ")) for line in said]


def test_one_node_of_a_unit_at_a_time_and_never_all(site: Site) -> None:
    site.world.progress.lines.clear()
    site.scrub()
    units = units_of(site.world.cluster.list_objects("Pod"))
    assert sorted(units) == ["node-1", "node-2", "node-3"]
    assert len(set(units.values())) == 1
    batches = at_once(site)
    assert set.union(*batches) == {f"node-{n}" for n in range(1, 5)}
    for batch in batches:
        assert len(batch & units.keys()) <= 1
        assert len(batch) <= min(AT_ONCE, 3)


def test_a_batch_has_one_node_of_each_unit() -> None:
    units = {"a": "u1", "b": "u1", "c": "u2"}
    assert next_batch(["a", "b", "c", "d", "e", "f"], units, 6) == ["a", "c", "d", "e"]
    assert next_batch(["a", "b"], units, 2) == ["a"]
    assert next_batch(["d", "e"], {}, 2) == ["d"]  # never all that there are
    assert next_batch(["d"], {}, 1) == ["d"]
    assert next_batch([], {}, 0) == []


def test_while_traffic_is_moved_nothing_is_read(site: Site) -> None:
    holder = TrafficHolder(site.world.ports("somebody"))
    holder.acquire(1.0)
    ends_at = site.world.clock.at + 60

    def on(at: float) -> None:
        holder.renew() if at < ends_at else holder.release()
        assert at >= ends_at or site.scrubs() == []

    site.world.clock.on_sleep.append(on)
    assert site.scrub()["outcome"] == "done"
    assert site.world.clock.at >= ends_at
    assert any("waiting for a release: traffic is moved by somebody" in line for line in site.world.progress.lines)


def test_a_shift_that_does_not_end_is_not_waited_for_for_ever(site: Site) -> None:
    holder = TrafficHolder(site.world.ports("somebody"))
    holder.acquire(1.0)
    site.world.clock.on_sleep.append(lambda at: holder.renew())
    with pytest.raises(ConflictError) as caught:
        site.scrub()
    assert (caught.value.code, "somebody" in caught.value.got) == ("K2-CON-001", True)
    assert site.scrubs() == []


def hang(site: Site) -> list[str]:
    """Let scrubs start and not end while the list that is returned is not empty."""
    hanging, real = ["hanging"], site.world._run_job

    def run_job(job: Any) -> None:
        if hanging and job["metadata"]["name"].startswith("k2-scrub-"):
            site.world.jobs_run.append(job["metadata"]["name"])
        else:
            real(job)

    site.world._run_job = run_job  # type: ignore[method-assign]
    return hanging


def test_a_shift_that_begins_meanwhile_ends_what_reads_and_it_goes_on_afterwards(site: Site) -> None:
    hanging = hang(site)
    holder = TrafficHolder(site.world.ports("somebody"))
    began = site.world.clock.at

    def on(at: float) -> None:
        if hanging and at > began + 10:
            if not holder.generation:
                holder.acquire(1.0)
            holder.renew()
            there = [job["metadata"]["name"] for job in site.world.cluster.list_objects("Job") if "status" not in job]
            if at > began + 20:
                assert there == []  # stands back within seconds
            if at > began + 40:
                hanging.clear()
                holder.release()

    site.world.clock.on_sleep.append(on)
    assert site.scrub()["outcome"] == "done"
    assert any("stands back" in line for line in site.world.progress.lines)


def test_a_stager_on_another_node_disturbs_nobody_and_one_on_the_same_does(site: Site) -> None:
    site.world.clock.on_sleep.append(lambda at: end_stager() if at > began + 30 else None)
    began = site.world.clock.at
    ports = site.world.ports()
    job = render_stage_job(site.lock, site.world.site, ports.templates, "tool", "node-1", "uid")
    job["metadata"]["name"] = "k2-stage-other"
    controllers, site.world.cluster.controllers = site.world.cluster.controllers, []
    site.world.cluster.create(job)
    site.world.cluster.controllers = controllers

    def end_stager() -> None:
        site.world.cluster.set_status("Job", "k2-stage-other", {"conditions": [{"type": "Complete", "status": "True"}]})

    site.world.progress.lines.clear()
    site.scrub()
    waited = [line for line in site.world.progress.lines if "waiting for a release" in line]
    assert waited == ["scrub: waiting for a release: k2-stage-other writes to node-1"]


def test_a_node_whose_lease_a_release_holds_is_left_alone_until_it_is_over(site: Site) -> None:
    """Its stager is not started yet, or between two tries."""
    holder = NodeHolder(site.world.ports("run-next"), site.world.subject(OLD))
    holder.acquire(["node-1"], 1.0)
    began = site.world.clock.at
    site.world.clock.on_sleep.append(lambda at: holder.keep() if at < began + 40 else holder.release())
    site.world.progress.lines.clear()
    site.scrub()
    (waited,) = [line for line in site.world.progress.lines if "waiting for a release" in line]
    assert waited == f"scrub: waiting for a release: node-1 is staged by {site.lock.digest}"
    assert site.world.clock.at >= began + 40


def test_two_at_once_are_one_at_a_time(site: Site) -> None:
    """The first one lives: it renews its Lease while the second one looks."""

    def second(first: Ports) -> None:
        renewing: list[float] = []

        def on(at: float) -> None:
            if not renewing:
                renewing.append(at)
                first.clock.sleep(0.0)
                renewing.clear()

        site.world.clock.on_sleep.append(on)
        with pytest.raises(ConflictError) as caught:
            site.scrub(run="scrub-2")
        assert (caught.value.code, caught.value.got) == ("K2-CON-006", "held by scrub-1")
        assert site.scrubs() == []

    caring(site.world.ports("scrub-1"), second)


def test_a_caretaker_whose_lease_was_taken_stops(site: Site) -> None:
    def act(first: Ports) -> None:
        site.world.cluster.edit("Lease", "k2-care", lambda obj: obj["spec"].update(holderIdentity="somebody"))
        first.clock.sleep(60.0)

    with pytest.raises(ConflictError, match="Another run"):
        caring(site.world.ports("scrub-1"), act)
    assert site.world.cluster.objects["Lease", "k2-care"]["spec"]["holderIdentity"] == "somebody"


def test_a_dead_caretakers_lease_is_taken_over(site: Site) -> None:
    with pytest.raises(KeyboardInterrupt):
        caring(site.world.ports("dead"), lambda ports: (_ for _ in ()).throw(KeyboardInterrupt))
    obj = site.world.cluster.get("Lease", "k2-care")
    assert obj is not None
    obj["spec"]["holderIdentity"] = "dead"
    site.world.cluster.replace(obj)
    began = site.world.clock.at
    assert site.scrub()["outcome"] == "done"
    assert 30 <= site.world.clock.at - began < 120


def test_a_live_set_whose_lock_nobody_knows_is_told(site: Site) -> None:
    """The ledger of another store: nothing may be decided from it."""
    for key in [k for k in site.world.store.objects if k.startswith(("ledger/k2", "receipts/", "live.json"))]:
        del site.world.store.objects[key]
    with pytest.raises(ConflictError, match="lock nobody knows"):
        site.scrub()
    with pytest.raises(ConflictError):
        read_needed(site.world.ports())


def test_the_rate_of_the_site_is_what_the_jobs_get(site: Site) -> None:
    staging = replace(site.world.site.staging, scrub_bytes_per_s=7_000_000, beside_engine_bytes_per_s=9)
    site.world.site = replace(site.world.site, staging=staging, reserve_bytes=5)
    site.scrub()
    options = [options for name, options in site.world.programs() if name.startswith("k2-scrub-")]
    keys = ("--limit-bytes-per-s", "--repair-bytes-per-s", "--reserve-bytes")
    assert {tuple(found[key] for key in keys) for found in options} == {("7000000", "9", "5")}
