"""Submitting a flow run to its deployment, following it, and telling how it ended."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tasks.core.errors import After, K2Error, UnavailableError, error_from_data
from tasks.core.ledger import FAILED
from tasks.core.spec import Site
from tasks.order import END
from tasks.steps.journal import records
from tasks.wiring import open_store

_POLL_S = 0.5
_QUEUE_NOTE_S = 15.0
_LAST_LINES_S = 4.0
_FINISHED = "Finished in state"
_GONE_STATES = ("CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Ended:
    """How a flow run ended: its own record, and the links under which it can be looked at."""

    run: str
    data: dict[str, Any]
    url: str


def use_api(site: Site) -> None:
    """Make the Prefect client talk to the site's server and to no other."""
    os.environ["PREFECT_API_URL"] = site.prefect_api_url
    os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
    from prefect.context import refresh_global_settings_context

    # The settings were read when prefect was imported, before the site was known.
    refresh_global_settings_context()


class _LinesOfSteps(logging.Handler):
    """Shows what steps say while a flow runs in this process, as its log does when it runs elsewhere."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, without Prefect's own about states."""
        message = record.getMessage()
        if record.levelno == logging.INFO and not _is_state(message):
            say(f"  {message}")


def show_steps_here() -> None:
    """Let steps of flows in this process speak on standard error; called again it changes nothing."""
    logger = logging.getLogger("prefect.task_runs")
    if not any(isinstance(handler, _LinesOfSteps) for handler in logger.handlers):
        logger.addHandler(_LinesOfSteps(logging.INFO))


def submit(site: Site, deployment: str, release_id: str, parameters: dict[str, Any]) -> Ended:
    """Start a run of a deployment, show its log until it ends, and return how it ended.

    Raises:
        K2Error: the run's own error, as the ledger carries it.
        UnavailableError: the run died without a word (K2-UNA-002), or Prefect does not answer (K2-UNA-001).
    """
    use_api(site)
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound, PrefectException

    try:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment)
            run = client.create_flow_run_from_deployment(found.id, parameters=parameters)
            url = f"{site.prefect_api_url.removesuffix('/api')}/runs/flow-run/{run.id}"
            say(f"{deployment}: run {run.name}  {url}")
            state = _follow(client, run.id)
    except ObjectNotFound as error:
        raise UnavailableError(
            "K2-UNA-001",
            "The deployment is not registered at the Prefect server.",
            where=deployment,
            hint="prefect deploy --all --prefect-file infra/prefect/prefect.yaml",
        ) from error
    except (HTTPError, PrefectException, OSError) as error:
        raise UnavailableError(
            "K2-UNA-001",
            "Prefect does not answer; the flow run goes on without us.",
            where=site.prefect_api_url,
            got=type(error).__name__,
            retry=After(5),
        ) from error
    return Ended(str(run.id), _outcome(site, release_id, str(run.id), state), url)


def _follow(client: Any, run_id: UUID) -> str:
    """Print the run's log lines as they come until it is in a final state; return that state's type."""
    shown, began, noted = 0, time.monotonic(), False
    while True:
        run = client.read_flow_run(run_id)
        final = run.state is not None and run.state.is_final()
        shown += len(_print_logs(client, run_id, shown))
        if final:
            _print_rest(client, run_id, shown)
            return str(run.state.type.value)
        if run.state is not None and run.state.name == "AwaitingConcurrencySlot" and not noted:
            noted = True
            say("waiting: another run of this deployment is not over yet (one at a time)")
        if not noted and run.start_time is None and time.monotonic() - began > _QUEUE_NOTE_S:
            noted = True
            say("waiting for a worker to pick the run up; is one running? prefect worker start --pool ...")
        time.sleep(_POLL_S)


def _print_rest(client: Any, run_id: UUID, shown: int) -> None:
    """Print what the run still had to say: its process sends its last lines after its last state."""
    deadline = time.monotonic() + _LAST_LINES_S
    while time.monotonic() < deadline:
        lines = _print_logs(client, run_id, shown)
        if any(line.name == "prefect.flow_runs" and line.message.startswith(_FINISHED) for line in lines):
            return
        shown += len(lines)
        time.sleep(_POLL_S / 2)


def _print_logs(client: Any, run_id: UUID, skip: int) -> list[Any]:
    """Print the log lines of steps after the first `skip` lines, and return all of those lines."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    lines: list[Any] = client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])), limit=200, offset=skip, sort=LogSort.TIMESTAMP_ASC
    )
    for line in lines:
        if line.name.startswith("prefect.task_runs") and line.level == logging.INFO and not _is_state(line.message):
            say(f"  {line.message}")
    return lines


def _outcome(site: Site, release_id: str, run: str, state: str) -> dict[str, Any]:
    """Return what the run recorded of its end; raise what it failed with."""
    for record in reversed(records(open_store(site), release_id)):
        if record.step == END and record.run == run:
            if record.event == FAILED:
                raise error_from_data(record.data["error"])
            return dict(record.data)
    if state in _GONE_STATES:
        raise UnavailableError(
            "K2-UNA-002",
            "The flow run died before it could say how it ended.",
            where=f"flow run {run}",
            got=state.lower(),
            expected="a record of its end",
            hint=f"k2ctl release {release_id} (it resumes)",
            retry=After(5),
        )
    raise K2Error(
        "K2-UNX-001",
        "The flow run ended without a record of its end.",
        where=f"flow run {run}",
        got=state.lower(),
        expected="a record of its end",
    )


def _is_state(message: str) -> bool:
    """Return whether a line is Prefect's own about a state; failures are shown as our errors, not as tracebacks."""
    return message.startswith(_FINISHED)


def say(line: str) -> None:
    """Write one line of progress where progress belongs: standard error."""
    print(line, file=sys.stderr, flush=True)
