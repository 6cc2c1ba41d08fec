"""Flow `scrub`: the staged weights are read again, and what has rotted is put right."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.release import ContextParameter, KubeconfigParameter, SiteParameter
from tasks import caring
from tasks.core.access import Access
from tasks.core.ledger import CARE
from tasks.order import ending

NodesParameter = Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=1000)]


@flow(name="scrub", retries=0, persist_result=False)
def scrub(
    nodes: NodesParameter = [],  # noqa: B006 - Prefect shows the default in its form, and nobody changes it
    site: SiteParameter = "",
    kubeconfig: KubeconfigParameter = "",
    context: ContextParameter = "",
) -> dict[str, Any]:
    """Read every byte of what is live, and of what rollback goes to, again on every node that holds it.

    A few nodes at a time, one of each unit, at the site's own rate; never while a release stages or shifts. A file that
    has rotted is fetched again from the store. A node on which that cannot be done loses its label, and the run fails.

    Args:
        nodes: Only these nodes; empty for all that hold the weights.
        site: Path of the site file as the worker sees it; empty for the worker's own site.
        kubeconfig: Path of another kubeconfig than the site file's, as the worker sees it; empty for the site file's.
        context: Which of the contexts that the site file names; empty for its own.
    """
    order = caring.open_care(site, Access(kubeconfig, context))
    with ending(order, "scrub", ledger=CARE) as result:
        result.update(caring.scrub(order, nodes))
    return result
