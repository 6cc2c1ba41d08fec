"""The store's part of a collection: files of no lock that is needed get a tombstone, and are deleted by a later run.

Against a release that begins meanwhile: the file's `.ok` goes first, then it is read anew who needs what, then the file
goes. A release writes its lock into its ledger before it looks for an `.ok`: either its record is seen here, and the
`.ok` is put back, or it finds none and pulls the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import ConflictError, K2Error
from tasks.core.store_collection import (
    BLOBS,
    TOMBSTONES,
    Blob,
    StorePlan,
    Upload,
    as_rows,
    blob_of,
    blobs_in,
    buried_at,
    plan_store,
    tombstone,
    tombstone_key,
    tombstone_of,
)
from tasks.core.units import format_bytes
from tasks.steps.context import Ports
from tasks.steps.weights_needed import Needed, read_needed


@dataclass(frozen=True)
class StoreReport:
    """What is to be done in the store, or was."""

    rows: Sequence[dict[str, Any]]
    needed: int
    needed_bytes: int
    waiting: int

    @property
    def note(self) -> str:
        """What a person is told in one line."""
        counts = {action: [row for row in self.rows if row["action"] == action] for action in ("bury", "delete", "end")}
        said = [f"{len(rows)} {_WORDS[action]} ({_bytes(rows)})" for action, rows in counts.items() if rows]
        return ", ".join(said) or "nothing to do"

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "files": list(self.rows),
            "needed": self.needed,
            "needed_bytes": self.needed_bytes,
            "waiting": self.waiting,
        }


_WORDS = {"bury": "files to the trash", "delete": "files deleted", "end": "unfinished uploads ended"}


def _bytes(rows: Sequence[dict[str, Any]]) -> str:
    return format_bytes(sum(row["size_bytes"] for row in rows))


def list_store(ports: Ports, needed: Needed, trash_age_s: float) -> StoreReport:
    """Return what a collection would do in the store. Changes nothing."""
    return _report(_plan(ports, needed, trash_age_s))


def collect_store(ports: Ports, trash_age_s: float) -> StoreReport:
    """Bury what nothing needs, delete what was buried long enough ago, and return what was done."""
    plan = _plan(ports, read_needed(ports), trash_age_s)
    for blob in plan.bury:
        with contextlib.suppress(ConflictError):  # another run was faster
            data = tombstone(blob, ports.clock.now(), ports.run)
            ports.store.put(tombstone_key(blob.sha256), data, if_absent=True)
    for sha256 in plan.unearth:
        ports.store.delete(tombstone_key(sha256))
    kept = _delete(ports, plan.delete, plan.abort)
    return _report(plan, kept)


def _plan(ports: Ports, needed: Needed, trash_age_s: float) -> StorePlan:
    sizes = {item.key: item.size_bytes for item in ports.store.list_objects(BLOBS)}
    uploads = [Upload(u.key, u.upload_id, u.size_bytes, u.idle_s) for u in ports.store.unfinished_uploads(BLOBS)]
    return plan_store(
        blobs_in(sizes), uploads, needed.sha256, _tombstones(ports), needed.used_at, trash_age_s, ports.clock.now()
    )


def _tombstones(ports: Ports) -> dict[str, float]:
    """Return when each tombstone was set; one that cannot be read begins anew."""
    found = {}
    for item in ports.store.list_objects(TOMBSTONES):
        sha256 = tombstone_of(item.key)
        if not sha256:
            continue
        try:
            at = buried_at(ports.store.get(item.key)[0])
        except KeyError:
            continue
        if at is None:
            ports.store.delete(item.key)
        else:
            found[sha256] = at
    return found


def _delete(ports: Ports, blobs: Sequence[Blob], uploads: Sequence[Upload]) -> set[str]:
    """Delete files, unless somebody has begun to need them; return which were kept after all."""
    if not blobs and not uploads:
        return set()
    taken = {blob.sha256: _take_ok(ports, blob.sha256) for blob in blobs}
    try:
        needed = read_needed(ports).sha256
    except K2Error:
        for sha256, ok in taken.items():
            _give_ok(ports, sha256, ok)
        raise
    kept = {blob.sha256 for blob in blobs if blob.sha256 in needed}
    for blob in blobs:
        if blob.sha256 in needed:
            _give_ok(ports, blob.sha256, taken[blob.sha256])
        else:
            ports.store.delete(f"{BLOBS}{blob.sha256}")
        ports.store.delete(tombstone_key(blob.sha256))
    for upload in uploads:
        if blob_of(upload.key) not in needed:
            ports.store.abort_upload(upload.key, upload.upload_id)
    return kept


def _take_ok(ports: Ports, sha256: str) -> bytes | None:
    """Take the word back that a file is verified, and return what it said."""
    key = f"{BLOBS}{sha256}.ok"
    try:
        data, _ = ports.store.get(key)
    except KeyError:
        return None
    ports.store.delete(key)
    return data


def _give_ok(ports: Ports, sha256: str, ok: bytes | None) -> None:
    if ok is not None:
        with contextlib.suppress(ConflictError):  # whoever needs it has verified it meanwhile
            ports.store.put(f"{BLOBS}{sha256}.ok", ok, if_absent=True)


def _report(plan: StorePlan, kept: set[str] | None = None) -> StoreReport:
    rows = [row for row in as_rows(plan) if row["what"].removeprefix(BLOBS) not in (kept or set())]
    return StoreReport(rows, plan.needed, plan.needed_bytes, len(plan.waiting))
