"""Kubernetes objects of a release: neutral templates in, finished objects out.

Templates are plain objects (parsed from manifests/engines/<engine>); fields are set by path, so that a field that a
template does not have is an error and not a silent addition. The same release, lock, site and templates give the same
objects, byte for byte.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tasks.core.fields import at, container_of, set_field, volume_of
from tasks.core.identity import digest_of
from tasks.core.lock import Lock
from tasks.core.route import RELEASE_HEADER
from tasks.core.spec import GroupShape, Release, Site

Object = dict[str, Any]
Templates = Mapping[str, Object]
Arguments = Mapping[str, str | int | float | bool]

SERVING_LABEL = "k2-release.io/serving"
ROLE_LABEL = "k2-release.io/role"
RELEASE_ANNOTATION = "k2-release.io/release"
BOOTSTRAP_ANNOTATION = "sglang.ai/bootstrap-port"
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
GROUP_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
GPU_RESOURCE = "nvidia.com/gpu"
MODELS_DIR = "/models"
ENGINE_PORT = 30000
BOOTSTRAP_PORT = 8998
RENDEZVOUS_PORT = 5757
ROUTER_PORT = 30080
ROUTER_METRICS_PORT = 29000

_STARTUP_MARGIN = 1.5
_PROBES_IN_DEADLINE = 240
_MAX_PERIOD_S = 10


class Backend(NamedTuple):
    """One backend of the live route; answers that it gives carry `serving` in a header (empty = none)."""

    service: str
    weight: int
    serving: str


class ServingNames(NamedTuple):
    """Names of the objects of one serving set."""

    serving12: str
    prefill: str
    decode: str
    router: str
    probe_route: str

    def group(self, role: str) -> str:
        """Return the name of a role's LeaderWorkerSet."""
        return {"prefill": self.prefill, "decode": self.decode}[role]


def serving_names(serving_digest: str) -> ServingNames:
    """Return the names of the objects that carry a serving digest."""
    short = serving_digest[:8]
    return ServingNames(
        serving_digest[:12], f"k2-{short}-prefill", f"k2-{short}-decode", f"k2-{short}-router", f"k2-probe-{short}"
    )


def staged_label(lock_digest: str) -> str:
    """Return the node label that says that a lock's files are staged and verified there (value `true`)."""
    return f"staged.k2-release.io/{lock_digest[:12]}"


def placed_label(serving12: str) -> str:
    """Return the node label that says that a node was chosen for a serving set (value `true`).

    Placement is by label and not by name in the pod template, so that a replaced node changes no template.
    """
    return f"placed.k2-release.io/{serving12}"


def manifests_digest(objects: Iterable[Object]) -> str:
    """Return the digest of rendered objects in their order."""
    return digest_of(list(objects))


def render_serving(release: Release, lock: Lock, site: Site, templates: Templates) -> tuple[Object, ...]:
    """Return the objects of a release's serving set in the order in which they are applied."""
    names = serving_names(release.serving_digest(lock.digest))
    groups = tuple(
        _render_group(release, lock, site, names, group, templates[group.role]) for group in release.profile.groups
    )
    return (
        *groups,
        _render_router_service(release, site, names, templates["router-service"]),
        _render_router(release, site, names, templates["router"]),
        _render_probe_route(release, site, names, templates["probe-route"]),
    )


def engine_arguments(release: Release, lock: Lock, role: str) -> list[str]:
    """Return the one argument list that every rank of a group runs, options in a fixed order."""
    profile = release.profile
    own: dict[str, str | int | float | bool] = {
        "model-path": f"{MODELS_DIR}/{lock.model_dir}",
        "served-model-name": profile.served_model_name,
        "host": "$(POD_IP)",
        "port": ENGINE_PORT,
        "nnodes": profile.group(role).nodes,
        "node-rank": "$(LWS_WORKER_INDEX)",
        "dist-init-addr": f"$(LWS_LEADER_ADDRESS):{RENDEZVOUS_PORT}",
        "disaggregation-mode": role,
        "disaggregation-bootstrap-port": BOOTSTRAP_PORT,
    }
    return words(own) + words(_sorted(profile.group(role).args))


