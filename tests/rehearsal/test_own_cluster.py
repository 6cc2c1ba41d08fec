"""A rehearsal on a cluster that is there already, and what keeps commands from another one, on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from infra.rehearsal.processes import recorded
from tests.rehearsal.conftest import Site

OLD, NEW = "k2-rehearsal-1", "k2-rehearsal-2"
OTHER_UID = "00000000-0000-4000-8000-000000000000"


def site_file(site: Site) -> str:
    return str(site.directory / "site.yaml")


def changed(site: Site, name: str, **fields: object) -> str:
    """Write the site file with other fields beside itself and return its path."""
    data = yaml.safe_load(Path(site_file(site)).read_text()) | fields
    path = site.directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def test_only_the_sites_own_contexts_are_taken(live: Site) -> None:
    admin = str(live.directory / "pki" / "admin.kubeconfig")
    name = yaml.safe_load(Path(site_file(live)).read_text())["context"]
    run = live.k2ctl("status", "--kubeconfig", admin, "--context", name, "--json")
    assert run.code == 0, run.err
    assert run.data()["live"]["release"] == OLD
    for more in ([], ["--kubeconfig", admin]):
        run = live.k2ctl("status", *more, "--context", "production", "--json")
        assert (run.code, run.data()["error"]["code"]) == (2, "K2-INP-009")


def test_a_cluster_that_only_has_the_name_is_refused(live: Site) -> None:
    uid = yaml.safe_load(Path(site_file(live)).read_text())["cluster_uid"]
    other = changed(live, "other", cluster_uid=OTHER_UID)
    for words in (["plan", NEW], ["release", NEW, "--local"], ["retire", OLD, "-y", "--local"]):
        run = live.k2ctl(*words, "--site", other, "--json")
        error = run.data()["error"]
        assert (run.code, error["code"]) == (2, "K2-INP-009"), run.err
        assert uid in error["got"]
        assert OTHER_UID in error["expected"]
    run = live.k2ctl("site", "check", "--site", other, "--json")
    assert run.code == 2
    assert run.data()["parts"][0]["part"] == "kubernetes"
    check = live.k2ctl("site", "check", "--json")
    assert check.code == 0, check.err
    assert "the cluster has the uid of the site file" in check.data()["parts"][0]["says"]


def test_a_whole_rehearsal_on_a_site_that_is_there(live: Site) -> None:
    """The candidate goes live beside the users of the site, and everything of the site runs on."""
    before = {process.pid for process in recorded(live.directory) if process.alive()}
    run = live.k2ctl("rehearse", "--site", changed(live, "no", rehearsal=False), "--json")
    assert run.code == 2
    run = live.k2ctl("rehearse", "--site", site_file(live), "--json", timeout_s=420)
    assert run.code == 0, run.err[-3000:]
    document = run.data()
    assert (document["outcome"], document["release"], document["live"]) == ("promoted", NEW, NEW)
    assert document["route"] == {NEW: 100}
    assert document["client"]["requests"] >= 1000
    assert (document["client"]["failed"], document["client"]["cut_streams"]) == (0, 0)
    assert {"lock", "shift", "promote"} <= {step["name"] for step in document["steps"]}
    said = yaml.safe_load(Path(site_file(live)).read_text())
    assert document["simulated"] == said["simulated"]
    assert [row["name"] for row in document["real"]] == said["real"]
    assert Path(document["receipt"]).is_file()
    # Nothing was stopped: every process of the site, its own users among them, and they noticed nothing.
    assert {process.pid for process in recorded(live.directory) if process.alive()} >= before
    assert live.client()["failed"] == 0
    receipt = json.loads(Path(document["receipt"]).read_text())
    assert receipt["release"]["id"] == NEW
    assert live.k2ctl("receipt", NEW, "--verify").code == 0
