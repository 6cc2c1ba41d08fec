"""What every step works with: the ports of one site, and the release it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.lock import Lock
from tasks.core.permissions import Right
from tasks.core.render import serving_names
from tasks.core.spec import Release, Site
from tasks.ports import Clock, Cluster, Engine, GatewayStats, Hub, LockKey, Progress, Store

FIELD_MANAGER = "k2-release"


@dataclass(frozen=True)
class Ports:
    """The ports of one site, and who is at work: `run` names this flow run in the ledger and on the traffic lease.

    `rights` are those that the flows use on the cluster, as `manifests/base` gives them; `lock_key` is the key that
    locks have to be signed with, where the site names one.
    """

    site: Site
    hub: Hub
    store: Store
    cluster: Cluster
    engine: Engine
    stats: GatewayStats
    clock: Clock
    progress: Progress
    templates: Mapping[str, dict[str, Any]]
    rights: tuple[Right, ...]
    run: str
    tool: str
    lock_key: LockKey | None = None


@dataclass(frozen=True)
class Subject:
    """A release with its accepted lock; what all steps after `lock` are about."""

    release: Release
    lock: Lock

    @property
    def serving(self) -> str:
        """The serving digest's first 12 hex digits: the label value on everything of this set."""
        return self.release.serving_digest(self.lock.digest)[:12]

    @property
    def router_service(self) -> str:
        """The name of the Service of this set's router."""
        return serving_names(self.serving).router
