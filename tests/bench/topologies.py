"""Every way that weights can go, on 1, 4 and 16 nodes with limited links: what the model predicts, what is measured.

make bench BENCH=topologies. Needs root, iproute2 and util-linux: each node, the Hub and the store are network
namespaces of their own, their links held to stated rates by `tc tbf`; the node programs are the real ones. The
checkpoint is so small, and the rates are so low, that the links are the bottleneck and not the CPUs of one machine;
disk and hash limit nothing here. Nothing is left on the machine, however this ends. The last line is JSON; exit code 1
says that the model does not hold.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.core.spec import Staging
from tasks.core.transfer_choice import Places, plan_transfers
from tasks.core.transfer_model import (
    EACH_FROM_HUB,
    ONE_PULL,
    SHARDED_EXCHANGE,
    SHARDED_PULL,
    STORE_FILLED,
    Prediction,
    Rates,
    demand_of,
    predict,
)
from tests.bench.limited import network
from tests.bench.limited.network import Limits
from tests.bench.limited.programs import Run
from tests.bench.limited.site import Site

NODES = (1, 4, 16)
PULLERS = 4
# The published checkpoint (61 shards: a small first one, a large last one), 40,000 times smaller.
SHARDS_BYTES = (70_000, *[420_000] * 59, 480_000)
LIMITS = Limits(hub=2_000_000, uplink=10_000_000, store=16_000_000, inside=2_500_000)
# Measured over predicted.
BAND = (0.8, 1.5)
TRIES = 3
# Ways that are predicted closer to each other than so are held to no order.
APART = 1.15
# How much more an exchange may grow with the nodes than predicted.
FLAT = 1.35
# Headers of packets and requests come on top of the bytes from outside.
OUTSIDE_BAND = (1.0, 1.15)


@dataclass(frozen=True)
class Row:
    """One way on so many nodes: what the model says of it, and what was measured."""

    nodes: int
    way: str
    bottleneck: str
    predicted_s: float
    measured_s: float
    ratio: float
    outside_predicted_bytes: int
    outside_measured_bytes: int
    programs_cpu_s: float
    tries: int = 1


def rates(limits: Limits) -> Rates:
    """Return the rates of the links; what only a real node has limits nothing, and starts are not measured."""
    inside = float(limits.inside)
    return Rates(limits.hub, limits.uplink, limits.store, inside, inside, disk=1e15, core_hash=1e15, start_s=0.0)


def predictions(site: Site, nodes: int, *, filled: bool) -> dict[str, Prediction]:
    """Return what the model says of each way from a store that holds everything or nothing."""
    present = {file.sha256: filled for file in site.lock.files}
    demand = replace(demand_of(site.lock, present, nodes, PULLERS), overlapped=True)
    return {way.name: way for way in predict(demand, rates(LIMITS))}


def measure(site: Site, nodes: int) -> list[Row]:
    """Measure every way that is possible on so many nodes."""
    empty, filled = (predictions(site, nodes, filled=there) for there in (False, True))
    ways: list[tuple[Prediction, Callable[[], Run]]] = [
        (empty[EACH_FROM_HUB], lambda: site.each_from_hub(nodes)),
        (empty[ONE_PULL], lambda: site.through_store(nodes, 1)),
        (filled[STORE_FILLED], lambda: site.from_filled_store(nodes)),
        (empty[SHARDED_PULL], lambda: site.through_store(nodes, PULLERS)),
        (empty[SHARDED_EXCHANGE], lambda: site.exchanged(nodes)),
    ]
    rows = []
    for way, act in ways:
        # Pullers on one node share its link to the Hub: that is one pull.
        if way.possible and not (nodes == 1 and way.name == SHARDED_PULL):
            rows.append(_least_disturbed(site, nodes, way, act))
    return rows


def _least_disturbed(site: Site, nodes: int, way: Prediction, act: Callable[[], Run]) -> Row:
    """Return the fastest of up to three tries: more than one only while it is slower than predicted.

    Whatever else this machine does can only make it slower.
    """
    tries: list[Row] = []
    while not tries or (len(tries) < TRIES and tries[-1].ratio > BAND[1]):
        tries.append(_row(site, nodes, way, act))
    return replace(min(tries, key=lambda row: row.measured_s), tries=len(tries))


def _row(site: Site, nodes: int, way: Prediction, act: Callable[[], Run]) -> Row:
    if way.name != STORE_FILLED:
        site.empty_store()
    site.empty_nodes()
    before = site.outside_bytes()
    run = act()
    row = Row(
        nodes=nodes,
        way=way.name,
        bottleneck=way.bottleneck,
        predicted_s=round(way.seconds, 2),
        measured_s=round(run.seconds, 2),
        ratio=round(run.seconds / way.seconds, 3),
        outside_predicted_bytes=way.outside_bytes,
        outside_measured_bytes=site.outside_bytes() - before,
        programs_cpu_s=round(run.cpu_s, 1),
    )
    print(
        f"{row.nodes:>3} nodes  {row.way:<17} predicted {row.predicted_s:6.1f} s, measured {row.measured_s:6.1f} s, "
        f"ratio {row.ratio:.2f}, from outside {row.outside_measured_bytes / 1e6:.0f} of "
        f"{row.outside_predicted_bytes / 1e6:.0f} MB, {row.programs_cpu_s:.1f} CPU s  [{row.bottleneck}]",
        flush=True,
    )
    return row


def plan_cpu_s(site: Site, nodes: int) -> float:
    """Return the CPU seconds of planning for so many nodes."""
    began, present = time.process_time(), {file.sha256: False for file in site.lock.files}
    plan_transfers(site.lock, Staging(), PULLERS, present, Places(nodes), 1.0)
    return round(time.process_time() - began, 4)


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each thing that is not as the model says."""
    return [*_out_of_band(rows), *_out_of_order(rows), *_not_flat(rows)]


