"""What a flow hands to its tasks: plain data naming the release, the site and the run; no client, no secret (I6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect import runtime
from prefect.logging import get_run_logger

from tasks import wiring
from tasks.core.errors import K2Error
from tasks.core.ledger import FAILED, FINISHED, Record
from tasks.core.spec import Release
from tasks.progress import RunProgress
from tasks.specs import find_release
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_lock
from tasks.steps.journal import append

END = "end"


@dataclass(frozen=True)
class Order:
    """A piece of work on one release at one site; `run` is the flow run's id."""

    release: str
    site: str
    run: str


def open_order(release: str, site: str) -> Order:
    """Return the order of the present flow run, its site and release checked to be readable."""
    order = Order(release, wiring.site_path(site), str(runtime.flow_run.id or "local"))
    read_release(order)
    return order


def connect(order: Order) -> Ports:
    """Return the ports of an order's site, with progress that goes to the run's log and artifacts."""
    return wiring.connect(order.site, order.run, RunProgress(), read_release(order).profile.served_model_name)


def read_release(order: Order) -> Release:
    """Return the release of an order."""
    return find_release(order.release, wiring.read_site(order.site).releases_dir)


def subject(order: Order, ports: Ports, lock_digest: str) -> Subject:
    """Return the release of an order with its lock, read from the store by digest."""
    return Subject(read_release(order), get_lock(ports.store, lock_digest))


@contextmanager
def ending(order: Order, flow: str) -> Iterator[dict[str, Any]]:
    """Record how a flow run ended, for whoever waits for it: the caller fills in the outcome.

    The ledger carries the outcome from the run's process to `k2ctl`; the Prefect database is not asked.
    """
    result: dict[str, Any] = {"flow": flow, "outcome": "done"}
    try:
        yield result
    except K2Error as error:
        _end(order, FAILED, {"flow": flow, "outcome": "failed", "error": error.as_data()})
        get_run_logger().error(error.as_text())
        raise
    except Exception as error:
        unknown = K2Error("K2-UNX-001", f"The flow ended with {type(error).__name__}.", where=flow)
        _end(order, FAILED, {"flow": flow, "outcome": "failed", "error": unknown.as_data()})
        raise
    _end(order, FINISHED, result)


def _end(order: Order, event: str, data: dict[str, Any]) -> None:
    ports = connect(order)
    append(ports.store, Record(read_release(order).id, END, event, order.run, ports.clock.now(), data))