def router_arguments(release: Release, site: Site, names: ServingNames) -> list[str]:
    """Return the router's arguments: discovery by labels that only this serving set's leaders carry."""
    return [
        *words({"host": "$(POD_IP)", "port": ROUTER_PORT}),
        *words({"prometheus-host": "$(POD_IP)", "prometheus-port": ROUTER_METRICS_PORT}),
        *words({"pd-disaggregation": True, "service-discovery": True}),
        *words({"service-discovery-namespace": site.namespace, "service-discovery-port": ENGINE_PORT}),
        "--prefill-selector",
        *_selector(names, "prefill"),
        "--decode-selector",
        *_selector(names, "decode"),
        *words(_sorted(release.profile.router_args)),
    ]


def _render_group(
    release: Release, lock: Lock, site: Site, names: ServingNames, group: GroupShape, template: Object
) -> Object:
    obj = copy.deepcopy(template)
    _name(obj, names.group(group.role), site, release, names)
    set_field(obj, ("spec", "leaderWorkerTemplate", "size"), group.nodes)
    pod = at(obj, ("spec", "leaderWorkerTemplate", "workerTemplate"))
    pod["metadata"]["labels"][SERVING_LABEL] = names.serving12
    _fill_engine_pod(pod["spec"], release, lock, site, group)
    # One list of arguments for all ranks: the leader is the same template, plus what the router looks for on it.
    leader = copy.deepcopy(pod)
    if group.role == "prefill":
        leader["metadata"]["annotations"][BOOTSTRAP_ANNOTATION] = str(BOOTSTRAP_PORT)
    obj["spec"]["leaderWorkerTemplate"]["leaderTemplate"] = leader
    return obj


def _fill_engine_pod(spec: Object, release: Release, lock: Lock, site: Site, group: GroupShape) -> None:
    profile = release.profile
    terms = at(spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"))
    placed = placed_label(release.serving_digest(lock.digest)[:12])
    wanted = {staged_label(lock.digest): "true", placed: "true", **_sorted(site.node_selector)}
    terms["nodeSelectorTerms"] = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]} for key, value in wanted.items()]}
    ]
    check = container_of(spec, "initContainers", "marker-check")
    check["image"] = release.images.tool
    check["args"] = words({"dir": f"{MODELS_DIR}/{lock.model_dir}", "lock-digest": lock.digest})
    engine = container_of(spec, "containers", "engine")
    engine["image"] = release.images.engine
    engine["args"] = engine_arguments(release, lock, group.role)
    engine["env"] += [{"name": name, "value": value} for name, value in sorted(group.env.items())]
    _size_probes(engine, profile.ready_deadline_s)
    amounts = {GPU_RESOURCE: str(profile.gpus_per_node), "memory": f"{profile.host_memory_gib}Gi"}
    set_field(engine, ("resources", "requests"), dict(amounts))
    set_field(engine, ("resources", "limits"), dict(amounts))
    set_field(volume_of(spec, "models"), ("hostPath", "path"), site.nvme_path)
    set_field(volume_of(spec, "shm"), ("emptyDir", "sizeLimit"), f"{profile.shm_gib}Gi")


def _size_probes(container: Object, deadline_s: float) -> None:
    """Give the start-up half as long again as the deadline: the flow gives up first, with a diagnosis."""
    period_s = min(_MAX_PERIOD_S, max(1, round(deadline_s / _PROBES_IN_DEADLINE)))
    set_field(container, ("startupProbe", "periodSeconds"), period_s)
    set_field(container, ("startupProbe", "failureThreshold"), math.ceil(_STARTUP_MARGIN * deadline_s / period_s))
    set_field(container, ("readinessProbe", "periodSeconds"), period_s)


def _render_router_service(release: Release, site: Site, names: ServingNames, template: Object) -> Object:
    obj = copy.deepcopy(template)
    _name(obj, names.router, site, release, names)
    at(obj, ("spec", "selector"))[SERVING_LABEL] = names.serving12
    return obj


