"""How long weights take to every node, by each way that they can go: closed forms over what a site's wires carry.

A way is one or two phases. A phase takes as long as the slowest thing in it, which is its bottleneck. Where two phases
overlap they do so file by file, as no file is passed on before its digest matched: the shorter one adds a round of
files. So the real sizes count: 61 shards of 16 owners are four rounds, and the owner with most bytes holds up the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.core.lock import Lock
from tasks.core.spec import StagingFigures
from tasks.core.staging import FILES_AT_ONCE, PULLS_AT_ONCE

HUB, STORE, EXCHANGE = "hub", "store", "exchange"
EACH_FROM_HUB, ONE_PULL, SHARDED_PULL = "each-from-hub", "one-pull", "sharded-pull"
SHARDED_EXCHANGE, STORE_FILLED = "sharded-exchange", "store-filled"

# What starting the programs of one step takes beside moving bytes.
START_S = 2.0
# Three beats of the rendezvous: two until the nodes know each other, one until all know that nobody needs them.
MEET_S = 6.0

# figure -> (value, where it is from). At the low end of what is known: a plan should not promise too much.
ASSUMED: Mapping[str, tuple[int, str]] = {
    "hub_bytes_per_s": (1_000_000_000, "low end of the 1-5 GB/s that one host gets from the Hub"),
    "uplink_bytes_per_s": (12_500_000_000, "100 Gb/s"),
    "store_bytes_per_s": (20_000_000_000, "low end of in-cluster stores"),
    "store_client_bytes_per_s": (10_000_000_000, "one client with many ranged reads"),
    "network_bytes_per_s": (50_000_000_000, "one 400 Gb/s port"),
    "disk_bytes_per_s": (6_000_000_000, "one NVMe drive, no stripe"),
    "core_hash_bytes_per_s": (1_200_000_000, "sha256 with SHA-NI from memory, measured on one Xeon core"),
}


@dataclass(frozen=True)
class Rates:
    """What each part carries, in bytes per second, and which figures are assumed because the site does not state them.

    `hub` and `disk` are of one node, `store_client` of one node at the store, `network` of one node with the others and
    in each direction; `uplink` and `store` are of the whole site, `core_hash` of one core.
    """

    hub: float
    uplink: float
    store: float
    store_client: float
    network: float
    disk: float
    core_hash: float
    start_s: float = START_S
    meet_s: float = MEET_S
    assumed: tuple[str, ...] = ()


def rates_of(figures: StagingFigures) -> Rates:
    """Return the rates of a site; a figure that it does not state is assumed and named as such."""

    def figure(name: str) -> float:
        stated = getattr(figures, name)
        return float(ASSUMED[name][0] if stated is None else stated)

    return Rates(
        hub=figure("hub_bytes_per_s"),
        uplink=figure("uplink_bytes_per_s"),
        store=figure("store_bytes_per_s"),
        store_client=figure("store_client_bytes_per_s"),
        network=figure("network_bytes_per_s"),
        disk=figure("disk_bytes_per_s"),
        core_hash=figure("core_hash_bytes_per_s"),
        assumed=tuple(name for name in ASSUMED if getattr(figures, name) is None),
    )


@dataclass(frozen=True)
class Demand:
    """What has to move: bytes to each of so many nodes, and the sizes of the files that they are.

    `blobs_bytes` are the distinct files of the lock, `missing_bytes` those of them that the store does not hold. Of the
    nodes, `nodes` lack all of it and are waited for, `guests` lack it and are not, `holders` have it. `pullers` bring
    files into the store, each with `pulls_at_once` files under way; a node has `at_once`. A file is hashed on one core.
    `origin` is where owners pull from, `hub` or `store`. `overlapped`: a node takes a file from the store as soon as it
    is there.
    """

    node_bytes: int
    blobs_bytes: tuple[int, ...]
    missing_bytes: tuple[int, ...]
    nodes: int
    pullers: int
    guests: int = 0
    holders: int = 0
    origin: str = HUB
    at_once: int = FILES_AT_ONCE
    pulls_at_once: int = PULLS_AT_ONCE
    overlapped: bool = True


def demand_of(lock: Lock, present: Mapping[str, bool], nodes: int, pullers: int) -> Demand:
    """Return the demand of a lock on so many nodes that hold nothing of it.

    Args:
        lock: the files.
        present: sha256 -> whether the store holds it, verified.
        nodes: how many nodes have to get all of it.
        pullers: Jobs that bring files into the store at once.
    """
    blobs = {file.sha256 or file.git_sha1: file.size_bytes for file in lock.files}
    missing = tuple(size for sha, size in blobs.items() if not present.get(sha, False))
    return Demand(lock.total_bytes, tuple(blobs.values()), missing, nodes, pullers)


@dataclass(frozen=True)
class Phase:
    """How long a phase takes and what it waits for."""

    seconds: float
    bottleneck: str


@dataclass(frozen=True)
class Prediction:
    """One way for the weights: seconds by step and in all, what holds it up, and the bytes that come from outside.

    `topology` is its name in a site file. The steps may run at the same time. A way that is not `possible` here says
    why, and has no figures.
    """

    name: str
    topology: str
    possible: bool
    why_not: str = ""
    pull_s: float = 0.0
    stage_s: float = 0.0
    seconds: float = 0.0
    bottleneck: str = ""
    outside_bytes: int = 0


def predict(demand: Demand, rates: Rates) -> tuple[Prediction, ...]:
    """Return what each way takes, in a fixed order; those that are not possible too."""
    return (
        _each_from_hub(demand, rates),
        _pulled(ONE_PULL, 1, demand, rates),
        _pulled(SHARDED_PULL, demand.pullers, demand, rates),
        _exchanged(demand, rates),
        _store_filled(demand, rates),
    )


def deal(sizes: Iterable[int], hands: int) -> list[list[int]]:
    """Return sizes dealt to so many hands: largest first, each to whoever has the least so far."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    loads = [(0, index) for index in range(hands)]
    for size in sorted(sizes, reverse=True):
        load, index = loads[0]
        dealt[index].append(size)
        heapq.heapreplace(loads, (load + size, index))
    return dealt


