"""Step `lock`: a commit's lock is made from the Hub once, and taken from the store ever after.

What was accepted first is what holds (trust on first use): the Hub is not asked again, and a release goes on without
it. Another lock for the same commit, from whatever source, is an error that shows both.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import ConflictError, InputError, IntegrityError
from tasks.core.identity import canonical_bytes, check_repo, check_revision
from tasks.core.lock import Lock, check_accepted, first_difference
from tasks.core.units import format_bytes
from tasks.ports import Store
from tasks.steps.context import Ports
from tasks.steps.documents import get_lock, put_lock
from tasks.steps.locking import make_accepted_lock
from tasks.steps.signatures import require_signature

ACCEPTANCE_VERSION = 1


@dataclass(frozen=True)
class FoundLock:
    """A lock and where it came from: `accepted from ...` for one that the store held already."""

    lock: Lock
    source: str


@dataclass(frozen=True)
class _Acceptance:
    """The record of the lock that was accepted for a commit."""

    lock_digest: str
    source: str


def lock_step(ports: Ports, repo: str, revision: str) -> tuple[Lock, dict[str, Any]]:
    """Return the accepted lock of a commit with what is recorded of it; the first time it is made and accepted.

    Where the site names a key, a lock that this key has not signed is refused, and not accepted.
    """
    found = find_lock(ports, repo, revision)
    lock = found.lock
    signed_by = require_signature(ports.store, lock, ports.lock_key)
    keep_lock(ports, found)
    signed = f", signed by {signed_by[:12]}" if signed_by else ""
    return lock, {
        "lock_digest": lock.digest,
        "lock_source": found.source,
        "signed_by": signed_by,
        "files": len(lock.files),
        "shards": len(lock.shards),
        "total_bytes": lock.total_bytes,
        "note": f"{len(lock.shards)} shards, {format_bytes(lock.total_bytes)}, lock {lock.digest[:12]}{signed}, "
        f"{found.source}",
    }


def find_lock(ports: Ports, repo: str, revision: str, *, again: bool = False, total_size: bool = True) -> FoundLock:
    """Return the lock that was accepted for a commit, or else one made from the Hub; reads only.

    Args:
        ports: the site.
        repo: owner/name.
        revision: the commit.
        again: make it from the Hub although one was accepted.
        total_size: as `make_accepted_lock` has it.
    """
    accepted = None if again else _accepted_lock(ports.store, repo, revision)
    if accepted:
        return accepted
    lock, _ = make_accepted_lock(ports.hub, repo, revision, ports.progress, total_size=total_size)
    return FoundLock(lock, f"made from {ports.site.hub.endpoint}")


def keep_lock(ports: Ports, found: FoundLock) -> None:
    """Keep a lock by its digest and as the accepted one of its commit; twice is the same as once.

    Raises:
        IntegrityError: another one was accepted before (K2-INT-005); it stays.
        InputError: a file of it has no sha256.
    """
    store, lock = ports.store, check_accepted(found.lock)
    digest = put_lock(store, lock)
    if digest != lock.digest:
        raise IntegrityError("K2-INT-003", "The stored lock has another digest.", got=digest, expected=lock.digest)
    record = {
        "version": ACCEPTANCE_VERSION,
        "repo": lock.repo,
        "revision": lock.revision,
        "lock_digest": digest,
        "source": found.source,
        "accepted_at": ports.clock.now(),
        "run": ports.run,
        "tool": ports.tool,
    }
    if _acceptance(store, lock.repo, lock.revision) is None:
        # Another run may be faster, or it was our own put and only its answer was lost: what is there is compared.
        with contextlib.suppress(ConflictError):
            store.put(acceptance_key(lock.repo, lock.revision), canonical_bytes(record), if_absent=True)
    _check_same(store, lock)


def _check_same(store: Store, lock: Lock) -> None:
    """Check that a lock is the one that was accepted for its commit."""
    there = _acceptance(store, lock.repo, lock.revision)
    if there is None or there.lock_digest == lock.digest:
        return
    try:
        where, got, expected = first_difference(lock, get_lock(store, there.lock_digest))
    except InputError:
        where, got, expected = "", "", ""
    raise IntegrityError(
        "K2-INT-005",
        "Another lock was accepted for this commit before.",
        where=f"{lock.repo}@{lock.revision}" + (f", {where}" if where else ""),
        got=f"lock {lock.digest}" + (f": {got}" if where else ""),
        expected=f"lock {there.lock_digest}, {there.source}" + (f": {expected}" if where else ""),
    )


def _accepted_lock(store: Store, repo: str, revision: str) -> FoundLock | None:
    """Return the lock that was accepted for a commit, or None if none was, or the store has lost it."""
    record = _acceptance(store, repo, revision)
    if record is None:
        return None
    try:
        lock = get_lock(store, record.lock_digest)
    except InputError as error:
        if error.code != "K2-INP-007":
            raise
        return None  # made again, it has to be the same: the record stays
    if (lock.repo, lock.revision) != (repo, revision):
        raise _damaged(repo, revision, f"a lock of {lock.repo}@{lock.revision}")
    return FoundLock(lock, f"accepted before, {record.source}")


def _acceptance(store: Store, repo: str, revision: str) -> _Acceptance | None:
    """Return the record of what was accepted for a commit, or None."""
    check_repo(repo)
    check_revision(revision)
    try:
        data, _ = store.get(acceptance_key(repo, revision))
    except KeyError:
        return None
    try:
        record = json.loads(data)
        version, named = int(record["version"]), (record["repo"], record["revision"])
        made = _Acceptance(str(record["lock_digest"]), str(record["source"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(repo, revision, type(error).__name__) from error
    if version > ACCEPTANCE_VERSION:
        raise InputError(
            "K2-INP-006",
            "The record of an accepted lock was written by a newer version of this tool.",
            where=acceptance_key(repo, revision),
            got=str(version),
            expected=f"<= {ACCEPTANCE_VERSION}",
        )
    if named != (repo, revision):
        raise _damaged(repo, revision, f"a record of {named[0]}@{named[1]}")
    return made


def _damaged(repo: str, revision: str, got: str) -> IntegrityError:
    return IntegrityError(
        "K2-INT-003",
        "The record of an accepted lock is not what was written.",
        where=acceptance_key(repo, revision),
        got=got,
        expected=f"the lock that was accepted for {repo}@{revision}",
    )


def acceptance_key(repo: str, revision: str) -> str:
    """Return the store key of the record of what was accepted for a commit."""
    return f"accepted/{repo}/{revision}.json"
