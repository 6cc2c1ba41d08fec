"""A whole rehearsal, and what must hold on the site that it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.rehearsal.accounts import rights_objects
from infra.rehearsal.audit import read_uses
from tasks.core.permissions import Right, identities_of, rights_of
from tasks.specs import load_base
from tests.rehearsal.conftest import Run, Site, wait_for

NEW = "k2-rehearsal-2"
POOL = {"k2-release.io/pool": "h200"}


def test_document(promoted: tuple[Site, dict[str, Any]]) -> None:
    _, document = promoted
    assert document["outcome"] == "promoted"
    assert document["release"] == NEW
    assert Path(document["receipt"]).is_file()
    assert {"name", "outcome", "seconds"} <= document["steps"][0].keys()
    names = [step["name"] for step in document["steps"]]
    assert names == [
        "lock",
        "plan",
        "preflight",
        "pull",
        "stage",
        "rollout",
        "warm",
        "smoke",
        "throughput",
        "approve",
        "shift",
        "promote",
    ]
    assert document["client"]["requests"] >= 1000
    assert document["client"]["failed"] == 0
    assert document["client"]["cut_streams"] == 0
    assert document["users"] == ""
    assert document["simulated"]
    assert document["live"] == NEW


def test_what_is_said_to_be_real_runs(promoted: tuple[Site, dict[str, Any]]) -> None:
    """Each row of `real` is checked against /proc while the process runs."""
    _, document = promoted
    names = {row["name"].split(" (")[0] for row in document["real"]}
    assert {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "lws-manager",
        "object-store",
        "prefect-server",
        "prefect-worker",
        "envoy",
        "sglang-router",
    } <= names
    for row in document["real"]:
        executable = Path(f"/proc/{row['pid']}/exe")
        assert os.readlink(executable) == row["executable"], row
        with executable.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == row["sha256"], row
        assert row["version"]
        assert row["address"]
        assert "infra.rehearsal" not in Path(f"/proc/{row['pid']}/cmdline").read_text(), row


def test_kubectl_logs_reach_the_engine(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, _ = promoted
    ports = site.ports()
    pod = next(p for p in ports.cluster.list_objects("Pod", {"k2-release.io/role": "decode"}))
    assert "fired up" in ports.cluster.pod_log(pod["metadata"]["name"], "engine", 400)


def test_engines_carry_the_marker_check_and_the_label(promoted: tuple[Site, dict[str, Any]]) -> None:
    """I2: every engine pod, whoever created it, waits for the marker check and runs only on labelled nodes."""
    site, _ = promoted
    pods = [
        p
        for role in ("prefill", "decode")
        for p in site.ports().cluster.list_objects("Pod", {"k2-release.io/role": role})
    ]
    assert len(pods) >= 3
    for pod in pods:
        checks = [c["command"] for c in pod["spec"]["initContainers"]]
        assert ["python", "-m", "tasks.node.marker_check"] in checks
        assert "staged.k2-release.io/" in json.dumps(pod["spec"]["affinity"]["nodeAffinity"])


def _versions(site: Site) -> dict[str, str]:
    """resourceVersion of every object that a release may touch; nodes by labels, as their status beats."""
    cluster = site.ports().cluster
    kinds = ("Pod", "Service", "Deployment", "Job", "LeaderWorkerSet", "HTTPRoute", "Lease", "ConfigMap")
    found = {
        f"{kind}/{o['metadata']['name']}": str(o["metadata"]["resourceVersion"])
        for kind in kinds
        for o in cluster.list_objects(kind)
    }
    found |= {
        f"Node/{n['metadata']['name']}": json.dumps(n["metadata"]["labels"], sort_keys=True)
        for n in cluster.list_objects("Node")
    }
    return found


def test_same_release_again_changes_nothing(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, _ = promoted
    before, pulled = _versions(site), site.hub_bytes()
    listing = {o.key: o.etag for o in site.ports().store.list_objects("") if not o.key.startswith("ledger/")}
    run = site.k2ctl("release", NEW, "-y", "--json")
    assert run.code == 0, run.err
    assert run.data()["outcome"] == "unchanged"
    assert _versions(site) == before
    # The lock that was accepted comes from the store.
    assert site.hub_bytes() == pulled
    assert {o.key: o.etag for o in site.ports().store.list_objects("") if not o.key.startswith("ledger/")} == listing


def test_only_a_gate_limit_starts_no_pod(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, _ = promoted
    gates = site.gates(NEW)
    gates["limits"][0]["value"] += 1
    release = site.release(NEW, "k2-limit", gates=gates)
    plan = site.k2ctl("plan", release, "--json").data()
    assert (plan["change"], plan["pods_started"], plan["shifts_traffic"], plan["bytes_to_stage"]) == (
        "policy",
        0,
        False,
        0,
    )
    before = {
        k: v for k, v in _versions(site).items() if k.startswith(("Pod/", "LeaderWorkerSet/", "Deployment/", "Job/"))
    }
    run = site.k2ctl("release", release, "-y", "--json")
    assert run.code == 0, run.err
    assert run.data()["outcome"] == "promoted"
    after = {
        k: v for k, v in _versions(site).items() if k.startswith(("Pod/", "LeaderWorkerSet/", "Deployment/", "Job/"))
    }
    assert after == before
    assert site.k2ctl("receipt", release, "--verify").code == 0


def test_a_limit_that_the_live_samples_miss_is_refused(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, _ = promoted
    gates = site.gates(NEW)
    gates["limits"][0]["value"] = 1e9
    run = site.k2ctl("release", site.release(NEW, "k2-limit-too-high", gates=gates), "-y", "--json")
    assert run.code == 4, run.err
    assert "e2e_output_tok_per_s" in run.data()["error"]["got"]


def test_only_arguments_move_no_byte_of_weights(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, _ = promoted
    assert site.k2ctl("retire", "k2-rehearsal-1", "-y").code == 0
    release = site.release(NEW, "k2-arguments", args={"decode": {"mem-fraction-static": 0.62}})
    plan = site.k2ctl("plan", release, "--json").data()
    assert (plan["change"], plan["bytes_to_pull"], plan["bytes_to_stage"]) == ("arguments", 0, 0)
    before = _weights(site.directory)
    run = site.k2ctl("release", release, "-y", "--json")
    assert run.code == 0, run.err
    assert run.data()["outcome"] == "promoted"
    assert _weights(site.directory) == before
    assert site.client()["failed"] == 0


def _weights(directory: Path) -> dict[str, tuple[int, int]]:
    """Inode and mtime of every weight file on every node."""
    return {
        str(p): (p.stat().st_ino, p.stat().st_mtime_ns)
        for p in directory.glob("nodes/*/mnt/nvme/k2/[!.]*/*/*")
        if not p.name.startswith(".")
    }


def test_receipt_verifies_until_a_byte_changes(promoted: tuple[Site, dict[str, Any]]) -> None:
    site, document = promoted
    assert site.k2ctl("receipt", NEW, "--verify").code == 0
    assert site.k2ctl("verify", NEW, "--store").code == 0
    assert all(row["ok"] for row in site.k2ctl("verify", NEW, "--nodes", "--json").data()["nodes"])
    receipt = json.loads(Path(document["receipt"]).read_text())
    node, name = receipt["nodes"][1]["node"], "model-33-of-61.safetensors"
    (path,) = site.directory.glob(f"nodes/{node}/mnt/nvme/k2/*/{receipt['lock']['revision']}/{name}")
    was = path.stat()
    content = bytearray(path.read_bytes())
    content[200_000] ^= 1
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    path.chmod(0o444)
    run = site.k2ctl("receipt", NEW, "--verify", "--json")
    assert run.code == 5
    error = run.data()["error"]
    assert node in error["where"]
    assert name in error["where"]
    assert error["got"] == hashlib.sha256(content).hexdigest()
    assert len(error["expected"]) == 64
    run = site.k2ctl("verify", NEW, "--nodes", "--json")
    assert run.code == 5
    assert [row["node"] for row in run.data()["nodes"] if not row["ok"]] == [node]
    assert [(row["node"], row["path"], row["got"]) for row in run.data()["problems"]] == [(node, name, error["got"])]


def test_scrub_puts_that_byte_right_and_the_receipt_holds_again(promoted: tuple[Site, dict[str, Any]]) -> None:
    """What the test before has left: a byte of a staged file of what is live, changed with its size and time kept."""
    site, document = promoted
    receipt = json.loads(Path(document["receipt"]).read_text())
    node, name = receipt["nodes"][1]["node"], "model-33-of-61.safetensors"
    run = site.k2ctl("scrub", "--json", timeout_s=600)
    assert run.code == 0, run.err
    rows = {row["node"]: row for row in run.data()["nodes"]}
    assert {row["outcome"] for other, row in rows.items() if other != node} == {"right"}
    (problem,) = rows[node]["problems"]
    assert (rows[node]["outcome"], problem["path"], problem["problem"], problem["repaired"]) == (
        "repaired",
        name,
        "content",
        True,
    )
    assert (problem["differs_from"], problem["differs_to"]) == (200_000, 200_000)
    assert rows[node]["how"] == "direct"
    verified = site.k2ctl("receipt", NEW, "--verify")
    assert verified.code == 0, verified.err


def test_gc_moves_what_nothing_needs_to_the_trash_and_nothing_else(promoted: tuple[Site, dict[str, Any]]) -> None:
    """The first release's weights, which was replaced and retired, and a directory of which nobody knows anything."""
    site, document = promoted
    lock = json.loads(Path(document["receipt"]).read_text())["lock"]
    roots = {
        path.parents[1]: path.parents[4].name
        for path in site.directory.glob(f"nodes/*/mnt/nvme/k2/*/{lock['revision']}")
    }
    replaced = json.loads(site.k2ctl("receipt", "k2-rehearsal-1", "--json").out)["lock"]["revision"]
    stray = f"somebody--model/{'e' * 40}"
    first = min(roots)
    (first / stray).mkdir(parents=True)
    (first / stray / "model.safetensors").write_bytes(b"x" * 1_000_000)
    before = _weights(site.directory)
    wanted = sorted([*((node, replaced) for node in roots.values()), (roots[first], "e" * 40)])

    def going(run: Run) -> list[tuple[str, str]]:
        assert run.code == 0, run.err
        rows = [row for row in run.data()["checkpoints"] if row["action"] != "keep"]
        return sorted((row["node"], row["path"].rpartition("/")[2]) for row in rows)

    assert going(site.k2ctl("gc", "--json")) == wanted
    assert _weights(site.directory) == before
    assert going(site.k2ctl("gc", "-y", "--json")) == wanted
    gone = (replaced, "e" * 40)
    assert _weights(site.directory) == {
        path: stat for path, stat in before.items() if Path(path).parent.name not in gone
    }
    assert len([*site.directory.glob(f"nodes/*/mnt/nvme/k2/.k2-trash/*@{replaced}/*.safetensors")]) == 61 * len(roots)
    assert (first / ".k2-trash").is_dir() and not (first / stray).exists()
    labels = [node["metadata"]["labels"] for node in site.ports().cluster.list_objects("Node", POOL)]
    staged = {key for each in labels for key in each if key.startswith("staged.k2-release.io/")}
    assert staged == {f"staged.k2-release.io/{lock['digest'][:12]}"}
    assert site.k2ctl("receipt", NEW, "--verify").code == 0


