"""A live copy of the objects of one kind."""

from __future__ import annotations

import asyncio

from infra.rehearsal.gateway.routes import Object
from infra.rehearsal.kubeclient import EventType, KubeClient
from infra.rehearsal.kuberesources import Resource


class Mirror:
    """Follows one kind of object in a namespace; a broken connection only delays it."""

    def __init__(self, resource: Resource, namespace: str, changed: asyncio.Event) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        """Set once the first list is complete: until then an object that is missing may well exist."""
        self._namespace = namespace if resource.namespaced else None
        self._changed = changed
        self._objects: dict[tuple[str, str], Object] = {}

    def objects(self) -> list[Object]:
        """Return the objects as last seen."""
        return list(self._objects.values())

    async def follow(self, client: KubeClient) -> None:
        """Take in every change and set `changed` for it, for ever."""
        async for event in client.watch(self.resource, self._namespace):
            if event.type is EventType.SYNCED:
                self.synced.set()
            elif event.type is EventType.DELETED:
                self._objects.pop(_key(event.object), None)
            else:
                self._objects[_key(event.object)] = event.object
            self._changed.set()


def _key(item: Object) -> tuple[str, str]:
    return (item["metadata"].get("namespace", ""), item["metadata"]["name"])
