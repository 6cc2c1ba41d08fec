"""Submitting a flow run to its deployment, following it, and telling how it ended."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import UUID

from tasks.core.errors import CATALOGUE, After, InputError, K2Error, UnavailableError, error_from_data
from tasks.core.ledger import CARE, FAILED
from tasks.core.spec import Site
from tasks.order import END
from tasks.steps.journal import records
from tasks.wiring import open_store

_POLL_S = 0.5
_QUEUE_NOTE_S = 15.0
_LAST_LINES_S = 4.0
_FINISHED = "Finished in state"
_GONE_STATES = ("CRASHED", "CANCELLED")
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_REFUSED_IN_RUN = "Validation of flow parameters failed"
# The one line that `str` of a K2Error is, in the message that Prefect makes of an exception.
_ERROR_LINE = re.compile(
    r"(?P<code>K2-[A-Z]{3}-\d{3}) (?P<summary>.+?)(?:; where: (?P<where>.+?))?"
    r"(?:; got: (?P<got>.*?)(?=, expected: |$))?(?:[;,] expected: (?P<expected>.*))?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class _LastState:
    """The last state of a deployment's run: its type and message."""

    deployment: str
    run: str
    kind: str
    message: str


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
        K2Error: the run's own error, as the ledger carries it, or else as its state tells it.
        InputError: the server refuses the parameters; no run was made.
        UnavailableError: the run died without a word (K2-UNA-002), or Prefect does not answer (K2-UNA-001).
        KeyboardInterrupt: whoever waited goes away; the run does not.
    """
    use_api(site)
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound, PrefectException

    begun = "nothing was started"
    try:
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment)
            run = _create(client, found.id, deployment, parameters)
            begun = "the flow run goes on without us"
            url = f"{site.prefect_api_url.removesuffix('/api')}/runs/flow-run/{run.id}"
            say(f"{deployment}: run {run.name}  {url}")
            try:
                state = _follow(client, run.id)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_left_alone(site, release_id, str(run.id), url)) from None
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
            f"Prefect does not answer; {begun}.",
            where=site.prefect_api_url,
            got=type(error).__name__,
            retry=After(5),
        ) from error
    return Ended(str(run.id), _outcome(site, release_id, _LastState(deployment, str(run.id), *state)), url)


def _create(client: Any, deployment_id: UUID, deployment: str, parameters: dict[str, Any]) -> Any:
    """Create a run; InputError with the server's own sentence if it refuses the parameters."""
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        return client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
    except PrefectHTTPStatusError as error:
        status = error.response.status_code
        if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR or status in _PASSING:
            raise
        raise InputError(
            "K2-INP-001",
            "The Prefect server refuses the run.",
            where=deployment,
            got=_detail(error.response) or f"HTTP {status}",
            expected="parameters that the deployment's form allows",
        ) from error


def _detail(response: Any) -> str:
    """Return the sentence that an API's error answer carries."""
    try:
        answer = response.json()
    except ValueError:
        return ""
    detail = answer.get("detail") or answer.get("exception_detail") if isinstance(answer, dict) else ""
    if isinstance(detail, list):
        detail = "; ".join(str(item.get("msg", item) if isinstance(item, dict) else item) for item in detail)
    return str(detail or "")


def _left_alone(site: Site, release_id: str, run: str, url: str) -> str:
    """Return what whoever stops waiting has to know."""
    return "\n".join(
        (
            "no longer waiting; the flow run goes on",
            f"  look at it  {url}",
            *([] if release_id == CARE else [f"  follow      k2ctl status {release_id}"]),
            f"  cancel      PREFECT_API_URL={site.prefect_api_url} prefect flow-run cancel {run}",
        )
    )


def _follow(client: Any, run_id: UUID) -> tuple[str, str]:
    """Print the run's log lines as they come until it is in a final state; return that state's type and message."""
    shown, began, noted = 0, time.monotonic(), False
    while True:
        run = client.read_flow_run(run_id)
        final = run.state is not None and run.state.is_final()
        shown += len(_print_logs(client, run_id, shown))
        if final:
            _print_rest(client, run_id, shown)
            return str(run.state.type.value), str(run.state.message or "")
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


def _outcome(site: Site, release_id: str, last: _LastState) -> dict[str, Any]:
    """Return what the run recorded of its end; raise what it failed with."""
    told = _error_of_state(last)
    try:
        written = records(open_store(site), release_id)
    except UnavailableError:
        if told is not None:
            raise told from None
        raise
    for record in reversed(written):
        if record.step == END and record.run == last.run:
            if record.event == FAILED:
                raise error_from_data(record.data["error"])
            return dict(record.data)
    if told is not None:
        raise told
    if last.kind in _GONE_STATES:
        raise UnavailableError(
            "K2-UNA-002",
            "The flow run died before it could say how it ended.",
            where=f"flow run {last.run}",
            got=last.kind.lower(),
            expected="a record of its end",
            hint=f"{again(last.deployment, release_id)} (it resumes)",
            retry=After(5),
        )
    raise K2Error(
        "K2-UNX-001",
        "The flow run ended without a record of its end.",
        where=f"flow run {last.run}",
        got=f"{last.kind.lower()}: {last.message}" if last.message else last.kind.lower(),
        expected="a record of its end",
    )


def _error_of_state(last: _LastState) -> K2Error | None:
    """Return the error of ours that a failed run's state tells, where the run could not write into the ledger."""
    if last.kind != "FAILED":
        return None
    if last.message.startswith(_REFUSED_IN_RUN):
        return InputError(
            "K2-INP-001", "The flow run's parameters are not valid.", where=f"flow run {last.run}", got=last.message
        )
    found = _ERROR_LINE.search(last.message)
    if found is None or found["code"] not in CATALOGUE:
        return None
    data = {key: value or "" for key, value in found.groupdict().items()}
    return error_from_data({**data, "retry_after_s": 5.0 if data["code"].startswith("K2-UNA-") else None})


def again(deployment: str, release_id: str) -> str:
    """Return the command that starts a deployment's flow on a release again."""
    name = deployment.partition("/")[0]
    if release_id == CARE:
        return {"collect": "k2ctl gc -y"}.get(name, f"k2ctl {name}")
    return f"k2ctl {name} {release_id}" + ("" if name == "release" else " -y")


def _is_state(message: str) -> bool:
    """Return whether a line is Prefect's own about a state; failures are shown as our errors, not as tracebacks."""
    return message.startswith(_FINISHED)


def say(line: str) -> None:
    """Write one line of progress where progress belongs: standard error."""
    print(line, file=sys.stderr, flush=True)
