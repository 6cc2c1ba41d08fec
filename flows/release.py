"""Flow `release`: from a revision to a gated candidate that takes no traffic yet."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from tasks import cluster, gates, staging, traffic, weights
from tasks.core.access import Access
from tasks.order import Order, ending, open_order

# The form's help comes from the docstring's Args; the limits are checked by the server before a run exists.
ReleaseParameter = Annotated[str, Field(min_length=1, max_length=400)]
SiteParameter = Annotated[str, Field(max_length=400)]
KubeconfigParameter = Annotated[str, Field(max_length=400)]
ContextParameter = Annotated[str, Field(max_length=250)]


@flow(name="release", flow_run_name="release-{release}", retries=0, persist_result=False)
def release(
    release: ReleaseParameter,
    site: SiteParameter = "",
    kubeconfig: KubeconfigParameter = "",
    context: ContextParameter = "",
) -> dict[str, Any]:
    """Bring a release to *gated*: weights verified on every node, engines ready, gates passed, no user touched.

    Run it again after any death: each step looks at the world and does what is missing. A step that fails while the
    candidate has users already (its shift was cut off) sends them back first.

    Args:
        release: Id of a release file in the site's releases directory, or the path of one as the worker sees it.
        site: Path of the site file as the worker sees it; empty for the worker's own site.
        kubeconfig: Path of another kubeconfig than the site file's, as the worker sees it; empty for the site file's.
        context: Which of the contexts that the site file names; empty for its own.
    """
    order = open_order(release, site, Access(kubeconfig, context))
    with ending(order, "release") as result, traffic.no_unwatched_candidate(order):
        locked = weights.lock(order)
        plan = cluster.plan(order, locked["lock_digest"])["plan"]
        result["plan"] = plan
        if plan["change"] == "none":
            result["outcome"] = "unchanged"
        elif plan["change"] == "policy":
            gates.rejudge(order, plan["lock_digest"])
            result["outcome"] = "gated"
        else:
            _bring_up(order, plan)
            result["outcome"] = "gated"
    return result


def _bring_up(order: Order, plan: dict[str, Any]) -> None:
    """Carry out the steps between the plan and the last gate, in order."""
    lock_digest = plan["lock_digest"]
    cluster.preflight(order, plan)
    staging.deliver(order, plan)
    cluster.rollout(order, plan)
    gates.warm(order, lock_digest)
    gates.smoke(order, lock_digest)
    traffic.check_no_users(order, lock_digest)
    gates.throughput(order, lock_digest)
