"""What each way of the weights takes, held against the published arithmetic for 16 nodes of 8 H200."""

from collections import Counter
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core import ownership
from tasks.core.spec import StagingFigures
from tasks.core.staging import FILES_AT_ONCE
from tasks.core.transfer_model import (
    ASSUMED,
    EACH_FROM_HUB,
    ONE_PULL,
    SHARDED_EXCHANGE,
    SHARDED_PULL,
    STORE_FILLED,
    Rates,
    deal,
    demand_of,
    predict,
    rates_of,
)
from tasks.node import exchange, stage
from tasks.node.puller import share
from tests.fakes.checkpoints import contents, lock_of, published_lock

# The formulas of the table know no single files: as many that none counts.
FINE, REAL = published_lock(6100), published_lock()
# Limits that the table does not look at.
ANY = 1e18
GB, MINUTE = 1e9, 60.0


def gigabytes(**per_s):
    """Return rates in GB/s; what is not named limits nothing."""
    named = ("hub", "uplink", "store", "store_client", "network", "disk", "core_hash")
    return Rates(**{name: per_s.get(name, ANY) * GB for name in named}, start_s=per_s.get("start_s", 0.0), meet_s=0.0)


def way(name, lock, rates, nodes=16, pullers=1, present=None, **more):
    demand = replace(demand_of(lock, present or {}, nodes, pullers), **more)
    return next(row for row in predict(demand, rates) if row.name == name)


def all_present(lock):
    return {file.sha256: True for file in lock.files}


GBIT_10, GBIT_100, GBIT_400 = 1.25, 12.5, 50.0


@pytest.mark.parametrize(
    ("hub", "uplink", "seconds", "bottleneck"),
    [
        (1, GBIT_10, 220 * MINUTE, "uplink"),
        (1, GBIT_100, 22 * MINUTE, "uplink"),
        (1, GBIT_400, 17 * MINUTE, "Hub per host"),
        (3, GBIT_400, 343, "Hub per host"),
        (5, GBIT_400, 329, "uplink"),
    ],
)
def test_a_each_node_from_the_hub(hub, uplink, seconds, bottleneck):
    row = way(EACH_FROM_HUB, FINE, gigabytes(hub=hub, uplink=uplink, disk=12))
    assert row.seconds == pytest.approx(seconds, rel=0.01)
    assert (row.bottleneck, row.outside_bytes) == (bottleneck, 16 * FINE.total_bytes)


@pytest.mark.parametrize(
    ("hub", "store", "seconds"),
    [
        (1, 160, 19 * MINUTE),
        (1, 20, 31 * MINUTE),
        (3, 160, 446),
        (3, 20, 19.4 * MINUTE),
        (5, 160, 309),
        (5, 20, 17.15 * MINUTE),
    ],
)
def test_b_one_pull_then_the_store(hub, store, seconds):
    rates = gigabytes(hub=hub, uplink=GBIT_400, store=store, store_client=10)
    row = way(ONE_PULL, FINE, rates, overlapped=False)
    assert row.seconds == pytest.approx(seconds, rel=0.01)
    assert row.pull_s + row.stage_s == row.seconds
    assert row.outside_bytes == FINE.total_bytes


@pytest.mark.parametrize(
    ("hub", "store", "seconds"), [(3, 160, 350), (3, 50, 350), (3, 20, 14 * MINUTE), (5, 160, 211)]
)
def test_b_overlapped_by_shard(hub, store, seconds):
    rates = gigabytes(hub=hub, uplink=GBIT_400, store=store, store_client=10)
    row = way(ONE_PULL, REAL, rates, pulls_at_once=1, overlapped=True)
    assert row.seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("uplink", "hub", "disk", "seconds"),
    [
        (GBIT_10, 1, 12, 14 * MINUTE),
        (GBIT_100, 1, 12, 88),
        (GBIT_100, 1, 25, 84),
        (GBIT_400, 1, 12, 88),
        (GBIT_400, 1, 25, 66),
        (GBIT_400, 3, 25, 43),
        (GBIT_400, 5, 25, 43),
    ],
)
def test_c_sharded_pull_and_exchange(uplink, hub, disk, seconds):
    row = way(SHARDED_EXCHANGE, FINE, gigabytes(uplink=uplink, hub=hub, disk=disk, network=50, start_s=2))
    assert row.seconds == pytest.approx(seconds, rel=0.025)
    assert row.outside_bytes == FINE.total_bytes


