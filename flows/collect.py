"""Flow `collect`: weights that nothing needs any more go, through a trash."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.release import ContextParameter, KubeconfigParameter, SiteParameter
from flows.scrub import NodesParameter
from tasks import caring
from tasks.core.access import Access
from tasks.core.ledger import CARE
from tasks.order import ending

AgeParameter = Annotated[float, Field(ge=0)] | None


@flow(name="collect", retries=0, persist_result=False)
def collect(
    nodes: NodesParameter = [],  # noqa: B006 - Prefect shows the default in its form, and nobody changes it
    trash_age_s: AgeParameter = None,
    site: SiteParameter = "",
    kubeconfig: KubeconfigParameter = "",
    context: ContextParameter = "",
) -> dict[str, Any]:
    """Move checkpoints that nothing needs to the trash of their nodes, and delete what has been in it long enough.

    Starting this flow *is* the consent; `k2ctl gc` lists first. Never touched: what is live, what rollback goes to,
    what is staged or gated and neither promoted nor given up, what a pod mounts, a process has open, or a stager
    works on.

    Args:
        nodes: Only these nodes; empty for all of the site's pool.
        trash_age_s: How long what is deleted now has been in the trash at least; empty for the site's own figure.
        site: Path of the site file as the worker sees it; empty for the worker's own site.
        kubeconfig: Path of another kubeconfig than the site file's, as the worker sees it; empty for the site file's.
        context: Which of the contexts that the site file names; empty for its own.
    """
    order = caring.open_care(site, Access(kubeconfig, context))
    with ending(order, "collect", ledger=CARE) as result:
        result.update(caring.collect(order, nodes, trash_age_s))
    return result
