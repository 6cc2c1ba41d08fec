"""Quotas of the namespace: what an API server's refusal says, and whether what is still to be made fits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.core.demand import Demand
from tasks.core.errors import CapacityError
from tasks.core.quantity import amount, quantity

Object = Mapping[str, Any]

_EXCEEDED = re.compile(
    r"exceeded quota: (?P<quota>[^,\s]+), requested: (?P<requested>\S+), used: (?P<used>\S+), limited: (?P<limited>\S+)"
)
_UNSTATED = re.compile(r"failed quota: (?P<quota>[^:\s]+): must specify (?P<what>.+)$")
_NAMED = 3


@dataclass(frozen=True)
class QuotaRefusal:
    """Why a quota kept an object from being made: its name, and for each of its resources what it said."""

    quota: str
    requested: Mapping[str, str]
    used: Mapping[str, str]
    limited: Mapping[str, str]
    unstated: str = ""

    @property
    def summary(self) -> str:
        """What a person reads: the limit, what is used of it and what was asked for."""
        if self.unstated:
            return f"Quota {self.quota} wants every container to state {self.unstated}."
        parts = [
            f"{self.limited.get(name, '?')} {name}, {self.used.get(name, '?')} are used, {more} more are needed"
            for name, more in self.requested.items()
        ]
        return f"Quota {self.quota} allows {'; '.join(parts)}."

    @property
    def remedy(self) -> str:
        """What helps."""
        if self.unstated:
            return "State it in the manifest, or give the namespace a LimitRange with defaults."
        return f"Raise it (kubectl edit resourcequota {self.quota}), or take down what counts against it."


def read_refusal(message: str) -> QuotaRefusal | None:
    """Return what a refusal says of a quota, or None if it is not about one."""
    if (found := _EXCEEDED.search(message)) is not None:
        return QuotaRefusal(found["quota"], _pairs(found["requested"]), _pairs(found["used"]), _pairs(found["limited"]))
    if (found := _UNSTATED.search(message)) is not None:
        return QuotaRefusal(found["quota"], {}, {}, {}, unstated=found["what"].strip())
    return None


def refusal_error(message: str, where: str) -> CapacityError | None:
    """Return the error of a write that a quota refused, or None if the refusal is not about one."""
    refusal = read_refusal(message)
    if refusal is None:
        return None
    return CapacityError("K2-CAP-003", refusal.summary, where=where, got=message, hint=refusal.remedy)


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (pair.partition("=") for pair in text.split(","))}


@dataclass(frozen=True)
class Shortfall:
    """One limit of a quota that has no room for what is needed."""

    quota: str
    resource: str
    hard: Decimal
    used: Decimal
    needed: Decimal


def shortfalls(quotas: Iterable[Object], demand: Demand) -> tuple[Shortfall, ...]:
    """Return the limits that what is to be made does not fit under, in the order of quotas and their resources."""
    found = []
    for quota in quotas:
        needed, status = demand.needed(quota), quota.get("status") or {}
        hard, used = quota["spec"].get("hard") or {}, status.get("used") or {}
        for resource in sorted(hard):
            limit, taken = quantity(str(hard[resource])), quantity(str(used.get(resource, "0")))
            more = needed.get(resource, Decimal(0))
            if more > 0 and taken + more > limit:
                found.append(Shortfall(str(quota["metadata"]["name"]), resource, limit, taken, more))
    return tuple(found)


def check_quotas(quotas: Iterable[Object], demand: Demand, namespace: str) -> None:
    """Raise CapacityError (K2-CAP-003) if what is to be made does not fit under the quotas; it names each limit."""
    short = shortfalls(quotas, demand)
    if not short:
        return
    first = short[0]
    more = f" and {len(short) - _NAMED} more" if len(short) > _NAMED else ""
    raise CapacityError(
        "K2-CAP-003",
        "The release does not fit under the quotas of the namespace.",
        where=", ".join(f"ResourceQuota {s.quota}: {s.resource}" for s in short[:_NAMED]) + more,
        got=f"{amount(first.used)} of {amount(first.hard)} {first.resource} used",
        expected=f"{amount(first.needed)} more to be free",
        hint=f"Raise it (kubectl -n {namespace} edit resourcequota {first.quota}), or take down what counts against it "
        "(k2ctl retire RELEASE -y for a set that is not live).",
        details={
            "shortfalls": [{**vars(s), **{k: amount(getattr(s, k)) for k in ("hard", "used", "needed")}} for s in short]
        },
    )
