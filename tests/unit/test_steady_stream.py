"""Streams that break, stand, drip or end early, and from which byte they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tasks.core.errors import After, Never, UnavailableError
from tasks.node import steady_stream
from tasks.node.meter import Meter
from tasks.node.program import Stop, StoppedError
from tasks.node.steady_stream import Pace, steady_blocks
from tasks.node.workers import attempt, backoff_s

DATA = bytes(range(250)) * 400
BLOCK = 1000


class Source:
    """Opens streams; what the nth one does is said beforehand."""

    def __init__(self, *streams: Callable[[Iterator[bytes]], Iterator[bytes]]) -> None:
        self.opened: list[int] = []
        self._streams = list(streams)

    def open(self, offset: int) -> Iterator[bytes]:
        self.opened.append(offset)
        blocks = (DATA[i : i + BLOCK] for i in range(offset, len(DATA), BLOCK))
        return self._streams.pop(0)(blocks) if self._streams else blocks


def read(source: Source, pace: Pace, size_bytes: int = len(DATA), stop: Stop | None = None) -> bytes:
    return b"".join(steady_blocks(source.open, size_bytes, pace, Meter("x", size_bytes), stop or Stop()))


def cut(after: int, seconds: float = 0.0, **details: int) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
    def change(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(after):
            yield next(blocks)
        raise UnavailableError("K2-UNA-001", "cut", retry=After(seconds), details=dict(details))

    return change


def ended(after: int) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
    def change(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(after):
            yield next(blocks)

    return change


PACE = Pace(stall_s=30.0, tries=3)


def test_a_stream_that_is_cut_at_each_tenth_goes_on_each_time() -> None:
    source = Source(*[cut(10)] * 9)
    assert read(source, PACE) == DATA
    assert source.opened == [i * 10 * BLOCK for i in range(10)]


def test_a_source_that_brings_nothing_is_given_up_after_some_tries() -> None:
    source = Source(*[cut(0)] * 99)
    with pytest.raises(UnavailableError, match="cut"):
        read(source, PACE)
    assert source.opened == [0, 0, 0]


def test_a_byte_now_and_then_is_no_progress() -> None:
    def one_byte(blocks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(blocks)[:1]
        raise UnavailableError("K2-UNA-001", "cut", retry=After(0.0))

    source = Source(*[one_byte] * 99)
    with pytest.raises(UnavailableError):
        read(source, PACE)
    assert source.opened == [0, 1, 2]


def test_what_cannot_help_is_not_tried() -> None:
    def refused(blocks: Iterator[bytes]) -> Iterator[bytes]:
        raise UnavailableError("K2-UNA-001", "no", retry=Never())
        yield b""

    source = Source(refused)
    with pytest.raises(UnavailableError, match="no"):
        read(source, PACE)
    assert source.opened == [0]


def test_a_clean_end_too_early_is_asked_about_once_more() -> None:
    source = Source(ended(3))
    assert read(source, PACE) == DATA
    assert source.opened == [0, 3 * BLOCK]


def test_a_source_that_ends_there_again_is_believed() -> None:
    source = Source(ended(3), ended(0))
    assert read(source, PACE) == DATA[: 3 * BLOCK]


def test_an_empty_file_is_asked_for_once() -> None:
    source = Source(ended(0))
    assert read(source, PACE, size_bytes=0) == b""
    assert source.opened == [0]


class Ticks:
    """A clock that only the source moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(steady_stream.time, "monotonic", lambda: self.now)

    def each(self, seconds: float, count_bytes: int) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
        def change(blocks: Iterator[bytes]) -> Iterator[bytes]:
            for block in blocks:
                for start in range(0, len(block), count_bytes):
                    self.now += seconds
                    yield block[start : start + count_bytes]

        return change


def test_a_drip_is_broken_off_and_goes_on_from_its_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    source = Source(ticks.each(10.0, 500))
    assert read(source, Pace(stall_s=30.0, min_bytes_per_s=100, tries=3)) == DATA
    assert source.opened == [0, 1500]  # after 30 s


def test_a_small_file_that_came_late_is_no_drip(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    source = Source(ticks.each(100.0, BLOCK))
    assert read(source, Pace(stall_s=30.0, min_bytes_per_s=100, tries=3), size_bytes=BLOCK)[:BLOCK] == DATA[:BLOCK]
    assert source.opened == [0]


def test_a_stream_that_breaks_behind_the_last_byte_is_whole() -> None:
    source = Source(cut(len(DATA) // BLOCK))
    assert read(source, PACE) == DATA
    assert source.opened == [0]


def test_a_slow_stream_that_is_fast_enough_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    source = Source(ticks.each(10.0, 1000))
    assert read(source, Pace(stall_s=30.0, min_bytes_per_s=100, tries=3)) == DATA
    assert source.opened == [0]


def test_a_reader_that_takes_its_time_is_no_drip(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, source = Ticks(monkeypatch), Source()
    received = b""
    for block in steady_blocks(source.open, len(DATA), Pace(30.0, 100), Meter("x", len(DATA)), Stop()):
        ticks.now += 1000.0
        received += block
    assert (received, source.opened) == (DATA, [0])


@pytest.mark.parametrize("asked", [True, False])
def test_a_wait_that_was_asked_for_is_told_as_one_and_ends_with_a_stop(asked: bool) -> None:
    meter, stop = Meter("x", len(DATA)), Stop()
    source = Source(cut(3, 30.0, **({"status": 429} if asked else {})))
    quiet = []

    def sleep(seconds: float) -> None:
        quiet.append(meter.line()["quiet_s"])
        stop.set()
        stop.check()

    stop.sleep = sleep  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(StoppedError):
        list(steady_blocks(source.open, len(DATA), PACE, meter, stop))
    assert time.monotonic() - began < 5
    assert 29.0 <= quiet[0] <= 35.0 if asked else quiet == [0.0]
    assert meter.line()["last_error"].startswith("K2-UNA-001 cut")


def test_waits_grow_and_differ_and_are_never_shorter_than_asked() -> None:
    for failures, least in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 60.0), (4000, 60.0)):
        waits = {backoff_s(1.0, failures) for _ in range(50)}
        assert least <= min(waits) <= max(waits) <= least + min(least / 4, 5.0)
        assert len(waits) > 40
    assert backoff_s(0.0, 5) == 0.0
    assert 300.0 <= backoff_s(300.0, 4) <= 305.0


def test_an_attempt_waits_where_it_is_told_to() -> None:
    waited: list[float] = []
    left = [UnavailableError("K2-UNA-001", "x", retry=After(2.0))] * 3

    def work() -> str:
        if left:
            raise left.pop()
        return "done"

    assert attempt(work, Stop(), integrity_tries=1, tries=4, told=lambda _: None, sleep=waited.append) == "done"
    assert all(asked <= wait <= asked + 5.0 for asked, wait in zip((2, 4, 8), waited, strict=True))
