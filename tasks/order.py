"""What a flow hands to its tasks: plain data naming the release, the site and the run; no client, no secret (I6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect import runtime
from prefect.logging import get_run_logger

from tasks import wiring
from tasks.core.access import AS_WRITTEN, Access
from tasks.core.errors import K2Error, UnavailableError
from tasks.core.identity import check_release_id
from tasks.core.ledger import FAILED, FINISHED, Record
from tasks.core.spec import Release
from tasks.progress import RunProgress
from tasks.specs import find_release
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_lock
from tasks.steps.journal import append, speaking_for_itself, unknown_error, without_cause
from tasks.steps.patience import API_PATIENCE_S

END = "end"
_END_TRIES = 3
_END_WAIT_S = 2.0


@dataclass(frozen=True)
class Order:
    """A piece of work on one release at one site; `run` is the flow run's id.

    `kubeconfig` and `context` are what was chosen in place of the site file's own; empty where nothing was.
    """

    release: str
    site: str
    run: str
    kubeconfig: str = ""
    context: str = ""

    @property
    def access(self) -> Access:
        """How the site's cluster is reached."""
        return Access(self.kubeconfig, self.context)


def open_order(release: str, site: str, access: Access = AS_WRITTEN) -> Order:
    """Return the order of the present flow run, its site and release checked to be readable.

    A release that cannot be read ends the run here. Where it was named by its id, that is recorded for whoever waits;
    a release named by a path has no id yet, and without a site there is no store: then the run's own state tells.
    """
    with speaking_for_itself("the flow's parameters"):
        run = str(runtime.flow_run.id or "local")
        order = Order(release, wiring.site_path(site), run, access.kubeconfig, access.context)
        try:
            read_release(order)
        except K2Error as error:
            with contextlib.suppress(K2Error):
                check_release_id(release)
                _append_end(order, release, FAILED, {"outcome": "failed", "error": error.as_data()})
            raise
    return order


def connect(order: Order, patience_s: float = API_PATIENCE_S) -> Ports:
    """Return the ports of an order's site, with progress that goes to the run's log and artifacts.

    Args:
        order: the piece of work.
        patience_s: how long an API server that is away is waited for.
    """
    with speaking_for_itself("connect"):
        name = read_release(order).profile.served_model_name
        return wiring.connect_patiently(order.site, order.run, RunProgress(), name, order.access, patience_s)


def read_release(order: Order) -> Release:
    """Return the release of an order."""
    return find_release(order.release, wiring.read_site(order.site, order.access).releases_dir)


def subject(order: Order, ports: Ports, lock_digest: str) -> Subject:
    """Return the release of an order with its lock, read from the store by digest."""
    with speaking_for_itself("subject"):
        return Subject(read_release(order), get_lock(ports.store, lock_digest))


@contextmanager
def ending(order: Order, flow: str, ledger: str = "") -> Iterator[dict[str, Any]]:
    """Record how a flow run ended, for whoever waits for it: the caller fills in the outcome.

    The record goes into the release's ledger, or into the one that is named: of a run that is about no release.

    The ledger carries the outcome from the run's process to `k2ctl`; the Prefect database is not asked. An error goes
    on without its causes, as Prefect logs whole chains (I6), and is never hidden by a store that does not answer: then
    the run's state carries it.
    """
    result: dict[str, Any] = {"flow": flow, "outcome": "done"}
    release = order.release
    try:
        release = ledger or read_release(order).id
        yield result
    except K2Error as error:
        _failed(order, release, flow, error)
        raise without_cause(error) from None
    except Exception as error:
        unknown = unknown_error(flow, error)
        _failed(order, release, flow, unknown)
        raise unknown from None
    with speaking_for_itself(flow):
        _append_end(order, release, FINISHED, result)


def _failed(order: Order, release: str, flow: str, error: K2Error) -> None:
    """Record how a flow failed, if the store lets us, and say it in the run's log."""
    with contextlib.suppress(K2Error):
        _append_end(order, release, FAILED, {"flow": flow, "outcome": "failed", "error": error.as_data()})
    get_run_logger().error(error.as_text())


def _append_end(order: Order, release: str, event: str, data: dict[str, Any]) -> None:
    """Append the record of a run's end; a store that does not answer is tried a few times."""
    # Not by `connect`: the release need not be readable (any more).
    ports = wiring.connect(order.site, order.run, RunProgress(), access=order.access)
    for left in reversed(range(_END_TRIES)):
        try:
            append(ports.store, Record(release, END, event, order.run, ports.clock.now(), data))
        except UnavailableError:
            if not left:
                raise
            ports.clock.sleep(_END_WAIT_S)
        else:
            return
