"""Kubernetes events about pods, at most one of a kind every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from infra.rehearsal.kubeclient import JsonObject, KubeClient, KubeError
from infra.rehearsal.kuberesources import EVENTS
from infra.rehearsal.nodes.machines import timestamp

_QUIET_S = 10.0
_MESSAGE_CHARACTERS = 1000

log = logging.getLogger(__name__)


class EventRecorder:
    """Writes events in the background; an event that cannot be written is dropped."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._last: dict[tuple[str, str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record(self, pod: JsonObject, node: str, reason: str, message: str, *, warning: bool) -> None:
        """Record one event about a pod, unless the same was recorded a moment ago."""
        uid = pod["metadata"]["uid"]
        key = (uid, reason, message[:80])
        now = time.monotonic()
        if now - self._last.get(key, -_QUIET_S) < _QUIET_S:
            return
        self._last[key] = now
        body = _event(pod, node, reason, message, warning=warning)
        task = asyncio.create_task(self._write(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, uid: str) -> None:
        """Drop what is remembered about a pod that is gone."""
        self._last = {key: moment for key, moment in self._last.items() if key[0] != uid}

    async def _write(self, body: JsonObject) -> None:
        try:
            await self._client.create(EVENTS, body)
        except (KubeError, aiohttp.ClientError, TimeoutError) as error:
            log.debug("event dropped: %s", error)


def _event(pod: JsonObject, node: str, reason: str, message: str, *, warning: bool) -> JsonObject:
    metadata, now = pod["metadata"], timestamp()
    return {
        "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "reason": reason,
        "message": message[:_MESSAGE_CHARACTERS],
        "type": "Warning" if warning else "Normal",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": "kubelet", "host": node},
    }
