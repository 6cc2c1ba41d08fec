"""The plan: what a release would change, how many bytes move, how long and at what cost, before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import CapacityError
from tasks.core.lock import Lock
from tasks.core.spec import Release, Site
from tasks.core.transfer_choice import Places, Transfers, plan_transfers, transfer_rows
from tasks.core.units import format_bytes, format_duration, format_usd
from tasks.core.ways import bytes_to_pull

# Classes of change, from least to most.
NONE, POLICY, ROUTER, ARGUMENTS, IMAGE, WEIGHTS, FIRST = (
    "none",
    "policy",
    "router",
    "arguments",
    "image",
    "weights",
    "first",
)


_PODS_NAMED = 2


@dataclass(frozen=True)
class LiveRelease:
    """What is live: identities and the serving data that its digest is over.

    `recorded` says whether the promotion has its record and its receipt; a death before them leaves it live without.
    """

    release: str
    serving_digest: str
    policy_digest: str
    lock_digest: str
    serving_data: Mapping[str, Any]
    recorded: bool = True


@dataclass(frozen=True)
class Occupant:
    """A pod that has GPUs on a node: `namespace/name`, and the release of ours that it belongs to or nothing."""

    pod: str
    release: str

    def __str__(self) -> str:
        return self.pod + (f" of {self.release}" if self.release else "")


@dataclass(frozen=True)
class NodeFacts:
    """A node of the pool as the API shows it.

    `staged` are lock digests (12 hex) that its labels name, `used_by` the pods that have GPUs there.
    """

    name: str
    uid: str
    usable: bool
    why_not: str
    gpus_total: int
    gpus_used: int
    gpus_used_by_candidate: int
    staged: tuple[str, ...]
    used_by: tuple[Occupant, ...] = ()

    def carries(self, gpus: int) -> bool:
        """Whether the node may be used and shows the GPUs that a node of the profile has."""
        return self.usable and self.gpus_total == gpus

    def free(self, gpus: int) -> bool:
        """Whether the whole node is free for the candidate (or already its own)."""
        return self.carries(gpus) and self.gpus_used == self.gpus_used_by_candidate


@dataclass(frozen=True)
class Plan:
    """What will happen. `nodes` are the chosen nodes, `spares` further nodes that are staged but not used now.

    `live_release` and `live_serving_digest` are what was live when the plan was made (empty for nothing),
    `route_stable` the serving label that the route sent users to: whoever carries the plan out later compares.
    `transfers` is how the weights go and how long that is predicted to take.
    """

    release: str
    change: str
    serving_digest: str
    policy_digest: str
    lock_digest: str
    capacity_mode: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    bytes_to_pull: int
    bytes_to_stage: int
    objects: tuple[str, ...]
    pods_started: int
    shifts_traffic: bool
    warnings: tuple[str, ...]
    usd_per_hour: float
    live_release: str
    live_serving_digest: str
    route_stable: str
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def has_changes(self) -> bool:
        """Whether carrying the plan out changes anything."""
        return self.change != NONE


def change_class(release: Release, lock_digest: str, live: LiveRelease | None, stable: str) -> str:
    """Return the class of the change from what is live.

    A live release that the route does not send users to serves nobody: any change is as the first one. A live release
    whose promotion has no record yet is promoted again, as a policy: that writes the record and moves nothing.

    Args:
        stable: the serving label (12 hex) of the route's stable set.
    """
    if live is None or not _is_served(live, stable):
        return FIRST
    if live.serving_digest == release.serving_digest(lock_digest):
        same = live.release == release.id and live.policy_digest == release.policy_digest
        return NONE if same and live.recorded else POLICY
    if live.lock_digest != lock_digest:
        return WEIGHTS
    wanted, have = release.serving_data(lock_digest), live.serving_data
    if wanted["engine"] != have.get("engine"):
        return IMAGE
    return ROUTER if _engines(wanted["profile"]) == _engines(have.get("profile", {})) else ARGUMENTS


def _is_served(live: LiveRelease, stable: str) -> bool:
    return live.serving_digest[:12] == stable


def _engines(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a profile the engines' pods are made of: everything but the router's arguments."""
    return {key: value for key, value in profile.items() if key != "router_args"}


