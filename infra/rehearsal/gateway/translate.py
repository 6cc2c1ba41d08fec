"""Turns HTTPRoutes, Services and Pods into Envoy resources. Pure: the same world gives the same bytes.

The order of routes is the Gateway API's: an exact path, the longest prefix, a method, the most headers, then the oldest
HTTPRoute, then its name. A backend that leads nowhere keeps its share of requests and answers them 500; a Service with
no ready pod answers 503, by Envoy itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from infra.rehearsal.gateway.backends import Endpoint, UnresolvedError, ready_endpoints, service_port
from infra.rehearsal.gateway.parents import Parent, attach, served_gateway
from infra.rehearsal.gateway.routes import (
    ANY_PATH,
    BackendRef,
    HeaderChange,
    Match,
    Object,
    Rule,
    UnsupportedError,
    read_rules,
)

ROUTE_CONFIG = "k2"
"""Name of the one RouteConfiguration."""

NO_CLUSTER = "unresolved"
"""A cluster that never exists: requests sent to it are answered 500, as the Gateway API wants for a bad backend."""

EnvoyResource = dict[str, Any]


@dataclass(frozen=True, slots=True)
class World:
    """What the controller sees of the cluster, as JSON objects."""

    classes: Sequence[Object] = ()
    gateways: Sequence[Object] = ()
    routes: Sequence[Object] = ()
    services: Sequence[Object] = ()
    pods: Sequence[Object] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer about a route: becomes a condition of its status."""

    true: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """What this gateway says about one HTTPRoute under one of its parents."""

    namespace: str
    name: str
    generation: int
    parent_ref: Object
    accepted: Outcome
    resolved: Outcome


@dataclass(frozen=True, slots=True)
class Translation:
    """What Envoy is to run, and what to tell the authors of the routes."""

    routes: EnvoyResource
    clusters: tuple[EnvoyResource, ...]
    endpoints: dict[str, EnvoyResource]
    """ClusterLoadAssignment by cluster name."""
    verdicts: tuple[RouteVerdict, ...]
    gateway: Object | None
    """The Gateway that Envoy serves, or None."""
    attached_routes: int


@dataclass(slots=True)
class _Clusters:
    """The clusters that routes asked for so far."""

    services: Sequence[Object]
    pods: Sequence[Object]
    found: dict[str, tuple[Endpoint, ...]] = field(default_factory=dict)

    def of(self, ref: BackendRef, *, from_namespace: str) -> str:
        """Return the name of the cluster of a backend.

        Raises:
            UnresolvedError: it leads nowhere.
        """
        service, port = service_port(ref, self.services, from_namespace=from_namespace)
        name = f"{ref.namespace}/{ref.name}/{ref.port}"
        self.found[name] = ready_endpoints(service, port, self.pods)
        return name


def translate(world: World, *, controller: str, eds_dir: PurePath) -> Translation:
    """Return Envoy's routes, clusters and endpoints for a world, and a verdict on each route of ours.

    Args:
        world: what the API server holds.
        controller: our controllerName; routes of other controllers' Gateways are left alone.
        eds_dir: directory of the endpoint files, one a cluster (see `endpoint_file`).
    """
    gateway = served_gateway(world.classes, world.gateways, controller)
    clusters = _Clusters(world.services, world.pods)
    verdicts: list[RouteVerdict] = []
    entries: list[tuple[tuple[Any, ...], EnvoyResource]] = []
    attached = 0
    for route in sorted(world.routes, key=lambda item: _age(item)):
        parents = attach(route, world.classes, world.gateways, gateway, controller)
        if not parents:
            continue
        accepted, resolved, made = _translate_route(route, clusters)
        own = [_verdict(route, parent, accepted, resolved) for parent in parents]
        verdicts += own
        if any(verdict.accepted.true for verdict in own):
            attached += 1
            entries += made
    entries.sort(key=lambda entry: entry[0])
    return Translation(
        routes=_route_config([entry for _, entry in entries]),
        clusters=tuple(_cluster(name, eds_dir) for name in sorted(clusters.found)),
        endpoints={name: _load_assignment(name, found) for name, found in sorted(clusters.found.items())},
        verdicts=tuple(verdicts),
        gateway=gateway,
        attached_routes=attached,
    )


def endpoint_file(eds_dir: PurePath, cluster: str) -> PurePath:
    """Return the file that holds the endpoints of a cluster (Envoy takes one assignment from each file)."""
    return eds_dir / f"{cluster.replace('/', '_')}.json"


def _translate_route(
    route: Object, clusters: _Clusters
) -> tuple[Outcome, Outcome, list[tuple[tuple[Any, ...], EnvoyResource]]]:
    """Return (accepted, resolved, Envoy routes with their sort keys) of one HTTPRoute."""
    try:
        rules = read_rules(route)
    except UnsupportedError as error:
        resolved = Outcome(True, "ResolvedRefs", "not looked at: the route is not accepted")
        return Outcome(False, error.reason, error.message), resolved, []
    problems: list[UnresolvedError] = []
    made = []
    for i, rule in enumerate(rules):
        action = _action(rule, route, clusters, problems)
        for j, match in enumerate(rule.matches):
            # The generation stands in Envoy's own dump, for whoever asks which one is live.
            name = f"{_full_name(route)}/{i}/{j}@{route['metadata'].get('generation', 0)}"
            entry = {"name": name, "match": _envoy_match(match), **action}
            made.append(((*_rank(match), *_age(route), i, j), entry))
    resolved = Outcome(True, "ResolvedRefs", "every backend is known")
    if problems:
        resolved = Outcome(False, problems[0].reason, "; ".join(sorted({problem.message for problem in problems})))
    return Outcome(True, "Accepted", "every field of the route is served"), resolved, made


