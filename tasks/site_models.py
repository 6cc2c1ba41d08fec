"""The fields of a site file: what is allowed in them, and the frozen value it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.core.spec import GatewayRef, HubRef, Site, Staging, StagingFigures, StoreRef
from tasks.spec_models import AbsolutePath, ContextName, Count, Model, NotNegative, Positive


class StoreModel(Model):
    """The site's S3-compatible object store."""

    endpoint: str = Field(pattern=r"^https?://")
    bucket: str = Field(min_length=3)
    region: str = "us-east-1"
    credentials_file: str = Field(description="JSON file of the flow: access_key, secret_key. Relative to this file.")
    credentials_secret: str = Field(default="k2-store", description="Secret of the pods: access_key, secret_key.")


class HubModel(Model):
    """The Hugging Face Hub or a mirror of it."""

    endpoint: str = Field(default="https://huggingface.co", pattern=r"^https?://")
    token_file: str = ""
    token_secret: str = Field(default="", description="Secret of the pods with the key token; empty = anonymous.")


class GatewayModel(Model):
    """The gateway that users reach."""

    url: str = Field(pattern=r"^https?://")
    name: str = "k2-gateway"
    stats_url: str = Field(description="Where the gateway's statistics for each backend are read.")


class StagingFiguresModel(Model):
    """What the site's wires and disks carry, in bytes per second; the plan assumes what is not said, and says so."""

    hub_bytes_per_s: Count | None = Field(default=None, description="What one node gets from the Hub.")
    uplink_bytes_per_s: Count | None = Field(default=None, description="What the whole site gets from outside.")
    store_bytes_per_s: Count | None = Field(default=None, description="What the store gives to all clients together.")
    store_client_bytes_per_s: Count | None = Field(default=None, description="What the store gives to one client.")
    network_bytes_per_s: Count | None = Field(default=None, description="What a node takes from other nodes.")
    disk_bytes_per_s: Count | None = Field(default=None, description="What a node's NVMe writes.")
    core_hash_bytes_per_s: Count | None = Field(default=None, description="What one core of a node hashes (sha256).")


class StagingModel(Model):
    """How weights come onto the nodes and are looked after there."""

    topology: Literal["auto", "store", "exchange", "hub"] = Field(
        default="auto",
        description="Who brings the bytes: the store, the other nodes, the Hub; auto: as planned.",
    )
    exchange_origin: Literal["hub", "store"] = Field(
        default="hub", description="Where a node pulls its share from in an exchange."
    )
    p2p_command: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]*$")] = Field(
        default="",
        description="Topology hub: get files by this program of Dragonfly in the tool's image, such as dfget.",
    )
    cache_mode: Literal["keep", "drop"] = Field(
        default="keep", description="Whether staged files stay in the page cache for an engine that starts soon."
    )
    beside_engine_bytes_per_s: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Limit of writing to a node whose GPUs are in use; 0: none."
    )
    scrub_bytes_per_s: Annotated[int, Field(ge=0)] = Field(
        default=500_000_000, description="Limit of reading for the scheduled check of staged bytes; 0: none."
    )
    trash_age_s: NotNegative = Field(default=86400, description="How long what was deleted can be taken back.")
    figures: StagingFiguresModel = StagingFiguresModel()

    @model_validator(mode="after")
    def _p2p_in_topology_hub(self) -> StagingModel:
        if self.p2p_command and self.topology != "hub":
            raise ValueError("p2p_command needs topology: hub")
        return self

    def freeze(self) -> Staging:
        """Return the core's value."""
        return Staging(
            topology=self.topology,
            exchange_origin=self.exchange_origin,
            p2p_command=self.p2p_command,
            cache_mode=self.cache_mode,
            beside_engine_bytes_per_s=self.beside_engine_bytes_per_s,
            scrub_bytes_per_s=self.scrub_bytes_per_s,
            trash_age_s=float(self.trash_age_s),
            figures=StagingFigures(**self.figures.model_dump()),
        )


class SiteModel(Model):
    """One cluster (manifests/sites/*.yaml). Relative paths are relative to the file."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    kubeconfig: str
    context: str = Field(default="", description="Name of the cluster in that kubeconfig.")
    other_contexts: list[ContextName] = Field(
        default=[], description="Names by which other kubeconfigs call the same cluster; `--context` takes these too."
    )
    cluster_uid: str = Field(
        default="",
        pattern=r"^$|^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        description="uid of the cluster's namespace kube-system; another cluster is refused. Empty: not checked.",
    )
    namespace: str = "k2"
    store: StoreModel
    hub: HubModel = HubModel()
    gateway: GatewayModel
    prefect_api_url: str = ""
    node_selector: dict[str, str] = Field(description="Labels of the GPU nodes that releases may use.")
    nvme_path: AbsolutePath = Field(description="Directory for checkpoints on the nodes' own NVMe, never a share.")
    reserve_bytes: Annotated[int, Field(ge=0)] = Field(default=0, description="Space to leave free on each node.")
    staging: StagingModel = StagingModel()
    usd_per_gpu_hour: NotNegative
    pullers: Count = Field(default=4, description="Parallel Jobs that bring the checkpoint into the store.")
    lease_duration_s: Positive = 30
    releases_dir: str = Field(default="releases", description="Where `k2ctl release ID` finds ID.yaml.")
    simulated: list[str] = Field(default=[], description="What of this site is not real; shown in every receipt.")
    rehearsal: bool = Field(default=False, description="Whether `k2ctl rehearse --site` may try releases here.")
    real: list[str] = Field(default=[], description="What of a rehearsal's site is real, by its owner's word.")
    lock_key: str = Field(
        default="", description="PEM file of a public key: a lock that it has not signed is refused. Empty: not asked."
    )

    def freeze(self, base: Path) -> Site:
        """Return the core's value with paths made absolute against `base`."""

        def place(path: str) -> str:
            return str((base / Path(path).expanduser()).resolve()) if path else ""

        store, hub, gateway = self.store, self.hub, self.gateway
        return Site(
            name=self.name,
            kubeconfig=place(self.kubeconfig),
            context=self.context,
            namespace=self.namespace,
            store=StoreRef(
                store.endpoint, store.bucket, place(store.credentials_file), store.credentials_secret, store.region
            ),
            hub=HubRef(hub.endpoint, place(hub.token_file), hub.token_secret),
            gateway=GatewayRef(gateway.url, gateway.name, gateway.stats_url),
            prefect_api_url=self.prefect_api_url,
            node_selector=self.node_selector,
            nvme_path=self.nvme_path.rstrip("/"),
            usd_per_gpu_hour=float(self.usd_per_gpu_hour),
            pullers=self.pullers,
            lease_duration_s=float(self.lease_duration_s),
            releases_dir=place(self.releases_dir),
            reserve_bytes=self.reserve_bytes,
            staging=self.staging.freeze(),
            simulated=tuple(self.simulated),
            other_contexts=tuple(self.other_contexts),
            cluster_uid=self.cluster_uid,
            rehearsal=self.rehearsal,
            real=tuple(self.real),
            lock_key=place(self.lock_key),
        )
