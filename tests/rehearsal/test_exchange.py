"""A whole rehearsal in which the nodes exchange the weights: no blob is in the store, and a repair needs no Hub."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import yaml

from tests.rehearsal.conftest import Site, rehearse

NEW = "k2-rehearsal-2"
SHARD = "model-7-of-61.safetensors"


def test_weights_are_exchanged_and_what_is_lost_comes_from_another_node(tmp_path: Path) -> None:
    site, run = rehearse(tmp_path, "--topology", "exchange", "--keep", "--json")
    try:
        assert run.code == 0, run.err[-3000:]
        document = run.data()
        assert (document["outcome"], document["client"]["failed"]) == ("promoted", 0)
        notes = {step["name"]: step.get("outcome") for step in document["steps"]}
        assert notes["pull"] == "unchanged"
        store = site.ports().store
        assert [item.key for prefix in ("blobs/", "exchange/") for item in store.list_objects(prefix)] == []
        copies = sorted(site.directory.glob(f"nodes/*/mnt/nvme/k2/*/*/{SHARD}"))
        assert len(copies) == 2 * 6
        # Once to its owner. Before that the lock step read its header: of so small a shard that is the whole.
        assert _served(site) == {path.parent.name: 2 * path.stat().st_size for path in copies}
        assert site.k2ctl("receipt", NEW, "--verify").code == 0
        _lose_and_release(site, copies)
    finally:
        site.k2ctl("rehearse", "--stop")


def _lose_and_release(site: Site, copies: list[Path]) -> None:
    """A node of the pool lost a shard; the next release, which changes arguments only, finds and mends that."""
    revision = yaml.safe_load((site.directory / "releases" / f"{NEW}.yaml").read_text())["revision"]
    lost = next(path for path in reversed(copies) if path.parent.name == revision)
    data, before = lost.read_bytes(), _served(site)
    lost.unlink()
    assert site.k2ctl("retire", "k2-rehearsal-1", "-y").code == 0
    release = site.release(NEW, "k2-arguments", args={"decode": {"mem-fraction-static": 0.62}})
    run = site.k2ctl("release", release, "-y", "--json")
    assert run.code == 0, run.err
    assert lost.read_bytes() == data
    assert _served(site) == before
    assert site.client()["failed"] == 0
    assert site.k2ctl("receipt", release, "--verify").code == 0


def _served(site: Site) -> dict[str, int]:
    """Bytes of one shard that the Hub has served, by revision."""
    endpoint = yaml.safe_load((site.directory / "site.yaml").read_text())["hub"]["endpoint"]
    with urllib.request.urlopen(f"{endpoint}/_rehearsal/stats", timeout=10) as answer:
        by_path = json.load(answer)["by_path"]
    return {path.split("/")[2]: row["bytes_served"] for path, row in by_path.items() if path.endswith("/" + SHARD)}
