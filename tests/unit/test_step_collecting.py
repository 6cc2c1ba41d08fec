"""Step collect: what nothing needs goes, on real directories, and whatever comes between keeps what it needs (I10)."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.collection import KEEP
from tasks.core.errors import ConflictError, InputError, IntegrityError, RightsError, UnavailableError
from tasks.core.ledger import CARE, FINISHED, Record
from tasks.core.lock import Lock
from tasks.core.permissions import Right
from tasks.node.directory_lock import hold
from tasks.node.marker_check import check_directory
from tasks.node.program import Stop
from tasks.steps import store_collecting
from tasks.steps.caretaker import caring
from tasks.steps.collecting import collect_step, list_step
from tasks.steps.journal import append, recorded
from tests.fakes.disk_world import DiskWorld, quick_disks
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.pipeline import bring_up, make_live, retire
from tests.fakes.small_world import REPO, Death, Faults, checkpoint, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", revision="b" * 40)
NODES = [f"node-{n}" for n in range(1, 7)]
DAY_S = 86400.0


class Site:
    """A site on which `new` is live over `old`, which is what rollback goes to; all nodes hold both."""

    def __init__(self, world: DiskWorld) -> None:
        self.world = world
        self.old = make_live(world.ports("run-old"), OLD).lock
        self.hub("b", NEW.revision)
        self.new = make_live(world.ports("run-new"), NEW).lock

    def hub(self, seed: str, revision: str) -> None:
        self.world.hub = MemoryHub(REPO, revision, checkpoint(seed))

    def retire_old(self) -> None:
        self.world.clock.sleep(1000)
        retire(self.world.ports("run-retire"), OLD)

    def list(self, *nodes: str) -> dict[str, Any]:
        return list_step(self.world.ports("list"), nodes)

    def collect(self, *nodes: str, run: str = "gc", faults: Faults | None = None, **more: Any) -> dict[str, Any]:
        ports = self.world.ports(run, faults)
        act = lambda own: recorded(own, CARE, "collect", lambda: collect_step(own, nodes, **more))  # noqa: E731
        return caring(ports, act)

    def holders(self, lock: Lock) -> list[str]:
        """Return the nodes on which a lock's directory still is what was verified."""
        found = [node for node in NODES if self.world.directory(node, lock).exists()]
        for node in found:
            check_directory(self.world.directory(node, lock), lock.digest)
        return found

    def labelled(self, lock: Lock) -> list[str]:
        return [node for node in NODES if lock.digest[:12] in self.world.labels(node)]

    def trash(self) -> list[Path]:
        return sorted(self.world.disks.glob("*/.k2-trash/*"))

    def age_trash(self) -> None:
        """Let two days pass: on the pipeline's clock, and on the nodes', whose own has not gone on in a test."""
        self.world.clock.sleep(2 * DAY_S)

    def blobs(self, lock: Lock) -> list[str]:
        return [f.path for f in lock.files if f"blobs/{f.sha256}.ok" in self.world.store.objects]

    def assert_new_untouched(self) -> None:
        assert self.holders(self.new) == NODES
        assert self.labelled(self.new) == NODES
        assert self.blobs(self.new) == [file.path for file in self.new.files]


def actions(report: dict[str, Any], lock: Lock) -> set[str]:
    return {row["action"] for row in report["checkpoints"] if row["path"] == lock.model_dir}


@pytest.fixture(scope="module")
def kept() -> Iterator[Site]:
    with quick_disks() as disks:
        yield Site(DiskWorld(disks))


@pytest.fixture
def site(kept: Site) -> Iterator[Site]:
    made = copy.deepcopy(kept)
    made.world.cluster.controllers = [made.world._control]
    with quick_disks() as disks:
        for node in NODES:
            shutil.copytree(kept.world.root(node), disks / node)
        made.world.disks = disks
        for lock in (made.old, made.new):
            for node in NODES:
                remark(made.world, node, lock)
        yield made


def remark(world: DiskWorld, node: str, lock: Lock) -> None:
    """Let a node's marker speak of the copy's inodes."""
    directory = world.directory(node, lock)
    path = directory / ".k2-staged.json"
    data = json.loads(path.read_bytes())
    for file in data["files"]:
        stat = (directory / file["path"]).stat()
        file["inode"], file["mtime_ns"] = stat.st_ino, stat.st_mtime_ns
    path.chmod(0o644)
    path.write_text(json.dumps(data))
    world.store.objects[f"markers/{node}/{lock.digest}.json"] = path.read_bytes()