def _slowest(limits: Mapping[str, float]) -> Phase:
    bottleneck = max(limits, key=lambda name: limits[name])
    return Phase(limits[bottleneck], bottleneck)


def _overlap(pull: Phase, spread: Phase, files_bytes: Sequence[int], under_way: int) -> Phase:
    """Return two phases as one, where files are passed on as soon as they are pulled, and so many are under way.

    Two stages in a row: the whole is the longest path that changes from the first to the second after some round.
    """
    total = max(sum(files_bytes), 1)
    ordered, paths, pulled = sorted(files_bytes, reverse=True), [0.0], 0
    for first in range(0, len(ordered), under_way):
        before, pulled = pulled, pulled + sum(ordered[first : first + under_way])
        paths.append(pull.seconds * pulled / total + spread.seconds * (1 - before / total))
    return Phase(max(paths), (pull if pull.seconds >= spread.seconds else spread).bottleneck)


def _started(seconds: float, rates: Rates) -> float:
    return seconds + rates.start_s if seconds else 0.0


def _writing(demand: Demand, rates: Rates) -> dict[str, float]:
    """Return the limits of whatever ends on a node's disk."""
    size = demand.node_bytes if demand.nodes else 0
    return {"disk": size / rates.disk, "hash": size / (demand.at_once * rates.core_hash)}


def _each_from_hub(demand: Demand, rates: Rates) -> Prediction:
    """Nodes that are not waited for take from the uplink as well."""
    size, nodes = demand.node_bytes, demand.nodes + demand.guests
    uplink_s = nodes * size / rates.uplink if demand.nodes else 0.0
    host_s = size / rates.hub if demand.nodes else 0.0
    phase = _slowest({"Hub per host": host_s, "uplink": uplink_s, **_writing(demand, rates)})
    seconds = _started(phase.seconds, rates)
    return Prediction(EACH_FROM_HUB, HUB, True, "", 0.0, seconds, seconds, phase.bottleneck, nodes * size)


def _reading(demand: Demand, rates: Rates) -> Phase:
    """Return the phase in which every node reads all of it from the store."""
    size = demand.node_bytes if demand.nodes else 0
    limits = {"store": demand.nodes * size / rates.store, "store per client": size / rates.store_client}
    return _slowest({**limits, **_writing(demand, rates)})