def make_plan(
    release: Release,
    lock: Lock,
    site: Site,
    live: LiveRelease | None,
    stable: str,
    nodes: Sequence[NodeFacts],
    blobs_present: Mapping[str, bool],
    objects: Sequence[str],
) -> Plan:
    """Return the plan of a release.

    Args:
        stable: the serving label of the route's stable set; empty where there is no route.
        blobs_present: sha256 -> whether the store holds it, verified.
        objects: names of the objects that the release renders.

    Raises:
        CapacityError: fewer free nodes than the topology needs; names every node that is not free and why.
    """
    digest = lock.digest
    change = change_class(release, digest, live, stable)
    runs = change not in (NONE, POLICY)
    needed = release.profile.nodes
    each = release.profile.gpus_per_node
    chosen = _choose(nodes, needed, each, digest[:12], live.release if live else "") if runs else ()
    spares = tuple(n.name for n in nodes if n.carries(each) and n.name not in chosen) if runs else ()
    unstaged = sum(digest[:12] not in n.staged for n in nodes if n.name in {*chosen, *spares})
    holding = len(chosen) + len(spares) - unstaged
    transfers = _transfers(lock, site, nodes, chosen, spares, each, blobs_present) if runs else Transfers()
    to_pull = bytes_to_pull(lock, site, blobs_present, unstaged, holding, transfers.topology) if runs else 0
    return Plan(
        release=release.id,
        change=change,
        serving_digest=release.serving_digest(digest),
        policy_digest=release.policy_digest,
        lock_digest=digest,
        capacity_mode="double" if runs else "none",
        nodes=chosen,
        spares=spares,
        bytes_to_pull=to_pull,
        bytes_to_stage=unstaged * lock.total_bytes if runs else 0,
        objects=tuple(objects) if runs else (),
        pods_started=needed + 1 if runs else 0,
        shifts_traffic=runs,
        warnings=_warnings(release, change, live, stable),
        usd_per_hour=needed * each * site.usd_per_gpu_hour if runs else 0.0,
        live_release=live.release if live else "",
        live_serving_digest=live.serving_digest if live else "",
        route_stable=stable,
        transfers=transfers,
    )


def _transfers(
    lock: Lock,
    site: Site,
    nodes: Sequence[NodeFacts],
    chosen: Sequence[str],
    spares: Sequence[str],
    gpus: int,
    present: Mapping[str, bool],
) -> Transfers:
    """Return how the weights come onto the nodes that lack them; chosen nodes that nobody uses wait for them."""
    staged = {node.name for node in nodes if lock.digest[:12] in node.staged}
    lacking, spares_lacking = set(chosen) - staged, set(spares) - staged
    idle = sum(node.name in chosen and not node.gpus_used for node in nodes)
    return plan_transfers(
        lock,
        site.staging,
        site.pullers,
        present,
        Places(len(lacking), len(spares_lacking), len(staged.intersection((*chosen, *spares)))),
        idle * gpus * site.usd_per_gpu_hour,
    )


def _choose(nodes: Sequence[NodeFacts], needed: int, gpus: int, lock12: str, live: str) -> tuple[str, ...]:
    """Return the nodes for the candidate: those it has, then those that hold the weights already, then by name."""
    free = sorted(
        (n for n in nodes if n.free(gpus)),
        key=lambda n: (not n.gpus_used_by_candidate, lock12 not in n.staged, natural_key(n.name)),
    )
    if len(free) < needed:
        taken = "; ".join(f"{n.name}: {_why_not_free(n, gpus)}" for n in nodes if not n.free(gpus))
        raise CapacityError(
            "K2-CAP-001",
            "Not enough free nodes for a second set beside the live one (mode double).",
            where=taken or "the pool is empty",
            got=f"{len(free)} free of {len(nodes)}",
            expected=f"{needed} whole free nodes",
            hint=_hint(nodes, needed, gpus, live),
        )
    return tuple(n.name for n in free[:needed])


