"""A bounded piece of what a Hub sends, and not more: of a server that sends for ever, or hardly anything, too."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

from tasks.core.errors import After, UnavailableError

_LEAST_BYTES_PER_S = 10_000


def read_up_to(blocks: Generator[bytes], enough_bytes: int, patience_s: float, where: str) -> bytes:
    """Return what comes, and stop where it is more than enough.

    A stream that ends by itself is read to its end, which keeps the connection.

    Args:
        blocks: the stream; it is closed.
        enough_bytes: more than so many are not taken.
        patience_s: from then on a stream that drips is given up: each byte comes in time, and it would take for ever.
        where: the file, for messages.
    """
    data, began = bytearray(), time.monotonic()
    with closing(blocks):
        for block in blocks:
            data += block
            if len(data) > enough_bytes:
                break
            elapsed_s = time.monotonic() - began
            if elapsed_s > patience_s and len(data) < elapsed_s * _LEAST_BYTES_PER_S:
                raise UnavailableError(
                    "K2-UNA-001",
                    "The Hub sends too slowly.",
                    where=where,
                    got=f"{len(data)} bytes in {elapsed_s:.0f} s",
                    expected=f"at least {_LEAST_BYTES_PER_S} bytes per second",
                    retry=After(5.0),
                )
    return bytes(data)
