"""Whether a release fits under the namespace's quotas, before anything of it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.core.demand import demand_of
from tasks.core.quota import check_quotas
from tasks.core.render import render_serving
from tasks.core.ways import STORE, pulls_into_store, topology_of
from tasks.core.worker_jobs import render_hub_stage_job, render_probe_job, render_pull_jobs, render_stage_job
from tasks.steps.context import Ports, Subject

_KINDS = ("LeaderWorkerSet", "Deployment", "Service", "HTTPRoute", "Job")


def check_room(ports: Ports, subject: Subject, chosen: Sequence[str], staged: Sequence[str]) -> int:
    """Compare what is still to be made with the namespace's quotas, and return how many there are.

    Args:
        chosen: nodes of the set.
        staged: nodes that the weights are staged on, spares too.

    Raises:
        CapacityError: a limit has no room (K2-CAP-003); all that have none are in the details.
    """
    quotas = ports.cluster.list_objects("ResourceQuota")
    if not quotas:
        return 0
    lock, site, templates, tool = subject.lock, ports.site, ports.templates, subject.release.images.tool

    def staging(nodes: Sequence[str]) -> list[dict[str, Any]]:
        return [render_stage_job(lock, site, templates, tool, node, "") for node in nodes]

    jobs = {"preflight": [render_probe_job(lock, site, templates, tool, node) for node in chosen]}
    if topology_of(site) == STORE:
        # Both at the same time; spares come after.
        jobs["pull and stage"] = [*render_pull_jobs(lock, site, templates, tool), *staging(chosen)]
        jobs["stage spares"] = staging([node for node in staged if node not in chosen])
    else:
        if pulls_into_store(site):
            jobs["pull"] = [*render_pull_jobs(lock, site, templates, tool)]
        jobs["stage"] = [render_hub_stage_job(lock, site, templates, tool, node, "") for node in staged]
    serving = render_serving(subject.release, lock, site, templates)
    there = [obj for kind in _KINDS for obj in ports.cluster.list_objects(kind)]
    check_quotas(quotas, demand_of(serving, jobs, there, ports.cluster.list_objects("Pod")), site.namespace)
    return len(quotas)
