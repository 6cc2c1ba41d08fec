"""Which way the weights go: every way predicted, one picked, and the reason as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tasks.core.lock import Lock
from tasks.core.spec import Staging
from tasks.core.transfer_model import (
    ASSUMED,
    EACH_FROM_HUB,
    EXCHANGE,
    HUB,
    ONE_PULL,
    SHARDED_EXCHANGE,
    SHARDED_PULL,
    STORE,
    STORE_FILLED,
    Demand,
    Prediction,
    Rates,
    demand_of,
    predict,
    rates_of,
)
from tasks.core.units import format_bytes, format_duration, format_usd

AUTO = "auto"
# What is in the store serves the next node and the rollback too: another way has to be clearly faster.
_CLEARLY = 0.9
# Figures without which a prediction may flatter a way that the site has never shown to work.
_NEEDED = {
    EXCHANGE: ("store_bytes_per_s", "network_bytes_per_s"),
    HUB: ("store_bytes_per_s", "hub_bytes_per_s", "uplink_bytes_per_s"),
}
_RUN_AS = {
    STORE: (STORE_FILLED, SHARDED_PULL, ONE_PULL),
    EXCHANGE: (SHARDED_EXCHANGE,),
    HUB: (EACH_FROM_HUB,),
}


@dataclass(frozen=True)
class Transfers:
    """How the weights go and how long that is predicted to take.

    `topology` is a site file's word, empty where nothing is brought up; `predicted_s` is by step, spares included;
    `usd_waiting` what GPUs that are idle meanwhile cost; `ways` are for the chosen nodes alone; `assumed` are the
    figures that the site does not state, with their values.
    """

    topology: str = ""
    why: str = ""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    usd_waiting: float = 0.0
    ways: tuple[Prediction, ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """The nodes of a plan: those that lack the weights, chosen ones and spares, and those that have them."""

    lacking: int
    spares_lacking: int = 0
    holding: int = 0


def plan_transfers(
    lock: Lock,
    staging: Staging,
    pullers: int,
    present: Mapping[str, bool],
    places: Places,
    waiting_usd_per_hour: float,
) -> Transfers:
    """Return the way that the weights of a lock go.

    Args:
        lock: the files.
        staging: what the site says of topology and figures.
        pullers: Jobs that bring files into the store at once.
        present: sha256 -> whether the store holds it, verified.
        places: the nodes.
        waiting_usd_per_hour: what the GPUs cost that have nothing to do until the weights are there.
    """
    rates = rates_of(staging.figures)
    demand = replace(
        demand_of(lock, present, places.lacking, min(pullers, len(lock.files))),
        guests=places.spares_lacking,
        holders=places.holding,
        origin=staging.exchange_origin,
    )
    ways = predict(demand, rates)
    way, topology, why = choose(ways, staging.topology, rates.assumed)
    return Transfers(
        topology=topology,
        why=why,
        predicted_s={"pull": round(way.pull_s, 3), "stage": round(way.stage_s + _spares_s(demand, rates, way), 3)},
        usd_waiting=round(way.seconds / 3600 * waiting_usd_per_hour, 2),
        ways=ways,
        assumed=tuple(_assumption(name) for name in rates.assumed),
    )


def _spares_s(demand: Demand, rates: Rates, way: Prediction) -> float:
    """Return what staging the spares adds: from the store they are staged after the chosen nodes, else beside them."""
    if not demand.guests or (way.topology != STORE and demand.nodes):
        return 0.0
    later = predict(replace(demand, nodes=demand.guests, guests=0, missing_bytes=()), rates)
    row = _of_topology(later, way.topology)
    return row.stage_s if row else 0.0


def choose(ways: Sequence[Prediction], wanted: str, assumed: Sequence[str]) -> tuple[Prediction, str, str]:
    """Return the way to go, its topology, and why, as a sentence.

    Args:
        ways: the predictions of `predict`.
        wanted: the site's topology, `auto` for the fastest.
        assumed: names of the figures that the site does not state.
    """
    if wanted == AUTO:
        way, why = _fastest(ways, assumed)
        return way, way.topology, why
    why = f"the site file says {wanted}"
    named = _of_topology(ways, wanted)
    if named is not None:
        return named, wanted, why + _faster_than(named, ways)
    # An exchange with nobody else in it takes everything from the Hub.
    refused = next(row for row in ways if row.topology == wanted)
    return _of_topology(ways, HUB) or refused, wanted, f"{why}, although {refused.why_not}"


def _of_topology(ways: Sequence[Prediction], topology: str) -> Prediction | None:
    """Return what would run under a topology's name, or None if it is not possible."""
    rows = {row.name: row for row in ways if row.possible}
    return next((rows[name] for name in _RUN_AS.get(topology, ()) if name in rows), None)