@pytest.mark.parametrize(("store", "seconds"), [(20, 14 * MINUTE), (50, 329), (100, 165), (160, 103)])
def test_c_through_the_store_and_e_with_a_filled_one(store, seconds):
    rates = gigabytes(hub=1, uplink=GBIT_100, store=store, disk=12)
    through = way(SHARDED_PULL, FINE, rates, pullers=16, pulls_at_once=1, overlapped=True)
    filled = way(STORE_FILLED, FINE, replace(rates, store_client=10 * GB), present=all_present(FINE))
    assert through.seconds == pytest.approx(seconds, rel=0.02)
    assert filled.seconds == pytest.approx(seconds, rel=0.02)
    assert (filled.outside_bytes, filled.pull_s) == (0, 0)


@pytest.mark.parametrize(("at_once", "seconds"), [(1, 108), (2, 130), (3, 151)])
def test_files_are_passed_on_whole_and_that_costs_a_round(at_once, seconds):
    """88 s is for files of no size: of 61 on 16 owners, so many are under way at once and come at the same time."""
    rates = gigabytes(uplink=GBIT_100, hub=1, disk=12, network=50)
    assert way(SHARDED_EXCHANGE, FINE, rates, at_once=1).seconds == pytest.approx(86, abs=1)
    assert way(SHARDED_EXCHANGE, REAL, rates, at_once=at_once).seconds == pytest.approx(seconds, abs=1)


FLAT = [
    (FINE, GBIT_100, 1, 12),
    (FINE, GBIT_400, 3, 12),
    *((published_lock(count), *figures) for count in (61, 62, 64) for figures in (
        (GBIT_10, 1, 12), (GBIT_100, 1, 6), (GBIT_100, 3, 6), (GBIT_400, 1, 6), (GBIT_400, 1, 12), (GBIT_400, 3, 6)
    )),
]  # fmt: skip


@pytest.mark.parametrize(("lock", "uplink", "hub", "disk"), FLAT)
def test_from_16_to_128_nodes_the_exchange_stays_flat_and_the_hub_grows(lock, uplink, hub, disk):
    rates = gigabytes(uplink=uplink, hub=hub, disk=disk, network=50)
    few, many = (way(SHARDED_EXCHANGE, lock, rates, nodes=nodes) for nodes in (16, 128))
    assert many.seconds <= 1.1 * few.seconds
    assert many.outside_bytes == few.outside_bytes
    few, many = (way(EACH_FROM_HUB, lock, rates, nodes=nodes) for nodes in (16, 128))
    assert many.seconds == pytest.approx(128 * lock.total_bytes / rates.uplink, rel=1e-6)
    assert many.seconds > 2 * few.seconds


def test_with_more_owners_than_shards_all_end_their_only_one_at_the_same_time():
    """The worst place for 128 nodes: uplink and disks are as fast, so that overlapping them was worth most."""
    rates = gigabytes(uplink=GBIT_100, hub=1, disk=12, network=50)
    few, many = (way(SHARDED_EXCHANGE, REAL, rates, nodes=nodes).seconds for nodes in (16, 128))
    assert 1.1 * few < many < 1.15 * few
    assert many == pytest.approx(REAL.total_bytes * (1 / 12.5e9 + 1 / 12e9), rel=0.01)


def test_the_last_file_is_given_to_all_others_by_one_owner():
    rates = gigabytes(uplink=GBIT_100, network=5)
    row = way(SHARDED_EXCHANGE, published_lock(8), rates, nodes=8, at_once=1)
    assert row.seconds == pytest.approx(REAL.total_bytes * (1 / 12.5e9 + 7 / 8 / 5e9), rel=0.01)


def test_nodes_that_have_the_weights_give_them_and_nothing_comes_from_outside():
    rates = gigabytes(uplink=GBIT_10, hub=1, network=50, disk=12)
    row = way(SHARDED_EXCHANGE, REAL, rates, nodes=1, holders=15)
    assert (row.possible, row.outside_bytes, row.bottleneck) == (True, 0, "disk")
    assert row.seconds < 90
    alone = way(SHARDED_EXCHANGE, REAL, rates, nodes=1)
    assert (alone.possible, alone.why_not) == (False, "there is no other node")
    assert way(SHARDED_EXCHANGE, REAL, rates, nodes=0, holders=3).why_not == "no node lacks the weights"


