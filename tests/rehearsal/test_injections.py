"""Each injection ends as it must: with its exit code, the place named, and users untouched or sent back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rehearsal.conftest import rehearse

OLD = "k2-rehearsal-1"


def _run(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any], Path]:
    site, run = rehearse(tmp_path, "--json", *args)
    return run.code, run.data(), site.directory


def _no_user_noticed(document: dict[str, Any]) -> None:
    assert document["client"]["failed"] == 0, document["client"]
    assert document["client"]["cut_streams"] == 0
    assert document["users"] == ""
    assert document["client"]["requests"] > 0
    assert document["live"] == OLD


def test_shard_bitflip(tmp_path: Path) -> None:
    code, document, directory = _run(tmp_path, "--inject", "shard-bitflip")
    assert code == 5
    assert document["error"]["code"] == "K2-INT-001"
    assert "model-7-of-61.safetensors" in document["error"]["where"]
    assert document["error"]["got"] != document["error"]["expected"]
    assert document["route"] == {OLD: 100}
    staged = sorted(p.parent.name for p in directory.glob("nodes/*/mnt/nvme/k2/*/*/.k2-staged.json"))
    assert len(set(staged)) == 1, "only the old revision has markers"
    _no_user_noticed(document)


def test_gate_miss(tmp_path: Path) -> None:
    code, document, _ = _run(tmp_path, "--inject", "gate-miss")
    assert code == 4
    assert document["error"]["code"] == "K2-GAT-001"
    assert document["route"] == {OLD: 100}
    _no_user_noticed(document)


def test_node_lost(tmp_path: Path) -> None:
    code, document, _ = _run(tmp_path, "--inject", "node-lost")
    assert code == 6
    assert "node-" in document["error"]["where"] + document["error"]["summary"]
    assert document["route"] == {OLD: 100}
    _no_user_noticed(document)


def test_slo_breach(tmp_path: Path) -> None:
    code, document, _ = _run(tmp_path, "--inject", "slo-breach")
    assert code == 10
    assert document["error"]["code"] == "K2-REV-001"
    assert document["route"][OLD] == 100
    assert document["error"]["details"]["proved"]
    assert max(row["candidate_percent"] for row in document["error"]["details"]["history"]) == 10
    _no_user_noticed(document)


def test_api_server_killed_in_staging_rollout_and_shift(tmp_path: Path) -> None:
    """etcd and kube-apiserver die three times and are away for a minute each: nobody restarts anything by hand."""
    _, run = rehearse(tmp_path, "--json", "--inject", "apiserver-killed", timeout_s=800)
    document = run.data()
    assert (run.code, document["outcome"]) == (0, "promoted"), run.err[-3000:]
    for step in ("stage", "rollout", "shift"):
        assert f"are killed in {step};" in run.err
    assert run.err.count("etcd and kube-apiserver are back") == 3
    assert run.err.count("Kubernetes API: answers again after") >= 3
    assert document["client"]["failed"] == 0, document["client"]
    assert document["client"]["cut_streams"] == 0
    assert document["live"] == "k2-rehearsal-2"
    assert document["route"]["k2-rehearsal-2"] == 100
    attempts = {step["name"]: step["outcome"] for step in document["steps"]}
    assert attempts["shift"] == attempts["rollout"] == attempts["stage"] == "done"


def test_first(tmp_path: Path) -> None:
    code, document, _ = _run(tmp_path, "--first")
    assert code == 0
    assert document["outcome"] == "promoted"
    assert document["live"] == "k2-rehearsal-2"
    receipt = json.loads(Path(document["receipt"]).read_text())
    throughput = receipt["gates"]["throughput"]["verdict"]
    assert "no baseline" in throughput["reason"]
    assert throughput["outcome"] == "pass"


def test_first_with_a_failed_gate_stays_parked(tmp_path: Path) -> None:
    code, document, _ = _run(tmp_path, "--first", "--inject", "gate-miss")
    assert code == 4
    assert document["route"] == {"parking": 100}
    assert document["parked"] == {"status": 503, "retry_after": "30"}
    assert document["live"] is None