def _faster_than(way: Prediction, ways: Sequence[Prediction]) -> str:
    others = [row for topology in _RUN_AS if (row := _of_topology(ways, topology))]
    fastest = min(others, key=lambda row: row.seconds)
    if fastest.seconds >= way.seconds * _CLEARLY:
        return ""
    return f"; {fastest.topology} is predicted at {format_duration(fastest.seconds)}"


def _fastest(ways: Sequence[Prediction], assumed: Sequence[str]) -> tuple[Prediction, str]:
    """Return the way through the store, or another that is clearly faster by figures that the site states."""
    store = _of_topology(ways, STORE)
    assert store is not None  # one of its three rows is always possible
    if not store.stage_s:
        return store, "no chosen node lacks the weights; what is in the store serves the next one"
    faster = [
        row
        for topology in (EXCHANGE, HUB)
        if (row := _of_topology(ways, topology)) and row.seconds < store.seconds * _CLEARLY
    ]
    known = [row for row in faster if not _unstated(row, assumed)]
    took = format_duration(store.seconds)
    if known:
        best = min(known, key=lambda row: row.seconds)
        return best, f"fastest: {format_duration(best.seconds)}, {took} through the store ({store.bottleneck})"
    if faster:
        best = min(faster, key=lambda row: row.seconds)
        lacking = " and ".join(_unstated(best, assumed))
        return store, (
            f"{best.topology} is predicted at {format_duration(best.seconds)} against {took}, but on assumed figures: "
            f"state {lacking} in the site's staging.figures and it is picked"
        )
    return store, "no other way is clearly faster, and what is in the store serves the next node too"


def _unstated(way: Prediction, assumed: Sequence[str]) -> list[str]:
    return [name for name in _NEEDED[way.topology] if name in assumed]


def _assumption(name: str) -> str:
    value, source = ASSUMED[name]
    return f"{name.removesuffix('_bytes_per_s')} {format_bytes(value)}/s ({source})"


def transfer_rows(transfers: Transfers) -> list[tuple[str, str]]:
    """Return what a person wants to know of the way that the weights go, as names and values."""
    if not transfers.topology:
        return []
    pull_s, stage_s = (transfers.predicted_s[step] for step in ("pull", "stage"))
    predicted = f"pull {format_duration(pull_s)}, stage {format_duration(stage_s)}"
    if transfers.usd_waiting:
        predicted += f"; {format_usd(transfers.usd_waiting)} for GPUs that wait"
    return [
        ("weights go by", f"{transfers.topology}: {transfers.why}"),
        ("predicted", predicted),
        *((f"  {way.name}", _way(way)) for way in transfers.ways),
        *(("  assumed", text) for text in transfers.assumed),
    ]


def _way(way: Prediction) -> str:
    if not way.possible:
        return f"not possible: {way.why_not}"
    held_up = f", {way.bottleneck}" if way.seconds else ""
    return f"{format_duration(way.seconds)}{held_up}, {format_bytes(way.outside_bytes)} from outside"
