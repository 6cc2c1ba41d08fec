"""A small asyncio client of the Kubernetes REST API, for the programs that make up the rehearsal site.

It works on plain dictionaries: the node agent and the group controller touch a dozen kinds and must stay cheap on
two cores, which rules out typed models built for every watch event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, cast

import aiohttp

from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.kuberesources import SERVICE_ACCOUNTS, Resource

JsonObject = dict[str, Any]
"""A decoded Kubernetes object."""

_REQUEST_TIMEOUT_S = 15.0
_WATCH_WINDOW_S = 30.0
_WATCH_GRACE_S = 5.0
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_GONE = 410

log = logging.getLogger(__name__)


class PatchKind(StrEnum):
    """The content types of a patch."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    JSON = "application/json-patch+json"
    APPLY = "application/apply-patch+yaml"


class KubeError(Exception):
    """The API answered with an error: `status` is the HTTP code, `reason` the Status object's word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def not_found(self) -> bool:
        """Tell whether the object (or its kind) does not exist."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Tell whether the object exists already, or a precondition did not hold."""
        return self.status == 409


@dataclass(frozen=True)
class ObjectList:
    """One consistent list: its items and the resourceVersion that a watch goes on from."""

    items: list[JsonObject]
    resource_version: str


class EventType(StrEnum):
    """What a watch reports. SYNCED comes once after each (re)list, without an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    SYNCED = "SYNCED"


@dataclass(frozen=True)
class WatchEvent:
    """One change of one object; for SYNCED the object is empty."""

    type: EventType
    object: JsonObject


class KubeClient:
    """Talks to one API server; use it as an async context manager. Every request has a timeout."""

    def __init__(
        self, connection: Connection, *, user_agent: str = "k2-rehearsal", watch_window_s: float = _WATCH_WINDOW_S
    ) -> None:
        self.connection = connection
        self.watch_window_s = watch_window_s
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"User-Agent": self._user_agent}
        if self.connection.token:
            headers["Authorization"] = f"Bearer {self.connection.token}"
        tls = self.connection.ssl_context()
        connector = aiohttp.TCPConnector(limit=64, ssl=tls if tls is not None else True, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the open HTTP session."""
        if self._session is None:
            raise RuntimeError("KubeClient is used outside of its context")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object | None = None,
        content_type: str = "application/json",
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> JsonObject:
        """Send one request and return the decoded answer; anything but 2xx raises KubeError."""
        async with self.session.request(
            method,
            self.connection.server + path,
            params=params,
            data=None if body is None else json.dumps(body),
            headers=None if body is None else {"Content-Type": content_type},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            text = await response.text()
            if response.status >= 300:
                raise _error(response.status, text)
            return cast(JsonObject, json.loads(text)) if text.startswith("{") else {"text": text}

    async def ready(self) -> bool:
        """Tell whether the API server says that it is ready."""
        try:
            await self.request("GET", "/readyz", timeout_s=5)
        except (KubeError, aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> JsonObject:
        """Return one object."""
        return await self.request("GET", resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page_size: int = 500,
    ) -> ObjectList:
        """Return all objects of a kind, page by page; items carry their kind as a single object would."""
        params = _selectors(label_selector, field_selector) | {"limit": str(page_size)}
        items: list[JsonObject] = []
        while True:
            page = await self.request("GET", resource.path(namespace), params=params)
            for item in page.get("items") or []:
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return ObjectList(items, metadata.get("resourceVersion", ""))
            params["continue"] = metadata["continue"]

    async def create(self, resource: Resource, body: JsonObject, namespace: str | None = None) -> JsonObject:
        """Create an object and return it as stored."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self.request("POST", resource.path(namespace or _namespace(body)), body=body)

    async def replace(self, resource: Resource, body: JsonObject, *, subresource: str | None = None) -> JsonObject:
        """Write a whole object; its resourceVersion, when given, must still be current."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        path = resource.path(_namespace(body), body["metadata"]["name"], subresource)
        return await self.request("PUT", path, body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: JsonObject | Sequence[JsonObject],
        namespace: str | None = None,
        *,
        kind: PatchKind = PatchKind.MERGE,
        subresource: str | None = None,
        field_manager: str | None = None,
        force: bool = False,
    ) -> JsonObject:
        """Change a part of an object and return the whole; an apply patch needs a field manager."""
        params: dict[str, str] = {}
        if field_manager:
            params["fieldManager"] = field_manager
        if kind is PatchKind.APPLY:
            params["force"] = "true" if force else "false"
            body = {"apiVersion": resource.api_version, "kind": resource.kind, **cast(JsonObject, body)}
        path = resource.path(namespace, name, subresource)
        return await self.request("PATCH", path, params=params, body=body, content_type=kind.value)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
        propagation: str | None = None,
    ) -> bool:
        """Ask for the deletion of an object; False when it is gone already or its uid is another one."""
        options: JsonObject = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            await self.request("DELETE", resource.path(namespace, name), body=options)
        except KubeError as error:
            if error.not_found or (error.conflict and uid is not None):
                return False
            raise
        return True

    async def request_token(
        self,
        service_account: str,
        namespace: str,
        *,
        expires_s: int,
        audiences: Sequence[str] = (),
        pod_name: str | None = None,
        pod_uid: str | None = None,
    ) -> str:
        """Return a new token of a ServiceAccount, bound to a pod when one is named."""
        spec: JsonObject = {"expirationSeconds": expires_s}
        if audiences:
            spec["audiences"] = [*audiences]
        if pod_name is not None:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self.request("POST", SERVICE_ACCOUNTS.path(namespace, service_account, "token"), body=body)
        return cast(str, answer["status"]["token"])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> AsyncIterator[WatchEvent]:
        """Report every object, then every change, for ever.

        Lists again after an expired resourceVersion or an error and then reports only the differences; objects that
        went away in the gap are reported as DELETED with their last known content.
        """
        driver = _WatchDriver(self, resource, namespace, _selectors(label_selector, field_selector))
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                async for event in driver.relist():
                    yield event
                while True:
                    async for event in driver.stream():
                        yield event
                    backoff_s = _FIRST_BACKOFF_S
            except (KubeError, aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
                if not (isinstance(error, KubeError) and error.status == _GONE):
                    log.info("watch of %s interrupted: %s", resource.plural, error or type(error).__name__)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)


class _WatchDriver:
    """Keeps what a watch knows, so that a relist can be told as differences."""

    def __init__(
        self, client: KubeClient, resource: Resource, namespace: str | None, selectors: dict[str, str]
    ) -> None:
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._selectors = selectors
        self._known: dict[str, JsonObject] = {}
        self._version = ""

    async def relist(self) -> AsyncIterator[WatchEvent]:
        listed = await self._client.list(
            self._resource,
            self._namespace,
            label_selector=self._selectors.get("labelSelector"),
            field_selector=self._selectors.get("fieldSelector"),
        )
        self._version = listed.resource_version
        present = {item["metadata"]["uid"]: item for item in listed.items}
        for uid in [uid for uid in self._known if uid not in present]:
            yield WatchEvent(EventType.DELETED, self._known.pop(uid))
        for uid, item in present.items():
            known = self._known.get(uid)
            if known is None or known["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._known[uid] = item
                yield WatchEvent(EventType.ADDED if known is None else EventType.MODIFIED, item)
        yield WatchEvent(EventType.SYNCED, {})

    async def stream(self) -> AsyncIterator[WatchEvent]:
        params = self._selectors | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(self._client.watch_window_s))),
        }
        # The server ends every watch after its window. One that is not ended then is held by something in between,
        # which looks like a quiet cluster until its own deadline.
        lost_s = self._client.watch_window_s + _WATCH_GRACE_S
        timeout = aiohttp.ClientTimeout(total=lost_s, connect=_REQUEST_TIMEOUT_S, sock_read=lost_s)
        url = self._client.connection.server + self._resource.path(self._namespace)
        async with self._client.session.get(url, params=params, timeout=timeout) as response:
            if response.status >= 300:
                raise _error(response.status, await response.text())
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = self._event(json.loads(line)) if line else None
                    if event is not None:
                        yield event

    def _event(self, raw: JsonObject) -> WatchEvent | None:
        item: JsonObject = raw["object"]
        if raw["type"] == "ERROR":
            raise KubeError(item.get("code", _GONE), item.get("reason", ""), item.get("message", ""))
        self._version = item["metadata"]["resourceVersion"]
        if raw["type"] == "BOOKMARK":
            return None
        event = WatchEvent(EventType(raw["type"]), item)
        if event.type is EventType.DELETED:
            self._known.pop(item["metadata"]["uid"], None)
        else:
            self._known[item["metadata"]["uid"]] = item
        return event


def _selectors(label_selector: str | None, field_selector: str | None) -> dict[str, str]:
    chosen = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {key: value for key, value in chosen.items() if value}


def _namespace(body: JsonObject) -> str | None:
    return cast("str | None", body["metadata"].get("namespace"))


def _error(status: int, text: str) -> KubeError:
    try:
        answer = json.loads(text)
        return KubeError(status, answer.get("reason", ""), answer.get("message", ""))
    except (ValueError, AttributeError):
        return KubeError(status, "", text[:256])
