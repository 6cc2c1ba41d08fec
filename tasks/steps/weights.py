"""Steps `lock` and `pull`: from a revision on the Hub to verified bytes in the store."""

from __future__ import annotations

import json
from typing import Any

from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.identity import check_revision, git_blob_sha1_hex, sha256_hex
from tasks.core.lock import INDEX_FILE, Lock, LockedFile, accept_small_files, check_index, make_lock
from tasks.core.units import format_bytes
from tasks.core.worker_jobs import render_pull_jobs
from tasks.ports import Hub, Store
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import put_lock
from tasks.steps.jobs import run_jobs

_SMALL_FILE_MAX_BYTES = 64 * 1024 * 1024
_PULL_DEADLINE_S = 4 * 3600.0


def make_accepted_lock(hub: Hub, repo: str, revision: str) -> tuple[Lock, dict[str, bytes]]:
    """Return the lock of a commit, small files accepted, and the bytes of the small files that were read.

    Each small file is checked against its git blob id and gets our own sha256; the index must name exactly the shards.

    Raises:
        InputError: no such repository or commit, an unsafe path, an inconsistent checkpoint.
        IntegrityError: a small file's bytes do not have the blob id that the Hub states for them.
    """
    check_revision(revision)
    listed = hub.list_revision(repo, revision)
    lock = make_lock(repo, revision, listed.files)
    small = {file.path: _read_small(hub, lock, file) for file in lock.files if not file.sha256}
    if INDEX_FILE not in {file.path for file in lock.files}:
        raise InputError("K2-INP-004", "The revision has no index of its shards.", where=INDEX_FILE)
    if INDEX_FILE not in small:
        small[INDEX_FILE] = _read_small(hub, lock, lock.file(INDEX_FILE))
    check_index(lock, _parse_index(small[INDEX_FILE]))
    return accept_small_files(lock, {path: sha256_hex(data) for path, data in small.items()}), small


def _parse_index(data: bytes) -> dict[str, Any]:
    try:
        index = json.loads(data)
        return {"weight_map": dict(index["weight_map"])}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            "K2-INP-004",
            "The index of the shards cannot be read.",
            where=INDEX_FILE,
            got=type(error).__name__,
            expected="a JSON object with a weight_map",
        ) from error


def _read_small(hub: Hub, lock: Lock, file: LockedFile) -> bytes:
    data = hub.read_file(lock.repo, lock.revision, file.path, _SMALL_FILE_MAX_BYTES)
    got, expected = (sha256_hex(data), file.sha256) if file.sha256 else (git_blob_sha1_hex(data), file.git_sha1)
    if got != expected:
        raise IntegrityError(
            "K2-INT-001",
            "A small file's bytes are not those that the Hub lists.",
            where=f"{lock.repo}@{lock.revision[:8]} {file.path}",
            got=got,
            expected=expected,
        )
    return data


def lock_step(ports: Ports, repo: str, revision: str) -> tuple[Lock, dict[str, Any]]:
    """Lock a revision, keep the lock in the store by its digest, and return it with what is recorded of it."""
    lock, _ = make_accepted_lock(ports.hub, repo, revision)
    digest = put_lock(ports.store, lock)
    if digest != lock.digest:
        raise IntegrityError("K2-INT-003", "The stored lock has another digest.", got=digest, expected=lock.digest)
    return lock, {
        "lock_digest": digest,
        "files": len(lock.files),
        "shards": len(lock.shards),
        "total_bytes": lock.total_bytes,
        "note": f"{len(lock.shards)} shards, {format_bytes(lock.total_bytes)}, lock {digest[:12]}",
    }


def blobs_present(store: Store, lock: Lock) -> dict[str, bool]:
    """Return for each sha256 of the lock whether the store holds it verified: marker and blob with the right size."""
    sizes = {item.key: item.size_bytes for item in store.list_objects("blobs/")}
    return {
        file.sha256: f"blobs/{file.sha256}.ok" in sizes and sizes.get(f"blobs/{file.sha256}") == file.size_bytes
        for file in lock.files
    }


def pull_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Bring every file of the lock into the store, verified in the same pass; what is there already moves no byte."""
    lock = subject.lock
    present = blobs_present(ports.store, lock)
    missing = [file for file in lock.files if not present[file.sha256]]
    if not missing:
        return {"outcome": "unchanged", "bytes_fetched": 0, "note": "every file is in the store already"}
    total = sum({file.sha256: file.size_bytes for file in missing}.values())
    jobs = render_pull_jobs(lock, ports.site, ports.templates, subject.release.images.tool)
    results = run_jobs(ports, "pull", jobs, total, _PULL_DEADLINE_S)
    absent = [sha for sha, there in blobs_present(ports.store, lock).items() if not there]
    if absent:
        raise UnavailableError(
            "K2-UNA-003",
            "The pullers ended but the store does not hold every file.",
            where=f"blobs/{absent[0]}",
            got=f"{len(absent)} missing",
            expected="none missing",
        )
    fetched = sum(int(result.message.get("bytes_fetched", 0)) for result in results)
    return {
        "bytes_fetched": fetched,
        "pullers": len(results),
        "note": f"{format_bytes(fetched)} from the Hub, verified",
    }
