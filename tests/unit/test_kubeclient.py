"""The REST client against a small real HTTP server."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from infra.rehearsal import kubeclient
from infra.rehearsal.kubeclient import KubeClient, KubeError, PatchKind
from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.kuberesources import LEASES, NODES, PODS, SERVICE_ACCOUNTS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(handler: Handler, scenario: Callable[[KubeClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with KubeClient(Connection(f"http://127.0.0.1:{port}", token="secret"), **options) as client:
                return await asyncio.wait_for(scenario(client), 60)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def item(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "k2", "uid": f"uid-{name}", "resourceVersion": str(version)}}


def test_paths():
    assert PODS.path("k2", "p", "status") == "/api/v1/namespaces/k2/pods/p/status"
    assert LEASES.path() == "/apis/coordination.k8s.io/v1/leases"
    assert NODES.path("ignored", "node-1") == "/api/v1/nodes/node-1"
    assert SERVICE_ACCOUNTS.path("k2", "a/b") == "/api/v1/namespaces/k2/serviceaccounts/a%2Fb"


def test_requests_carry_the_token_the_kind_and_the_patch_type():
    seen: list[tuple[str, str, dict[str, str], str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        seen.append((request.method, request.headers["Authorization"], dict(request.query), request.content_type, body))
        return web.json_response({"kind": "Pod"})

    async def scenario(client: KubeClient) -> None:
        await client.create(PODS, {"metadata": {"name": "p", "namespace": "k2"}})
        await client.patch(PODS, "p", {"spec": {}}, "k2", kind=PatchKind.APPLY, field_manager="k2-release", force=True)
        await client.delete(PODS, "p", "k2", grace_s=0, uid="u")

    serve(handler, scenario)
    assert seen[0][:2] == ("POST", "Bearer secret") and seen[0][4]["kind"] == "Pod"
    assert seen[1][2:4] == ({"fieldManager": "k2-release", "force": "true"}, "application/apply-patch+yaml")
    assert seen[2][4]["gracePeriodSeconds"] == 0 and seen[2][4]["preconditions"] == {"uid": "u"}


def test_errors_carry_the_reason_and_a_gone_object_needs_no_deletion():
    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("/broken"):
            return web.Response(status=502, text="bad gateway")
        return web.json_response({"kind": "Status", "reason": "NotFound", "message": "no pod p"}, status=404)

    async def scenario(client: KubeClient) -> None:
        with pytest.raises(KubeError, match="404 NotFound: no pod p") as caught:
            await client.get(PODS, "p", "k2")
        assert caught.value.not_found and not caught.value.conflict
        assert await client.delete(PODS, "p", "k2") is False
        with pytest.raises(KubeError, match="502 : bad gateway"):
            await client.get(PODS, "broken", "k2")
        assert not await client.ready()

    serve(handler, scenario)


def test_a_list_follows_its_pages_and_names_the_kind():
    async def handler(request: web.Request) -> web.Response:
        if request.query.get("continue") == "more":
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [item("b", 2)]})
        metadata = {"resourceVersion": "9", "continue": "more"}
        return web.json_response({"metadata": metadata, "items": [item("a", 1)]})

    listed = serve(handler, lambda client: client.list(PODS, "k2", label_selector="x=y"))
    assert [(entry["kind"], entry["metadata"]["name"]) for entry in listed.items] == [("Pod", "a"), ("Pod", "b")]
    assert listed.resource_version == "9"


def test_a_watch_survives_an_expired_version_and_tells_only_the_difference():
    lists = iter(
        [
            {"metadata": {"resourceVersion": "10"}, "items": [item("a", 1), item("b", 2)]},
            {"metadata": {"resourceVersion": "20"}, "items": [item("b", 2), item("c", 15)]},
        ]
    )
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    streams = {
        "10": [{"type": "MODIFIED", "object": item("a", 11)}, {"type": "BOOKMARK", "object": item("", 12)}],
        "12": [gone],
        "20": [{"type": "DELETED", "object": item("c", 21)}],
    }

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(next(lists))
        response = web.StreamResponse()
        await response.prepare(request)
        for event in streams.get(request.query["resourceVersion"], []):
            line = json.dumps(event).encode() + b"\n"
            # In two halves: a line may arrive in pieces.
            await response.write(line[:10])
            await response.write(line[10:])
        if request.query["resourceVersion"] not in streams:
            await asyncio.sleep(60)
        return response

    async def scenario(client: KubeClient) -> list[tuple[str, str]]:
        told = []
        async for event in client.watch(PODS, "k2"):
            told.append((event.type.value, event.object.get("metadata", {}).get("name", "")))
            if told[-1] == ("DELETED", "c"):
                return told
        return told

    assert serve(handler, scenario) == [
        ("ADDED", "a"),
        ("ADDED", "b"),
        ("SYNCED", ""),
        ("MODIFIED", "a"),
        ("DELETED", "a"),
        ("ADDED", "c"),
        ("SYNCED", ""),
        ("DELETED", "c"),
    ]


def test_a_watch_that_is_held_is_noticed_by_its_own_deadline(monkeypatch):
    """The server takes the watch and says nothing more, not even that it is over: what went by is listed anew."""
    monkeypatch.setattr(kubeclient, "_WATCH_GRACE_S", 0.3)
    lists = iter([[item("a", 1)], [item("b", 2)]])
    windows: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": next(lists)})
        windows.append(request.query["timeoutSeconds"])
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async def scenario(client: KubeClient) -> list[str]:
        told = []
        async for event in client.watch(PODS, "k2"):
            told.append(f"{event.type.value} {event.object.get('metadata', {}).get('name', '')}")
            if told[-1] == "ADDED b":
                return told
        return told

    began = time.monotonic()
    assert serve(handler, scenario, watch_window_s=1.0) == ["ADDED a", "SYNCED ", "DELETED a", "ADDED b"]
    assert windows[0] == "1"
    assert 1.0 < time.monotonic() - began < 10


def test_a_kubeconfig_is_read_with_its_context(tmp_path):
    (tmp_path / "ca.crt").write_text("CA")
    (tmp_path / "token").write_text("t1\n")
    key = base64.b64encode(b"KEY").decode()
    config = {
        "current-context": "x",
        "contexts": [
            {"name": "x", "context": {"cluster": "c", "user": "u"}},
            {"name": "y", "context": {"cluster": "c", "user": "v"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1/", "certificate-authority": "ca.crt"}}],
        "users": [
            {"name": "u", "user": {"tokenFile": "token"}},
            {"name": "v", "user": {"client-key-data": key, "client-certificate-data": key}},
        ],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    assert Connection.from_kubeconfig(path) == Connection("https://127.0.0.1:1", ca_pem="CA", token="t1")
    assert Connection.from_kubeconfig(path, "y").client_key_pem == "KEY"
    assert "t1" not in repr(Connection.from_kubeconfig(path))
