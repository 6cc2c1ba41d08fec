"""Who may still need weights: read from ledger, live record, route, sets and pods. What cannot be read stops (I10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.core.collection import Claim, Needs, locks_of, unfinished_claims
from tasks.core.errors import ConflictError, InputError
from tasks.core.ledger import CARE, Record
from tasks.core.lock import Lock
from tasks.core.mounts import Use, resolved, uses_of_groups, uses_of_pods
from tasks.core.route import LIVE_ROUTE, PARKING, RouteState, read_route
from tasks.ports import Store
from tasks.steps.context import Ports
from tasks.steps.documents import find_receipt, get_live, get_lock
from tasks.steps.journal import records

LIVE, ROLLBACK, CANDIDATE = "live", "rollback target", "candidate on the live route"


@dataclass(frozen=True)
class Needed:
    """What is needed: on the nodes by path, in the store by sha256; and when a file's releases were last heard of."""

    needs: Needs
    sha256: frozenset[str]
    used_at: Mapping[str, float]
    locks: Mapping[str, Lock]


def read_needed(ports: Ports) -> Needed:
    """Return who may still need which weights now.

    Raises:
        ConflictError: the lock of a release on the route is not known: then nothing may go (K2-CON-006).
        K2Error: something could not be read; what is not known is needed.
    """
    ledgers = read_ledgers(ports.store)
    claims = [
        *(Claim(lock, release, why) for release, lock, why in served_locks(ports, ledgers)),
        *(claim for release, events in ledgers.items() for claim in unfinished_claims(release, events)),
    ]
    locks = {digest: get_lock(ports.store, digest) for digest in dict.fromkeys(claim.lock_digest for claim in claims)}
    used = _uses(ports)
    for digest in {use.lock_digest for use in used if use.lock_digest} - locks.keys():
        if (lock := _find_lock(ports.store, digest)) is not None:
            locks[digest] = lock
    by_path: dict[str, list[Claim]] = {}
    for claim in claims:
        by_path.setdefault(locks[claim.lock_digest].model_dir, []).append(claim)
    needs = Needs(by_path, resolved(used, {digest: lock.model_dir for digest, lock in locks.items()}))
    named = {claim.lock_digest for claim in claims} | {use.lock_digest for use in used if use.lock_digest}
    needed = {file.sha256 for digest in named & locks.keys() for file in locks[digest].files}
    # A set names its checkpoint's directory: the files of every lock that stands in such a one are needed. Whoever
    # mounts all of a node's disk needs nothing of the store for that.
    everything = _all_locks(ports.store, ledgers) | locks
    for lock in everything.values():
        if any(use.covers(lock.model_dir) for use in needs.uses if not use.is_everything):
            needed |= {file.sha256 for file in lock.files}
    return Needed(needs, frozenset(needed), _used_at(ledgers, everything), locks)


def read_ledgers(store: Store) -> dict[str, list[Record]]:
    """Return the records of every release that the store knows."""
    names = {item.key.split("/")[1] for item in store.list_objects("ledger/")}
    return {name: records(store, name) for name in sorted(names - {CARE})}


def served_locks(ports: Ports, ledgers: Mapping[str, Sequence[Record]]) -> list[tuple[str, str, str]]:
    """Return release, lock digest and role of what is live, what rollback goes to, and a candidate on the route."""
    live, _ = get_live(ports.store)
    found = [(str(live["release"]), str(live["lock_digest"]), LIVE)] if live else []
    state = _route(ports)
    if state is None:
        return found
    for backend, why in ((state.stable, LIVE), (state.previous, ROLLBACK), (state.candidate, CANDIDATE)):
        if backend is None or backend == PARKING:
            continue
        if live and live["release"] == backend.release:
            if why != LIVE:
                found.append((backend.release, str(live["lock_digest"]), why))
            continue
        found += [(backend.release, digest, why) for digest in _locks_of_release(ports, backend.release, ledgers)]
    return found


def _route(ports: Ports) -> RouteState | None:
    """Return what was last written to the live route, whatever weights a human hand gave it since; None without one."""
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    return read_route({**obj, "spec": {}}) if obj else None


def _locks_of_release(ports: Ports, release: str, ledgers: Mapping[str, Sequence[Record]]) -> list[str]:
    receipt = find_receipt(ports.store, release)
    if receipt is not None:
        return [str(receipt["lock"]["digest"])]
    known = locks_of(ledgers.get(release, ()))
    if not known:
        raise ConflictError(
            "K2-CON-006",
            "The live route names a release whose lock nobody knows.",
            where=f"release {release}",
            got="neither a receipt nor a record of its lock step",
            expected="its lock's digest, so that its weights are left alone",
            hint="is this the site's own store? k2ctl status; nothing was touched",
        )
    return known[-1:]


def _uses(ports: Ports) -> list[Use]:
    root, namespace = ports.site.nvme_path, ports.site.namespace
    groups = ports.cluster.list_objects("LeaderWorkerSet")
    pods = ports.cluster.list_objects("Pod", everywhere=True)
    return [*uses_of_groups(groups, root, namespace), *uses_of_pods(pods, root, namespace)]


def _find_lock(store: Store, digest: str) -> Lock | None:
    try:
        return get_lock(store, digest)
    except InputError:
        return None


def _all_locks(store: Store, ledgers: Mapping[str, Sequence[Record]]) -> dict[str, Lock]:
    digests = {digest for events in ledgers.values() for digest in locks_of(events)}
    return {digest: lock for digest in sorted(digests) if (lock := _find_lock(store, digest)) is not None}


def _used_at(ledgers: Mapping[str, Sequence[Record]], locks: Mapping[str, Lock]) -> dict[str, float]:
    """Return when a release that has or had each file was last heard of."""
    found: dict[str, float] = {}
    for events in ledgers.values():
        last = max((event.at for event in events), default=0.0)
        for digest in locks_of(events):
            for file in locks[digest].files if digest in locks else ():
                found[file.sha256] = max(found.get(file.sha256, 0.0), last)
    return found
