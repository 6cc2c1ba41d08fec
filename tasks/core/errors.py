"""What can go wrong, from the point of view of the person on call.

Few classes; each carries a stable code, what happened, where, got/expected, the next command, and its own answer to
"would trying again help?". Library exceptions are chained (`raise ... from`), never leaked. A failed gate is a
`Verdict`, not an exception, until the flow has to end because of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.catalogue import CATALOGUE, CatalogueEntry, ExitCode

__all__ = [
    "CATALOGUE",
    "After",
    "CapacityError",
    "CatalogueEntry",
    "ConflictError",
    "ExitCode",
    "GateError",
    "InputError",
    "IntegrityError",
    "K2Error",
    "Never",
    "NotReadyError",
    "Retry",
    "RevertedError",
    "RightsError",
    "UnavailableError",
    "error_from_data",
]


@dataclass(frozen=True)
class Never:
    """Trying again cannot help: the cause is static."""


@dataclass(frozen=True)
class After:
    """Trying again may help after `seconds`."""

    seconds: float


Retry = Never | After


@dataclass(eq=False, repr=False)
class K2Error(Exception):
    """A failure that its reader can act on.

    Args:
        code: key of CATALOGUE; decides the exit code.
        summary: what happened, one sentence.
        where: the place: node, file, object, URL. Empty when there is none.
        got, expected: both sides of a comparison, where there was one.
        hint: the next command or act; defaults to the catalogue's remedy.
        retry: `Never()` or `After(seconds)`.
        details: further plain data for receipts and `--json`.
    """

    code: str
    summary: str
    where: str = ""
    got: str = ""
    expected: str = ""
    hint: str = ""
    retry: Retry = field(default_factory=Never)
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise ValueError(f"unknown error code {self.code}")
        if not self.hint:
            self.hint = CATALOGUE[self.code].remedy
        super().__init__(self.code, self.summary)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of `k2ctl` for this error."""
        return CATALOGUE[self.code].exit_code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __str__(self) -> str:
        """Return one line: code, summary, where, got/expected."""
        parts = [f"{self.code} {self.summary}"]
        if self.where:
            parts.append(f"where: {self.where}")
        sides = [f"{name}: {value}" for name, value in (("got", self.got), ("expected", self.expected)) if value]
        if sides:
            parts.append(", ".join(sides))
        return "; ".join(parts)

    def as_text(self) -> str:
        """Return the error as a person reads it: one labelled line each, the next command last."""
        rows = [
            ("error", f"{self.code}  {self.summary}"),
            ("where", self.where),
            ("got", self.got),
            ("expected", self.expected),
            ("next", self.hint),
        ]
        return "\n".join(f"{label + ':':<10}{value}" for label, value in rows if value)

    def as_data(self) -> dict[str, Any]:
        """Return the error as plain JSON data."""
        return {
            "code": self.code,
            "exit_code": int(self.exit_code),
            "summary": self.summary,
            "where": self.where,
            "got": self.got,
            "expected": self.expected,
            "next": self.hint,
            "retry_after_s": self.retry.seconds if isinstance(self.retry, After) else None,
            "details": self.details,
        }


class InputError(K2Error):
    """What was asked for is wrong: a file, a parameter, a revision, an argument."""


class IntegrityError(K2Error):
    """Bytes are not the bytes of the lock."""


class UnavailableError(K2Error):
    """A service could not be reached or failed by its own account; trying again may help."""


class RightsError(UnavailableError):
    """The Kubernetes API answers, but refuses this identity: for whoever has it, the same as an API that is away.

    What rides out an outage of the API rides this out as well; trying again does not help.
    """


class CapacityError(K2Error):
    """There is not enough room: nodes, GPUs, disk, quota."""


class ConflictError(K2Error):
    """Somebody else owns, holds or has changed what this release needs."""


class NotReadyError(K2Error):
    """The cluster did not reach the state in time; carries diagnoses in `details`."""


class GateError(K2Error):
    """A gate said fail or inconclusive before any user was touched."""


class RevertedError(K2Error):
    """Users were touched and traffic was sent back, or holds for a person."""


_CLASSES: dict[str, type[K2Error]] = {
    "INP": InputError,
    "INT": IntegrityError,
    "UNA": UnavailableError,
    "CAP": CapacityError,
    "CON": ConflictError,
    "RDY": NotReadyError,
    "RGT": RightsError,
    "GAT": GateError,
    "REV": RevertedError,
    "UNX": K2Error,
}


def error_from_data(data: Mapping[str, Any]) -> K2Error:
    """Return the error that `as_data` described: how an outcome crosses from one process to another."""
    seconds = data.get("retry_after_s")
    cls = _CLASSES[str(data["code"]).split("-")[1]]
    return cls(
        code=data["code"],
        summary=data["summary"],
        where=data.get("where", ""),
        got=data.get("got", ""),
        expected=data.get("expected", ""),
        hint=data.get("next", ""),
        retry=After(float(seconds)) if seconds is not None else Never(),
        details=dict(data.get("details", {})),
    )