BASIC = {"authorization.k8s.io", "authentication.k8s.io"}
"""Groups of the questions about oneself, which everybody may ask."""


def test_every_account_uses_each_of_its_rights_and_is_refused_nothing(promoted: tuple[Site, dict[str, Any]]) -> None:
    """By the API server's own audit log, after everything above; who asked nothing of it is not in the log at all."""
    site, _ = promoted
    for _again in range(2):  # the second one replaces the Jobs of the first
        site.k2ctl("receipt", NEW, "--verify")
    admin = site.directory / "pki" / "admin.kubeconfig"
    node = site.ports().cluster.list_objects("Node")[0]["metadata"]["name"]
    subprocess.run(
        [
            str(Path(sys.executable).parent / "kubectl"),
            f"--kubeconfig={admin}",
            "label",
            "node",
            node,
            "k2-release.io/pool-",
        ],
        check=True,
    )
    wait_for("the node agent puts its label back", lambda: len(site.ports().cluster.list_objects("Node", POOL)) == 6)

    uses = [use for use in read_uses(site.directory) if use.right.group not in BASIC]
    assert [f"{use.user}: {use.right}" for use in uses if not use.allowed] == []
    base, rehearsal = load_base(), rights_objects()
    granted = {
        name: [replace(right, name="") for right in rights_of([*base, *rehearsal], name)]
        for obj in [*base, *rehearsal]
        for name in identities_of(obj)
    }
    assert {use.user for use in uses} == set(granted)
    products = {name for obj in base for name in identities_of(obj)}
    for name, rights in granted.items():
        used = {use.right for use in uses if use.user == name}
        beyond = [str(right) for right in used if not any(given.covers(right) for given in rights)]
        assert beyond == [], f"{name} has rights that stand in no manifest"
        # What the product is given for all namespaces it must use so; our kubelet serves whatever namespaces there are.
        idle = [right for right in rights if right not in used and not (name not in products and _covers(right, used))]
        assert [str(right) for right in idle] == [], f"{name} does not use these"


def _covers(right: Right, used: set[Right]) -> bool:
    return any(right.covers(each) for each in used)
