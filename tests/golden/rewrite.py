"""Writes the rendered objects of the example release: `python tests/golden/rewrite.py`, then read the diff."""

import json
import sys
from importlib import resources
from pathlib import Path

import yaml

from tasks.core import render, worker_jobs
from tasks.core.lock import LockedFile, make_lock
from tasks.specs import load_base, load_release, load_site, load_templates

FOLDER = Path(__file__).parent / "example"
MANIFESTS = Path(str(resources.files("manifests")))


def rendered():
    """Return the text of each golden file by name."""
    release = load_release(MANIFESTS / "releases" / "k2-20261130-1.yaml")
    site = load_site(MANIFESTS / "sites" / "example-h200.yaml")
    lock = make_lock(release.repo, release.revision, [LockedFile("model-1-of-1.safetensors", 4, "shard", "0f" * 32)])
    templates, tool = load_templates("sglang"), release.images.tool
    serving = render.render_serving(release, lock, site, templates)
    names = render.serving_names(release.serving_digest(lock.digest))
    backends = [(names.router, 10, names.serving12), ("k2-parking", 90, "parking")]
    live = render.render_live_route(
        templates["live-route"], backends, {"k2-release.io/generation": "1"}, site.namespace
    )
    jobs = (
        *worker_jobs.render_pull_jobs(lock, site, templates, tool),
        worker_jobs.render_stage_job(lock, site, templates, tool, "node-1", "00000000-0000-0000-0000-000000000001"),
        *worker_jobs.render_exchange_jobs(lock, site, templates, tool, {"node-1": "uid-1"}, {"node-2": "uid-2"}, "r1"),
        worker_jobs.render_verify_job(lock, site, templates, tool, "node-1"),
        worker_jobs.render_scrub_job(lock, site, templates, tool, "node-1", "00000000-0000-0000-0000-000000000001"),
        worker_jobs.render_collect_job(site, templates, tool, "node-1", "0e" * 32),
    )
    digests = {
        "lock": lock.digest,
        "serving": release.serving_digest(lock.digest),
        "policy": release.policy_digest,
        "manifests": render.manifests_digest(serving),
    }
    return {
        "base.yaml": _yaml(render.render_base(load_base(), site, tool)),
        "serving.yaml": _yaml(serving),
        "live-route.yaml": _yaml([live]),
        "jobs.yaml": _yaml(jobs),
        "digests.json": json.dumps(digests, indent=2) + "\n",
    }


def _yaml(objects):
    dumper = yaml.SafeDumper
    dumper.ignore_aliases = lambda *_: True
    return yaml.dump_all(objects, Dumper=dumper, sort_keys=False, width=120)


def main():
    """Write the files that differ, and name them."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
