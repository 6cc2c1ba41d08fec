"""What of the weights in the store may go: files of no lock that is needed, after their time behind a tombstone (I10).

Pure. The first run that finds a file unneeded leaves a tombstone, a later one deletes the file if it still is and the
tombstone is old enough. Whoever needs it meanwhile takes the tombstone away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.identity import canonical_bytes

TOMBSTONES = "trash/"
BLOBS = "blobs/"
LEFT_S = 3600.0
"""Nobody who lives writes to an upload so seldom."""
_BLOB = re.compile(rf"{BLOBS}([0-9a-f]{{64}})(\.ok)?")
_TOMBSTONE = re.compile(rf"{TOMBSTONES}([0-9a-f]{{64}})\.json")


@dataclass(frozen=True)
class Blob:
    """One file's bytes in the store, by sha256; `is_verified` says that its `.ok` is there."""

    sha256: str
    size_bytes: int
    is_verified: bool


@dataclass(frozen=True)
class Upload:
    """An upload that was never finished, and since when nobody writes to it; 0 where the store does not tell."""

    key: str
    upload_id: str
    size_bytes: int
    idle_s: float


@dataclass(frozen=True)
class StorePlan:
    """What is to be done in the store, and why the rest stays.

    `bury` get a tombstone, `unearth` lose theirs, `delete` are deleted with it, `abort` are unfinished uploads.
    `waiting` have one and stay for so many seconds.
    """

    bury: tuple[Blob, ...]
    unearth: tuple[str, ...]
    delete: tuple[Blob, ...]
    abort: tuple[Upload, ...]
    waiting: Mapping[str, float]
    needed: int
    needed_bytes: int


def blob_of(key: str) -> str:
    """Return the sha256 that a key of the store is about; empty if it is no blob's."""
    found = _BLOB.fullmatch(key)
    return found.group(1) if found else ""


def tombstone_key(sha256: str) -> str:
    """Return the key of a blob's tombstone."""
    return f"{TOMBSTONES}{sha256}.json"


def tombstone_of(key: str) -> str:
    """Return the sha256 that a tombstone is about; empty if the key is none's."""
    found = _TOMBSTONE.fullmatch(key)
    return found.group(1) if found else ""


def tombstone(blob: Blob, now: float, run: str) -> bytes:
    """Return the tombstone of a blob."""
    return canonical_bytes(
        {"version": 1, "sha256": blob.sha256, "size_bytes": blob.size_bytes, "buried_at": now, "run": run}
    )


def buried_at(data: bytes) -> float | None:
    """Return when a tombstone was set; None if it cannot be read, and then its time has not begun."""
    try:
        return float(json.loads(data)["buried_at"])
    except (ValueError, KeyError, TypeError):
        return None


def blobs_in(sizes: Mapping[str, int]) -> list[Blob]:
    """Return the blobs of a listing of keys with sizes; an `.ok` without its blob counts as one of no bytes."""
    digests = sorted({sha for key in sizes if (sha := blob_of(key))})
    return [Blob(sha, sizes.get(f"{BLOBS}{sha}", 0), f"{BLOBS}{sha}.ok" in sizes) for sha in digests]


def plan_store(
    blobs: Iterable[Blob],
    uploads: Iterable[Upload],
    needed: Collection[str],
    tombstones: Mapping[str, float],
    used_at: Mapping[str, float],
    age_s: float,
    now: float,
) -> StorePlan:
    """Return what is to be done.

    Args:
        blobs: what is there.
        uploads: unfinished ones.
        needed: sha256 of every file of every lock that is needed.
        tombstones: when each was set, by sha256.
        used_at: when a release that has or had the file was last heard of: a tombstone of before that says nothing.
        age_s: how old a tombstone has to be.
        now: seconds since the epoch.
    """
    bury, delete, waiting, kept = [], [], {}, []
    for blob in blobs:
        since = max(tombstones.get(blob.sha256, now), used_at.get(blob.sha256, 0.0))
        if blob.sha256 in needed:
            kept.append(blob)
        elif blob.sha256 not in tombstones:
            bury.append(blob)
        elif now - since >= age_s:
            delete.append(blob)
        else:
            waiting[blob.sha256] = age_s - (now - since)
    there = {blob.sha256 for blob in (*bury, *delete)} | waiting.keys()
    idle_s = max(age_s, LEFT_S)
    old = [u for u in uploads if blob_of(u.key) and blob_of(u.key) not in needed and u.idle_s >= idle_s]
    return StorePlan(
        tuple(bury),
        tuple(sorted(tombstones.keys() - there)),
        tuple(delete),
        tuple(old),
        waiting,
        len(kept),
        sum(blob.size_bytes for blob in kept),
    )


def as_rows(plan: StorePlan) -> list[dict[str, Any]]:
    """Return what is to be done as rows for a person."""
    rows: list[dict[str, Any]] = [
        {"what": f"{BLOBS}{blob.sha256}", "size_bytes": blob.size_bytes, "action": "bury"} for blob in plan.bury
    ]
    rows += [{"what": f"{BLOBS}{b.sha256}", "size_bytes": b.size_bytes, "action": "delete"} for b in plan.delete]
    rows += [{"what": f"{u.key} (upload)", "size_bytes": u.size_bytes, "action": "end"} for u in plan.abort]
    return rows
