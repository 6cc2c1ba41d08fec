"""Quantities as Kubernetes writes them: `8`, `500m`, `1536Gi`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_FACTORS = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    "m": Decimal("0.001"),
    "u": Decimal("0.000001"),
    "n": Decimal("0.000000001"),
}
_QUANTITY = re.compile(r"^(?P<number>[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)(?P<suffix>[A-Za-z]*)$")


def quantity(text: str) -> Decimal:
    """Return a quantity as Kubernetes writes it (`8`, `500m`, `1536Gi`) as a number.

    Raises:
        ValueError: it is none.
    """
    found = _QUANTITY.match(text.strip())
    try:
        return Decimal(found["number"]) * _FACTORS[found["suffix"]]  # type: ignore[index]
    except (TypeError, KeyError, InvalidOperation) as error:
        raise ValueError(f"{text!r} is no quantity") from error


def amount(value: Decimal) -> str:
    """Return a number as a quantity: in the largest binary unit that it is a whole multiple of, from Mi on."""
    for unit in ("Ti", "Gi", "Mi"):
        if value and value % _FACTORS[unit] == 0:
            return f"{int(value / _FACTORS[unit])}{unit}"
    return f"{value.normalize():f}"
