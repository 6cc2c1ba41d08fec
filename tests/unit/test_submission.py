"""Following a flow run: what a server refuses, how a run without a record is told, and what an interrupt leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from flows import cli
from flows.console import submission
from flows.console.submission import _create, _follow, _LastState, _outcome, submit
from tasks.core.errors import ConflictError, InputError, K2Error, UnavailableError
from tasks.core.ledger import FAILED, FINISHED, Record
from tasks.order import END
from tasks.steps.journal import append
from tests.fakes.memory_store import MemoryStore
from tests.fakes.small_world import site

RUN = "0" * 32
R = "k2-new-1"


def create(status: int, body: Any) -> None:
    """Ask for a run of a client whose server gives this answer."""

    def refuse(found: UUID, parameters: dict[str, Any]) -> None:
        request = httpx.Request("POST", "http://127.0.0.1:1/api/deployments/x/create_flow_run")
        error = httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, json=body))
        raise PrefectHTTPStatusError.from_httpx_error(error)

    client = SimpleNamespace(create_flow_run_from_deployment=refuse)
    _create(client, UUID(int=1), "promote/promote", {"approver": "X"})


@pytest.mark.parametrize("status", [400, 409, 422])
def test_parameters_that_the_server_refuses_are_wrong_input_with_its_sentence(status: int) -> None:
    sentence = "Error creating flow run: Validation failed for field 'approver'. Failure reason: 'X' is too short"
    with pytest.raises(InputError) as caught:
        create(status, {"detail": sentence})
    assert caught.value.got == sentence
    assert caught.value.exit_code == 2


def test_a_list_of_reasons_is_one_sentence() -> None:
    with pytest.raises(InputError) as caught:
        create(422, {"detail": [{"loc": ["body"], "msg": "too long"}, {"msg": "too short"}]})
    assert caught.value.got == "too long; too short"


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_cannot_just_now_is_no_wrong_input(status: int) -> None:
    with pytest.raises(PrefectHTTPStatusError):
        create(status, {"detail": "later"})


def outcome(store: Any, monkeypatch: pytest.MonkeyPatch, kind: str, message: str = "") -> dict[str, Any]:
    monkeypatch.setattr(submission, "open_store", lambda site: store)
    return _outcome(site(), R, _LastState("promote/promote", RUN, kind, message))


def told(error: K2Error) -> str:
    """What Prefect makes of an exception that ends a flow."""
    return f"Flow run encountered an exception: {type(error).__name__}: {error}"


def test_the_record_of_this_run_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    error = ConflictError("K2-CON-006", "Not gated.", where="x")
    append(store, Record(R, END, FINISHED, RUN, 1.0, {"outcome": "promoted"}))
    append(store, Record(R, END, FAILED, "another", 1.0, {"error": error.as_data()}))
    assert outcome(store, monkeypatch, "COMPLETED")["outcome"] == "promoted"


@pytest.mark.parametrize(
    "error",
    [
        InputError("K2-INP-007", "The release is not known.", where="/releases", got="k2-x", expected="one of a; b"),
        InputError("K2-INP-001", "No site: which cluster is meant?", where="--site or K2_SITE"),
        UnavailableError("K2-UNA-001", "The store is down."),
    ],
)
@pytest.mark.parametrize("down", [True, False])
def test_a_run_that_could_not_record_its_end_is_told_by_its_state(
    monkeypatch: pytest.MonkeyPatch, error: K2Error, down: bool
) -> None:
    class Down(MemoryStore):
        def list_objects(self, prefix: str) -> Any:
            raise UnavailableError("K2-UNA-001", "The store is down.", where="here")

    with pytest.raises(type(error)) as caught:
        outcome(Down() if down else MemoryStore(), monkeypatch, "FAILED", told(error))
    got, was = caught.value, error
    assert (got.code, got.summary, got.where) == (was.code, was.summary, was.where)
    assert (got.got, got.expected, got.exit_code) == (was.got, was.expected, was.exit_code)


def test_parameters_that_only_the_run_refuses_are_wrong_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError):
        outcome(MemoryStore(), monkeypatch, "FAILED", "Validation of flow parameters failed with error: too long")


@pytest.mark.parametrize("message", ["", "Flow run encountered an exception: ValueError: K2-ABC-999 x"])
def test_a_failure_of_another_kind_says_what_the_state_says(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    with pytest.raises(K2Error) as caught:
        outcome(MemoryStore(), monkeypatch, "FAILED", message)
    assert caught.value.code == "K2-UNX-001"
    assert message in caught.value.got


def test_a_run_that_died_names_the_command_that_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError) as caught:
        outcome(MemoryStore(), monkeypatch, "CRASHED", "killed")
    assert caught.value.code == "K2-UNA-002"
    command = caught.value.hint.split(" (")[0]
    assert command == f"k2ctl promote {R} -y"
    cli.build_parser().parse_args(command.split()[1:])


def test_whoever_stops_waiting_is_told_that_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(id=UUID(int=7), name="promote-x")
    client = SimpleNamespace(
        read_deployment_by_name=lambda name: SimpleNamespace(id=UUID(int=1)),
        create_flow_run_from_deployment=lambda found, parameters: run,
    )

    @contextmanager
    def get_client(sync_client: bool) -> Iterator[Any]:
        yield client

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    monkeypatch.setattr(submission, "use_api", lambda site: None)
    monkeypatch.setattr(submission, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        submit(site(prefect_api_url="http://127.0.0.1:1/api"), "promote/promote", R, {})
    said = str(caught.value)
    assert "goes on" in said
    assert f"http://127.0.0.1:1/runs/flow-run/{run.id}" in said
    assert f"k2ctl status {R}" in said
    assert f"PREFECT_API_URL=http://127.0.0.1:1/api prefect flow-run cancel {run.id}" in said


def test_a_prefect_server_that_is_not_there_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "use_api", lambda site: None)

    def get_client(sync_client: bool) -> None:
        raise OSError("refused")

    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    with pytest.raises(UnavailableError) as caught:
        submit(site(prefect_api_url="http://127.0.0.1:1/api"), "promote/promote", R, {})
    assert "nothing was started" in caught.value.summary


def test_the_last_state_is_returned_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(
        is_final=lambda: True, name="Failed", type=SimpleNamespace(value="FAILED"), message="K2-INP-001 No."
    )
    last = SimpleNamespace(name="prefect.flow_runs", message="Finished in state Failed", level=20)
    client = SimpleNamespace(
        read_flow_run=lambda run: SimpleNamespace(state=state, start_time=1), read_logs=lambda *a, **k: [last]
    )
    assert _follow(client, UUID(int=1)) == ("FAILED", "K2-INP-001 No.")
