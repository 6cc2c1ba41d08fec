"""HTTPRoutes become Envoy routes in the Gateway API's order, and what is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from infra.rehearsal.gateway import backends
from infra.rehearsal.gateway.status import LIVE, gateway_status, route_status
from infra.rehearsal.gateway.translate import Outcome, Translation, World, translate
from infra.rehearsal.gateway.xds import XdsFiles

OURS = "k2-release.io/rehearsal-gateway"
GATEWAY: dict[str, Any] = {
    "metadata": {"name": "k2-gateway", "namespace": "k2", "generation": 1},
    "spec": {"gatewayClassName": "k2", "listeners": [{"name": "http", "protocol": "HTTP", "port": 80}]},
}
CLASS = {"metadata": {"name": "k2"}, "spec": {"controllerName": OURS}}
SERVED = Outcome(True, "Live", "served")


def service(name: str, **spec: Any) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 30080}], **spec}
    return {"metadata": {"name": name, "namespace": "k2"}, "spec": spec}


def pod(name: str, app: str, ip: str, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "k2", "labels": {"app": app, "more": "yes"}, **metadata},
        "spec": {"containers": [{"name": "router", "ports": [{"name": "http", "containerPort": 31000}]}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
    }


def route(name: str, *rules: dict[str, Any], created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "k2", "generation": 3, "creationTimestamp": created},
        "spec": {"parentRefs": [{"name": "k2-gateway"}], "rules": list(rules), **spec},
    }


def rule(*backends: dict[str, Any], **match: Any) -> dict[str, Any]:
    return {"matches": [match] if match else [], "backendRefs": list(backends or [to("blue")])}


def to(name: str, weight: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "port": 80, "weight": weight, **more}


def path(value: str, kind: str = "PathPrefix") -> dict[str, Any]:
    return {"type": kind, "value": value}


def translated(*routes: dict[str, Any], **world: Any) -> Translation:
    seen: dict[str, Any] = {
        "classes": [CLASS],
        "gateways": [GATEWAY],
        "services": [service("blue"), service("green")],
        "pods": [pod("blue-0", "blue", "127.1.0.1"), pod("green-0", "green", "127.1.0.2")],
        **world,
    }
    return translate(World(routes=routes, **seen), controller=OURS, eds_dir=PurePath("/eds"))


def envoy_routes(result: Translation) -> list[dict[str, Any]]:
    routes: list[dict[str, Any]] = result.routes["virtual_hosts"][0]["routes"]
    return routes


def shares(entry: dict[str, Any]) -> dict[str, int]:
    return {item["name"]: item["weight"] for item in entry["route"]["weighted_clusters"]["clusters"]}


def hosts(result: Translation, cluster: str) -> list[tuple[str, int]]:
    found = [host for group in result.endpoints[cluster]["endpoints"] for host in group["lb_endpoints"]]
    addresses = [host["endpoint"]["address"]["socket_address"] for host in found]
    return [(address["address"], address["port_value"]) for address in addresses]


def test_weights_become_clusters_and_a_zero_keeps_its_cluster_warm() -> None:
    result = translated(route("live", rule(to("blue", 90), to("green", 0))))
    assert shares(envoy_routes(result)[0]) == {"k2/blue/80": 90}
    assert [item["name"] for item in result.clusters] == ["k2/blue/80", "k2/green/80"]
    assert hosts(result, "k2/green/80") == [("127.1.0.2", 30080)]


def test_nothing_limits_repeats_or_cuts_a_stream() -> None:
    result = translated(route("live", rule()))
    action = envoy_routes(result)[0]["route"]
    assert (action["timeout"], action["idle_timeout"]) == ("0s", "0s")
    text = json.dumps([result.routes, result.clusters])
    for trap in ("retry_policy", "health_checks", "outlier", "close_connections", "ignore_health_on_host_removal"):
        assert trap not in text


def test_a_rule_without_matches_is_everything() -> None:
    assert envoy_routes(translated(route("live", rule())))[0]["match"] == {"prefix": "/"}
    assert envoy_routes(translated(route("live", {"backendRefs": [to("blue")]})))[0]["match"] == {"prefix": "/"}


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({"path": path("/v1", "Exact")}, {"path": "/v1"}),
        ({"path": path("/v1")}, {"path_separated_prefix": "/v1"}),
        ({"path": path("/v1/")}, {"path_separated_prefix": "/v1"}),
        ({"method": "POST"}, {"prefix": "/", "headers": [{"name": ":method", "string_match": {"exact": "POST"}}]}),
        (
            {"headers": [{"name": "X-K2", "value": "a"}, {"name": "x-k2", "value": "second of the same name"}]},
            {"prefix": "/", "headers": [{"name": "x-k2", "string_match": {"exact": "a"}}]},
        ),
    ],
)
def test_match(match: dict[str, Any], expected: dict[str, Any]) -> None:
    assert envoy_routes(translated(route("live", rule(**match))))[0]["match"] == expected


def test_precedence_is_the_gateway_apis() -> None:
    header = [{"name": "a", "value": "1"}]
    older, newer = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    result = translated(
        route("z-newer", rule(path=path("/")), created=newer),
        route("b", rule(path=path("/")), created=older),
        route("a", rule(path=path("/")), created=older),
        route("two-headers", rule(headers=[*header, {"name": "b", "value": "1"}]), created=newer),
        route("header", rule(headers=header), created=older),
        route("method", rule(method="GET"), created=newer),
        route("long", rule(path=path("/v1/chat")), created=newer),
        route("short", rule(path=path("/v1"), method="GET", headers=header), created=older),
        route("exact", rule(path=path("/v", "Exact")), created=newer),
        route("rules", rule(headers=header), rule(headers=[{"name": "b", "value": "2"}]), created=newer),
    )
    order = [entry["name"].removeprefix("k2/").removesuffix("@3") for entry in envoy_routes(result)]
    assert order == [
        "exact/0/0",
        "long/0/0",
        "short/0/0",
        "method/0/0",
        "two-headers/0/0",
        "header/0/0",
        "rules/0/0",
        "rules/1/0",
        "a/0/0",
        "b/0/0",
        "z-newer/0/0",
    ]


def test_response_headers_are_text_and_not_envoy_commands() -> None:
    modifier = {
        "set": [{"name": "x-k2-release", "value": "100%"}],
        "add": [{"name": "b", "value": "2"}],
        "remove": ["c"],
    }
    filters = [{"type": "ResponseHeaderModifier", "responseHeaderModifier": modifier}]
    result = translated(route("live", rule(to("blue", filters=filters))))
    [cluster] = envoy_routes(result)[0]["route"]["weighted_clusters"]["clusters"]
    options = [
        (o["header"]["key"], o["header"]["value"], o["append_action"]) for o in cluster["response_headers_to_add"]
    ]
    assert options == [
        ("x-k2-release", "100%%", "OVERWRITE_IF_EXISTS_OR_ADD"),
        ("b", "2", "APPEND_IF_EXISTS_OR_ADD"),
    ]
    assert cluster["response_headers_to_remove"] == ["c"]


@pytest.mark.parametrize("backends", [[to("blue", 0), to("green", 0)], []])
def test_no_weight_is_answered_500(backends: list[dict[str, Any]]) -> None:
    [entry] = envoy_routes(translated(route("live", {"backendRefs": backends})))
    assert entry["direct_response"]["status"] == 500


@pytest.mark.parametrize(
    ("ref", "services", "reason", "message"),
    [
        (to("nobody"), [], "BackendNotFound", "there is no Service k2/nobody"),
        (to("blue", port=81), [service("blue")], "BackendNotFound", "Service k2/blue has no port 81"),
        ({"name": "blue"}, [service("blue")], "BackendNotFound", "Service k2/blue has no port None"),
        (to("blue"), [service("blue", selector=None)], "BackendNotFound", "Service k2/blue has no selector"),
        (to("blue", namespace="other"), [], "RefNotPermitted", "other/blue is in another namespace"),
        (to("blue", kind="Bucket", group="x.io"), [], "InvalidKind", "k2/blue is a x.io Bucket"),
    ],
)
def test_a_backend_that_leads_nowhere_keeps_its_share_and_is_named(
    ref: dict[str, Any], services: list[dict[str, Any]], reason: str, message: str
) -> None:
    result = translated(route("live", rule(to("green", 3), ref)), services=[service("green"), *services])
    assert shares(envoy_routes(result)[0]) == {"k2/green/80": 3, "unresolved": 1}
    assert envoy_routes(result)[0]["route"]["cluster_not_found_response_code"] == "INTERNAL_SERVER_ERROR"
    [verdict] = result.verdicts
    assert (verdict.accepted.true, verdict.resolved.true, verdict.resolved.reason) == (True, False, reason)
    assert message in verdict.resolved.message


def test_endpoints_are_ready_pods_that_stay() -> None:
    pods = [
        pod("b", "blue", "127.1.0.2"),
        pod("a", "blue", "127.1.0.1"),
        pod("not-ready", "blue", "127.1.0.3", ready="False"),
        pod("leaving", "blue", "127.1.0.4", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("no-address", "blue", ""),
        pod("other", "green", "127.1.0.5"),
        pod("elsewhere", "blue", "127.1.0.6", namespace="other"),
    ]
    result = translated(route("live", rule()), pods=pods)
    assert hosts(result, "k2/blue/80") == [("127.1.0.1", 30080), ("127.1.0.2", 30080)]


@pytest.mark.parametrize(
    ("port", "expected"),
    [({"port": 80}, 80), ({"port": 80, "targetPort": 9}, 9), ({"port": 80, "targetPort": "http"}, 31000)],
)
def test_target_port(port: dict[str, Any], expected: int) -> None:
    result = translated(route("live", rule()), services=[service("blue", ports=[port])])
    assert hosts(result, "k2/blue/80") == [("127.1.0.1", expected)]


def test_a_service_that_publishes_not_ready_addresses_keeps_what_the_node_controller_gave_up() -> None:
    ended = pod("blue-3", "blue", "127.5.12.3", ready="False")
    ended["status"]["phase"] = "Failed"
    pods = [
        pod("blue-0", "blue", "127.5.12.0", ready="False"),
        pod("blue-1", "blue", "127.5.12.1", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("blue-2", "blue", ""),
        ended,
    ]
    services = [service("blue", publishNotReadyAddresses=True)]
    found = backends.ready_endpoints(services[0], services[0]["spec"]["ports"][0], pods)
    assert [endpoint.pod for endpoint in found] == ["blue-0", "blue-1"]
    plain = service("blue")
    assert backends.ready_endpoints(plain, plain["spec"]["ports"][0], pods) == ()


def test_a_service_without_ready_pods_has_an_empty_cluster() -> None:
    result = translated(route("live", rule()), pods=[])
    assert result.endpoints["k2/blue/80"]["endpoints"] == []
    assert result.verdicts[0].resolved.true


REDIRECT = {"type": "RequestRedirect", "requestRedirect": {"hostname": "a"}}


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (route("r", rule(path=path("/.*", "RegularExpression"))), "spec.rules[0].matches[0].path.type"),
        (
            route("r", rule(headers=[{"type": "RegularExpression", "name": "a", "value": "b"}])),
            "spec.rules[0].matches[0].headers[0].type",
        ),
        (route("r", rule(queryParams=[{"name": "a", "value": "b"}])), "spec.rules[0].matches[0].queryParams"),
        (route("r", {**rule(), "filters": [REDIRECT]}), "spec.rules[0].filters"),
        (route("r", rule(to("blue", filters=[REDIRECT]))), "spec.rules[0].backendRefs[0].filters[0].type"),
        (route("r", {**rule(), "timeouts": {"request": "10s"}}), "spec.rules[0].timeouts.request"),
        (route("r", {**rule(), "retry": {"attempts": 2}}), "spec.rules[0].retry"),
        (route("r", {**rule(), "sessionPersistence": {"type": "Cookie"}}), "spec.rules[0].sessionPersistence"),
        (route("r", rule(), hostnames=["example.com"]), "spec.hostnames"),
        (route("r", rule(), rule(fromTheFuture=1)), "spec.rules[1].matches[0].fromTheFuture"),
    ],
)
def test_what_is_not_served_is_refused_by_name(bad: dict[str, Any], where: str) -> None:
    result = translated(bad, route("good", rule(to("green"))))
    refused, good = sorted(result.verdicts, key=lambda verdict: verdict.name, reverse=True)
    assert (refused.accepted.true, refused.accepted.reason) == (False, "UnsupportedValue")
    assert where in refused.accepted.message
    assert good.accepted.true
    assert [shares(entry) for entry in envoy_routes(result)] == [{"k2/green/80": 1}]


def test_no_limit_may_be_asked_for() -> None:
    assert translated(route("r", {**rule(), "timeouts": {"request": "0s"}})).verdicts[0].accepted.true


def test_routes_of_other_gateways_are_left_alone() -> None:
    other = {**GATEWAY, "metadata": {"name": "other", "namespace": "k2"}}
    other["spec"] = {**GATEWAY["spec"], "gatewayClassName": "foreign"}
    result = translated(route("r", rule(), parentRefs=[{"name": "other"}]), gateways=[GATEWAY, other])
    assert (result.verdicts, envoy_routes(result), result.attached_routes) == ((), [], 0)


@pytest.mark.parametrize(
    ("ref", "accepted"),
    [({"sectionName": "http"}, True), ({"sectionName": "https"}, False), ({"port": 80}, True), ({"port": 81}, False)],
)
def test_parent_listener(ref: dict[str, Any], accepted: bool) -> None:
    result = translated(route("r", rule(), parentRefs=[{"name": "k2-gateway", **ref}]))
    assert result.verdicts[0].accepted.true is accepted
    assert len(envoy_routes(result)) == (1 if accepted else 0)


def test_the_oldest_gateway_is_served() -> None:
    newer = {**GATEWAY, "metadata": {"name": "newer", "namespace": "k2", "creationTimestamp": "2026-02-01T00:00:00Z"}}
    result = translated(route("r", rule(), parentRefs=[{"name": "newer"}]), gateways=[newer, GATEWAY])
    assert result.gateway is GATEWAY
    assert result.verdicts[0].accepted.reason == "NoMatchingParent"


def test_the_same_world_gives_the_same_bytes() -> None:
    routes = [route("a", rule(to("green"), to("blue"))), route("b", rule(path=path("/v1")))]
    one, two = translated(*routes), translated(*reversed(routes))
    assert json.dumps([one.routes, one.clusters, one.endpoints]) == json.dumps(
        [two.routes, two.clusters, two.endpoints]
    )


def test_status_moves_only_when_the_answer_does() -> None:
    item = route("live", rule())
    foreign = {"controllerName": "foreign", "parentRef": {"name": "x"}, "conditions": []}
    item["status"] = {"parents": [foreign]}
    verdicts = translated(item).verdicts
    status = route_status(item, verdicts, controller=OURS, served=SERVED, now="t1")
    assert status is not None
    assert status["parents"][0] == foreign
    conditions = {c["type"]: (c["status"], c["observedGeneration"]) for c in status["parents"][1]["conditions"]}
    assert conditions == {"Accepted": ("True", 3), "ResolvedRefs": ("True", 3), LIVE: ("True", 3)}

    known = {**item, "status": status}
    assert route_status(known, verdicts, controller=OURS, served=SERVED, now="t2") is None
    failed = Outcome(False, "NotServed", "no")
    changed = route_status(known, verdicts, controller=OURS, served=failed, now="t2")
    assert changed is not None
    times = {c["type"]: c["lastTransitionTime"] for c in changed["parents"][1]["conditions"]}
    assert times == {"Accepted": "t1", "ResolvedRefs": "t1", LIVE: "t2"}
    assert route_status(known, (), controller=OURS, served=SERVED, now="t2") == {"parents": [foreign]}


def test_gateway_status_names_the_address_and_what_is_wrong() -> None:
    about = {"ready": SERVED, "address": "127.0.0.1", "url": "http://127.0.0.1:1", "attached_routes": 2, "now": "t1"}
    status = gateway_status(GATEWAY, is_served=True, **about)  # type: ignore[arg-type]
    assert status is not None
    assert status["addresses"] == [{"type": "IPAddress", "value": "127.0.0.1"}]
    assert status["listeners"][0]["attachedRoutes"] == 2
    assert {c["type"]: c["status"] for c in status["conditions"]} == {"Accepted": "True", "Programmed": "True"}
    again = gateway_status({**GATEWAY, "status": status}, is_served=True, **{**about, "now": "t2"})  # type: ignore[arg-type]
    assert again is None
    tls = {**GATEWAY, "spec": {**GATEWAY["spec"], "listeners": [{"name": "s", "protocol": "HTTPS", "port": 443}]}}
    refused = gateway_status(tls, is_served=False, **about)  # type: ignore[arg-type]
    assert refused is not None
    assert refused["conditions"][0]["reason"] == "ListenersNotValid"


def test_versions_grow_over_restarts_and_only_with_changes(tmp_path: Path) -> None:
    files = XdsFiles(tmp_path)
    first = files.write_routes({"name": "a"})
    assert files.write_routes({"name": "a"}) == first
    second = files.write_endpoints("k2/blue/80", {"cluster_name": "k2/blue/80"})
    again = XdsFiles(tmp_path)
    assert again.write_routes({"name": "a"}) == first
    third = again.write_routes({"name": "b"})
    assert first < second < third
    again.keep_endpoints_of([])
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["routes.json"]
