"""`k2ctl rehearse --site`: what is refused, by name and before anything is asked, and what a rehearsal there does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import cli
from flows.console import own_cluster, rehearsal
from flows.console.injecting import INJECTIONS
from flows.console.own_cluster import OwnRehearsal
from flows.console.rehearsal import Programme
from infra.rehearsal.own_site import OwnSite
from tasks import wiring
from tasks.core.errors import ExitCode, GateError, UnavailableError
from tasks.steps.context import Ports
from tasks.steps.site_setup import set_up_site
from tests.fakes.counted_server import Counted, counted_server, write_kubeconfig
from tests.fakes.pipeline import make_live
from tests.fakes.site_files import write_release, write_site
from tests.fakes.small_world import World, release

OLD, NEW = release("k2-old-1"), release("k2-new-1", args={"decode-log-interval": 7})
EMBEDDED = [
    ["--full"],
    ["--first"],
    ["--keep"],
    ["--stop"],
    ["--site-only"],
    ["--dir", "d"],
    ["--seed", "0"],
    ["--topology", "hub"],
]


@dataclass
class Place:
    """A site file that may be rehearsed on, and the only server that it leads to."""

    directory: Path
    server: Counted

    def write(self, **changes: Any) -> str:
        fields = {
            "context": "ours",
            "rehearsal": True,
            "store": {"endpoint": self.server.url, "bucket": "k2-test", "credentials_file": "store.json"},
            "hub": {"endpoint": self.server.url},
            "gateway": {"url": self.server.url, "stats_url": self.server.url},
        }
        return str(write_site(self.directory, **{**fields, **changes}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Whoever is not refused would start a whole rehearsal here, or one there.
    monkeypatch.setattr("infra.rehearsal.site.prepare", lambda _report: pytest.fail("a rehearsal began"))
    monkeypatch.setattr(OwnSite, "__enter__", lambda _self: pytest.fail("a rehearsal began"))
    with counted_server() as server:
        write_kubeconfig(tmp_path / "kubeconfig", ("ours", server.url))
        place = Place(tmp_path, server)
        place.write()
        for what in (OLD, NEW):
            write_release(tmp_path, what)
        yield place
        assert server.connections == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Run `k2ctl rehearse`, see exit code 2, and return the error of its document."""
    assert cli.main(["rehearse", *words, "--json"]) == 2
    return dict(json.loads(capsys.readouterr().out)["error"])


