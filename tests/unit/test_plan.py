"""The plan: the class of a change, the chosen nodes, the bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import CapacityError
from tasks.core.plan import (
    LiveRelease,
    NodeFacts,
    Occupant,
    change_class,
    make_plan,
    natural_key,
    plan_rows,
    waiting_cost,
)
from tasks.core.spec import Retention, plain
from tasks.core.transfer_choice import Transfers
from tests.fakes.checkpoints import contents, lock_of, published_lock
from tests.fakes.small_world import IMAGES, release, site

LOCK = lock_of(contents())
BASE = release("k2-live-1")


def live(of=BASE, lock_digest=LOCK.digest):
    return LiveRelease(
        of.id, of.serving_digest(lock_digest), of.policy_digest, lock_digest, plain(of.serving_data(lock_digest))
    )


def node(name="node-1", *, usable=True, used=0, own=0, staged=(), total=8):
    return NodeFacts(name, f"uid-{name}", usable, "" if usable else "cordoned", total, used, own, tuple(staged))


POOL = [node(f"node-{n}") for n in range(1, 7)]


def made(what, pool=POOL, of=None, blobs=None, stable=None):
    if stable is None:
        stable = of.serving_digest[:12] if of else "parking"
    return make_plan(what, LOCK, site(), of, stable, pool, blobs or {}, ["A/a"])


@pytest.mark.parametrize(
    ("what", "before", "change"),
    [
        (BASE, None, "first"),
        (BASE, live(), "none"),
        (release("k2-live-2"), live(), "policy"),
        (replace(BASE, retention=Retention(1.0)), live(), "policy"),
        (replace(BASE, images=replace(IMAGES, tool="newer")), live(), "none"),
        (replace(BASE, images=replace(IMAGES, router="newer")), live(), "router"),
        (replace(BASE, profile=replace(BASE.profile, router_args={"policy": "x"})), live(), "router"),
        (release("k2-live-2", args={"context-length": 8192}), live(), "arguments"),
        (replace(BASE, profile=replace(BASE.profile, host_memory_gib=2000)), live(), "arguments"),
        (replace(BASE, profile=replace(BASE.profile, engine_version="1.0")), live(), "arguments"),
        (replace(BASE, images=replace(IMAGES, engine="newer")), live(), "image"),
        (BASE, live(lock_digest="f" * 64), "weights"),
    ],
)
def test_the_class_of_a_change(what, before, change):
    assert change_class(what, LOCK.digest, before, before.serving_digest[:12] if before else "parking") == change


def test_a_release_that_is_live_changes_nothing_and_needs_no_node():
    plan = made(BASE, [], live())
    assert not plan.has_changes
    assert (plan.nodes, plan.bytes_to_pull, plan.bytes_to_stage, plan.pods_started, plan.objects) == ((), 0, 0, 0, ())
    assert not plan.shifts_traffic


def test_a_new_policy_starts_no_pod_and_moves_no_byte():
    plan = made(release("k2-live-2"), [], live())
    assert plan.has_changes
    assert (plan.pods_started, plan.bytes_to_pull, plan.bytes_to_stage, plan.shifts_traffic) == (0, 0, 0, False)


def test_bytes_are_those_that_are_missing():
    lock12 = LOCK.digest[:12]
    pool = [node("node-1", staged=[lock12]), *POOL[1:]]
    plan = made(BASE, pool)
    assert plan.bytes_to_pull == LOCK.total_bytes
    assert plan.bytes_to_stage == 5 * LOCK.total_bytes
    assert made(BASE, blobs={f.sha256: True for f in LOCK.files}).bytes_to_pull == 0
    assert plan.usd_per_hour == pytest.approx(3 * 8 * 2.3)


def test_two_files_of_the_same_content_are_pulled_once():
    files = {**contents(), "copy-1.json": b"same", "copy-2.json": b"same"}
    lock = lock_of(files)
    plan = make_plan(BASE, lock, site(), None, "parking", POOL, {}, [])
    assert plan.bytes_to_pull == lock.total_bytes - len(b"same")


@pytest.mark.parametrize(
    ("pool", "chosen"),
    [
        (POOL, ("node-1", "node-2", "node-3")),
        ([node(f"node-{n}") for n in (10, 9, 11, 2)], ("node-2", "node-9", "node-10")),
        ([*POOL[:3], node("node-4", staged=[LOCK.digest[:12]])], ("node-4", "node-1", "node-2")),
        ([*POOL[:3], node("node-9", used=8, own=8)], ("node-9", "node-1", "node-2")),
        ([node("node-1", used=8), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", used=1), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", usable=False), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", usable=False, used=8, own=8), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", used=9, own=8), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", total=0), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", total=7), *POOL[1:4]], ("node-2", "node-3", "node-4")),
        ([node("node-1", total=16), *POOL[1:4]], ("node-2", "node-3", "node-4")),
    ],
)
def test_chosen_nodes(pool, chosen):
    assert made(BASE, pool).nodes == chosen


def test_too_few_free_nodes_are_named_with_the_reason():
    with pytest.raises(CapacityError) as caught:
        made(BASE, [node("node-1", usable=False), node("node-2", used=8), node("node-3"), node("node-4", total=0)])
    assert caught.value.where == "node-1: cordoned; node-2: 8 of 8 GPUs in use; node-4: shows 0 GPUs, not 8"
    assert (caught.value.got, caught.value.expected) == ("1 free of 4", "3 whole free nodes")


def test_whoever_has_the_nodes_is_named_and_how_to_free_them():
    pods = tuple(Occupant(f"k2/old-decode-{n}", "k2-old-1") for n in range(3))
    taken = [replace(node("node-1", used=8), used_by=pods), node("node-2", used=8), node("node-3"), node("node-4")]
    with pytest.raises(CapacityError) as caught:
        made(BASE, taken)
    assert caught.value.where == (
        "node-1: 8 of 8 GPUs in use by k2/old-decode-0 of k2-old-1, k2/old-decode-1 of k2-old-1 and 1 more; "
        "node-2: 8 of 8 GPUs in use"
    )
    assert "k2ctl retire k2-old-1 -y" in caught.value.hint


@pytest.mark.parametrize("release_id", [BASE.id, ""])
def test_nobody_is_told_to_retire_what_is_live_or_not_ours(release_id):
    taken = [replace(node(f"node-{n}", used=8), used_by=(Occupant("k2/x", release_id),)) for n in range(1, 4)]
    with pytest.raises(CapacityError) as caught:
        made(release("k2-live-2", args={"context-length": 8192}), taken, of=live())
    assert "retire" not in caught.value.hint
    assert "0 of 3 nodes" in caught.value.hint


def test_a_node_without_its_gpus_is_no_spare_either():
    assert made(BASE, [*POOL[:4], node("node-9", total=0)]).spares == ("node-4",)


UNRECORDED = replace(live(), recorded=False)


@pytest.mark.parametrize(
    ("what", "before", "stable", "change", "warning"),
    [
        (BASE, UNRECORDED, None, "policy", "promote again"),
        (release("k2-live-2"), UNRECORDED, None, "policy", "k2ctl promote k2-live-1 -y"),
        (BASE, live(), "parking", "first", "users to parking and not to the live release k2-live-1"),
        (release("k2-live-2"), live(), "0" * 12, "first", "users to 000000000000"),
        (replace(BASE, images=replace(IMAGES, engine="newer")), live(), "parking", "first", "as if nothing were live"),
        (BASE, live(), "", "first", "users to nobody"),
    ],
)
def test_a_half_done_promotion_and_a_parked_site_are_carried_on_from_and_said(what, before, stable, change, warning):
    plan = made(what, of=before, stable=stable)
    assert plan.change == change
    assert warning in "; ".join(plan.warnings)
    assert plan.shifts_traffic == (change == "first")


def test_the_plan_says_what_it_was_made_over():
    plan = made(release("k2-live-2"), of=live())
    assert (plan.live_release, plan.live_serving_digest) == (BASE.id, live().serving_digest)
    assert plan.route_stable == live().serving_digest[:12]
    first = made(BASE)
    assert (first.live_release, first.live_serving_digest, first.route_stable) == ("", "", "parking")


NODES = st.lists(
    st.builds(
        lambda n, usable, used, own, staged: node(
            f"node-{n}", usable=usable, used=used, own=min(own, used), staged=[LOCK.digest[:12]] * staged
        ),
        st.integers(1, 30), st.booleans(), st.sampled_from([0, 8]), st.sampled_from([0, 8]), st.booleans(),
    ),
    max_size=12,
    unique_by=lambda n: n.name,
)  # fmt: skip


@given(NODES, st.randoms())
def test_choice(pool, dice):
    free = [n for n in pool if n.usable and n.gpus_used == n.gpus_used_by_candidate]
    shuffled = list(pool)
    dice.shuffle(shuffled)
    if len(free) < 3:
        with pytest.raises(CapacityError):
            made(BASE, pool)
        return
    plan = made(BASE, pool)
    assert made(BASE, shuffled).nodes == plan.nodes
    assert len(set(plan.nodes)) == 3
    assert set(plan.nodes) <= {n.name for n in free}
    assert not set(plan.nodes) & set(plan.spares)
    assert set(plan.spares) <= {n.name for n in pool if n.usable}
    own = {n.name for n in free if n.gpus_used_by_candidate}
    assert own <= set(plan.nodes) or set(plan.nodes) <= own


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_names_sort_as_people_count(numbers):
    names = [f"rack-a-node-{n}" for n in numbers]
    assert sorted(names, key=natural_key) == [f"rack-a-node-{n}" for n in sorted(numbers)]
    assert sorted(["node-x", "node-1", "ip-10-0-0-1.ec2.internal"], key=natural_key)


def test_rows_say_what_a_person_asks():
    rows = {row["what"]: row["value"] for row in plan_rows(made(BASE), 55.2)}
    assert rows["change"] == "first"
    assert rows["second set costs"] == "$55.20 per hour"
    assert "no baseline" in rows["warning"]
    assert waiting_cost(1800, 55.2) == "30 min 00 s, $27.60 so far at $55.20/h"


def test_the_way_of_the_weights_is_planned_for_the_nodes_that_lack_them():
    staged = [LOCK.digest[:12]]
    pool = [node("node-1", staged=staged), *POOL[1:3], node("node-4", used=8), node("node-5", used=8, staged=staged)]
    plan = made(BASE, pool)
    assert (plan.nodes, plan.spares) == (("node-1", "node-2", "node-3"), ("node-4", "node-5"))
    assert plan.transfers.topology == "store"
    ways = {way.name: way for way in plan.transfers.ways}
    assert ways["each-from-hub"].outside_bytes == 3 * LOCK.total_bytes
    assert plan.transfers.predicted_s == {
        "pull": pytest.approx(2, abs=0.1),
        "stage": pytest.approx(4, abs=0.1),
    }  # two starts: the chosen ones, then a spare
    all_of_it = {file.sha256: True for file in LOCK.files}
    again = made(BASE, [node(f"node-{n}", staged=staged) for n in range(1, 4)], blobs=all_of_it)
    assert again.transfers.predicted_s == {"pull": 0.0, "stage": 0.0}


def test_a_plan_that_starts_nothing_moves_no_weights():
    assert made(BASE, of=live()).transfers == Transfers()
    assert "weights go by" not in {row["what"] for row in plan_rows(made(BASE, of=live()), 0)}
    assert "weights go by" in {row["what"] for row in plan_rows(made(BASE), 0)}


def test_gpus_wait_for_weights_only_where_nobody_uses_them():
    big = published_lock()

    def waiting(pool):
        return make_plan(BASE, big, site(), None, "parking", pool, {}, []).transfers.usd_waiting

    three, one = waiting(POOL[:3]), waiting([*(node(f"node-{n}", used=8, own=8) for n in (1, 2)), node("node-3")])
    assert 0 < one == pytest.approx(three / 3, abs=0.01)
