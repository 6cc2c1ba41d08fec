"""The unfinished uploads of dead pulls: nobody sees them, they are paid for, and no one finishes them.

An upload is ended only when nobody has written to it for so long that no living puller can be behind it: a living one
writes a part in less, or is ended by its own watch. How long is told by the store's clock alone, from the upload's
start and its newest part. Where a store does not tell its time, nothing is ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.core.errors import UnavailableError
from tasks.core.units import format_bytes
from tasks.node.program import say

if TYPE_CHECKING:
    from tasks.ports import Store, UnfinishedUpload

_BLOB = re.compile(r"blobs/[0-9a-f]{64}")


@dataclass(frozen=True)
class Sweep:
    """Which uploads are looked at, and from when on one counts as left.

    Args:
        concerns: says of a blob's key whether this puller looks after it; another one may be about to go on with it.
        idle_s: nobody has written for so long, and nobody will go on: the blob is there, or a better upload is.
        left_s: nobody has written for so long, although somebody might still go on with it.
    """

    concerns: Callable[[str], bool] = lambda key: True
    idle_s: float = 2 * 3600.0
    left_s: float = 24 * 3600.0


def sweep(store: Store, how: Sweep, taken_up: Collection[str], wanted: Collection[str]) -> dict[str, Any]:
    """End the uploads that dead pulls have left; return how many there were and how many bytes they held.

    A store that refuses is no reason to end a pull: it is said, and returned.

    Args:
        store: where to look; only keys of blobs are looked at.
        how: which uploads.
        taken_up: ids of uploads that this run is about to go on with.
        wanted: keys of blobs that this run brings anyway.
    """
    ended: list[UnfinishedUpload] = []
    refused = {}
    try:
        for upload in store.unfinished_uploads("blobs/"):
            if _is_left(store, upload, how, taken_up, wanted):
                store.abort_upload(upload.key, upload.upload_id)
                ended.append(upload)
    except UnavailableError as error:
        say(f"uploads of dead pulls are left where they are: {error}")
        refused = {"error": error.summary[:100]}
    size_bytes = sum(upload.size_bytes for upload in ended)
    if ended:
        oldest_h = max(upload.idle_s for upload in ended) / 3600
        say(f"ended {len(ended)} uploads of dead pulls: {format_bytes(size_bytes)}, idle for up to {oldest_h:.1f} h")
    return {"uploads": len(ended), "bytes": size_bytes, **refused}


def _is_left(
    store: Store, upload: UnfinishedUpload, how: Sweep, taken_up: Collection[str], wanted: Collection[str]
) -> bool:
    if not _BLOB.fullmatch(upload.key) or not how.concerns(upload.key):
        return False
    if upload.upload_id in taken_up or upload.idle_s < how.idle_s:
        return False
    if upload.key in wanted or upload.idle_s >= how.left_s:
        return True
    return store.head(f"{upload.key}.ok") is not None and store.head(upload.key) is not None
