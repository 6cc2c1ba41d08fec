"""Tasks `scrub` and `collect`: what is done for the weights of a whole site, and for no release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import runtime, task

from tasks import wiring
from tasks.core.access import AS_WRITTEN, Access
from tasks.core.ledger import CARE
from tasks.order import Order
from tasks.progress import RunProgress
from tasks.steps.caretaker import caring
from tasks.steps.collecting import collect_step
from tasks.steps.context import Ports
from tasks.steps.journal import recorded, speaking_for_itself
from tasks.steps.scrubbing import scrub_step


def open_care(site: str, access: Access = AS_WRITTEN) -> Order:
    """Return the order of the present flow run, which is for the whole site."""
    with speaking_for_itself("the flow's parameters"):
        run = str(runtime.flow_run.id or "local")
        return Order(CARE, wiring.site_path(site), run, access.kubeconfig, access.context)


@task(name="scrub", retries=0, persist_result=False)
def scrub(order: Order, nodes: Sequence[str]) -> dict[str, Any]:
    """Read every staged byte of what is live, and of the rollback target, again, and put right what has rotted."""
    return caring(_connect(order), lambda ports: recorded(ports, CARE, "scrub", lambda: scrub_step(ports, nodes)))


@task(name="collect", retries=0, persist_result=False)
def collect(order: Order, nodes: Sequence[str], trash_age_s: float | None) -> dict[str, Any]:
    """Move the weights that nothing needs to the trash, and delete what has been in it long enough."""
    return caring(
        _connect(order),
        lambda ports: recorded(ports, CARE, "collect", lambda: collect_step(ports, nodes, trash_age_s)),
    )


def _connect(order: Order) -> Ports:
    with speaking_for_itself("connect"):
        return wiring.connect_patiently(order.site, order.run, RunProgress(), access=order.access)