@pytest.fixture
def old_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose own clocks have gone on by days."""
    from tasks.node.trash import Trash

    real = Trash.age_s
    monkeypatch.setattr(Trash, "age_s", lambda self, name: real(self, name) + 10 * DAY_S)


def test_live_and_rollback_target_stay(site: Site) -> None:
    report = site.collect()
    assert report["outcome"] == "unchanged"
    assert (actions(report, site.old), actions(report, site.new)) == ({KEEP}, {KEEP})
    why = {row["path"]: row["why"] for row in report["checkpoints"]}
    assert why == {site.old.model_dir: f"{OLD.id}: rollback target", site.new.model_dir: f"{NEW.id}: live"}
    assert site.holders(site.old) == site.holders(site.new) == NODES
    assert not [key for key in site.world.store.objects if key.startswith("trash/")]


def test_a_list_changes_nothing(site: Site) -> None:
    site.retire_old()
    before = dict(site.world.store.objects)
    report = site.list()
    assert report["outcome"] == "listed"
    assert actions(report, site.old) == {"move to the trash"}
    assert [row["action"] for row in report["store"]["files"]] == ["bury", "bury"]
    assert site.holders(site.old) == site.labelled(site.old) == NODES
    changed = {k.split("/")[0] for k, v in site.world.store.objects.items() if before.get(k) != v}
    assert changed == {"inventories"}
    assert before.keys() <= site.world.store.objects.keys()


def test_what_was_replaced_and_retired_goes_to_the_trash_and_later_for_good(site: Site, old_enough: None) -> None:
    site.retire_old()
    report = site.collect()
    assert report["outcome"] == "collected"
    assert actions(report, site.old) == {"move to the trash"}
    assert (site.holders(site.old), site.labelled(site.old)) == ([], [])
    assert len(site.trash()) == 6
    assert not [k for k in site.world.store.objects if k.startswith("markers/") and site.old.digest in k]
    assert len(site.blobs(site.old)) == len(site.old.files)  # buried, not deleted
    site.assert_new_untouched()
    # At once again: too young.
    assert site.collect()["outcome"] == "unchanged"
    assert len(site.trash()) == 6
    site.age_trash()
    report = site.collect()
    assert actions(report, site.old) == {"delete"}
    assert site.trash() == []
    # What both locks have stays, as the live one needs it.
    shared = {file.sha256 for file in site.new.files}
    assert site.blobs(site.old) == [file.path for file in site.old.files if file.sha256 in shared]
    gone = [f for f in site.old.files if f.sha256 not in shared]
    assert len(gone) == 2
    for file in gone:
        assert not [key for key in site.world.store.objects if file.sha256 in key]
    assert not [key for key in site.world.store.objects if key.startswith(("trash/", "inventories/"))]
    site.assert_new_untouched()
    assert site.collect()["outcome"] == "unchanged"


def test_the_age_of_the_trash_can_be_given(site: Site, old_enough: None) -> None:
    site.retire_old()
    site.collect(trash_age_s=0.0)
    assert len(site.trash()) == 6  # never by the run that moved it
    site.collect(trash_age_s=0.0)
    assert site.trash() == []


@pytest.mark.parametrize("ended", ["gated", "failed in the middle"])
def test_what_is_not_promoted_yet_stays_until_it_is_given_up(site: Site, ended: str) -> None:
    site.retire_old()
    what = release("k2-next-1", revision="c" * 40)
    site.hub("c", what.revision)
    if ended == "gated":
        subject = bring_up(site.world.ports("run-next"), what)
    else:
        site.world.broken_jobs["k2-stage-"] = IntegrityError("K2-INT-001", "No.", where="node-3").as_data()
        with pytest.raises(IntegrityError):
            bring_up(site.world.ports("run-next"), what)
        site.world.broken_jobs.clear()
        subject = site.world.subject(what)
        for node in ("node-1", "node-2"):  # half of them, by a stager that was not stopped
            site.world._program(
                "tasks.node.stage", {"--node": node, "--node-uid": "x", "--lock-digest": subject.lock.digest}
            )
    there = [node for node in NODES if site.world.directory(node, subject.lock).exists()]
    assert len(there) >= 2
    report = site.collect()
    assert actions(report, subject.lock) == {KEEP}
    assert {node for node in NODES if site.world.directory(node, subject.lock).exists()} == set(there)
    assert site.blobs(subject.lock) == [file.path for file in subject.lock.files]
    why = [row["why"] for row in report["checkpoints"] if row["path"] == subject.lock.model_dir]
    assert all("k2ctl retire k2-next-1 -y" in reason for reason in why)
    retire(site.world.ports("run-give-up"), what)
    assert actions(site.collect(), subject.lock) == {"move to the trash"}
    site.assert_new_untouched()


def test_a_set_that_is_in_the_cluster_keeps_its_weights_whatever_the_ledger_says(site: Site) -> None:
    """Its pods mount them: here of a release whose retirement is on record and whose groups somebody kept."""
    append(site.world.store, Record(OLD.id, "retire", FINISHED, "x", site.world.clock.now()))
    obj = site.world.cluster.objects["HTTPRoute", "k2-live"]
    state = json.loads(obj["metadata"]["annotations"]["k2-release.io/state"])
    obj["metadata"]["annotations"]["k2-release.io/state"] = json.dumps({**state, "previous": None})
    report = site.collect()
    assert actions(report, site.old) == {KEEP}
    assert {row["why"] for row in report["checkpoints"] if row["path"] == site.old.model_dir} != {""}
    assert site.holders(site.old) == NODES
    assert len(site.blobs(site.old)) == len(site.old.files)


def foreign_pod(site: Site, node: str, **volume: Any) -> None:
    spec = {
        "nodeName": node,
        "containers": [{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/data"}]}],
        "volumes": [{"name": "v", **volume}],
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}
    site.world.cluster.apply(namespace)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "debug", "namespace": "other"}, "spec": spec}
    site.world.cluster.create(pod)


def test_somebody_elses_pod_that_mounts_the_directory_keeps_all_of_that_node(site: Site) -> None:
    site.retire_old()
    foreign_pod(site, "node-2", hostPath={"path": "/mnt/nvme/k2"})
    report = site.collect()
    (row,) = [row for row in report["checkpoints"] if row["node"] == "node-2" and row["path"] == site.old.model_dir]
    assert (row["action"], row["why"]) == (KEEP, "pod other/debug mounts the directory for weights")
    assert site.holders(site.old) == ["node-2"]
    assert site.labelled(site.old) == ["node-2"]


def test_only_the_named_nodes_are_collected_on(site: Site) -> None:
    site.retire_old()
    report = site.collect("node-3")
    assert {row["node"] for row in report["checkpoints"]} == {"node-3"}
    assert site.holders(site.old) == [node for node in NODES if node != "node-3"]
    with pytest.raises(InputError):
        site.collect("nodo-3")


def test_a_node_that_cannot_be_looked_at_is_told_and_keeps_no_other(site: Site) -> None:
    site.retire_old()
    site.world.cluster.merge_patch("Node", "node-4", {"spec": {"unschedulable": True}})
    error = UnavailableError("K2-UNA-003", "No answer.", where="node-5")
    site.world.broken_jobs["k2-collect-node-5"] = error.as_data()
    report = site.collect()
    assert report["unread"].keys() == {"node-4", "node-5"}
    assert site.holders(site.old) == ["node-4", "node-5"]


def test_a_release_that_begins_after_the_decision_keeps_what_it_needs(site: Site) -> None:
    """Its stagers run between the list and the act, and find every file there: nothing of the list has changed."""
    site.retire_old()
    again = release("k2-old-2")
    begun: list[str] = []

    def begin(options: Any) -> None:
        if "--order" in options and not begun:
            begun.append("yes")
            site.hub("a", again.revision)
            bring_up(site.world.ports("run-again"), again)

    site.world.before_job["k2-collect"] = begin
    report = site.collect()
    assert begun
    assert actions(report, site.old) == {KEEP}
    assert site.holders(site.old) == NODES
    assert len(site.blobs(site.old)) == len(site.old.files)
    assert site.labelled(site.old) == NODES  # put on by its stage step, after the collection had taken them off
    site.assert_new_untouched()


def test_a_release_that_begins_while_the_store_is_collected_keeps_its_files(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.retire_old()
    site.collect()
    site.age_trash()
    real, calls = store_collecting.read_needed, list[int]()

    def read(ports: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the .ok are taken, nothing is deleted yet
            data = {"lock_digest": site.old.digest}
            append(site.world.store, Record("k2-old-3", "lock", FINISHED, "x", site.world.clock.now(), data))
            assert len(site.blobs(site.old)) < len(site.old.files)
        return real(ports)

    monkeypatch.setattr(store_collecting, "read_needed", read)
    report = site.collect()
    assert len(calls) == 2
    assert len(site.blobs(site.old)) == len(site.old.files)
    assert [row for row in report["store"]["files"] if row["action"] == "delete"] == []
    assert not [key for key in site.world.store.objects if key.startswith("trash/")]


def test_files_whose_need_cannot_be_read_again_stay_verified(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.retire_old()
    site.collect()
    site.age_trash()
    real, calls = store_collecting.read_needed, list[int]()

    def read(ports: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise UnavailableError("K2-UNA-001", "The store does not answer.")
        return real(ports)

    monkeypatch.setattr(store_collecting, "read_needed", read)
    with pytest.raises(UnavailableError):
        site.collect()
    assert len(site.blobs(site.old)) == len(site.old.files)


def test_what_is_needed_again_is_taken_out_of_the_stores_trash(site: Site) -> None:
    site.retire_old()
    site.collect()
    assert len([key for key in site.world.store.objects if key.startswith("trash/")]) == 2
    site.hub("a", OLD.revision)
    bring_up(site.world.ports("run-again"), release("k2-old-2"))
    site.collect()
    assert not [key for key in site.world.store.objects if key.startswith("trash/")]
    assert len(site.blobs(site.old)) == len(site.old.files)


def test_a_tombstone_of_before_the_last_use_says_nothing(site: Site) -> None:
    site.retire_old()
    site.collect()
    site.age_trash()
    again = release("k2-old-2")
    site.hub("a", OLD.revision)
    bring_up(site.world.ports("run-again"), again)
    retire(site.world.ports("run-give-up"), again)
    site.collect()
    assert len(site.blobs(site.old)) == len(site.old.files)


def test_uploads_that_nobody_finishes_are_ended(site: Site) -> None:
    site.world.store.now = site.world.clock.now
    needed, unknown = f"blobs/{site.new.files[0].sha256}", "blobs/" + "e" * 64
    for key in (needed, unknown, "other/key"):
        site.world.store.start_upload(key)
    site.world.clock.sleep(2 * DAY_S)
    young = site.world.store.start_upload("blobs/" + "f" * 64)
    report = site.collect()
    assert [row["what"] for row in report["store"]["files"]] == [f"{unknown} (upload)"]
    left = {key for key, _ in site.world.store.uploads.values()}
    assert left == {needed, "other/key", "blobs/" + "f" * 64}
    assert young in site.world.store.uploads


def test_a_stager_at_work_keeps_its_directory(site: Site) -> None:
    site.retire_old()
    with hold(site.world.root("node-1"), site.old.revision, 0.0, Stop()):
        report = site.collect()
    (row,) = [row for row in report["checkpoints"] if row["node"] == "node-1" and row["path"] == site.old.model_dir]
    assert (row["action"], row["why"]) == (KEEP, "a stager or a scrub works there")
    assert site.holders(site.old) == ["node-1"]


@pytest.mark.parametrize(
    "broken",
    ["a record that cannot be read", "a lock that is gone", "pods that may not be listed", "a release nobody knows"],
)
def test_what_cannot_be_read_touches_nothing(site: Site, broken: str) -> None:
    site.retire_old()
    before = {k: v for k, v in site.world.store.objects.items() if k.startswith(("blobs/", "markers/"))}
    error: type[Exception] = IntegrityError
    if broken.startswith("a record"):
        site.world.store.objects["ledger/k2-other/00000.json"] = b"{"
    elif broken.startswith("a lock"):
        error = InputError
        data = {"lock_digest": "9" * 64}
        append(site.world.store, Record("k2-other", "lock", FINISHED, "x", site.world.clock.now(), data))
    elif broken.startswith("pods"):
        error = RightsError
        site.world.cluster.removed_rights.add(Right("", "pods", "list"))
    else:
        error = ConflictError
        obj = site.world.cluster.objects["HTTPRoute", "k2-live"]
        state = json.loads(obj["metadata"]["annotations"]["k2-release.io/state"])
        state["previous"] = {"service": "s", "serving": "0" * 12, "release": "k2-unheard-of"}
        obj["metadata"]["annotations"]["k2-release.io/state"] = json.dumps(state)
    with pytest.raises(error):
        site.collect()
    assert site.holders(site.old) == site.labelled(site.old) == NODES
    assert site.trash() == []
    now = {k: v for k, v in site.world.store.objects.items() if k.startswith(("blobs/", "markers/"))}
    assert now == before


def test_a_death_anywhere_and_a_run_again_end_as_an_undisturbed_run(site: Site, old_enough: None) -> None:
    """Two runs, days apart; each is killed at a port call, whichever, and started again."""
    site.retire_old()
    at, done = 3, 0
    while done < 2:
        faults = Faults(at)
        try:
            site.collect(run=f"gc-{at}", faults=faults)
        except Death:
            site.world.clock.sleep(120)  # until its Lease is over
            at = at + 14 if at < 150 else 10**9
        else:
            done, at = done + 1, 5
            site.age_trash()
        site.assert_new_untouched()
    assert (site.holders(site.old), site.labelled(site.old), site.trash()) == ([], [], [])
    shared = {file.sha256 for file in site.new.files}
    assert site.blobs(site.old) == [file.path for file in site.old.files if file.sha256 in shared]