def test_an_exchange_may_take_its_shares_from_the_store():
    rates = gigabytes(hub=1, uplink=GBIT_100, store=20, network=50, disk=12)
    filled = way(SHARDED_EXCHANGE, REAL, rates, present=all_present(REAL), origin="store")
    assert (filled.pull_s, filled.outside_bytes) == (0, 0)
    assert filled.seconds < way(STORE_FILLED, REAL, rates, present=all_present(REAL)).seconds / 5
    empty = way(SHARDED_EXCHANGE, REAL, rates, origin="store", pullers=16)
    assert (empty.stage_s, empty.outside_bytes) == (filled.stage_s, REAL.total_bytes)
    assert empty.seconds == pytest.approx(empty.pull_s + empty.stage_s) and empty.pull_s > 60


def test_spares_take_from_the_uplink_and_from_the_owners_too():
    rates = gigabytes(hub=1, uplink=GBIT_10, network=5)
    for name in (EACH_FROM_HUB, SHARDED_EXCHANGE):
        alone, more = (way(name, REAL, rates, nodes=4, guests=guests) for guests in (0, 4))
        assert more.seconds > 1.04 * alone.seconds


def test_the_owner_with_most_bytes_holds_up_the_others():
    """Some owners have four shards where the fair share is 3.8: what they give to 15 others is the network's limit."""
    rates = gigabytes(network=1)
    even, real = (way(SHARDED_EXCHANGE, lock, rates, at_once=1).seconds for lock in (FINE, REAL))
    assert even == pytest.approx(FINE.total_bytes * 15 / 16 / GB, rel=0.01)
    assert real == pytest.approx(max(map(sum, deal([f.size_bytes for f in REAL.files], 16))) * 15 / GB, rel=0.01)
    assert real > 1.05 * even


@pytest.mark.parametrize(
    ("name", "slow", "bottleneck"),
    [
        (EACH_FROM_HUB, {"hub": 1}, "Hub per host"),
        (EACH_FROM_HUB, {"uplink": 1}, "uplink"),
        (EACH_FROM_HUB, {"disk": 1}, "disk"),
        (EACH_FROM_HUB, {"core_hash": 1}, "hash"),
        (ONE_PULL, {"hub": 1}, "Hub per host"),
        (ONE_PULL, {"store": 1}, "store"),
        (SHARDED_PULL, {"uplink": 1}, "uplink"),
        (SHARDED_PULL, {"store_client": 1}, "store per client"),
        (SHARDED_PULL, {"disk": 1}, "disk"),
        (SHARDED_EXCHANGE, {"network": 1}, "network"),
        (SHARDED_EXCHANGE, {"uplink": 1, "hub": 2}, "uplink"),
        (SHARDED_EXCHANGE, {"hub": 1}, "Hub per host"),
        (SHARDED_EXCHANGE, {"core_hash": 1}, "hash"),
        (SHARDED_EXCHANGE, {"disk": 1}, "disk"),
    ],
)
def test_the_bottleneck_has_a_name(name, slow, bottleneck):
    assert way(name, REAL, replace(gigabytes(), **{k: v * GB for k, v in slow.items()}), pullers=4).bottleneck == (
        bottleneck
    )


def test_more_cores_hash_more_until_the_disk_is_the_limit():
    figures = StagingFigures(disk_bytes_per_s=12_000_000_000, store_bytes_per_s=10**15, store_client_bytes_per_s=10**15)
    rows = [
        way(STORE_FILLED, REAL, rates_of(figures), present=all_present(REAL), at_once=cores) for cores in (3, 10, 21)
    ]
    assert [row.bottleneck for row in rows] == ["hash", "disk", "disk"]
    assert rows[0].seconds == pytest.approx(REAL.total_bytes / 3.6e9 + 2, rel=0.01)


def test_what_is_not_possible_says_why():
    rates = gigabytes(hub=1)
    assert way(STORE_FILLED, REAL, rates).why_not == "the store holds 0 of 61 files"
    assert way(SHARDED_PULL, REAL, rates).why_not == "the site has one puller"
    for name in (ONE_PULL, SHARDED_PULL):
        row = way(name, REAL, rates, pullers=4, present=all_present(REAL))
        assert (row.possible, row.why_not) == (False, "the store holds all of it already")


