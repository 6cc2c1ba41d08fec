"""What a person writes: profile, site and release, as the frozen values that everything inside works with.

Files are parsed and checked at the edge (`tasks.specs`); nothing here reads or validates text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.identity import digest_of

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class GroupShape:
    """One role's group: nodes that live and die together.

    `args` are engine options without dashes to their value (True = a flag without value), in the engine's own names;
    `env` are extra environment variables of the engine containers.
    """

    role: str
    nodes: int
    args: Mapping[str, str | int | float | bool]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Profile:
    """How one engine runs one unit (one prefill group, one decode group, one router) on one kind of hardware.

    `host_memory_gib` is what an engine container asks for and may use, `shm_gib` the part of it that is /dev/shm.
    """

    name: str
    engine: str
    engine_version: str
    gpus_per_node: int
    served_model_name: str
    groups: tuple[GroupShape, ...]
    router_args: Mapping[str, str | int | float | bool]
    ready_deadline_s: float
    host_memory_gib: int = 1536
    shm_gib: int = 64

    def group(self, role: str) -> GroupShape:
        """Return the group of a role; raise KeyError if the profile has none."""
        for group in self.groups:
            if group.role == role:
                return group
        raise KeyError(role)

    @property
    def nodes(self) -> int:
        """Nodes of one unit."""
        return sum(group.nodes for group in self.groups)


@dataclass(frozen=True)
class Images:
    """Container images by digest: engine, router and this tool (node programs)."""

    engine: str
    router: str
    tool: str


@dataclass(frozen=True)
class Limit:
    """One absolute limit of a gate: `metric` compared by `op` (`>=` or `<=`) with `value` in `unit`."""

    metric: str
    op: str
    value: float
    unit: str


@dataclass(frozen=True)
class Workload:
    """The load of a throughput gate: requests of fixed shape at fixed concurrency."""

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int


@dataclass(frozen=True)
class GatePolicy:
    """What a release has to show before traffic: graded smoke, then end-to-end throughput.

    `baseline_ratio`: the least share of the last promoted release's rate at the same workload (0.9 = at most 10% lost).
    """

    smoke_min_correct_share: float
    workload: Workload
    limits: tuple[Limit, ...]
    baseline_ratio: float


@dataclass(frozen=True)
class TrafficPlan:
    """How traffic moves: weights of the candidate in percent, the bake after each, and the checks while it bakes.

    `max_error_share` and `max_p95_s` are limits on what is observed during a bake; fewer than `min_samples`
    observations is no data and therefore inconclusive.
    """

    steps_percent: tuple[int, ...]
    bake_s: float
    check_interval_s: float
    min_samples: int
    max_error_share: float
    max_p95_s: float


@dataclass(frozen=True)
class Retention:
    """How long the old set stays warm after promotion, and so how long rollback stays instant."""

    hold_s: float


@dataclass(frozen=True)
class Release:
    """One immutable release as written. Digests are computed with the lock: see `serving_digest`."""

    id: str
    repo: str
    revision: str
    images: Images
    profile: Profile
    gates: GatePolicy
    traffic: TrafficPlan
    retention: Retention

    @property
    def policy_digest(self) -> str:
        """Digest of what does not touch a pod: gates, traffic plan, retention."""
        return digest_of(plain({"gates": self.gates, "traffic": self.traffic, "retention": self.retention}))

    def serving_data(self, lock_digest: str) -> dict[str, Any]:
        """Return what makes two serving sets the same: lock, images, resolved arguments, env, group shapes.

        The tool's own image is left out: a newer k2-release must plan no change on an untouched release.
        """
        return serving_form(plain({"images": self.images, "profile": self.profile}), lock_digest)

    def serving_digest(self, lock_digest: str) -> str:
        """Digest that groups, Services and labels carry."""
        return digest_of(self.serving_data(lock_digest))


def serving_form(release: Mapping[str, Any], lock_digest: str) -> dict[str, Any]:
    """Return the serving data of a release that is plain data already, such as the one in a receipt."""
    unread = ("name", "ready_deadline_s")
    return {
        "engine": release["images"]["engine"],
        "router": release["images"]["router"],
        "profile": {key: value for key, value in release["profile"].items() if key not in unread},
        "lock": lock_digest,
    }


@dataclass(frozen=True)
class StoreRef:
    """The object store of a site; credentials by reference (a file of the flow, a Secret of the pods)."""

    endpoint: str
    bucket: str
    credentials_file: str
    credentials_secret: str
    region: str = "us-east-1"


@dataclass(frozen=True)
class HubRef:
    """The Hub or a mirror of it; the token by reference, empty for none."""

    endpoint: str
    token_file: str = ""
    token_secret: str = ""


@dataclass(frozen=True)
class GatewayRef:
    """The gateway that users reach: its URL, its object, and where its per-backend statistics are read."""

    url: str
    name: str
    stats_url: str


@dataclass(frozen=True)
class StagingFigures:
    """What the site's wires and disks carry, in bytes per second; None where its owner has not said.

    `hub` is what one node gets from the Hub, `uplink` what the whole site gets from outside, `store` what the object
    store gives to all clients together and `store_client` to one, `network` what a node takes from other nodes, `disk`
    what its NVMe writes, `core_hash` what one core of a node hashes (sha256).
    """

    hub_bytes_per_s: int | None = None
    uplink_bytes_per_s: int | None = None
    store_bytes_per_s: int | None = None
    store_client_bytes_per_s: int | None = None
    network_bytes_per_s: int | None = None
    disk_bytes_per_s: int | None = None
    core_hash_bytes_per_s: int | None = None


@dataclass(frozen=True)
class Staging:
    """How weights come onto the nodes of a site and are looked after there.

    `topology`: `store` (pulled into the store once, read by each node), `exchange` (each node pulls its share from the
    Hub and gets the rest from the others), `hub` (each node pulls everything), or `auto` (the plan picks one).
    `exchange_origin`: where an owner pulls its share from in an exchange, `hub` or `store`. `p2p_command`: the program
    by which nodes take files from the Hub in topology `hub`, Dragonfly's `dfget`; empty for none.
    `cache_mode`: `keep` leaves what was written in the page cache, for an engine that starts soon; `drop` does not push
    out what a serving engine has there. Rates are limits in bytes per second, 0 for none: `beside_engine` of writing
    to a node whose GPUs are in use, `scrub` of reading for the scheduled check. `trash_age_s`: how long what was
    deleted can still be taken back.
    """

    topology: str = "auto"
    exchange_origin: str = "hub"
    p2p_command: str = ""
    cache_mode: str = "keep"
    beside_engine_bytes_per_s: int = 0
    scrub_bytes_per_s: int = 500_000_000
    trash_age_s: float = 86400.0
    figures: StagingFigures = StagingFigures()


@dataclass(frozen=True)
class Site:
    """One cluster: where it is, what it is made of, what an hour of it costs.

    `other_contexts` are further names of `context` in other people's kubeconfigs; `cluster_uid` is the uid of the
    cluster's namespace kube-system, empty if it is not checked. `rehearsal` says that releases may be tried here, with
    `real` as the owner's own list of what is. `lock_key` is the file of the public key that locks have to be signed
    with, empty if they need not be.
    """

    name: str
    kubeconfig: str
    context: str
    namespace: str
    store: StoreRef
    hub: HubRef
    gateway: GatewayRef
    prefect_api_url: str
    node_selector: Mapping[str, str]
    nvme_path: str
    usd_per_gpu_hour: float
    pullers: int
    lease_duration_s: float
    releases_dir: str
    reserve_bytes: int = 0
    staging: Staging = Staging()
    simulated: tuple[str, ...] = field(default=())
    other_contexts: tuple[str, ...] = field(default=())
    cluster_uid: str = ""
    rehearsal: bool = False
    real: tuple[str, ...] = field(default=())
    lock_key: str = ""

    @property
    def contexts(self) -> tuple[str, ...]:
        """Every name by which the site file knows its cluster."""
        return tuple(name for name in (self.context, *self.other_contexts) if name)


def plain(value: Any) -> Any:
    """Return frozen dataclasses, mappings and tuples as the JSON-like data that digests and stores take."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
