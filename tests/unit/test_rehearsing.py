"""What a rehearsal comes to: users who noticed it make it fail, however the release itself ended."""

from __future__ import annotations

import pytest

from flows.console.rehearsing import Outcome, blame
from tasks.core.errors import ExitCode


def outcome(exit_code: ExitCode = ExitCode.DONE, **client: int) -> Outcome:
    counts = {"requests": 1500, "failed": 0, "cut_streams": 0, **client}
    return Outcome("k2-rehearsal-2", "promoted", exit_code, client=counts)


@pytest.mark.parametrize("client", [{"failed": 1}, {"cut_streams": 1}, {"failed": 2, "cut_streams": 3}])
@pytest.mark.parametrize("exit_code", [ExitCode.DONE, ExitCode.REVERTED, ExitCode.GATE_FAILED])
def test_a_user_who_was_failed_fails_the_rehearsal(client: dict[str, int], exit_code: ExitCode) -> None:
    result = outcome(exit_code, **client)
    blame(result, 0)
    assert (result.outcome, result.exit_code) == ("users-failed", 1)
    assert f"{client.get('failed', 0)} failed" in result.users


def test_too_few_requests_prove_nothing() -> None:
    result = outcome(requests=999)
    blame(result, 1000)
    assert (result.outcome, result.exit_code) == ("users-failed", 1)
    assert "999" in result.users


@pytest.mark.parametrize("least", [0, 1000])
@pytest.mark.parametrize("exit_code", [ExitCode.DONE, ExitCode.REVERTED])
def test_users_who_noticed_nothing_leave_the_outcome_as_it_is(least: int, exit_code: ExitCode) -> None:
    result = outcome(exit_code)
    blame(result, least)
    assert (result.outcome, result.exit_code, result.users) == ("promoted", exit_code, "")


def test_a_client_without_a_report_is_no_proof() -> None:
    result = Outcome("k2-rehearsal-2", "promoted", ExitCode.DONE)
    blame(result, 1000)
    assert result.exit_code == 1
