"""A Hub whose answers to one file a test writes itself, and the whole way of that file into a store."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tasks.adapters.hub import HfHub
from tasks.core.identity import sha256_hex
from tasks.core.lock import LockedFile, make_lock
from tasks.node.meter import Meter
from tasks.node.program import Stop
from tasks.node.steady_stream import Pace
from tasks.node.transfer import Route, move_blob
from tests.contract.odd_server import odd_server, send
from tests.fakes.memory_store import MemoryStore

REPO = "moonshotai/Kimi-K2-Instruct"
COMMIT = "a" * 40
PATH = "model-1-of-1.safetensors"
DATA = random.Random(4).randbytes(300_000)
KEY = f"blobs/{sha256_hex(DATA)}"

Answer = Callable[[BaseHTTPRequestHandler, int], None]


def offset_of(handler: BaseHTTPRequestHandler) -> int:
    """Return the first byte that a request asks for."""
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    return int(asked.group(1)) if asked else 0


def right(handler: BaseHTTPRequestHandler, nth: int = 0, data: bytes = DATA, **headers: str) -> None:
    """Answer as an honest server does."""
    offset = offset_of(handler)
    if offset:
        headers["Content_Range"] = f"bytes {offset}-{len(data) - 1}/{len(data)}"
    send(handler, 206 if offset else 200, data[offset:], **headers)


def cut(handler: BaseHTTPRequestHandler, after_bytes: int) -> None:
    """Answer as an honest server does whose connection breaks."""
    offset = offset_of(handler)
    headers = {"Content_Length": str(len(DATA) - offset)}
    if offset:
        headers["Content_Range"] = f"bytes {offset}-{len(DATA) - 1}/{len(DATA)}"
    send(handler, 206 if offset else 200, DATA[offset : offset + after_bytes], **headers)


@dataclass
class LyingHub:
    """A running server, what it was asked, and a store for what comes from it.

    `asked` holds the first byte, the token and the path of each request.
    """

    url: str
    asked: list[tuple[int, str | None, str]]
    pace: Pace = field(default_factory=lambda: Pace(stall_s=5.0, tries=4))
    store: MemoryStore = field(default_factory=lambda: MemoryStore(min_part_bytes=1))

    def pull(self, **hub: Any) -> Meter:
        """Bring the file into the store."""
        file = LockedFile(PATH, len(DATA), "shard", sha256=sha256_hex(DATA))
        lock = make_lock(REPO, COMMIT, [file])
        route = Route(HfHub(self.url, stall_s=self.pace.stall_s, **hub), self.store, lock, self.url, 64_000, self.pace)
        meter = Meter(PATH, len(DATA))
        move_blob(route, file, meter, Stop())
        return meter

    def assert_right(self) -> None:
        """The store holds the right bytes, stated, and nothing else."""
        assert self.store.objects.keys() == {KEY, f"{KEY}.ok"}
        assert self.store.objects[KEY] == DATA
        assert self.store.uploads == {}

    def assert_nothing_named(self) -> None:
        """The store holds nothing under any name."""
        assert self.store.objects == {}


@contextmanager
def lying_hub(answer: Answer) -> Iterator[LyingHub]:
    """Serve each request with a function that is told which one it is, from 1."""
    asked: list[tuple[int, str | None, str]] = []

    def serve(handler: BaseHTTPRequestHandler) -> None:
        asked.append((offset_of(handler), handler.headers.get("Authorization"), handler.path))
        answer(handler, len(asked))

    with odd_server(serve) as url:
        yield LyingHub(url, asked)
