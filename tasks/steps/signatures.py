"""Signatures over locks: made and checked offline, and kept in the store by lock and key."""

from __future__ import annotations

from tasks.core.attestation import Coverage, bundle, check_statement, parse_bundle, signed_bytes, statement
from tasks.core.errors import IntegrityError
from tasks.core.lock import Lock, check_accepted
from tasks.ports import LockKey, SigningKey, Store


def sign_lock(key: SigningKey, lock: Lock) -> bytes:
    """Return a signature file for a lock; InputError if a file of it has no sha256."""
    payload = statement(check_accepted(lock))
    return bundle(payload, key.sign(signed_bytes(payload)), key.key_id)


def check_signature(key: LockKey, lock: Lock, data: bytes, where: str) -> Coverage:
    """Check a signature file against a lock and return how far it goes.

    Raises:
        IntegrityError: it is not of this key, not whole, or over something else (K2-INT-006).
    """
    found = parse_bundle(data, where)
    if not key.verifies(found.signed_bytes, found.signature):
        raise IntegrityError(
            "K2-INT-006",
            "The signature was not made with the key, or what it is over was changed.",
            where=where,
            got=f"key {found.key_id[:12] or 'not named'}",
            expected=f"key {key.key_id[:12]}",
        )
    return check_statement(lock, found.payload, where)


def require_signature(store: Store, lock: Lock, key: LockKey | None) -> str:
    """Check that the store holds a signature over this very lock by a key, and return the key's id; "" without a key.

    Raises:
        IntegrityError: there is none, or it is not over the lock but at most over its files (K2-INT-006).
    """
    if key is None:
        return ""
    place = signature_key(lock, key)
    try:
        data, _ = store.get(place)
    except KeyError as error:
        raise IntegrityError(
            "K2-INT-006",
            "The lock is not signed.",
            where=f"{lock.repo}@{lock.revision[:8]}",
            got=f"no {place} in the store",
            expected="a signature of the site's lock_key",
            hint=f"its owner signs: k2ctl lock {lock.repo} --revision {lock.revision} --sign-key KEY, after reading it",
        ) from error
    if not check_signature(key, lock, data, place).names_lock:
        raise IntegrityError(
            "K2-INT-006",
            "The signature is over the files, not over the lock: of which revision they are it does not say.",
            where=place,
            got="no lock in the statement",
            expected=f"lock {lock.digest}",
        )
    return key.key_id


def put_signature(store: Store, lock: Lock, key: LockKey, data: bytes) -> str:
    """Keep a signature file, once checked, and return the store key; a signature that was there goes.

    Raises:
        IntegrityError: it is not a good one of this key over this lock (K2-INT-006).
    """
    check_signature(key, lock, data, "signature")
    place = signature_key(lock, key)
    store.put(place, data)
    return place


def signature_key(lock: Lock, key: LockKey) -> str:
    """Return the store key of a lock's signature by a key."""
    return f"signatures/{lock.digest}/{key.key_id}.json"
