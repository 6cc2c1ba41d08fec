"""The flows that look after weights, under a real Prefect server: what is recorded, and how a failure ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.collect import collect
from flows.scrub import scrub
from tasks import wiring
from tasks.core.errors import ConflictError, IntegrityError
from tasks.core.ledger import CARE, FAILED, FINISHED, Record
from tasks.order import END
from tasks.ports import Progress
from tasks.steps.context import Ports
from tasks.steps.journal import records
from tests.fakes.disk_world import DiskWorld, quick_disks
from tests.fakes.pipeline import make_live
from tests.fakes.site_files import write_site
from tests.fakes.small_world import release


@pytest.fixture
def world(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskWorld]:
    path = write_site(tmp_path)
    with quick_disks() as disks:
        made = DiskWorld(disks, nodes=4)

        def connect(path: str, run: str, progress: Progress, model: str = "", access: object = None) -> Ports:
            return replace(made.ports(run), progress=progress)

        monkeypatch.setattr(wiring, "connect", connect)
        monkeypatch.setenv("K2_SITE", str(path))
        yield made


def last_end(world: DiskWorld) -> Record:
    return [record for record in records(world.store, CARE) if record.step == END][-1]


def test_scrub_and_collect_leave_their_ends_in_the_sites_own_ledger(world: DiskWorld) -> None:
    lock = make_live(world.ports("run-old"), release("k2-old-1")).lock
    (world.root("node-4") / "org--x" / ("e" * 40)).mkdir(parents=True)
    done = scrub()
    assert (done["outcome"], len(done["nodes"])) == ("done", 4)
    assert (last_end(world).event, last_end(world).data["flow"]) == (FINISHED, "scrub")
    path = world.directory("node-2", lock) / "config.json"
    path.unlink()
    assert [row["outcome"] for row in scrub(["node-2"])["nodes"]] == ["repaired"]
    assert collect()["outcome"] == "collected"
    assert last_end(world).data["flow"] == "collect"
    assert not (world.root("node-4") / "org--x").exists()
    assert world.directory("node-4", lock).exists()


def test_rot_that_stays_fails_the_run_with_its_node(world: DiskWorld) -> None:
    lock = make_live(world.ports("run-old"), release("k2-old-1")).lock
    (world.directory("node-2", lock) / "config.json").unlink()
    world.store.objects.pop(f"blobs/{lock.file('config.json').sha256}")
    with pytest.raises(IntegrityError) as caught:
        scrub()
    assert (caught.value.where, caught.value.exit_code) == ("node-2", 5)
    end = last_end(world)
    assert (end.event, end.data["error"]["code"]) == (FAILED, "K2-INT-002")


def test_one_caretaker_at_a_time(world: DiskWorld) -> None:
    make_live(world.ports("run-old"), release("k2-old-1"))
    collect()
    obj = world.cluster.objects["Lease", "k2-care"]

    def renew(at: float) -> None:
        from tasks.core.lease import micro_time

        obj["spec"] |= {"holderIdentity": "somebody", "renewTime": micro_time(at)}

    renew(world.clock.now())
    world.clock.on_sleep.append(renew)
    with pytest.raises(ConflictError, match="Another run"):
        scrub()