def test_what_is_in_the_store_or_on_the_nodes_already_takes_no_time():
    first = REAL.files[0]
    rates = gigabytes(hub=1, store_client=10)
    row = way(SHARDED_PULL, REAL, rates, pullers=2, present={first.sha256: True})
    assert row.outside_bytes == REAL.total_bytes - first.size_bytes
    nothing = way(STORE_FILLED, REAL, replace(rates, start_s=2.0), nodes=0, present=all_present(REAL))
    assert (nothing.possible, nothing.seconds, nothing.pull_s, nothing.stage_s) == (True, 0, 0, 0)
    pull_only = way(ONE_PULL, REAL, replace(rates, start_s=2.0), nodes=0)
    assert (pull_only.stage_s, pull_only.pull_s) == (0, pytest.approx(REAL.total_bytes / GB + 2))


def test_a_content_that_stands_twice_is_pulled_once_and_staged_twice():
    files = contents()
    lock = lock_of(files | {"copy.safetensors": files["model-1-of-4.safetensors"]})
    demand = demand_of(lock, {}, 3, 2)
    assert demand.node_bytes - sum(demand.blobs_bytes) == len(files["model-1-of-4.safetensors"])


def test_figures_that_a_site_does_not_state_are_assumed_and_named():
    stated = rates_of(StagingFigures(hub_bytes_per_s=7, core_hash_bytes_per_s=5))
    assert (stated.hub, stated.core_hash, stated.uplink) == (7, 5, ASSUMED["uplink_bytes_per_s"][0])
    assert set(stated.assumed) == set(ASSUMED) - {"hub_bytes_per_s", "core_hash_bytes_per_s"}
    assert {field.name for field in fields(StagingFigures)} == set(ASSUMED)
    assert all(source for _, source in ASSUMED.values())


SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 20))
def test_a_deal_gives_everything_once_and_no_hand_much_more(sizes, hands):
    dealt = deal(sizes, hands)
    assert sorted(size for hand in dealt for size in hand) == sorted(sizes)
    loads = [sum(hand) for hand in dealt]
    assert max(loads) - min(loads) <= max(sizes)


def test_the_pullers_and_the_owners_deal_as_the_model_does():
    sizes_by_sha256, owners = {file.sha256: file.size_bytes for file in REAL.files}, Counter()
    for sha256, owner in ownership.deal(REAL.files, [f"node-{n}" for n in range(16)]).items():
        owners[owner] += sizes_by_sha256[sha256]
    assert sorted(owners.values()) == sorted(map(sum, deal(sizes_by_sha256.values(), 16)))
    assert [[file.size_bytes for file in share(REAL, puller, 8)] for puller in range(8)] == deal(
        [file.size_bytes for file in REAL.files], 8
    )


RATE = st.integers(1, 1000)


@given(
    st.fixed_dictionaries({f.name: RATE for f in fields(Rates) if f.name not in ("start_s", "meet_s", "assumed")}),
    st.integers(1, 130),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_no_way_beats_its_slowest_part_and_a_faster_part_slows_nothing(rates, nodes, pullers, overlapped, data):
    rates = gigabytes(**rates, start_s=2.0)
    demand = replace(demand_of(REAL, {}, nodes, pullers), overlapped=overlapped)
    faster = replace(
        rates, **{data.draw(st.sampled_from(["hub", "uplink", "store", "network", "disk", "core_hash"])): ANY}
    )
    for row, other in zip(predict(demand, rates), predict(demand, faster), strict=True):
        if not row.possible:
            continue
        assert row.seconds >= REAL.total_bytes / min(rates.disk, 3 * rates.core_hash)
        assert row.seconds >= row.outside_bytes / rates.uplink
        assert max(row.pull_s, row.stage_s) <= row.seconds <= row.pull_s + row.stage_s + 1e-6
        assert other.seconds <= row.seconds + 1e-6


def test_the_programs_have_as_many_files_under_way_as_the_model_thinks():
    assert stage._parser().get_default("threads") == FILES_AT_ONCE
    assert exchange._parser().get_default("pull_threads") == FILES_AT_ONCE


def test_starting_programs_and_meeting_take_a_while():
    rates = replace(gigabytes(uplink=GBIT_100, hub=1), start_s=2.0, meet_s=4.0)
    plain = gigabytes(uplink=GBIT_100, hub=1)
    for name, more in ((EACH_FROM_HUB, 2), (ONE_PULL, 2), (SHARDED_EXCHANGE, 6)):
        assert way(name, REAL, rates).seconds == pytest.approx(way(name, REAL, plain).seconds + more)