def _render_router(release: Release, site: Site, names: ServingNames, template: Object) -> Object:
    obj = copy.deepcopy(template)
    _name(obj, names.router, site, release, names)
    at(obj, ("spec", "selector", "matchLabels"))[SERVING_LABEL] = names.serving12
    at(obj, ("spec", "template", "metadata", "labels"))[SERVING_LABEL] = names.serving12
    router = container_of(at(obj, ("spec", "template", "spec")), "containers", "router")
    router["image"] = release.images.router
    router["args"] = router_arguments(release, site, names)
    return obj


def _render_probe_route(release: Release, site: Site, names: ServingNames, template: Object) -> Object:
    obj = copy.deepcopy(template)
    _name(obj, names.probe_route, site, release, names)
    obj["spec"]["parentRefs"][0]["name"] = site.gateway.name
    for rule in obj["spec"]["rules"]:
        for match in rule["matches"]:
            for header in match["headers"]:
                header["value"] = names.serving12
        rule["backendRefs"] = [_backend_ref(Backend(names.router, 1, names.serving12))]
    return obj


def render_live_route(
    template: Object,
    backends: Sequence[Backend | tuple[str, int, str]],
    annotations: Mapping[str, str],
    namespace: str,
    gateway: str = "",
) -> Object:
    """Return the route that users take, with backends (service, weight, serving12) in the given order.

    An empty `gateway` keeps the template's.
    """
    obj = copy.deepcopy(template)
    obj["metadata"]["namespace"] = namespace
    obj["metadata"]["annotations"] = dict(annotations)
    if gateway:
        obj["spec"]["parentRefs"][0]["name"] = gateway
    for rule in obj["spec"]["rules"]:
        rule["backendRefs"] = [_backend_ref(Backend(*backend)) for backend in backends]
    return obj


def _backend_ref(backend: Backend) -> Object:
    ref: Object = {"name": backend.service, "port": 80, "weight": backend.weight}
    if backend.serving:
        header = {"name": RELEASE_HEADER, "value": backend.serving}
        ref["filters"] = [{"type": "ResponseHeaderModifier", "responseHeaderModifier": {"set": [header]}}]
    return ref


def render_base(objects: Iterable[Object], site: Site, tool_image: str) -> tuple[Object, ...]:
    """Return the objects that a site needs once, for its namespace and gateway, in the order given."""
    return tuple(_render_base_object(obj, site, tool_image) for obj in objects)


def _render_base_object(template: Object, site: Site, tool_image: str) -> Object:
    obj = copy.deepcopy(template)
    if "namespace" in obj["metadata"]:
        obj["metadata"]["namespace"] = site.namespace
    if obj["kind"] == "Namespace":
        obj["metadata"]["name"] = site.namespace
    if obj["kind"] == "Gateway":
        obj["metadata"]["name"] = site.gateway.name
    for subject in obj.get("subjects", ()):
        subject["namespace"] = site.namespace
    if obj["kind"] == "Deployment":
        for container in at(obj, ("spec", "template", "spec", "containers")):
            container["image"] = tool_image
    return obj


def _name(obj: Object, name: str, site: Site, release: Release, names: ServingNames) -> None:
    metadata = obj["metadata"]
    metadata |= {"name": name, "namespace": site.namespace}
    metadata["labels"][SERVING_LABEL] = names.serving12
    # On the object alone, never on its pods: a release that differs only in its policy must not restart them.
    metadata["annotations"][RELEASE_ANNOTATION] = release.id


def _selector(names: ServingNames, role: str) -> list[str]:
    return [f"{SERVING_LABEL}={names.serving12}", f"{ROLE_LABEL}={role}", f"{WORKER_INDEX_LABEL}=0"]


def words(arguments: Arguments) -> list[str]:
    """Return options as the words of a command line; True stands for an option without a value."""
    pairs = [(f"--{option}", *(() if value is True else (str(value),))) for option, value in arguments.items()]
    return [word for pair in pairs for word in pair]


def _sorted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(mapping.items()))
