"""The bytes of a stream of blocks, each taken while it holds: the next one may be in the same buffer."""

from __future__ import annotations

from collections.abc import Iterable


def whole(blocks: Iterable[bytes | memoryview]) -> bytes:
    """Return all bytes of a stream."""
    data = bytearray()
    for block in blocks:
        data += block
    return bytes(data)
