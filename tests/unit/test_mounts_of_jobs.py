"""What the Jobs of this tool use of weights is told by their own arguments, so that none blocks a collection."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.core import worker_jobs
from tasks.core.mounts import resolved, uses_of, uses_of_groups
from tasks.core.render import render_serving
from tests.fakes.checkpoints import contents, lock_of
from tests.fakes.small_world import TEMPLATES, release, site

SITE, LOCK = site(), lock_of(contents())
NODES = {"node-1": "uid-1"}
JOBS = {
    "stage": worker_jobs.render_stage_job(LOCK, SITE, TEMPLATES, "tool", "node-1", "uid-1"),
    "stage from the Hub": worker_jobs.render_hub_stage_job(LOCK, SITE, TEMPLATES, "tool", "node-1", "uid-1"),
    "exchange": worker_jobs.render_exchange_jobs(LOCK, SITE, TEMPLATES, "tool", NODES, {}, "run-1")[0],
    "verify": worker_jobs.render_verify_job(LOCK, SITE, TEMPLATES, "tool", "node-1"),
    "scrub": worker_jobs.render_scrub_job(LOCK, SITE, TEMPLATES, "tool", "node-1", "uid-1"),
}


def pod(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod that a Job makes on a node."""
    template = job["spec"]["template"]
    return {
        "metadata": {**template["metadata"], "name": "p", "namespace": SITE.namespace},
        "spec": {**template["spec"], "nodeName": "node-1"},
    }


@pytest.mark.parametrize("name", JOBS)
def test_a_job_uses_the_checkpoint_of_its_lock_and_no_other(name: str) -> None:
    uses = resolved(uses_of(pod(JOBS[name]), SITE.nvme_path, SITE.namespace), {LOCK.digest: LOCK.model_dir})
    assert {(use.node, use.path) for use in uses} == {("node-1", LOCK.model_dir)}


@pytest.mark.parametrize(
    "job",
    [
        worker_jobs.render_probe_job(LOCK, SITE, TEMPLATES, "tool", "node-1"),
        worker_jobs.render_collect_job(SITE, TEMPLATES, "tool", "node-1"),
        worker_jobs.render_pull_jobs(LOCK, SITE, TEMPLATES, "tool")[0],
    ],
    ids=["probe", "collect", "pull"],
)
def test_a_job_that_only_looks_uses_nothing(job: dict[str, Any]) -> None:
    assert uses_of(pod(job), SITE.nvme_path, SITE.namespace) == []


def test_every_template_that_mounts_weights_is_in_this_table() -> None:
    mounting = {
        name
        for name, template in TEMPLATES.items()
        if name.endswith("-job") and template["spec"]["template"]["spec"].get("volumes")
    }
    assert mounting == {"stage-job", "exchange-job", "verify-job", "scrub-job", "probe-job", "collect-job"}


def test_engines_use_the_checkpoint_that_they_serve() -> None:
    groups = [o for o in render_serving(release(), LOCK, SITE, TEMPLATES) if o["kind"] == "LeaderWorkerSet"]
    uses = resolved(uses_of_groups(groups, SITE.nvme_path, SITE.namespace), {LOCK.digest: LOCK.model_dir})
    assert {(use.node, use.path) for use in uses} == {("", LOCK.model_dir)}
