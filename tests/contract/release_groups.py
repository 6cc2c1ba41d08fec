"""The groups of a rehearsal's release as they are rendered, on nodes of the agent, in both shapes that LWS 0.9 offers.

Only the programs of the containers are other ones: what they are given (arguments, environment, probes, affinity,
volumes, priority) stays as rendered.
"""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Any

from infra.rehearsal.releases import release_data, write_release
from tasks.core.lock import LockedFile, make_lock
from tasks.core.render import placed_label, render_serving, staged_label
from tasks.core.spec import ROLES, Release
from tasks.specs import load_release, load_site, load_templates

Object = dict[str, Any]
MANIFESTS = Path(str(resources.files("manifests")))
ANSWER = (
    "import http.server, os\n"
    "class Ok(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "http.server.HTTPServer((os.environ['POD_IP'], 30000), Ok).serve_forever()\n"
)


def rendered(directory: Path) -> tuple[Release, list[Object], dict[str, str]]:
    """Return a release 1P+2D, its two LeaderWorkerSets, and the labels that the nodes for it carry."""
    path = write_release(directory, release_data("k2-both-1", "c" * 40, "rehearsal-1p2d"))
    release = load_release(path)
    lock = make_lock(release.repo, release.revision, [LockedFile("model-1-of-1.safetensors", 2, "shard", "d" * 64)])
    site = load_site(MANIFESTS / "sites" / "example-h200.yaml")
    groups = render_serving(release, lock, site, load_templates("sglang"))[: len(ROLES)]
    labels = {staged_label(lock.digest): "true", placed_label(release.serving_digest(lock.digest)[:12]): "true"}
    labels |= site.node_selector
    return release, [_with_other_programs(group) for group in groups], labels


def _with_other_programs(group: Object) -> Object:
    other = copy.deepcopy(group)
    other["metadata"]["namespace"] = "k2"
    templates = other["spec"]["leaderWorkerTemplate"]
    for template in (templates["leaderTemplate"], templates["workerTemplate"]):
        for init in template["spec"]["initContainers"]:
            init["command"] = ["python", "-c", "pass"]
        for engine in template["spec"]["containers"]:
            engine["command"] = ["python", "-c", ANSWER]
    return other


def as_one_set(groups: list[Object], name: str) -> Object:
    """Return the same groups as one DisaggregatedSet, a role each."""
    roles = []
    for group in groups:
        metadata = {key: dict(group["metadata"][key]) for key in ("labels", "annotations")}
        role = group["metadata"]["labels"]["k2-release.io/role"]
        roles.append({"name": role, "metadata": metadata, "spec": copy.deepcopy(group["spec"])})
    metadata = {"name": name, "namespace": "k2", "labels": {"app.kubernetes.io/managed-by": "k2-release"}}
    return {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": metadata,
        "spec": {"roles": roles},
    }
