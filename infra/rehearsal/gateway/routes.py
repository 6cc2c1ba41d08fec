"""Reads HTTPRoutes into plain values, and refuses by name whatever this gateway does not do.

A feature that is not understood makes the whole route not accepted: a rule that is half applied would send users
somewhere that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

ANY_PATH = "/"


class UnsupportedError(Exception):
    """A route asks for something that this gateway does not do.

    Args:
        reason: CamelCase word for the Accepted condition.
        message: names the field and the value.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Match:
    """What a request must look like; all parts must hold."""

    exact: bool
    path: str
    method: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HeaderChange:
    """What happens to the headers of a response on its way out."""

    set: tuple[tuple[str, str], ...] = ()
    add: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendRef:
    """One target of a rule, as written in the route: not yet looked up."""

    group: str
    kind: str
    namespace: str
    name: str
    port: int | None
    weight: int
    headers: HeaderChange


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that match any of `matches` go to `backends` by weight."""

    matches: tuple[Match, ...]
    backends: tuple[BackendRef, ...]


def read_rules(route: Object) -> tuple[Rule, ...]:
    """Return the rules of an HTTPRoute.

    Raises:
        UnsupportedError: something in its spec is beyond this gateway.
    """
    spec = route.get("spec", {})
    _only(spec, {"parentRefs", "rules"}, "spec")
    namespace = str(route["metadata"]["namespace"])
    return tuple(_rule(rule, namespace, f"spec.rules[{i}]") for i, rule in enumerate(spec.get("rules") or [{}]))


def _rule(rule: Object, namespace: str, where: str) -> Rule:
    _only(rule, {"name", "matches", "backendRefs", "timeouts"}, where)
    for name, value in (rule.get("timeouts") or {}).items():
        # No limit is what this gateway gives: an answer of an engine may stream for many minutes.
        if value not in ("0s", "0ms", "0m", "0h"):
            message = f"{where}.timeouts.{name} {value!r}: only 0s (no limit) is served"
            raise UnsupportedError("UnsupportedValue", message)
    matches = rule.get("matches") or [{}]
    backends = rule.get("backendRefs") or []
    return Rule(
        matches=tuple(_match(match, f"{where}.matches[{i}]") for i, match in enumerate(matches)),
        backends=tuple(_backend(ref, namespace, f"{where}.backendRefs[{i}]") for i, ref in enumerate(backends)),
    )


def _match(match: Object, where: str) -> Match:
    _only(match, {"path", "headers", "method"}, where)
    path = match.get("path") or {}
    kind = path.get("type", "PathPrefix")
    if kind not in ("PathPrefix", "Exact"):
        raise UnsupportedError("UnsupportedValue", f"{where}.path.type {kind!r}: PathPrefix and Exact are served")
    return Match(
        exact=kind == "Exact",
        path=str(path.get("value", ANY_PATH)),
        method=match.get("method"),
        headers=_header_matches(match.get("headers") or [], where),
    )


def _header_matches(headers: Iterable[Object], where: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for i, header in enumerate(headers):
        kind = header.get("type", "Exact")
        if kind != "Exact":
            raise UnsupportedError("UnsupportedValue", f"{where}.headers[{i}].type {kind!r}: only Exact is served")
        # Names are equal without regard to case; of equal ones the first counts, as the API says.
        found.setdefault(str(header["name"]).lower(), str(header["value"]))
    return tuple(found.items())


def _backend(ref: Object, namespace: str, where: str) -> BackendRef:
    _only(ref, {"group", "kind", "name", "namespace", "port", "weight", "filters"}, where)
    port = ref.get("port")
    return BackendRef(
        group=str(ref.get("group", "")),
        kind=str(ref.get("kind", "Service")),
        namespace=str(ref.get("namespace") or namespace),
        name=str(ref["name"]),
        port=None if port is None else int(port),
        weight=int(ref.get("weight", 1)),
        headers=_header_change(ref.get("filters") or [], where),
    )


def _header_change(filters: Iterable[Object], where: str) -> HeaderChange:
    change = HeaderChange()
    for i, item in enumerate(filters):
        at = f"{where}.filters[{i}]"
        if item.get("type") != "ResponseHeaderModifier":
            raise UnsupportedError(
                "UnsupportedValue", f"{at}.type {item.get('type')!r}: only ResponseHeaderModifier is served"
            )
        _only(item, {"type", "responseHeaderModifier"}, at)
        modifier = item.get("responseHeaderModifier") or {}
        _only(modifier, {"set", "add", "remove"}, f"{at}.responseHeaderModifier")
        change = HeaderChange(
            set=change.set + _pairs(modifier.get("set")),
            add=change.add + _pairs(modifier.get("add")),
            remove=change.remove + tuple(str(name) for name in modifier.get("remove") or ()),
        )
    return change


def _pairs(headers: Iterable[Object] | None) -> tuple[tuple[str, str], ...]:
    return tuple((str(header["name"]), str(header["value"])) for header in headers or ())


def _only(part: Object, known: set[str], where: str) -> None:
    """Refuse every field of `part` that holds something and is not known."""
    unknown = sorted(key for key, value in part.items() if key not in known and value not in (None, [], {}, ""))
    if unknown:
        raise UnsupportedError("UnsupportedValue", f"{where}.{unknown[0]} is not served by this gateway")
