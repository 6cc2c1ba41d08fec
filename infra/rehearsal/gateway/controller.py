"""Keeps Envoy at what the API server's HTTPRoutes say, and says in their status when it is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from infra.rehearsal.gateway.admin import Admin, EnvoyError
from infra.rehearsal.gateway.bootstrap import Address
from infra.rehearsal.gateway.envoy import Envoy
from infra.rehearsal.gateway.mirror import Mirror
from infra.rehearsal.gateway.parents import GATEWAY_GROUP, our_classes, our_gateways
from infra.rehearsal.gateway.routes import Object
from infra.rehearsal.gateway.status import class_status, gateway_status, route_status
from infra.rehearsal.gateway.translate import Outcome, Translation, World, translate
from infra.rehearsal.kubeclient import KubeClient, KubeError
from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.kuberesources import PODS, SERVICES, Resource

CONTROLLER = "k2-release.io/rehearsal-gateway"
"""controllerName of the GatewayClasses that this gateway follows."""

CLASSES = Resource(GATEWAY_GROUP, "v1", "gatewayclasses", "GatewayClass", namespaced=False)
GATEWAYS = Resource(GATEWAY_GROUP, "v1", "gateways", "Gateway")
ROUTES = Resource(GATEWAY_GROUP, "v1", "httproutes", "HTTPRoute")

_RETRY_S = 1.0
_STOP_GRACE_S = 2.0
_LIVE = Outcome(True, "Live", "Envoy serves by this generation of the route")

log = logging.getLogger("gateway")


class Controller:
    """Follows one namespace. It may die at any point: the next one starts from the API server and Envoy's own state."""

    def __init__(self, client: KubeClient, envoy: Envoy, admin: Admin, namespace: str) -> None:
        self._client, self._envoy, self._admin = client, envoy, admin
        self._changed = asyncio.Event()
        self._mirrors = {
            resource: Mirror(resource, namespace, self._changed)
            for resource in (CLASSES, GATEWAYS, ROUTES, SERVICES, PODS)
        }
        self._last: Translation | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then end Envoy in order.

        Whatever else ends this, Envoy is left running: users are served by the last routes, and the next controller
        takes it over.
        """
        self._prepare_files()
        how = "taken over" if await self._envoy.start(self._admin) else "started"
        log.info("envoy pid %s %s at %s", self._envoy.pid, how, self._envoy.listen)
        tasks = [asyncio.create_task(mirror.follow(self._client)) for mirror in self._mirrors.values()]
        tasks += [asyncio.create_task(self._supervise()), asyncio.create_task(self._reconcile_for_ever())]
        tasks.append(asyncio.create_task(_until_set(stop)))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()  # raises what a task failed with
        await self._envoy.stop(grace_s=_STOP_GRACE_S, admin=self._admin)
        log.info("stopped")

    def _prepare_files(self) -> None:
        """Give Envoy files to start with. Those of an earlier run are kept: it serves by them until we know better."""
        files = self._envoy.files
        if not files.routes.version:
            empty = translate(World(), controller=CONTROLLER, eds_dir=files.eds_dir)
            files.write_clusters(empty.clusters)
            files.write_routes(empty.routes)

    async def _supervise(self) -> None:
        """Start Envoy again whenever it ends."""
        while True:
            await self._envoy.wait()
            log.error("envoy ended; starting it again")
            try:
                await self._envoy.start(self._admin)
                log.info("envoy pid %s started at %s", self._envoy.pid, self._envoy.listen)
                self._changed.set()
            except EnvoyError as error:
                log.error("%s", error)
                await asyncio.sleep(_RETRY_S)

    async def _reconcile_for_ever(self) -> None:
        # A list that is not there yet would look like objects that were deleted.
        await asyncio.gather(*(mirror.synced.wait() for mirror in self._mirrors.values()))
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self._reconcile():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _RETRY_S)
                self._changed.set()

    def _world(self) -> World:
        classes, gateways, routes, services, pods = (mirror.objects() for mirror in self._mirrors.values())
        return World(classes, gateways, routes, services, pods)

    async def _reconcile(self) -> bool:
        """Bring Envoy to the world as seen now and write what came of it; return False when it is to be tried again."""
        started = time.monotonic()
        world = self._world()
        wanted = translate(world, controller=CONTROLLER, eds_dir=self._envoy.files.eds_dir)
        served = _LIVE
        try:
            await self._envoy.apply(wanted, self._admin)
        except EnvoyError as error:
            log.error("%s", error)
            # The text of the error names versions and files; in a status it would change at every try.
            served = Outcome(False, "NotServed", "Envoy does not serve by this generation; the gateway's log says why")
        if self._last != wanted:
            self._log_change(wanted, time.monotonic() - started)
            self._last = wanted
        return await self._write_statuses(world, wanted, served) and served.true

    def _log_change(self, wanted: Translation, took_s: float) -> None:
        version = self._envoy.files.routes.version
        hosts = sum(len(group["lb_endpoints"]) for item in wanted.endpoints.values() for group in item["endpoints"])
        shape = f"{wanted.attached_routes} HTTPRoutes, {len(wanted.clusters)} clusters, {hosts} endpoints"
        log.info("serving routes %s after %.1f ms: %s", version, took_s * 1000, shape)

    async def _write_statuses(self, world: World, wanted: Translation, served: Outcome) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        changes: list[tuple[Resource, Object, Object | None]] = []
        for route in world.routes:
            verdicts = [item for item in wanted.verdicts if _same(item.namespace, item.name, route)]
            status = route_status(route, verdicts, controller=CONTROLLER, served=served, now=now)
            changes.append((ROUTES, route, status))
        for gateway in our_gateways(world.classes, world.gateways, CONTROLLER):
            changes.append((GATEWAYS, gateway, self._gateway_status(gateway, wanted, served, now)))
        names = our_classes(world.classes, CONTROLLER)
        changes += [(CLASSES, c, class_status(c, now=now)) for c in world.classes if c["metadata"]["name"] in names]
        return all([await self._patch(*change) for change in changes])

    def _gateway_status(self, gateway: Object, wanted: Translation, served: Outcome, now: str) -> Object | None:
        listen = self._envoy.listen
        return gateway_status(
            gateway,
            is_served=wanted.gateway is gateway,
            ready=served if served.true else Outcome(False, "Pending", "Envoy does not run or refused its routes"),
            address=listen.host,
            url=listen.url,
            attached_routes=wanted.attached_routes,
            now=now,
        )

    async def _patch(self, resource: Resource, item: Object, status: Object | None) -> bool:
        if status is None:
            return True
        meta = item["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        try:
            await self._client.patch(resource, meta["name"], body, meta.get("namespace"), subresource="status")
        except KubeError as error:
            # Changed or gone since it was read: the watch brings the news, and with it the next round.
            if not (error.conflict or error.not_found):
                log.warning("status of %s %s: %s", resource.plural, meta["name"], error)
                return False
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("status of %s %s: %r", resource.plural, meta["name"], error)
            return False
        return True


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()


def _same(namespace: str, name: str, item: Object) -> bool:
    return (namespace, name) == (item["metadata"]["namespace"], item["metadata"]["name"])


async def run(
    connection: Connection, site: Path, listen: Address, admin: Address, namespace: str, stop: asyncio.Event
) -> None:
    """Run the gateway of a site until `stop` is set."""
    logs = site / "logs"
    envoy = Envoy(site / "gateway", listen, admin, log=logs / "envoy.log", access_log=logs / "gateway-failures.log")
    async with KubeClient(connection, user_agent="k2-rehearsal-gateway") as client, Admin(admin) as session:
        await Controller(client, envoy, session, namespace).run(stop)
