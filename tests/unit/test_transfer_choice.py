"""Which way the weights go, and the sentence that says why."""

from dataclasses import replace

import pytest

from tasks.core.spec import Staging, StagingFigures
from tasks.core.transfer_choice import Places, Transfers, plan_transfers, transfer_rows
from tests.fakes.checkpoints import published_lock

LOCK = published_lock()
ALL = {file.sha256: True for file in LOCK.files}
FIGURES = StagingFigures(
    hub_bytes_per_s=1_000_000_000,
    uplink_bytes_per_s=12_500_000_000,
    store_bytes_per_s=20_000_000_000,
    store_client_bytes_per_s=10_000_000_000,
    network_bytes_per_s=50_000_000_000,
    disk_bytes_per_s=12_000_000_000,
    core_hash_bytes_per_s=9_000_000_000,
)
FAST_STORE = replace(FIGURES, store_bytes_per_s=160_000_000_000)


def planned(figures=FIGURES, topology="auto", *, nodes=16, spares=0, holding=0, present=None, pullers=16, usd=0.0):
    staging, places = Staging(topology, figures=figures), Places(nodes, spares, holding)
    return plan_transfers(LOCK, staging, pullers, present or {}, places, usd)


@pytest.mark.parametrize(
    ("how", "topology", "reason"),
    [
        ({}, "exchange", "fastest: 2 min 39 s, 15 min 08 s through the store (store)"),
        ({"present": ALL}, "exchange", "fastest: 2 min 39 s, 13 min 45 s through the store (store)"),
        ({"figures": FAST_STORE, "present": ALL}, "store", "no other way is clearly faster"),
        ({"figures": FAST_STORE}, "exchange", "fastest"),
        ({"figures": StagingFigures()}, "store", "exchange is predicted at 6 min"),
        ({"figures": replace(FIGURES, network_bytes_per_s=None)}, "store", "state network_bytes_per_s in the site's"),
        ({"figures": replace(FIGURES, store_bytes_per_s=None)}, "store", "state store_bytes_per_s in the site's"),
        (
            {"nodes": 1, "pullers": 1, "figures": replace(FIGURES, store_bytes_per_s=600_000_000)},
            "hub",
            "fastest: 17 min 11 s, 32 min 29 s through the store (store)",
        ),
        ({"nodes": 1, "pullers": 16}, "store", "no other way is clearly faster"),
        ({"nodes": 0, "present": ALL}, "store", "no chosen node lacks the weights"),
        ({"nodes": 0, "topology": "exchange"}, "exchange", "the site file says exchange, although no node lacks the"),
        ({"topology": "hub"}, "hub", "the site file says hub; exchange is predicted at 2 min 39 s"),
        ({"topology": "store"}, "store", "the site file says store; exchange is predicted at 2 min 39 s"),
        ({"topology": "exchange"}, "exchange", "the site file says exchange"),
        ({"topology": "exchange", "nodes": 1}, "exchange", "says exchange, although there is no other node"),
        ({"nodes": 1, "holding": 15}, "exchange", "fastest: "),
    ],
)
def test_the_way_and_the_reason(how, topology, reason):
    made = planned(**how)
    assert made.topology == topology
    assert reason in made.why


def test_the_steps_are_predicted_with_the_spares():
    alone, more = planned(FAST_STORE, "store"), planned(FAST_STORE, "store", spares=4)
    assert alone.predicted_s["pull"] == more.predicted_s["pull"] > 0
    assert more.predicted_s["stage"] == pytest.approx(alone.predicted_s["stage"] + LOCK.total_bytes / 10e9 + 2, abs=0.1)
    hub_alone, by_hub = planned(topology="hub"), planned(topology="hub", spares=16)
    assert by_hub.predicted_s == {"pull": 0.0, "stage": pytest.approx(2 * hub_alone.predicted_s["stage"] - 2, abs=1)}
    guests = planned(topology="exchange", spares=1).predicted_s["stage"]
    assert guests == pytest.approx(planned(topology="exchange").predicted_s["stage"], rel=0.1)
    only_spares = planned(FAST_STORE, nodes=0, spares=16, present=ALL)
    assert only_spares.predicted_s == {"pull": 0.0, "stage": pytest.approx(LOCK.total_bytes / 10e9 + 2, abs=0.1)}


def test_one_node_in_an_exchange_is_predicted_as_one_at_the_hub():
    assert planned(topology="exchange", nodes=1).predicted_s == planned(topology="hub", nodes=1).predicted_s


def test_dollars_are_those_of_gpus_that_wait():
    seconds = planned().predicted_s["stage"]
    assert planned(usd=128 * 2.3).usd_waiting == pytest.approx(128 * 2.3 * seconds / 3600, abs=0.01)
    assert planned().usd_waiting == 0


def test_rows_show_every_way_and_what_is_assumed():
    rows = dict(transfer_rows(planned(replace(FIGURES, disk_bytes_per_s=None), usd=294.4)))
    assert rows["weights go by"].startswith("exchange: fastest: ")
    assert rows["predicted"] == "pull 0 ms, stage 4 min 05 s; $20.06 for GPUs that wait"
    assert rows["  each-from-hub"] == "21 min 59 s, uplink, 16.5 TB from outside"
    assert rows["  sharded-exchange"] == "4 min 05 s, disk, 1.03 TB from outside"
    assert rows["  store-filled"] == "not possible: the store holds 0 of 61 files"
    assert rows["  assumed"] == "disk 6 GB/s (one NVMe drive, no stripe)"
    assert transfer_rows(Transfers()) == []
