"""Documents kept in the store by digest or by name: locks, manifests, samples, receipts, baselines, what is live."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tasks.core.errors import ConflictError, InputError, IntegrityError
from tasks.core.identity import canonical_bytes, sha256_hex
from tasks.core.lock import Lock, lock_from_data
from tasks.core.plan import LiveRelease
from tasks.core.spec import plain
from tasks.ports import Store

LIVE_KEY = "live.json"
DOCUMENT_VERSION = 1


def put_by_digest(store: Store, prefix: str, value: Any) -> str:
    """Keep plain data under the sha256 of its canonical bytes and return that digest; twice is the same as once."""
    data = canonical_bytes(plain(value))
    digest = sha256_hex(data)
    # the name is the content's digest: what is there already is the same document
    with contextlib.suppress(ConflictError):
        store.put(f"{prefix}/{digest}.json", data, if_absent=True)
    return digest


def get_by_digest(store: Store, prefix: str, digest: str) -> Any:
    """Return data kept by `put_by_digest`.

    Raises:
        IntegrityError: the store returned other bytes (K2-INT-003).
        InputError: there is no such document.
    """
    key = f"{prefix}/{digest}.json"
    try:
        data, _ = store.get(key)
    except KeyError as error:
        raise InputError("K2-INP-007", "A document that the receipt names is not in the store.", where=key) from error
    if sha256_hex(data) != digest:
        raise IntegrityError(
            "K2-INT-003",
            "A stored document has another digest than its name.",
            where=key,
            got=sha256_hex(data),
            expected=digest,
        )
    return json.loads(data)


def put_lock(store: Store, lock: Lock) -> str:
    """Keep a lock by its digest and return the digest."""
    return put_by_digest(store, "locks", lock.to_data())


def get_lock(store: Store, digest: str) -> Lock:
    """Return a lock by its digest, checked against it."""
    return lock_from_data(get_by_digest(store, "locks", digest))


def get_live(store: Store) -> tuple[dict[str, Any] | None, str]:
    """Return the record of what is live and its etag, or (None, "") when nothing is."""
    try:
        data, etag = store.get(LIVE_KEY)
    except KeyError:
        return None, ""
    live = json.loads(data)
    if int(live.get("version", 0)) > DOCUMENT_VERSION:
        raise InputError(
            "K2-INP-006",
            "The record of what is live was written by a newer version of this tool.",
            where=LIVE_KEY,
            got=str(live.get("version")),
            expected=f"<= {DOCUMENT_VERSION}",
        )
    return live, etag


def put_live(store: Store, live: dict[str, Any], etag: str) -> None:
    """Move the record of what is live; ConflictError if it has moved since `etag` was read."""
    data = canonical_bytes({"version": DOCUMENT_VERSION, **plain(live)})
    if etag:
        store.put(LIVE_KEY, data, if_match=etag)
    else:
        store.put(LIVE_KEY, data, if_absent=True)


def live_release(store: Store) -> LiveRelease | None:
    """Return what is live in the form that the plan compares with, or None."""
    live, _ = get_live(store)
    if live is None:
        return None
    return LiveRelease(
        release=live["release"],
        serving_digest=live["serving_digest"],
        policy_digest=live["policy_digest"],
        lock_digest=live["lock_digest"],
        serving_data=live["serving_data"],
    )


def get_receipt(store: Store, release: str) -> dict[str, Any]:
    """Return a release's receipt, checked against the digest that it carries.

    Raises:
        InputError: the release has none.
        IntegrityError: the receipt's content does not have the digest beside it.
    """
    key = receipt_key(release)
    try:
        data, _ = store.get(key)
    except KeyError as error:
        there = [item.key.removeprefix("receipts/").removesuffix(".json") for item in store.list_objects("receipts/")]
        raise InputError(
            "K2-INP-007",
            "The release has no receipt: it was never promoted on this site.",
            where=release,
            got="none",
            expected=", ".join(there) or "no release has one yet",
            hint=f"k2ctl status {release}",
        ) from error
    envelope: dict[str, Any] = json.loads(data)
    body, digest = envelope["receipt"], envelope["sha256"]
    if sha256_hex(canonical_bytes(body)) != digest:
        raise IntegrityError(
            "K2-INT-003",
            "The receipt's content does not have its digest.",
            where=key,
            got=sha256_hex(canonical_bytes(body)),
            expected=digest,
        )
    return dict(body)


def find_receipt(store: Store, release: str) -> dict[str, Any] | None:
    """Return a release's receipt as `get_receipt` does, or None if it has none."""
    return get_receipt(store, release) if store.head(receipt_key(release)) else None


def put_receipt(store: Store, release: str, body: dict[str, Any]) -> str:
    """Write a release's receipt with its digest and return the store key; one that is there already stays as it is."""
    body = plain(body)
    data = canonical_bytes({"sha256": sha256_hex(canonical_bytes(body)), "receipt": body})
    # The first says who approved what was gated then; a later run has nothing to take back of that.
    with contextlib.suppress(ConflictError):
        store.put(receipt_key(release), data, if_absent=True)
    return receipt_key(release)


def receipt_key(release: str) -> str:
    """Return the store key of a release's receipt."""
    return f"receipts/{release}.json"
