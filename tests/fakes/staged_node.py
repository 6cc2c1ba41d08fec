"""A node's directory for weights on a real disk, and a store whose bodies a test may change."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE, check_marker_against_lock, marker_from_data
from tasks.node.program import Stop
from tasks.node.quarantine import QUARANTINE_DIR
from tasks.node.sources import StoreSource
from tasks.node.stage import Node, Stager
from tasks.node.verified_file import PARTIAL_DIR
from tests.fakes.checkpoints import contents
from tests.fakes.memory_store import MemoryStore

NODE = Node("node-1", "uid-1")
FILES = contents()
SHARD = "model-2-of-4.safetensors"


class FaultyStore(MemoryStore):
    """Serves blobs through a function that may change them, once for each time a blob is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[str, int, Iterator[bytes]], Iterator[bytes]] = lambda key, nth, blocks: blocks
        self.opened: dict[str, int] = {}
        self._lock = threading.Lock()

    def open(self, key: str, offset: int = 0) -> Iterator[bytes]:
        with self._lock:
            self.opened[key] = nth = self.opened.get(key, 0) + 1
        return self.change(key, nth, super().open(key, offset))


def blob_key(path: str = SHARD) -> str:
    return "blobs/" + hashlib.sha256(FILES[path]).hexdigest()


def flipped(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for i, block in enumerate(blocks):
        yield bytes([block[0] ^ 1]) + block[1:] if i == 1 else block


def stage(
    store: Any,
    root: Path,
    lock: Lock,
    node: Node = NODE,
    stop: Stop | None = None,
    reserve: int = 0,
    threads: int = 3,
    **more: Any,
) -> Any:
    stager = Stager(StoreSource(store), store, root, lock, node, reserve, stop or Stop(), **more)
    return stager.stage(threads=threads, lock_wait_s=60.0)


def tree(root: Path, lock: Lock) -> dict[str, bytes]:
    """Return the files of a checkpoint's directory by path, the quarantine left out."""
    directory = root / lock.model_dir
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    return {path: data for path, data in found.items() if not path.startswith(QUARANTINE_DIR)}


def quarantined(root: Path, lock: Lock) -> list[tuple[dict[str, Any], bytes]]:
    """Return the notes of what is in the quarantine, oldest first, each with the bytes."""
    place = root / lock.model_dir / QUARANTINE_DIR
    return [
        (json.loads(note.read_text()), note.with_suffix(".bytes").read_bytes()) for note in sorted(place.glob("*.json"))
    ]


def assert_staged(root: Path, lock: Lock, files: dict[str, bytes] = FILES) -> None:
    found = tree(root, lock)
    marker = marker_from_data(json.loads(found.pop(MARKER_FILE)))
    assert found == files
    check_marker_against_lock(marker, lock, "node-1")


def assert_nothing_unverified(root: Path, lock: Lock, files: dict[str, bytes] = FILES) -> None:
    """No file with a final name holds anything but the bytes of the lock, and nobody says that all is well."""
    found = tree(root, lock)
    assert MARKER_FILE not in found
    for path, data in found.items():
        assert path.startswith(PARTIAL_DIR) or data == files[path], path