def _verdict(route: Object, parent: Parent, accepted: Outcome, resolved: Outcome) -> RouteVerdict:
    if parent.refused is not None:
        accepted = Outcome(False, *parent.refused)
    meta = route["metadata"]
    return RouteVerdict(meta["namespace"], meta["name"], int(meta.get("generation", 0)), parent.ref, accepted, resolved)


def _rank(match: Match) -> tuple[int, int, int, int]:
    """Sort key of a match: the most specific first, in the Gateway API's order."""
    return (0 if match.exact else 1, -len(match.path), 0 if match.method else 1, -len(match.headers))


def _age(route: Object) -> tuple[str, str]:
    return (str(route["metadata"].get("creationTimestamp", "")), _full_name(route))


def _full_name(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _action(rule: Rule, route: Object, clusters: _Clusters, problems: list[UnresolvedError]) -> EnvoyResource:
    """Return what Envoy does with the requests of a rule; appends to `problems` what leads nowhere."""
    weighted = []
    for ref in rule.backends:
        try:
            name = clusters.of(ref, from_namespace=route["metadata"]["namespace"])
        except UnresolvedError as error:
            problems.append(error)
            name = NO_CLUSTER
        if ref.weight > 0:
            weighted.append({"name": name, "weight": ref.weight, **_headers(ref.headers)})
    if not weighted:
        body = f"no backend of {_full_name(route)} has a weight above 0\n"
        return {"direct_response": {"status": 500, "body": {"inline_string": body}}}
    return {
        "route": {
            "weighted_clusters": {"clusters": weighted},
            "cluster_not_found_response_code": "INTERNAL_SERVER_ERROR",
            # An answer may stream for many minutes and pause in the middle; the caller's own limits decide.
            # There is no retry_policy: a generation that was started may not be started twice.
            "timeout": "0s",
            "idle_timeout": "0s",
        }
    }


def _headers(change: HeaderChange) -> EnvoyResource:
    made: EnvoyResource = {}
    options = [_option(name, value, "OVERWRITE_IF_EXISTS_OR_ADD") for name, value in change.set]
    options += [_option(name, value, "APPEND_IF_EXISTS_OR_ADD") for name, value in change.add]
    if options:
        made["response_headers_to_add"] = options
    if change.remove:
        made["response_headers_to_remove"] = list(change.remove)
    return made


def _option(name: str, value: str, action: str) -> EnvoyResource:
    # Envoy reads %...% in values as commands; a value from a route is text.
    header = {"key": name, "value": value.replace("%", "%%")}
    return {"header": header, "append_action": action, "keep_empty_value": True}


def _envoy_match(match: Match) -> EnvoyResource:
    made: EnvoyResource
    if match.exact:
        made = {"path": match.path}
    elif match.path.rstrip("/"):
        # By path elements: /v1 matches /v1 and /v1/x but not /v10. A slash at the end says the same.
        made = {"path_separated_prefix": match.path.rstrip("/")}
    else:
        made = {"prefix": ANY_PATH}
    headers = [_equals(name, value) for name, value in match.headers]
    if match.method:
        headers.append(_equals(":method", match.method))
    if headers:
        made["headers"] = headers
    return made


def _equals(name: str, value: str) -> EnvoyResource:
    return {"name": name, "string_match": {"exact": value}}


def _route_config(routes: Iterable[EnvoyResource]) -> EnvoyResource:
    return {
        "@type": "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        "name": ROUTE_CONFIG,
        "virtual_hosts": [{"name": ROUTE_CONFIG, "domains": ["*"], "routes": list(routes)}],
    }


def _cluster(name: str, eds_dir: PurePath) -> EnvoyResource:
    # No health checks and no outlier detection: readiness is the pod's. Envoy cuts streams of a host that it finds
    # unhealthy, and lets them end on a host that merely leaves the assignment.
    limit = 1_000_000
    source = {"path": str(endpoint_file(eds_dir, name)), "watched_directory": {"path": str(eds_dir)}}
    return {
        "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": {"resource_api_version": "V3", "path_config_source": source}},
        "connect_timeout": "1s",
        "lb_policy": "LEAST_REQUEST",
        # Envoy's own limits (1,024 requests) would turn a load test of long streams into 503s.
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": limit, "max_pending_requests": limit, "max_requests": limit, "max_retries": 0}
            ]
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http_protocol_options": {}},
                # Shorter than any backend's own keep-alive limit: a connection that the backend closes at the moment
                # of a new request would be a failed request, as nothing is retried.
                "common_http_protocol_options": {"idle_timeout": "4s"},
            }
        },
    }


def _load_assignment(name: str, endpoints: Iterable[Endpoint]) -> EnvoyResource:
    hosts = [
        {
            "endpoint": {
                "hostname": endpoint.pod,
                "address": {"socket_address": {"address": endpoint.address, "port_value": endpoint.port}},
            }
        }
        for endpoint in endpoints
    ]
    return {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": hosts}] if hosts else [],
    }