def _out_of_band(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        if not BAND[0] <= row.ratio <= BAND[1]:
            found.append(f"{row.way} on {row.nodes}: {row.ratio} times the prediction")
        least, most = (row.outside_predicted_bytes * factor for factor in OUTSIDE_BAND)
        if row.outside_predicted_bytes and not least <= row.outside_measured_bytes <= most:
            found.append(f"{row.way} on {row.nodes}: {row.outside_measured_bytes} bytes from outside")
    return found


def _out_of_order(rows: Sequence[Row]) -> list[str]:
    """Return the pairs of ways on as many nodes of which the model says that one is faster, and it is not."""
    found = []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row.predicted_s)
        apart = one.nodes == other.nodes and slow.predicted_s > APART * fast.predicted_s
        if apart and fast.measured_s >= slow.measured_s:
            found.append(f"on {one.nodes}: {fast.way} was not faster than {slow.way}")
    return found


def _not_flat(rows: Sequence[Row]) -> list[str]:
    """Return that an exchange on more nodes took longer than on few, beyond what the model says of it."""
    some = [row for row in rows if row.way == SHARDED_EXCHANGE]
    few, many = min(some, key=lambda row: row.nodes), max(some, key=lambda row: row.nodes)
    grown, predicted = many.measured_s / few.measured_s, many.predicted_s / few.predicted_s
    return [f"exchange grew {grown:.2f} times, predicted {predicted:.2f}"] if grown > FLAT * max(1.0, predicted) else []


def main() -> int:
    """Measure, compare, print; return 1 if the model does not hold."""
    if lacking := network.why_not_possible():
        print(f"not possible: {lacking}", file=sys.stderr)
        return 2
    directory = network.private_directory()
    if directory is None:
        return network.run_inside(sys.argv)
    with Site(directory, LIMITS, SHARDS_BYTES) as site:
        began = time.monotonic()
        rows = [row for nodes in NODES for row in measure(site, nodes)]
        took_s = time.monotonic() - began
        planning = {str(nodes): plan_cpu_s(site, nodes) for nodes in (16, 128)}
    failed = failures(rows)
    result = {
        "bench": "topologies",
        "phase": "pull and stage, from programs that are ready to the last one's end",
        "workload": f"{len(SHARDS_BYTES)} shards, {sum(SHARDS_BYTES)} bytes, {PULLERS} pullers",
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs, network namespaces with tc tbf on one machine",
        "limits_bytes_per_s": asdict(LIMITS),
        "band": BAND,
        "load_average": round(os.getloadavg()[1], 1),
        "plan_cpu_s": planning,
        "took_s": round(took_s, 1),
        "rows": [asdict(row) for row in rows],
        "holds": not failed,
        "failed": failed,
    }
    for line in failed:
        print(f"NOT AS PREDICTED: {line}")
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
