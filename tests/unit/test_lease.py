"""The traffic lease: one holder at a time, generations that never go down, older writers fenced off (I3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tasks.core.errors import After, ConflictError
from tasks.core.lease import (
    LeaseState,
    check_fence,
    lease_spec,
    micro_time,
    parse_micro_time,
    read_lease,
    released,
    take,
)

DURATION = 15.0
NOBODY = LeaseState("", 0, 0.0, DURATION)


def test_a_free_lease_is_taken_with_a_new_generation():
    assert take(NOBODY, "a", 100.0, DURATION) == LeaseState("a", 1, 100.0, DURATION)


def test_renewing_keeps_the_generation():
    held = take(NOBODY, "a", 100.0, DURATION)
    assert take(held, "a", 110.0, DURATION) == LeaseState("a", 1, 110.0, DURATION)


def test_a_held_lease_says_when_to_try_again():
    held = take(NOBODY, "a", 100.0, DURATION)
    with pytest.raises(ConflictError) as caught:
        take(held, "b", 110.0, DURATION)
    assert (caught.value.code, caught.value.got) == ("K2-CON-001", "a")
    assert isinstance(caught.value.retry, After)
    assert take(held, "b", 110.0 + caught.value.retry.seconds, DURATION).generation == 2


def test_an_expired_lease_is_taken_over_and_so_is_one_given_back():
    held = take(NOBODY, "a", 100.0, DURATION)
    assert take(held, "b", 115.1, DURATION).generation == 2
    assert take(released(held), "b", 100.1, DURATION).generation == 2


@pytest.mark.parametrize(("on_route", "mine", "fenced"), [(0, 1, False), (1, 1, False), (2, 1, True)])
def test_the_fence(on_route, mine, fenced):
    if not fenced:
        check_fence(on_route, mine)
        return
    with pytest.raises(ConflictError) as caught:
        check_fence(on_route, mine)
    assert caught.value.code == "K2-CON-002"


@given(st.text("abc", max_size=3), st.integers(0, 10**6), st.integers(0, 2 * 10**15), st.integers(1, 3600))
def test_a_lease_comes_back_from_its_object(holder, generation, micros, duration):
    state = LeaseState(holder, generation, micros / 1e6, float(duration))
    again = read_lease({"spec": lease_spec(state)})
    assert (again.holder, again.generation, again.duration_s) == (holder, generation, duration)
    assert again.renewed_at == pytest.approx(state.renewed_at, abs=2e-6)


@pytest.mark.parametrize("duration", [0.2, 1.0, 14.4, 15.0])
def test_the_object_never_promises_less_than_the_holder_counts_on(duration):
    assert lease_spec(LeaseState("a", 1, 0.0, duration))["leaseDurationSeconds"] >= duration


def test_an_empty_object_is_held_by_nobody():
    assert read_lease({}) == LeaseState("", 0, 0.0, 0.0)
    assert read_lease({}).expired(0.0)


def test_micro_time_is_the_form_of_kubernetes():
    assert micro_time(0.5) == "1970-01-01T00:00:00.500000Z"
    assert parse_micro_time("1970-01-01T00:00:00.500000Z") == 0.5
    assert parse_micro_time(None) == 0.0


class Holders(RuleBasedStateMachine):
    """Three processes that take, renew and drop one lease, and write a fenced route."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.lease = NOBODY
        self.believe = {}
        self.route_generation = 0
        self.highest = 0

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(who=st.sampled_from("abc"))
    def somebody_takes(self, who):
        before = self.lease
        try:
            self.lease = take(before, who, self.now, DURATION)
        except ConflictError:
            assert before.holder not in ("", who)
            assert self.now <= before.renewed_at + DURATION
            return
        self.believe[who] = self.lease.generation
        if before.holder != who:
            assert before.expired(self.now)
            assert self.lease.generation == before.generation + 1

    @rule(who=st.sampled_from("abc"))
    def somebody_gives_back(self, who):
        if self.lease.holder == who:
            self.lease = released(self.lease)

    @rule(who=st.sampled_from("abc"))
    def somebody_writes_the_route(self, who):
        mine = self.believe.get(who, 0)
        try:
            check_fence(self.route_generation, mine)
        except ConflictError:
            assert mine < self.route_generation
            return
        self.route_generation = mine

    @invariant()
    def generations_never_go_down(self):
        assert self.lease.generation >= self.highest
        self.highest = self.lease.generation
        assert self.route_generation <= self.highest

    @invariant()
    def no_two_believe_in_the_same_generation(self):
        assert len(set(self.believe.values())) == len(self.believe)


TestHolders = Holders.TestCase
