"""Who is there, awaited or gone: by beats that change and by the reader's own clock, never by two clocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tasks.core.standing import DONE, LEFT, WORKING, Note, Patience, Sighting, Standing, note_from_bytes

NOTE = Note("node-2", "run-1", "b1", WORKING, "http://127.0.0.1:1", "t0ken")
HERE, AWAITED, GONE = Standing.HERE, Standing.AWAITED, Standing.GONE


class Clock:
    now_s = 500.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seen(clock: Clock) -> Sighting:
    return Sighting("run-1", Patience(join_s=60, lost_s=15, strikes=3, forgive_s=30, lies=2), clock.now)


def test_one_that_has_not_come_is_awaited_and_then_gone_and_may_still_come(seen: Sighting, clock: Clock) -> None:
    assert (seen.standing, seen.needs_us) == (AWAITED, True)
    clock.now_s += 61
    assert (seen.standing, seen.needs_us) == (GONE, False)
    seen.see(NOTE, "1")
    assert (seen.standing, seen.needs_us) == (HERE, True)


def test_a_beat_that_stops_is_a_node_that_is_lost(seen: Sighting, clock: Clock) -> None:
    for beat in range(1, 5):
        seen.see(NOTE, str(beat))
        clock.now_s += 14
        assert seen.standing is HERE
    seen.see(NOTE, "4")
    clock.now_s += 2
    assert seen.standing is GONE
    seen.see(replace(NOTE, boot="b2"), "4")
    assert seen.standing is HERE


def test_a_note_of_an_earlier_run_counts_when_its_beat_changes(seen: Sighting, clock: Clock) -> None:
    old = replace(NOTE, run="run-0")
    seen.see(old, "700")
    assert seen.standing is AWAITED
    seen.see(old, "700")
    assert seen.standing is AWAITED
    seen.see(old, "701")
    assert seen.standing is HERE


def test_one_that_left_in_an_earlier_run_is_awaited_in_this_one(seen: Sighting) -> None:
    seen.see(replace(NOTE, run="run-0", state=LEFT, url=""), "9")
    assert seen.standing is AWAITED
    seen.see(replace(NOTE, boot="b2"), "1")
    assert seen.standing is HERE
    seen.see(replace(NOTE, boot="b2", state=LEFT, url=""), "1")
    assert (seen.standing, seen.needs_us) == (GONE, False)


def test_one_that_is_done_can_be_asked_and_needs_nothing(seen: Sighting) -> None:
    seen.see(replace(NOTE, state=DONE), "1")
    assert (seen.standing, seen.needs_us) == (HERE, False)


def test_strikes_in_a_row_are_forgiven_after_a_while(seen: Sighting, clock: Clock) -> None:
    seen.see(NOTE, "1")
    seen.strike()
    seen.strike()
    seen.answered()
    seen.strike()
    assert seen.standing is HERE
    seen.strike()
    seen.strike()
    assert seen.standing is GONE
    for beat in range(2, 6):
        clock.now_s += 8
        seen.see(NOTE, str(beat))
    assert seen.standing is HERE


def test_lies_are_not_forgiven_to_the_process_that_told_them(seen: Sighting) -> None:
    seen.see(NOTE, "1")
    seen.lied()
    assert seen.standing is HERE
    seen.lied()
    seen.answered()
    seen.see(NOTE, "2")
    assert seen.standing is GONE
    seen.see(replace(NOTE, boot="b2"), "1")
    assert seen.standing is HERE


def test_a_note_is_read_back_and_nothing_else_is_one() -> None:
    assert note_from_bytes(NOTE.to_bytes()) == NOTE
    assert "t0ken" not in repr(NOTE)
    data = json.loads(NOTE.to_bytes())
    for wrong in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps(data | {"version": 2}).encode(),
        json.dumps({"version": 1}).encode(),
        json.dumps(data | {"url": "file:///etc/passwd"}).encode(),
        json.dumps(data | {"state": "?"}).encode(),
    ):
        assert note_from_bytes(wrong) is None
