"""`k2ctl scrub` and `k2ctl gc` as a person sees them: what is printed, and that nothing goes without -y."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.console import caring
from flows.console.submission import Ended, again
from tasks import wiring
from tasks.core.ledger import CARE
from tests.fakes.disk_world import DiskWorld, quick_disks
from tests.fakes.site_files import write_site
from tests.fakes.small_world import World

RIGHT = {"node": "node-1", "outcome": "right", "lock_digest": "a" * 64, "bytes_read": 17_000_000_000, "how": "direct"}
PROBLEM = {
    "path": "model-1-of-2.safetensors",
    "problem": "content",
    "got": "sha256 1234",
    "expected": "sha256 5678",
    "repaired": True,
    "source": "store http://s",
    "differs_from": 5,
    "differs_to": 9,
    "still_open": "open in 7 (python)",
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("K2_SITE", str(write_site(tmp_path, prefect_api_url="http://127.0.0.1:1/api", context="prod")))
    with quick_disks() as disks:
        made = DiskWorld(disks, nodes=2)
        monkeypatch.setattr(wiring, "connect", lambda *_, **__: made.ports("k2ctl"))
        yield made


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, Any]]]:
    """What was submitted; each run ends with a row of each kind."""
    seen: list[tuple[str, str, dict[str, Any]]] = []

    def submit(site: Any, deployment: str, ledger: str, parameters: dict[str, Any]) -> Ended:
        seen.append((deployment, ledger, parameters))
        rows = [RIGHT, {**RIGHT, "node": "node-2", "outcome": "repaired", "problems": [PROBLEM]}]
        skipped = {"node": "node-3", "outcome": "skipped", "lock_digest": "a" * 64, "why": "cordoned"}
        return Ended("run-1", {"outcome": "repaired", "nodes": [*rows, skipped], "note": "a note"}, "http://run")

    monkeypatch.setattr(caring, "submit", submit)
    return seen


def test_scrub_is_submitted_and_says_what_was_put_right(
    world: World, submitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scrub", "--node", "node-1", "--node", "node-2"]) == 0
    assert submitted == [("scrub/scrub", CARE, {"nodes": ["node-1", "node-2"], "site": ""})]
    out = capsys.readouterr().out
    assert "node-1        right     lock aaaaaaaaaaaa  17 GB read (direct)" in out
    assert "model-1-of-2.safetensors: content, got sha256 1234" in out
    assert "bytes 5 to 9 hold the differences" in out
    assert "right again, from store http://s" in out
    assert "open in 7 (python): that engine goes on with it until it is restarted" in out
    assert "node-3        skipped   lock aaaaaaaaaaaa  cordoned" in out
    assert out.endswith("a note\n")


def test_scrub_as_json_is_one_document(world: World, submitted: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scrub", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["version"], data["run"], data["outcome"], len(data["nodes"])) == (1, "run-1", "repaired", 3)


def test_gc_without_consent_lists_and_starts_no_flow(
    world: DiskWorld, submitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = world.root("node-2") / "org--old" / ("f" * 40)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x" * 5000)
    (world.root("node-1") / "notes.txt").write_text("mine")
    assert main(["gc"]) == 0
    shown = capsys.readouterr()
    assert f"   5 kB  org--old/{'f' * 40}: move to the trash - nothing needs it" in shown.out
    assert "notes.txt: not ours, left alone" in shown.out
    assert "nothing was changed; to carry it out: the same command with -y" in shown.err
    assert (directory / "model.safetensors").exists()
    assert submitted == []
    assert main(["gc", "--node", "node-2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["version"], data["outcome"], data["trash_age_s"]) == (1, "listed", 86400.0)
    assert [(row["node"], row["action"]) for row in data["checkpoints"]] == [("node-2", "move to the trash")]


def test_gc_with_consent_is_submitted(world: World, submitted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["gc", "-y", "--trash-age-s", "0", "--json"]) == 0
    assert submitted == [("collect/collect", CARE, {"nodes": [], "trash_age_s": 0.0, "site": ""})]


@pytest.mark.parametrize("age", ["-1", "nan", "inf", "soon"])
def test_an_age_is_a_number_of_seconds(world: World, age: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", "--trash-age-s", age]) == 2


def test_another_cluster_than_the_workers_is_not_submitted(
    world: World, submitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scrub", "--context", "prod"]) == 2
    assert submitted == []
    assert "--local" in capsys.readouterr().err


def test_what_is_said_of_a_run_that_died_can_be_copied() -> None:
    assert again("scrub/scrub", CARE) == "k2ctl scrub"
    assert again("collect/collect", CARE) == "k2ctl gc -y"
    assert again("retire/retire", "k2-x") == "k2ctl retire k2-x -y"
