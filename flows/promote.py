"""Flow `promote`: an approved release gets traffic, step by step, and becomes what is live."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from pydantic import Field

from flows.release import ContextParameter, KubeconfigParameter, ReleaseParameter, SiteParameter
from tasks import traffic
from tasks.core.access import Access
from tasks.order import Order, ending, open_order

ApproverParameter = Annotated[str, Field(min_length=2, max_length=100)]
CommentParameter = Annotated[str, Field(max_length=500)]


@flow(name="promote", flow_run_name="promote-{release}", retries=0, persist_result=False)
def promote(
    release: ReleaseParameter,
    approver: ApproverParameter,
    site: SiteParameter = "",
    comment: CommentParameter = "",
    kubeconfig: KubeconfigParameter = "",
    context: ContextParameter = "",
) -> dict[str, Any]:
    """Shift traffic to a gated release by its traffic plan, revert first on a failed check, then promote it.

    Starting this flow *is* the approval. Run it again after any death: it goes on from what the route says.

    Args:
        release: Id of a release file in the site's releases directory, or the path of one as the worker sees it.
        approver: Who lets this release have traffic: a person's name, or the CI job.
        site: Path of the site file as the worker sees it; empty for the worker's own site.
        comment: Why now; kept in the receipt.
        kubeconfig: Path of another kubeconfig than the site file's, as the worker sees it; empty for the site file's.
        context: Which of the contexts that the site file names; empty for its own.
    """
    order = open_order(release, site, Access(kubeconfig, context))
    with ending(order, "promote") as result:
        with traffic.no_unwatched_candidate(order):
            approved = traffic.approve(order, approver, comment)
            traffic.shift(order, approved["lock_digest"])
        # From here on the candidate carries everybody and has kept every check: a store that is down is no reason to
        # send users back. The next run finishes the record.
        done = traffic.promote(order, approved["lock_digest"], approver)
        result.update(
            {
                "outcome": "promoted",
                "receipt": done["receipt"],
                "previous": done["previous"],
                "retire_at": done["retire_at"],
            }
        )
        _schedule_retire(order, release, done)
    return result


def _schedule_retire(order: Order, release: str, done: dict[str, Any]) -> None:
    """Have the replaced set taken down when its hold is over, by one run of the `retire` deployment.

    The release is live already: that nothing could be scheduled is said, and is no failure of the promotion.
    """
    if not (done["previous"] and done["retire_at"] and runtime.deployment.id):
        return
    try:
        run_deployment(
            "retire/retire",
            parameters={
                "release": done["previous"],
                "site": order.site,
                "kubeconfig": order.kubeconfig,
                "context": order.context,
            },
            scheduled_time=datetime.fromtimestamp(done["retire_at"], UTC),
            idempotency_key=f"retire-{done['previous']}-for-{release}-at-{done['retire_at']:.0f}",
            timeout=0,
            as_subflow=False,
        )
    except Exception as error:
        get_run_logger().warning(
            "The retirement could not be scheduled (%s); by hand: k2ctl retire %s -y",
            type(error).__name__,
            done["previous"],
        )
