"""The translation of HTTPRoutes on the real Envoy: shares, headers, and streams that nothing may cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from infra.rehearsal.addresses import free_ports
from infra.rehearsal.gateway.admin import Admin, EnvoyError
from infra.rehearsal.gateway.bootstrap import Address, bootstrap, validate
from infra.rehearsal.gateway.envoy import Envoy
from infra.rehearsal.gateway.translate import Translation, World, translate
from infra.rehearsal.gateway.xds import XdsFiles

HOST = "127.0.0.1"
CONTROLLER = "example.com/gateway"
BLUE, GREEN = "blue", "green"
STREAM_CHUNKS = 20


class Backend:
    """Stands for the router of one release: plain answers, and streams of STREAM_CHUNKS pieces."""

    def __init__(self, name: str) -> None:
        self.name, self.port = name, free_ports(1, HOST)[0]
        self.open_streams = 0
        self.flowing = asyncio.Event()  # cleared, every stream waits in its middle
        self.flowing.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/stream", self._stream)
        app.router.add_get("/{path:.*}", self._plain)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, self.port).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def _plain(self, request: web.Request) -> web.Response:
        return web.Response(text=self.name, headers={"x-k2-release": "said by the backend"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.open_streams += 1
        try:
            for i in range(STREAM_CHUNKS):
                await response.write(f"data: {self.name} {i}\n\n".encode())
                await asyncio.sleep(0.02)
                if i == STREAM_CHUNKS // 2:
                    await self.flowing.wait()
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.open_streams -= 1
        return response


@dataclass
class Site:
    envoy: Envoy
    admin: Admin
    session: aiohttp.ClientSession
    backends: dict[str, Backend]

    async def apply(self, routes: Sequence[dict[str, Any]], *, ready: Sequence[str] = (BLUE, GREEN)) -> Translation:
        world = World(
            classes=[{"metadata": {"name": "k2"}, "spec": {"controllerName": CONTROLLER}}],
            gateways=[gateway()],
            routes=routes,
            services=[service(name, backend.port) for name, backend in self.backends.items()],
            pods=[pod(name, name in ready) for name in self.backends],
        )
        wanted = translate(world, controller=CONTROLLER, eds_dir=self.envoy.files.eds_dir)
        await self.envoy.apply(wanted, self.admin)
        return wanted

    async def get(self, path: str = "/", **headers: str) -> tuple[int, str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.get(self.envoy.listen.url + path, headers=named) as response:
            return response.status, await response.text(), response.headers.get("x-k2-release", "")

    async def stream(self) -> str:
        """Read a stream to its end and return who sent it; raises when it is cut."""
        async with self.session.get(self.envoy.listen.url + "/stream") as response:
            assert response.status == 200
            text = await response.text()
        assert text.count("data: ") == STREAM_CHUNKS + 1
        assert text.endswith("data: [DONE]\n\n")
        return text.split()[1]

    async def shares(self, requests: int) -> Counter[str]:
        answers = await asyncio.gather(*(self._some(requests // 8) for _ in range(8)))
        return Counter(name for part in answers for name in part)

    async def _some(self, requests: int) -> list[str]:
        found = []
        for _ in range(requests):
            status, name, _ = await self.get()
            assert status == 200
            found.append(name)
        return found


def gateway() -> dict[str, Any]:
    listener = {"name": "http", "protocol": "HTTP", "port": 80}
    spec = {"gatewayClassName": "k2", "listeners": [listener]}
    return {"metadata": {"name": "k2-gateway", "namespace": "k2"}, "spec": spec}


def route(name: str, *backends: dict[str, Any], header: str | None = None) -> dict[str, Any]:
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/"}}
    if header:
        match["headers"] = [{"name": "x-k2-release", "value": header}]
    spec = {"parentRefs": [{"name": "k2-gateway"}], "rules": [{"matches": [match], "backendRefs": list(backends)}]}
    return {"metadata": {"name": name, "namespace": "k2", "generation": 1}, "spec": spec}


def to(name: str, weight: int = 1) -> dict[str, Any]:
    modifier = {"set": [{"name": "x-k2-release", "value": name}]}
    filters = [{"type": "ResponseHeaderModifier", "responseHeaderModifier": modifier}]
    return {"name": name, "port": 80, "weight": weight, "filters": filters}


def service(name: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": port}]}
    return {"metadata": {"name": name, "namespace": "k2"}, "spec": spec}


def pod(name: str, ready: bool) -> dict[str, Any]:
    status = {"podIP": HOST, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {"name": f"{name}-0", "namespace": "k2", "labels": {"app": name}}, "status": status}


@contextlib.asynccontextmanager
async def running_site(directory: Path) -> AsyncIterator[Site]:
    backends = {name: Backend(name) for name in (BLUE, GREEN)}
    async with contextlib.AsyncExitStack() as stack:
        for backend in backends.values():
            await stack.enter_async_context(backend.running())
        envoy, admin = new_envoy(directory)
        await stack.enter_async_context(admin)
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        await stack.enter_async_context(session)
        empty = translate(World(), controller=CONTROLLER, eds_dir=envoy.files.eds_dir)
        envoy.files.write_clusters(empty.clusters)
        envoy.files.write_routes(empty.routes)
        await envoy.start(admin)
        try:
            yield Site(envoy, admin, session, backends)
        finally:
            await envoy.stop(grace_s=0)


def new_envoy(directory: Path) -> tuple[Envoy, Admin]:
    listen, admin = (Address(HOST, port) for port in free_ports(2, HOST))
    logs = {"log": directory / "envoy.log", "access_log": directory / "access.log"}
    return Envoy(directory / "gateway", listen, admin, **logs), Admin(admin)


def on_site(directory: Path, check: Callable[[Site], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running_site(directory) as site:
            await check(site)

    asyncio.run(asyncio.wait_for(run(), 110))


def test_start_up_file_is_one_that_envoy_accepts(tmp_path: Path) -> None:
    files = XdsFiles(tmp_path)
    files.write_clusters([])
    files.write_routes(translate(World(), controller=CONTROLLER, eds_dir=files.eds_dir).routes)
    document = bootstrap(Address(HOST, 1), Address(HOST, 2), files, tmp_path / "access.log")
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(document))
    assert validate(path) is None
    document["static_resources"]["listeners"][0]["address"] = {"socket_address": {"port_value": "no"}}
    path.write_text(json.dumps(document))
    assert "port_value" in (validate(path) or "")


def test_shares_follow_the_weights_and_no_stream_is_cut(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        await site.apply([route("live", to(BLUE, 100), to(GREEN, 0))])
        stop = asyncio.Event()

        async def stream_for_ever() -> int:
            count = 0
            while not stop.is_set():
                await site.stream()
                count += 1
            return count

        streams = [asyncio.create_task(stream_for_ever()) for _ in range(6)]
        for percent in (0, 1, 10, 50, 100, 0):
            await site.apply([route("live", to(BLUE, 100 - percent), to(GREEN, percent))])
            total = 480
            green = (await site.shares(total))[GREEN]
            # Five standard deviations of a fair draw: a wrong weight is far outside, chance is not.
            slack = 5 * (total * percent * (100 - percent)) ** 0.5 / 100
            assert abs(green - total * percent / 100) <= slack, f"{percent}%: {green} of {total}"
        stop.set()
        assert sum(await asyncio.gather(*streams)) >= 6
        failures = await site.admin.stats(r"^http\.gateway\.downstream_rq_(5xx|rx_reset|tx_reset)$")
        assert failures and not any(failures.values()), failures

    on_site(tmp_path, check)


def test_header_rule_reaches_one_backend_and_the_release_is_named(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        await site.apply([route("live", to(BLUE, 100)), route("probe", to(GREEN), header="green")])
        assert {await site.get() for _ in range(20)} == {(200, BLUE, BLUE)}
        assert {await site.get(x_k2_release="green") for _ in range(20)} == {(200, GREEN, GREEN)}
        assert await site.get(x_k2_release="other") == (200, BLUE, BLUE)

    on_site(tmp_path, check)


def test_stream_ends_on_an_endpoint_or_cluster_that_left(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        blue = site.backends[BLUE]

        async def held(count: int) -> list[asyncio.Task[str]]:
            blue.flowing.clear()
            tasks = [asyncio.create_task(site.stream()) for _ in range(count)]
            while blue.open_streams < count:
                await asyncio.sleep(0.005)
            return tasks

        live = [route("live", to(BLUE, 100))]
        await site.apply(live)
        streams = await held(5)
        await site.apply(live, ready=[GREEN])
        assert (await site.get())[0] == 503
        assert blue.open_streams == 5
        blue.flowing.set()
        assert await asyncio.gather(*streams) == [BLUE] * 5

        await site.apply(live)
        streams = await held(5)
        await site.apply([route("live", to(GREEN, 100))])
        assert blue.open_streams == 5
        assert await site.admin.warm_clusters() == {"k2/green/80"}
        blue.flowing.set()
        assert await asyncio.gather(*streams) == [BLUE] * 5

    on_site(tmp_path, check)


def test_bad_backends_answer_as_the_gateway_api_says(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        await site.apply([])
        assert (await site.get())[0] == 404
        await site.apply([route("live", to(BLUE, 0), to(GREEN, 0))])
        assert (await site.get())[0] == 500
        await site.apply([route("live", to("nobody"))])
        assert (await site.get())[0] == 500
        await site.apply([route("live", to(BLUE))], ready=[])
        assert (await site.get())[0] == 503
        await site.apply([route("live", to(BLUE, 1), to("nobody", 1))])
        statuses = Counter([(await site.get())[0] for _ in range(100)])
        assert set(statuses) == {200, 500}

    on_site(tmp_path, check)


def test_refused_routes_leave_the_old_ones(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        wanted = await site.apply([route("live", to(BLUE))])
        version = await site.admin.route_version()
        bad = json.loads(json.dumps(wanted.routes))
        bad["virtual_hosts"][0]["routes"][0]["route"]["timeout"] = "soon"
        with pytest.raises(EnvoyError, match="refused"):
            await site.envoy.apply(Translation(bad, *_rest(wanted)), site.admin)
        assert (await site.get())[:2] == (200, BLUE)
        await site.envoy.apply(wanted, site.admin)
        assert await site.admin.route_version() == version
        await site.apply([route("live", to(GREEN))])
        assert await site.admin.route_version() > version
        assert (await site.get())[:2] == (200, GREEN)

    on_site(tmp_path, check)


def _rest(item: Translation) -> tuple[Any, ...]:
    return (item.clusters, item.endpoints, item.verdicts, item.gateway, item.attached_routes)


def test_envoy_is_taken_over_and_comes_back_with_its_last_routes(tmp_path: Path) -> None:
    async def check(site: Site) -> None:
        wanted = await site.apply([route("live", to(BLUE))])
        first, pid = site.envoy, site.envoy.pid
        assert pid is not None
        logs = {"log": tmp_path / "envoy.log", "access_log": tmp_path / "access.log"}
        second = Envoy(tmp_path / "gateway", first.listen, first.admin_address, **logs)
        assert await second.start(site.admin)
        assert second.pid == pid
        version = await site.admin.route_version()
        await second.apply(wanted, site.admin)
        assert await site.admin.route_version() == version

        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(first.wait(), second.wait())
        assert not await second.start(site.admin)
        site.envoy = second
        try:
            assert (await site.get())[:2] == (200, BLUE)
            assert await site.admin.route_version() == version
        finally:
            await second.stop(grace_s=1, admin=site.admin)

    on_site(tmp_path, check)
