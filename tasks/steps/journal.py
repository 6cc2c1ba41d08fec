"""The ledger in the store: append a record, read a release's records, and wrap a step in its records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

from tasks.core.errors import ConflictError, K2Error
from tasks.core.identity import canonical_bytes
from tasks.core.ledger import (
    FAILED,
    FINISHED,
    STARTED,
    Record,
    StepState,
    fold,
    ledger_number,
    ledger_prefix,
    record_from_bytes,
)
from tasks.core.spec import plain
from tasks.ports import Store
from tasks.steps.context import Ports

_MAX_RACES = 50


def append(store: Store, record: Record) -> str:
    """Append a record with a conditional put and return its key; two writers never overwrite each other."""
    data = canonical_bytes(plain(record))
    first = max((ledger_number(key) for key in _keys(store, record.release)), default=-1) + 1
    for number in range(first, first + _MAX_RACES):
        key = record.key(number)
        try:
            store.put(key, data, if_absent=True)
        except ConflictError:
            if _holds(store, key, data):
                return key  # our own put, whose answer was lost
            continue
        return key
    raise ConflictError("K2-CON-006", "The ledger could not be appended to: too many writers.", where=record.release)


def records(store: Store, release: str) -> list[Record]:
    """Return a release's records in the order of their numbers."""
    return [record_from_bytes(store.get(key)[0], key) for key in _keys(store, release)]


def _keys(store: Store, release: str) -> list[str]:
    keys = [item.key for item in store.list_objects(ledger_prefix(release))]
    return sorted(keys, key=lambda key: (ledger_number(key), key))


def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.get(key)[0] == data
    except KeyError:
        return False


def states(store: Store, release: str) -> dict[str, StepState]:
    """Return the state of each step of a release."""
    return fold(records(store, release))


def recorded(ports: Ports, release: str, step: str, act: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Carry out a step between its records and return what it found.

    A K2Error is recorded with its data and raised on, without what caused it. Anything else becomes a K2Error that
    names its class and the place in the code. So nothing that a library put into a message (a token, a URL with a
    signature) reaches the ledger or the orchestrator's log, which shows whole chains of exceptions (I6).
    """
    append(ports.store, Record(release, step, STARTED, ports.run, ports.clock.now()))
    ports.progress.say(f"{step}: started")
    began = ports.clock.now()
    try:
        data = dict(act())
    except K2Error as error:
        _failed(ports, release, step, error)
        ports.progress.say(f"{step}: failed: {error}")
        raise without_cause(error) from None
    except BaseException as error:
        unknown = unknown_error(step, error)
        _failed(ports, release, step, unknown)
        if isinstance(error, Exception):
            raise unknown from None
        raise
    data.setdefault("outcome", "done")
    append(ports.store, Record(release, step, FINISHED, ports.run, ports.clock.now(), data))
    note = f" - {data['note']}" if data.get("note") else ""
    ports.progress.say(f"{step}: {data['outcome']} in {ports.clock.now() - began:.1f} s{note}")
    return data


def without_cause(error: K2Error) -> K2Error:
    """Return an error of ours stripped of the exceptions behind it: their words are those of libraries (I6)."""
    error.__cause__ = error.__context__ = None
    error.__suppress_context__ = True
    return error


@contextlib.contextmanager
def speaking_for_itself(where: str) -> Iterator[None]:
    """Let only errors of ours out, without what caused them; anything else becomes one that names its class."""
    try:
        yield
    except K2Error as error:
        raise without_cause(error) from None
    except Exception as error:
        raise unknown_error(where, error) from None


def unknown_error(step: str, error: BaseException) -> K2Error:
    """Return the K2Error of something unforeseen: its class and the places in the code, and none of its words."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in extract_tb(error.__traceback__)]
    return K2Error(
        "K2-UNX-001",
        f"The step ended with {type(error).__name__}.",
        where=step,
        got=" < ".join(reversed(frames[-6:])),
        expected="an outcome or a known error",
    )


def _failed(ports: Ports, release: str, step: str, error: K2Error) -> None:
    """Record a failure. A store that does not answer must not hide it: a step without an end counts as interrupted."""
    with contextlib.suppress(K2Error):
        append(ports.store, Record(release, step, FAILED, ports.run, ports.clock.now(), {"error": error.as_data()}))