def test_a_site_that_does_not_say_so_is_not_rehearsed_on(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    site = place.write(rehearsal=False)
    error = refused(capsys, "--site", site)
    assert error["summary"] == (
        "A rehearsal restarts and breaks things; this site does not say that it is for rehearsals."
    )
    assert error["where"] == f"{site}: rehearsal"


@pytest.mark.parametrize("site", ["example-h200", "kind"])
def test_of_the_shipped_sites_only_the_one_for_kind_may_be_rehearsed_on(site: str) -> None:
    path = Path(__file__).parents[2] / "manifests" / "sites" / f"{site}.yaml"
    assert wiring.read_site(str(path)).rehearsal is (site == "kind")


@pytest.mark.parametrize("option", EMBEDDED, ids=lambda words: words[0])
def test_what_only_the_embedded_site_can_do_is_refused_by_name(
    place: Place, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "--site", place.write(), *option)["where"] == option[0]


@pytest.mark.parametrize("name", INJECTIONS)
def test_an_injection_needs_the_embedded_site_and_says_which_part(
    place: Place, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--site", place.write(), "--inject", name)
    assert error["where"] == f"--inject {name}"
    assert INJECTIONS[name] in error["summary"]


@pytest.mark.parametrize("option", [["--kubeconfig", "k"], ["--context", "c"], ["--releases", "a", "b"]])
def test_what_is_about_a_cluster_needs_a_site(
    place: Place, option: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K2_SITE", place.write())  # which a rehearsal never takes for an order
    assert refused(capsys, *option)["where"] == option[0]


def test_a_context_that_the_site_file_does_not_name_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--site", place.write(), "--context", "production")
    assert (error["code"], error["expected"]) == ("K2-INP-009", "one of ours")


def test_two_releases_are_needed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    site = place.write()
    assert refused(capsys, "--site", site, "--releases", OLD.id, "k2-nobody-1")["code"] == "K2-INP-007"
    assert refused(capsys, "--site", site, "--releases", OLD.id, OLD.id)["got"] == f"{OLD.id} twice"
    write_release(place.directory, release("k2-third-1"))
    error = refused(capsys, "--site", site)
    assert error["got"] == "k2-new-1, k2-old-1, k2-third-1"
    assert "--releases OLD NEW" in error["next"]


class Client:
    """The users' client as a site of one's own starts and stops it, without a process."""

    def __init__(self, stage: OwnSite, counts: dict[str, Any]) -> None:
        self.stage, self.counts, self.calls = stage, counts, []  # type: ignore[var-annotated]

    def start(self, rate_per_s: float) -> Path:
        self.calls.append("start")
        path = self.stage.directory / "client.json"
        path.write_text(json.dumps(self.counts))
        return path

    def stop(self) -> dict[str, Any]:
        self.calls.append("stop")
        return self.counts


@dataclass
class Played:
    """A rehearsal on a world in memory."""

    world: World
    client: Client
    rehearsal: OwnRehearsal
    flows: list[str]
    failures: dict[str, Exception]

    def carry_out(self) -> dict[str, Any]:
        result = self.rehearsal.carry_out()
        document = json.loads((wiring.last_rehearsal_site().parent / "result.json").read_text())
        assert document["exit_code"] == result.exit_code
        return dict(document)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    """A rehearsal whose flows only make a release live, as the real ones would."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write_site(tmp_path, context="ours", rehearsal=True, real=["Kubernetes"], simulated=["GPUs"])
    for what in (OLD, NEW):
        write_release(tmp_path, what)
    site = wiring.read_site(str(path))
    world = World(releases_dir=site.releases_dir)
    world.site = replace(world.site, simulated=site.simulated)
    monkeypatch.setattr(wiring, "connect", lambda path, run, progress, model="", access=None: world.ports(run))
    monkeypatch.setattr(own_cluster, "use_server_for", lambda site: None)
    stage = OwnSite(site, path, tmp_path, "kimi-k2")
    client = Client(stage, {"requests": 1200, "failed": 0, "cut_streams": 0, "by_release": {}})
    monkeypatch.setattr(stage, "start_client", client.start)
    monkeypatch.setattr(stage, "stop_client", client.stop)
    monkeypatch.setattr(stage, "parked_answer", lambda: None)
    args = Namespace(site_only=False, first=False, keep=False, inject=[], json=True)
    it = OwnRehearsal(stage, args, Programme(OLD.id, NEW.id), site, OLD)
    made = Played(world, client, it, [], {})

    def run(name: str, release_id: str, **more: str) -> dict[str, Any]:
        made.flows.append(f"{name} {release_id}")
        if f"{name} {release_id}" in made.failures:
            raise made.failures[f"{name} {release_id}"]
        if name == "release":
            return {"outcome": "gated"}
        what, before = (OLD, None) if release_id == OLD.id else (NEW, OLD.id)
        make_live(world.ports(), what)
        return {"outcome": "promoted", "receipt": f"receipts/{what.id}.json", "previous": before, "retire_at": 1.0}

    monkeypatch.setattr(it, "_run_here", run)
    monkeypatch.setattr(rehearsal, "get_receipt", lambda store, release_id: {"release": {"id": release_id}})
    return made


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The images with which base objects were applied."""
    images: list[str] = []

    def spy(ports: Ports, base: Any, image: str) -> None:
        images.append(image)
        set_up_site(ports, base, image)

    monkeypatch.setattr(own_cluster, "set_up_site", spy)
    return images


def test_base_objects_older_release_candidate_and_the_same_document(played: Played, set_up: list[str]) -> None:
    played.world.cluster.delete("HTTPRoute", "k2-live")
    document = played.carry_out()
    assert set_up == [OLD.images.tool]
    assert played.flows == [f"{flow} {what.id}" for what in (OLD, NEW) for flow in ("release", "promote")]
    assert (document["outcome"], document["release"], document["live"]) == ("promoted", NEW.id, NEW.id)
    assert document["real"] == [{"name": "Kubernetes", "by": "the site file"}]
    assert document["simulated"] == ["GPUs"]
    assert document["client"]["requests"] == 1200
    assert played.client.calls == ["start", "stop"]


def test_base_objects_that_are_there_are_not_written_again(played: Played, set_up: list[str]) -> None:
    assert played.carry_out()["outcome"] == "promoted"
    assert set_up == []


def test_a_part_that_does_not_answer_stops_it_before_any_release(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(repo: str, revision: str) -> str:
        raise UnavailableError("K2-UNA-001", "The Hub did not answer.", where="http://hub")

    monkeypatch.setattr(played.world.hub, "resolve", down)
    with pytest.raises(UnavailableError):
        played.rehearsal.carry_out()
    assert played.flows == []


def test_a_release_that_fails_gives_its_exit_code_and_stops_the_users(played: Played) -> None:
    played.failures[f"release {NEW.id}"] = GateError("K2-GAT-001", "Too slow.")
    document = played.carry_out()
    assert (document["outcome"], document["exit_code"]) == ("failed", ExitCode.GATE_FAILED)
    assert document["live"] == OLD.id
    assert played.client.calls == ["start", "stop"]


def test_users_who_were_failed_fail_it(played: Played) -> None:
    played.client.counts["failed"] = 1
    assert played.carry_out()["outcome"] == "users-failed"


@pytest.mark.parametrize(
    ("url", "chosen", "submits"), [("", "", False), ("http://p/api", "", True), ("http://p/api", "ours", False)]
)
def test_flows_run_as_deployments_only_where_a_worker_reaches_the_same_cluster(
    played: Played, url: str, chosen: str, submits: bool
) -> None:
    it = played.rehearsal
    site = replace(it._site, prefect_api_url=url)
    programme = replace(it.programme, access=replace(it.programme.access, context=chosen))
    assert OwnRehearsal(it.stage, it.args, programme, site, OLD).submits() is submits


def test_nothing_of_a_site_is_looked_at_but_its_gateway(tmp_path: Path) -> None:
    data = yaml.safe_load(write_site(tmp_path).read_text())
    stage = OwnSite(wiring.read_site(str(tmp_path / "site.yaml")), tmp_path / "site.yaml", tmp_path, "m")
    assert (stage.hub_stats(), stage.real_parts()) == ({}, data.get("real", []))
    assert stage.cpu_seconds() > 0
