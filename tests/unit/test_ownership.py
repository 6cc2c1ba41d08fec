"""Who owns which shard: balanced, the same on every node, and a turn for every blob whoever is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.core.lock import LockedFile
from tasks.core.ownership import deal, in_rotation, turns, whose_turn

GB = 1_000_000_000


def file(number: int, size_bytes: int) -> LockedFile:
    return LockedFile(f"model-{number}.safetensors", size_bytes, "shard", sha256=f"{number:064x}")


KIMI = [file(1, 2_846_000_000), *(file(n, 17_066_000_000) for n in range(2, 61)), file(61, 19_415_000_000)]
lists = st.lists(st.integers(0, 20 * GB), min_size=1, max_size=80).map(
    lambda sizes: [file(n, size) for n, size in enumerate(sizes)]
)
parties = st.integers(1, 20).map(lambda count: [f"node-{n}" for n in range(count)])


def test_61_shards_over_16_nodes_are_balanced_by_bytes() -> None:
    nodes = [f"node-{n}" for n in range(16)]
    owners = deal(KIMI, nodes)
    loads = [sum(f.size_bytes for f in KIMI if owners[f.sha256] == node) for node in nodes]
    assert max(loads) <= 4 * 17_066_000_000 + 3 * GB
    assert {sum(owner == node for owner in owners.values()) for node in nodes} == {3, 4}


@given(lists, parties)
def test_every_blob_has_one_owner_in_whatever_order_the_files_come(files: list[LockedFile], nodes: list[str]) -> None:
    owners = deal(files, nodes)
    assert owners == deal(reversed(files), nodes)
    assert owners.keys() == {f.sha256 for f in files}
    loads = [sum(f.size_bytes for f in files if owners[f.sha256] == node) for node in nodes]
    assert max(loads) - min(loads) <= max(f.size_bytes for f in files)


@given(lists, parties, st.data())
def test_each_node_takes_its_own_first_and_everything_once(
    files: list[LockedFile], nodes: list[str], data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from([*nodes, "guest"]))
    owners = deal(files, nodes)
    order = in_rotation(files, owners, nodes, me)
    assert sorted(f.path for f in order) == sorted(f.path for f in files)
    if me in nodes:
        own = [f for f in files if owners[f.sha256] == me]
        assert {f.path for f in order[: len(own)]} == {f.path for f in own}


@given(parties, st.data())
def test_whoever_is_lost_it_is_somebodys_turn_and_all_agree(nodes: list[str], data: st.DataObject) -> None:
    owner = data.draw(st.sampled_from(nodes))
    lost = data.draw(st.sets(st.sampled_from(nodes)))
    left = [node for node in nodes if node not in lost]
    assert len({whose_turn(turns(nodes, owner, me), lost) for me in left}) == (1 if left else 0)
    for me in left:
        assert whose_turn(turns(nodes, owner, me), lost) in left
    assert whose_turn(turns(nodes, owner, "guest"), nodes) == "guest"


def test_no_two_nodes_begin_with_the_same_owner() -> None:
    nodes = [f"node-{n}" for n in range(16)]
    owners = deal(KIMI, nodes)
    firsts = []
    for me in nodes:
        others = [f for f in in_rotation(KIMI, owners, nodes, me) if owners[f.sha256] != me]
        firsts.append(owners[others[0].sha256])
    assert len(set(firsts)) == 16
