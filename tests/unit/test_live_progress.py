"""Progress on standard error: lines now and then, one line that changes on a terminal, nothing for short work."""

from __future__ import annotations

import io

import pytest

from flows.console.live_progress import LiveProgress, ShownTally


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Steps:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setattr("flows.console.live_progress.time", steps)
    return steps


def test_long_work_writes_a_line_now_and_then(clock: Steps) -> None:
    stream = io.StringIO()
    tally = ShownTally(LiveProgress(stream), "verify", 100_000_000, 2)
    for at in range(1, 11):
        clock.now = 100.0 + 3 * (at - 1)
        if at == 10:
            tally.file_done()
            tally.file_done()
        tally.advance(10_000_000)
    assert stream.getvalue().splitlines() == [
        "verify: 50 MB of 100 MB, 3.33 MB/s, ETA 15.0 s, 0 of 2 files",
        "verify: 90 MB of 100 MB, 3.33 MB/s, ETA 3.0 s, 0 of 2 files",
        "verify: 100 MB of 100 MB, 2 of 2 files",
    ]


def test_on_a_terminal_one_line_changes_and_goes(clock: Steps) -> None:
    stream = Terminal()
    progress = LiveProgress(stream)
    for done in range(0, 101, 10):
        progress.show("verify", done, 100, "bytes")
        clock.now += 0.5
    progress.say("done")
    text = stream.getvalue()
    assert text.count("\r\x1b[K") >= 4
    assert text.endswith("\r\x1b[Kdone\n")
    assert "\n" not in text[:-1]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_short_work_shows_nothing(clock: Steps, stream: io.StringIO) -> None:
    progress = LiveProgress(stream)
    for done in (0, 50, 100):
        progress.show("verify", done, 100, "bytes")
        clock.now += 0.1
    progress.clear()
    assert stream.getvalue() == ""
