"""A stream that goes on where it broke, and that is broken off and opened anew where it stands or drips.

The first rung of what a pull does about a source that fails: a new connection from the same byte costs nothing, as the
hash goes on. What this cannot mend, because the thread itself hangs, the watch of the process ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.core.errors import After, UnavailableError
from tasks.node.meter import Meter
from tasks.node.program import Stop, say
from tasks.node.workers import backoff_s

if TYPE_CHECKING:
    from tasks.ports import Block

_ENOUGH_BYTES = 1024 * 1024
_ENOUGH_SHARE = 1 / 1000


@dataclass(frozen=True)
class Pace:
    """What a stream must do to be kept.

    Args:
        stall_s: over so long a wait for bytes in all ...
        min_bytes_per_s: ... it must have brought at least so many a second.
        tries: streams in a row that brought nothing to speak of are given up.
    """

    stall_s: float = 30.0
    min_bytes_per_s: int = 10_000
    tries: int = 6


def steady_blocks(
    open_from: Callable[[int], Iterator[Block]], size_bytes: int, pace: Pace, meter: Meter, stop: Stop
) -> Generator[Block, None, None]:
    """Yield all bytes of a stream that `open_from` opens at an offset.

    What a source says is its end is believed when it says so twice, or when the bytes are enough.

    Raises:
        UnavailableError: the last of too many failures in a row, or one that says that trying again cannot help.
    """
    offset = failures = 0
    while True:
        begin = offset
        try:
            with closing(_at_pace(open_from(offset), pace)) as blocks:
                for block in blocks:
                    stop.check()
                    offset += len(block)
                    yield block
                    meter.at(min(offset, size_bytes))
            if offset >= size_bytes or offset == begin:
                return
            raise _ended_early(offset, size_bytes)
        except UnavailableError as error:
            stop.check()
            error.where = error.where or meter.path
            meter.failed(str(error))
            if offset >= size_bytes > 0:
                return  # all is here, however the stream ended: the digest decides
            failures = 1 if offset - begin >= min(_ENOUGH_BYTES, size_bytes * _ENOUGH_SHARE) else failures + 1
            if not isinstance(error.retry, After) or failures >= pace.tries:
                raise
            wait_s = backoff_s(error.retry.seconds, failures)
            say(f"{meter.path}: the stream broke at byte {offset}; going on from there in {wait_s:.1f} s: {error}")
            if "status" in error.details:
                meter.wait(stop, wait_s)
            else:
                stop.sleep(wait_s)  # nobody asked for it: a source that stands, stands


def _at_pace(stream: Iterator[Block], pace: Pace) -> Generator[Block, None, None]:
    """Yield a stream's blocks; UnavailableError when it is too slow. Time in which nobody reads does not count."""
    waited_s, received = 0.0, 0
    blocks = iter(stream)
    try:
        while True:
            began = time.monotonic()
            block = next(blocks, None)
            waited_s += time.monotonic() - began
            if block is None:
                return
            received += len(block)
            yield block
            # Only now: it may have been the last one.
            if waited_s >= pace.stall_s:
                if received < waited_s * pace.min_bytes_per_s:
                    raise _drips(received, waited_s, pace)
                waited_s, received = 0.0, 0
    finally:
        if isinstance(stream, Generator):
            stream.close()


def _drips(received: int, waited_s: float, pace: Pace) -> UnavailableError:
    return UnavailableError(
        "K2-UNA-001",
        "The stream only drips.",
        got=f"{received} bytes in {waited_s:.1f} s",
        expected=f"at least {pace.min_bytes_per_s} bytes/s",
        retry=After(1.0),
    )


def _ended_early(offset: int, size_bytes: int) -> UnavailableError:
    return UnavailableError(
        "K2-UNA-001",
        "The stream ended early.",
        got=f"{offset} bytes",
        expected=f"{size_bytes} bytes",
        retry=After(0.5),
    )