def _filling(demand: Demand, rates: Rates, pullers: int) -> Phase:
    """Return the phase in which pullers bring into the store what it lacks."""
    missing, most = sum(demand.missing_bytes), max(map(sum, deal(demand.missing_bytes, pullers)))
    return _slowest(
        {
            "Hub per host": most / rates.hub,
            "uplink": missing / rates.uplink,
            "store": missing / rates.store,
            "store per client": most / rates.store_client,
            "hash": most / (demand.pulls_at_once * rates.core_hash),
        }
    )


def _pulled(name: str, pullers: int, demand: Demand, rates: Rates) -> Prediction:
    if not demand.missing_bytes:
        return Prediction(name, STORE, False, "the store holds all of it already")
    if name == SHARDED_PULL and pullers < 2:
        return Prediction(name, STORE, False, "the site has one puller")
    pull, read = _filling(demand, rates, pullers), _reading(demand, rates)
    pull_s, stage_s = _started(pull.seconds, rates), _started(read.seconds, rates)
    both = Phase(pull_s + stage_s, (pull if pull.seconds >= read.seconds else read).bottleneck)
    if demand.overlapped and read.seconds:
        both = _overlap(pull, read, demand.missing_bytes, pullers * demand.pulls_at_once)
        stage_s = _started(both.seconds, rates)
        both = Phase(stage_s, both.bottleneck)
    return Prediction(name, STORE, True, "", pull_s, stage_s, both.seconds, both.bottleneck, sum(demand.missing_bytes))


def _store_filled(demand: Demand, rates: Rates) -> Prediction:
    if demand.missing_bytes:
        held = len(demand.blobs_bytes) - len(demand.missing_bytes)
        return Prediction(STORE_FILLED, STORE, False, f"the store holds {held} of {len(demand.blobs_bytes)} files")
    read = _reading(demand, rates)
    seconds = _started(read.seconds, rates)
    return Prediction(STORE_FILLED, STORE, True, "", 0.0, seconds, seconds, read.bottleneck, 0)


def _exchanged(demand: Demand, rates: Rates) -> Prediction:
    if not demand.nodes:
        return Prediction(SHARDED_EXCHANGE, EXCHANGE, False, "no node lacks the weights")
    if demand.nodes + demand.guests + demand.holders < 2:
        return Prediction(SHARDED_EXCHANGE, EXCHANGE, False, "there is no other node")
    outside_bytes = 0 if demand.holders else sum(demand.blobs_bytes)
    pull = Phase(0.0, "")
    if demand.origin == STORE:
        outside_bytes = sum(demand.missing_bytes)
        pull = _filling(demand, rates, demand.pullers) if outside_bytes else pull
    among = _among_nodes(demand, rates)
    pull_s, stage_s = _started(pull.seconds, rates), _started(among.seconds, rates)
    bottleneck = (pull if pull.seconds > among.seconds else among).bottleneck
    return Prediction(
        SHARDED_EXCHANGE, EXCHANGE, True, "", pull_s, stage_s, pull_s + stage_s, bottleneck, outside_bytes
    )


def _among_nodes(demand: Demand, rates: Rates) -> Phase:
    """Return the phase in which owners get their shares and all nodes the rest from them."""
    loads = [sum(hand) for hand in deal(demand.blobs_bytes, demand.nodes + demand.holders)]
    others = demand.nodes + demand.guests - 1
    share = _sharing(demand, rates, sum(loads), max(loads))
    # An owner gives what it has to all others; a node takes what the others have.
    passed_bytes = max(max(loads) * others, sum(loads) - min(loads))
    spread = _slowest({"network": passed_bytes / rates.network, **_writing(demand, rates)})
    both = _overlap(share, spread, demand.blobs_bytes, demand.nodes * demand.at_once)
    # The owner of the file that is pulled last gives it to all others alone.
    last = Phase(share.seconds + max(demand.blobs_bytes) * others / rates.network, "network")
    longest = both if both.seconds >= last.seconds else last
    return replace(longest, seconds=longest.seconds + rates.meet_s)


def _sharing(demand: Demand, rates: Rates, total: int, most: int) -> Phase:
    """Return the phase in which each owner gets its own share: from nodes that have it, else from the origin."""
    if demand.holders:
        return Phase(total / (demand.holders * rates.network), "network")
    if demand.origin == STORE:
        limits = {"store": total / rates.store, "store per client": most / rates.store_client}
    else:
        limits = {"Hub per host": most / rates.hub, "uplink": total / rates.uplink}
    return _slowest({**limits, "hash": most / (demand.at_once * rates.core_hash)})
