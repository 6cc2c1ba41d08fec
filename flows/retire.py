"""Flow `retire`: a replaced release gives its GPUs back."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.release import ContextParameter, KubeconfigParameter, ReleaseParameter, SiteParameter
from tasks import traffic
from tasks.core.access import Access
from tasks.order import ending, open_order


@flow(name="retire", flow_run_name="retire-{release}", retries=0, persist_result=False)
def retire(
    release: ReleaseParameter,
    site: SiteParameter = "",
    kubeconfig: KubeconfigParameter = "",
    context: ContextParameter = "",
) -> dict[str, Any]:
    """Take down the set of a release that no longer serves, after its hold and with nothing in flight.

    Args:
        release: Id of a release file in the site's releases directory, or the path of one as the worker sees it.
        site: Path of the site file as the worker sees it; empty for the worker's own site.
        kubeconfig: Path of another kubeconfig than the site file's, as the worker sees it; empty for the site file's.
        context: Which of the contexts that the site file names; empty for its own.
    """
    order = open_order(release, site, Access(kubeconfig, context))
    with ending(order, "retire") as result:
        done = traffic.retire(order)
        result.update({"outcome": done["outcome"], "removed": done.get("removed", [])})
    return result
