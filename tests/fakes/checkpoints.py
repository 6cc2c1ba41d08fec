"""Small checkpoints for tests: contents by path, and the lock that describes them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

from tasks.core.lock import Lock, LockedFile, classify, make_lock
from tests.fakes.memory_store import MemoryStore

REPO = "moonshotai/Kimi-K2-Instruct"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def contents(shards: int = 4, shard_bytes: int = 300_000) -> dict[str, bytes]:
    """Return files of a checkpoint: shards, a config, executable code in a directory, an empty file."""
    source = random.Random(7)
    files = {f"model-{i}-of-{shards}.safetensors": source.randbytes(shard_bytes + i) for i in range(1, shards + 1)}
    return files | {"config.json": b"{}\n", "code/modeling.py": b"pass\n", "code/empty.py": b""}


def lock_of(files: Mapping[str, bytes]) -> Lock:
    """Return the accepted lock of files: each has a sha256."""
    return make_lock(
        REPO,
        REVISION,
        [LockedFile(p, len(d), classify(p), sha256=hashlib.sha256(d).hexdigest()) for p, d in files.items()],
    )


def fill(store: MemoryStore, files: Mapping[str, bytes]) -> Lock:
    """Put the lock and the blobs of files into a store and return the lock."""
    lock = lock_of(files)
    store.objects[f"locks/{lock.digest}.json"] = lock.to_bytes()
    for file in lock.files:
        store.objects[f"blobs/{file.sha256}"] = files[file.path]
        store.objects[f"blobs/{file.sha256}.ok"] = b"{}"
    return lock


def published_lock(shards: int = 61) -> Lock:
    """Return a lock of the sizes that the published shapes of Kimi-K2-Instruct give; its digests are made up.

    Another count than 61 is as many shards of one size, the same bytes in all.
    """
    sizes = [2_846_000_000, *[17_066_000_000] * 59, 19_415_000_000]
    if shards != len(sizes):
        sizes = [sum(sizes) // shards] * shards
    names = [f"model-{number}-of-{len(sizes)}.safetensors" for number in range(1, len(sizes) + 1)]
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    files = [
        LockedFile(*row, sha256=sha) for *row, sha in zip(names, sizes, ["shard"] * len(sizes), digests, strict=True)
    ]
    return make_lock(REPO, REVISION, files)
