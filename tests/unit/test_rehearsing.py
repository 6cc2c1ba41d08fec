"""What a rehearsal comes to: users who noticed it make it fail, however the release itself ended."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import cli
from flows.console.injecting import node_of_candidate_alone
from flows.console.rehearsal import Programme, Rehearsal
from flows.console.rehearsal_result import Outcome, blame, blame_missed
from infra.rehearsal.processes import ProcessSpec, SiteError, Supervisor
from tasks import wiring
from tasks.core.errors import ExitCode


def outcome(exit_code: ExitCode = ExitCode.DONE, **client: int) -> Outcome:
    counts = {"requests": 1500, "failed": 0, "cut_streams": 0, **client}
    return Outcome("k2-rehearsal-2", "promoted", exit_code, client=counts)


@pytest.mark.parametrize("client", [{"failed": 1}, {"cut_streams": 1}, {"failed": 2, "cut_streams": 3}])
@pytest.mark.parametrize("exit_code", [ExitCode.DONE, ExitCode.REVERTED, ExitCode.GATE_FAILED])
def test_a_user_who_was_failed_fails_the_rehearsal(client: dict[str, int], exit_code: ExitCode) -> None:
    result = outcome(exit_code, **client)
    blame(result, 0)
    assert (result.outcome, result.exit_code) == ("users-failed", 1)
    assert f"{client.get('failed', 0)} failed" in result.users


def test_too_few_requests_prove_nothing() -> None:
    result = outcome(requests=999)
    blame(result, 1000)
    assert (result.outcome, result.exit_code) == ("users-failed", 1)
    assert "999" in result.users


@pytest.mark.parametrize("least", [0, 1000])
@pytest.mark.parametrize("exit_code", [ExitCode.DONE, ExitCode.REVERTED])
def test_users_who_noticed_nothing_leave_the_outcome_as_it_is(least: int, exit_code: ExitCode) -> None:
    result = outcome(exit_code)
    blame(result, least)
    assert (result.outcome, result.exit_code, result.users) == ("promoted", exit_code, "")


def test_a_client_without_a_report_is_no_proof() -> None:
    result = Outcome("k2-rehearsal-2", "promoted", ExitCode.DONE)
    blame(result, 1000)
    assert result.exit_code == 1


@pytest.fixture
def running_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's directory in which a process runs, noted as the kept one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Whoever is not refused would start a whole rehearsal here.
    monkeypatch.setattr("infra.rehearsal.site.prepare", lambda _report: pytest.fail("a rehearsal began"))
    directory = tmp_path / "kept"
    directory.mkdir()
    with Supervisor(directory) as supervisor:
        supervisor.start(ProcessSpec("sleeper", (sys.executable, "-c", "import time; time.sleep(60)")))
        note = wiring.last_rehearsal_site()
        note.parent.mkdir(parents=True)
        note.symlink_to(directory / "site.yaml")
        yield directory


@pytest.mark.parametrize("more", [["--keep"], ["--site-only"]])
def test_a_second_kept_site_is_refused(
    running_site: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rehearse", "--dir", str(tmp_path / "other"), *more]) == 7
    assert f"k2ctl rehearse --stop --dir {running_site}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_directory_of_a_running_site_is_refused_and_its_record_stays(running_site: Path) -> None:
    before = (running_site / "state.json").read_bytes()
    assert cli.main(["rehearse", "--dir", str(running_site)]) == 7
    assert (running_site / "state.json").read_bytes() == before


def test_a_stopped_site_by_its_directory_is_no_longer_the_kept_one(running_site: Path) -> None:
    assert cli.main(["rehearse", "--stop", "--dir", str(running_site)]) == 0
    assert not wiring.last_rehearsal_site().is_symlink()


@pytest.mark.parametrize(
    ("exit_code", "missed", "outcome_then"),
    [(ExitCode.DONE, ["node-lost"], "not-injected"), (ExitCode.DONE, [], "promoted"), (6, ["node-lost"], "promoted")],
)
def test_a_failure_that_did_not_happen_is_no_success(exit_code: ExitCode, missed: list[str], outcome_then: str) -> None:
    result = outcome(exit_code)
    blame_missed(result, missed)
    assert result.outcome == outcome_then
    assert result.exit_code == (ExitCode.UNEXPECTED if outcome_then == "not-injected" else exit_code)


def pod_on(node: str | None, serving: str = "", role: str = "") -> dict[str, Any]:
    labels = {"k2-release.io/serving": serving, "k2-release.io/role": role}
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"labels": {key: value for key, value in labels.items() if value}}, "spec": spec}


CANDIDATE = [pod_on("node-4", "new", "prefill"), pod_on("node-5", "new", "decode"), pod_on("node-6", "new", "decode")]
OLD = [pod_on("node-1", "old", "decode")]


@pytest.mark.parametrize(
    ("others", "node"),
    [
        ([], "node-5"),
        ([pod_on("node-5", "old", "router")], "node-6"),
        ([pod_on("node-5", role="parking")], "node-6"),
        ([pod_on("node-5", role="stage")], "node-5"),
        ([pod_on("node-5", "old", "router"), pod_on("node-6", role="parking")], "node-4"),
        (
            [pod_on("node-4", "old", "router"), pod_on("node-5", role="parking"), pod_on("node-6", role="parking")],
            "node-5",
        ),
        ([pod_on(name, "old", "router") for name in ("node-4", "node-5", "node-6")], None),
    ],
)
def test_a_lost_node_is_felt_by_the_candidate_and_by_no_user(others: list[dict[str, Any]], node: str | None) -> None:
    assert node_of_candidate_alone([*OLD, *CANDIDATE, *others, pod_on(None, "new", "decode")], "new") == node


class Uneventful(Rehearsal):
    """A rehearsal whose release goes well, and whose injection finds no moment."""

    def injecting(self) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace(missed=["node-lost"]))

    def _run(self, name: str, release_id: str, **more: str) -> dict[str, Any]:
        return {"outcome": "gated", "receipt": "receipts/x.json", "previous": "", "retire_at": None}


def test_a_rehearsal_asks_whether_its_injections_happened() -> None:
    result = Outcome("k2-rehearsal-2")
    args = SimpleNamespace(first=False, inject=["node-lost"])
    Uneventful(SimpleNamespace(cpu_seconds=lambda: 0.0), args, Programme("old", "new"))._release(result)  # type: ignore[arg-type]
    assert (result.outcome, result.exit_code) == ("not-injected", ExitCode.UNEXPECTED)


class Workerless(Rehearsal):
    """A rehearsal whose worker does not come up."""

    def start_worker(self) -> None:
        raise SiteError("the worker was not ready")


def test_a_worker_that_does_not_come_up_fails_the_rehearsal() -> None:
    args = SimpleNamespace(first=True, inject=[])
    with pytest.raises(SiteError, match="the worker was not ready"):
        Workerless(SimpleNamespace(), args, Programme("old", "new"))._start_life()  # type: ignore[arg-type]
