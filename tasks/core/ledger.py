"""The ledger's records and their fold, the receipt.

Append-only; one record for each event of a step. Resume and audit read these and the cluster, never the Prefect
database, so a lost Prefect server loses nothing of what is live.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import InputError, IntegrityError
from tasks.core.spec import plain

LEDGER_VERSION = 1
STARTED, FINISHED, FAILED = "started", "finished", "failed"
CARE = "_care"
"""In place of a release's id, which it cannot be: the ledger of scrubs and collections, which are of the whole site."""
STEPS = (
    "lock",
    "plan",
    "preflight",
    "pull",
    "stage",
    "rollout",
    "warm",
    "smoke",
    "throughput",
    "approve",
    "shift",
    "promote",
    "retire",
)


@dataclass(frozen=True)
class Record:
    """One event of one step of one release. `run` names the flow run that wrote it; `at` is seconds since the epoch."""

    release: str
    step: str
    event: str
    run: str
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)
    version: int = LEDGER_VERSION

    def key(self, number: int) -> str:
        """Return the store key of the record as the number-th of its release.

        Nothing but the number, so that a conditional put lets one writer only have it.
        """
        return f"{ledger_prefix(self.release)}{number:05d}.json"


def ledger_prefix(release: str) -> str:
    """Return the store prefix of a release's records."""
    return f"ledger/{release}/"


def ledger_number(key: str) -> int:
    """Return the number of a record's key; older tools wrote step and event behind it."""
    number = re.split(r"[-.]", key.rpartition("/")[2], maxsplit=1)[0]
    if not number.isdecimal():
        raise _unreadable(key, "a name without a number", f"{ledger_prefix('<release>')}00000.json and so on")
    return int(number)


def record_from_bytes(data: bytes, key: str) -> Record:
    """Return the record under a key; IntegrityError if it cannot be read, InputError if a newer tool wrote it."""
    try:
        return record_from_data(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(
            key, f"{len(data)} bytes that are no record ({type(error).__name__})", "a JSON object with version, step..."
        ) from error


def record_from_data(data: Mapping[str, Any]) -> Record:
    """Return the record of stored data; raise InputError if a newer tool wrote it."""
    if int(data.get("version", 0)) > LEDGER_VERSION:
        raise InputError(
            "K2-INP-006",
            "A ledger record was written by a newer version of this tool.",
            where=f"release {data.get('release')}",
            got=str(data.get("version")),
            expected=f"<= {LEDGER_VERSION}",
        )
    return Record(
        release=data["release"],
        step=data["step"],
        event=data["event"],
        run=data["run"],
        at=float(data["at"]),
        data=dict(data.get("data", {})),
        version=int(data["version"]),
    )


def _unreadable(key: str, got: str, expected: str) -> IntegrityError:
    """Return the refusal to go on from a ledger of which a part is unknown: a step might be done twice."""
    return IntegrityError(
        "K2-INT-003",
        "A ledger record cannot be read.",
        where=key,
        got=got,
        expected=expected,
        hint="Put the object back as it was written (the store's versions), or delete it if no release wrote it; "
        "nothing was changed.",
    )


@dataclass(frozen=True)
class StepState:
    """What the ledger knows of one step: its last event, how often it was tried and the seconds of the last try."""

    step: str
    outcome: str
    attempts: int
    seconds: float
    data: Mapping[str, Any]
    ended_at: float = 0.0
    began_at: float = 0.0


def fold(records: Iterable[Record]) -> dict[str, StepState]:
    """Return the state of each step from its records in order. A started step without an end is `interrupted`."""
    states: dict[str, StepState] = {}
    begun: dict[str, float] = {}
    for record in records:
        before = states.get(record.step)
        attempts = before.attempts if before else 0
        if record.event == STARTED:
            begun[record.step] = record.at
            kept = before.data if before else {}
            states[record.step] = StepState(record.step, "interrupted", attempts + 1, 0.0, kept, began_at=record.at)
        else:
            began = begun.get(record.step, record.at)
            seconds = record.at - began
            outcome = "failed" if record.event == FAILED else str(record.data.get("outcome", "done"))
            states[record.step] = StepState(
                record.step, outcome, max(attempts, 1), seconds, record.data, record.at, began
            )
    return states


def finished(states: Mapping[str, StepState], step: str) -> bool:
    """Return whether the last try of a step ended well."""
    state = states.get(step)
    return state is not None and state.outcome not in ("failed", "interrupted")


def receipt(release: Mapping[str, Any], records: Iterable[Record], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt: the release as written, every step's outcome and evidence, and the facts that pin it.

    Args:
        release: the release as plain data.
        records: all records of the release in order.
        facts: lock, nodes with marker digests, manifests digest, images, verdicts, weights over time, approver, tools;
            what their plan has predicted of a step stands beside its seconds.
    """
    states = fold(records)
    predicted = ((facts.get("plan") or {}).get("transfers") or {}).get("predicted_s") or {}
    steps = [
        {"name": s.step, "outcome": s.outcome, "attempts": s.attempts, "seconds": round(s.seconds, 3)}
        | ({"predicted_s": predicted[s.step]} if s.step in predicted else {})
        for s in (states[name] for name in STEPS if name in states)
    ]
    return {"version": LEDGER_VERSION, "release": plain(release), "steps": steps, **plain(facts)}
