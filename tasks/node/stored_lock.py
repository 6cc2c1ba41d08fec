"""Reads the lock that a program works by, and believes it only if it has the digest that was asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tasks.core.errors import After, IntegrityError, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock, lock_from_data

if TYPE_CHECKING:
    from tasks.ports import Store


def read_lock(store: Store, lock_digest: str) -> Lock:
    """Return the lock that the store keeps under a digest.

    Raises:
        IntegrityError: its bytes, or its content in canonical form, have another digest (K2-INT-003).
        UnavailableError: there is none, or the store does not answer.
        InputError: it is no lock.
    """
    key = f"locks/{lock_digest}.json"
    try:
        data, _ = store.get(key)
    except KeyError as error:
        raise UnavailableError(
            "K2-UNA-001",
            "The store does not hold the lock.",
            where=key,
            hint="Run the release again: its first step stores the lock.",
            retry=After(5.0),
        ) from error
    _expect(key, sha256_hex(data), lock_digest)
    lock = lock_from_data(json.loads(data))
    _expect(key, lock.digest, lock_digest)
    return lock


def _expect(key: str, got: str, expected: str) -> None:
    if got != expected:
        raise IntegrityError(
            "K2-INT-003", "The stored lock is not the one that was asked for.", where=key, got=got, expected=expected
        )
