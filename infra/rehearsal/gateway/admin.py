"""What Envoy's admin address says about the running Envoy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from infra.rehearsal.gateway.bootstrap import Address
from infra.rehearsal.gateway.translate import ROUTE_CONFIG

_TIMEOUT_S = 5.0


class EnvoyError(Exception):
    """Envoy did not start, refused a configuration, or does not answer."""


class Admin:
    """Envoy's admin address."""

    def __init__(self, address: Address) -> None:
        self._url = address.url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ready(self) -> bool:
        """Say whether Envoy takes requests."""
        try:
            return (await self._get("/ready")).startswith("LIVE")
        except EnvoyError:
            return False

    async def stats(self, pattern: str) -> dict[str, int | str]:
        """Return the counters, gauges and texts whose names match a regular expression."""
        document = json.loads(await self._get("/stats", format="json", filter=pattern))
        return {item["name"]: item["value"] for item in document["stats"] if "name" in item}

    async def config_dump(self, resource: str = "", *, with_endpoints: bool = False) -> list[Any]:
        """Return what Envoy runs with, in whole or one kind of resource."""
        parameters = {"resource": resource} if resource else {}
        if with_endpoints:
            parameters["include_eds"] = "on"
        found: list[Any] = json.loads(await self._get("/config_dump", **parameters)).get("configs", [])
        return found

    async def route_version(self) -> str:
        """Return the version of the routes that Envoy serves at this moment; empty before it has any."""
        for item in await self.config_dump("dynamic_route_configs"):
            if item["route_config"]["name"] == ROUTE_CONFIG:
                return str(item.get("version_info", ""))
        return ""

    async def warm_clusters(self) -> set[str]:
        """Return the names of the clusters that requests can be sent to."""
        active = await self.config_dump("dynamic_active_clusters")
        return {str(item["cluster"]["name"]) for item in active}

    async def post(self, path: str) -> None:
        """Send a command such as `/healthcheck/fail`."""
        await self._request("POST", path, {})

    async def _get(self, path: str, **parameters: str) -> str:
        return await self._request("GET", path, parameters)

    async def _request(self, method: str, path: str, parameters: Mapping[str, str]) -> str:
        if self._session is None:
            raise RuntimeError("Admin is used as an async context")
        try:
            async with self._session.request(method, self._url + path, params=parameters) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvoyError(f"admin {self._url} does not answer {path}: {error!r}") from error
        if response.status != 200:
            raise EnvoyError(f"admin {self._url}{path} answered {response.status}: {text[:200]}")
        return text