def _hint(nodes: Sequence[NodeFacts], needed: int, gpus: int, live: str) -> str:
    """Return what frees nodes: retiring a release that has some and is not live, where that can be enough."""
    fit = [node for node in nodes if node.carries(gpus)]
    others = {pod.release for node in fit for pod in node.used_by if pod.release} - {live}
    could_be_free = [n for n in fit if n.free(gpus) or (n.used_by and all(p.release in others for p in n.used_by))]
    if len(could_be_free) < needed:
        return (
            f"choose a smaller topology or add nodes: beside the live set {len(could_be_free)} of {len(nodes)} nodes "
            f"can be free, {needed} are needed"
        )
    return (
        f"take down what is not live: {' or '.join(f'`k2ctl retire {r} -y`' for r in sorted(others))}" if others else ""
    )


def _why_not_free(node: NodeFacts, gpus: int) -> str:
    if node.usable and node.gpus_total != gpus:
        return f"shows {node.gpus_total} GPUs, not {gpus}"
    by = f" by {', '.join(map(str, node.used_by[:_PODS_NAMED]))}" if node.used_by else ""
    more = f" and {len(node.used_by) - _PODS_NAMED} more" if len(node.used_by) > _PODS_NAMED else ""
    return node.why_not or f"{node.gpus_used} of {node.gpus_total} GPUs in use{by}{more}"


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key under which node-10 comes after node-9."""
    pieces: list[tuple[int, str]] = []
    for piece in name.replace("_", "-").split("-"):
        pieces.append((int(piece), "") if piece.isdigit() else (-1, piece))
    return tuple(pieces)


def _warnings(release: Release, change: str, live: LiveRelease | None, stable: str) -> tuple[str, ...]:
    if live is None:
        return ("nothing is live: no baseline, absolute limits decide; a revert goes to the parking backend",)
    if change == FIRST:
        return (
            f"the route sends users to {stable or 'nobody'} and not to the live release {live.release}: "
            "the set is brought up, gated and shifted to as if nothing were live",
        )
    if live.recorded:
        return ()
    if change == POLICY and live.release == release.id:
        return ("live, but the promotion died before its record: promote again, it writes that and moves no traffic",)
    return (f"the promotion of the live release died before its record: k2ctl promote {live.release} -y",)


def plan_rows(plan: Plan, usd_per_hour_total: float) -> list[dict[str, str]]:
    """Return the plan as rows of a table for a person."""
    rows = [
        ("change", plan.change),
        ("capacity mode", plan.capacity_mode),
        ("nodes", ", ".join(plan.nodes) or "none"),
        ("also staged", ", ".join(plan.spares) or "none"),
        ("to pull from the Hub", format_bytes(plan.bytes_to_pull)),
        ("to stage on nodes", format_bytes(plan.bytes_to_stage)),
        *transfer_rows(plan.transfers),
        ("pods started", str(plan.pods_started)),
        ("traffic", "shifts" if plan.shifts_traffic else "does not move"),
        ("second set costs", f"{format_usd(usd_per_hour_total)} per hour"),
        ("serving digest", plan.serving_digest[:12]),
        ("policy digest", plan.policy_digest[:12]),
        *(("warning", text) for text in plan.warnings),
    ]
    return [{"what": what, "value": value} for what, value in rows]


def waiting_cost(seconds: float, usd_per_hour: float) -> str:
    """Return what a wait has cost so far and costs per hour, as shown beside every wait."""
    so_far = format_usd(seconds / 3600 * usd_per_hour)
    return f"{format_duration(seconds)}, {so_far} so far at {format_usd(usd_per_hour)}/h"
