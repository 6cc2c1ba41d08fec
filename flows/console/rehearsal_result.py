"""What a rehearsal came to: the document, whether users noticed, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.console.reports import print_json
from flows.console.submission import say
from tasks import wiring
from tasks.core.errors import ExitCode


@dataclass
class Outcome:
    """What a rehearsal came to; becomes the JSON document."""

    release: str
    outcome: str = "failed"
    exit_code: int = ExitCode.UNEXPECTED
    receipt: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    built_s: float = 0.0
    users: str = ""


def blame(result: Outcome, least: int) -> None:
    """Make a rehearsal that users noticed, or that had fewer than `least` requests of users, a failed one.

    That comes before the outcome of the release: no way for it to end may be felt by users.
    """
    failed, cut = (int(result.client.get(key) or 0) for key in ("failed", "cut_streams"))
    requests = int(result.client.get("requests") or 0)
    if failed or cut:
        result.users = f"Of {requests} user requests {failed} failed, and {cut} streams were cut."
    elif requests < least:
        result.users = f"Only {requests} user requests were sent; {least} are needed to say that none fails."
    else:
        return
    result.outcome, result.exit_code = "users-failed", ExitCode.UNEXPECTED
    say(result.users)


def blame_missed(result: Outcome, missed: Sequence[str]) -> None:
    """Make a rehearsal whose release went well a failed one if what was to go wrong has not: it has shown nothing."""
    if missed and result.exit_code == ExitCode.DONE:
        result.outcome, result.exit_code = "not-injected", ExitCode.UNEXPECTED
        say(f"The moment of {', '.join(missed)} did not come: the release met no failure, and nothing was shown.")


def results_directory() -> Path:
    """Return where results and receipts outlive the site's own directory."""
    directory = wiring.last_rehearsal_site().parent
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def forget_results() -> None:
    """Remove the results of earlier rehearsals, so that no receipt stands beside the result of another."""
    results = results_directory()
    for path in (results / "result.json", *results.glob("*.receipt.json")):
        path.unlink(missing_ok=True)


def print_result(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Write a rehearsal's document to standard output: rows for a person, or as it is."""
    if as_json:
        print_json(document)
        return
    print(f"\n{document['release']}: {document['outcome']} (exit {document['exit_code']})")
    print(f"{'step':<14}{'outcome':<14}{'wall s':>8}{'CPU s':>8}")
    for step in document["steps"]:
        print(f"{step['name']:<14}{step['outcome']:<14}{step['seconds']:>8.1f}{step['cpu_seconds']:>8.1f}")
    print(
        f"{'everything':<28}{document['wall_s']:>8.1f}{document['cpu_s']:>8.1f}   (one-time build apart: "
        f"{document['one_time_build_s']:.1f} s)"
    )
    client = document["client"]
    if client:
        print(
            f"users: {client['requests']} requests, {client['failed']} failed, {client['cut_streams']} cut streams, "
            "answered by " + ", ".join(f"{name}: {count}" for name, count in client["by_release"].items())
        )
    print("traffic now: " + ", ".join(f"{name} {weight}%" for name, weight in document["route"].items()))
    if document["users"]:
        print(document["users"])
    if document["receipt"]:
        print(f"receipt: {document['receipt']}")
