"""The receipt of a release: written once from its ledger, and what it makes immutable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import InputError, IntegrityError
from tasks.core.ledger import FINISHED, Record, StepState, fold, receipt
from tasks.core.plan import NONE, POLICY
from tasks.core.spec import plain
from tasks.ports import Store
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import find_receipt, get_live, get_receipt, put_receipt, receipt_key
from tasks.steps.journal import records, states

GATES = ("smoke", "throughput")


def check_immutable(store: Store, subject: Subject) -> None:
    """Raise InputError if a release of this id has been promoted with another serving or policy digest."""
    release = subject.release
    now = (release.serving_digest(subject.lock.digest), release.policy_digest)
    live, _ = get_live(store)
    promoted = [
        find_receipt(store, release.id),
        live if live and live["release"] == release.id else None,
        *(event.data for event in records(store, release.id) if (event.step, event.event) == ("promote", FINISHED)),
    ]
    for facts in promoted:
        if not facts or "serving_digest" not in facts:
            continue
        before = (facts["serving_digest"], facts["policy_digest"])
        if before != now:
            raise InputError(
                "K2-INP-001",
                "A promoted release is immutable; give the changed file a new id.",
                where=f"release {release.id}",
                got=f"serving {now[0][:12]}, policy {now[1][:12]}",
                expected=f"serving {before[0][:12]}, policy {before[1][:12]}, as promoted",
                hint=f"change `id: {release.id}` in the file, then run the release again",
            )


def is_recorded(store: Store, release: str) -> bool:
    """Return whether the live release's latest promotion has its record, and the release its receipt."""
    return recorded_promotion(store, release) is not None and store.head(receipt_key(release)) is not None


def recorded_promotion(store: Store, release: str) -> StepState | None:
    """Return the record of the promotion that made a release live, or None if it died before it wrote one.

    The record of an earlier promotion of the same release says nothing of this one.
    """
    live, _ = get_live(store)
    promoted = states(store, release).get("promote")
    if live is None or live["release"] != release or promoted is None or "live" not in promoted.data:
        return None
    return promoted if promoted.data.get("promotion") == live.get("promotion") else None


def receipt_step(ports: Ports, subject: Subject) -> tuple[dict[str, Any], str]:
    """Write the receipt of a release from its ledger, unless it has one, and return what stands with its store key.

    Raises:
        IntegrityError: the receipt would not name every node of the set with its marker: it would prove nothing.
    """
    release = subject.release
    events = records(ports.store, release.id)
    done = fold(events)
    plan = carried_out_plan(release.id, events)
    inherited = _inherited(ports, done, plan)
    nodes = _data(done, "stage", "nodes") or inherited.get("nodes", [])
    check_nodes(release.id, nodes, release.profile.nodes)
    facts = {
        "lock": {
            "digest": subject.lock.digest,
            "repo": subject.lock.repo,
            "revision": subject.lock.revision,
            "files": len(subject.lock.files),
            "total_bytes": subject.lock.total_bytes,
        },
        "serving_digest": release.serving_digest(subject.lock.digest),
        "policy_digest": release.policy_digest,
        "images": plain(release.images),
        "manifests_digest": _data(done, "rollout", "manifests_digest") or inherited.get("manifests_digest"),
        "nodes": nodes,
        "placement": _data(done, "rollout", "placement") or inherited.get("placement", []),
        "gates": inherited.get("gates", {}) | {name: done[name].data for name in GATES if name in done},
        "weights": _weights(events),
        "approver": _data(done, "promote", "approver"),
        "plan": plan,
        "site": ports.site.name,
        "simulated": list(ports.site.simulated),
        "tool": ports.tool,
    }
    key = put_receipt(ports.store, release.id, receipt(plain(release), events, facts))
    body = get_receipt(ports.store, release.id)
    ports.progress.document("receipt", f"# Receipt of {release.id}\n\n```json\n{json.dumps(body, indent=1)}\n```")
    return body, key


def check_nodes(release: str, rows: Sequence[Mapping[str, Any]], needed: int) -> None:
    """Raise IntegrityError unless the rows name as many nodes as the set has, each with the digest of its marker."""
    named = {row["node"] for row in rows if row.get("marker_content_sha256")}
    if len(named) != needed or len(rows) != needed:
        raise IntegrityError(
            "K2-INT-003",
            "The receipt does not name every node of the set with its marker: it proves nothing.",
            where=f"receipt of {release}",
            got=f"{len(named)} nodes",
            expected=f"{needed} nodes",
            hint="`k2ctl status` shows the steps; a run of the release whose stage step ended well names the nodes",
        )


def carried_out_plan(release: str, events: Sequence[Record]) -> dict[str, Any]:
    """Return the plan that the release carried out.

    A later one that found nothing to do, or nothing but the record of a promotion that had died, says nothing.
    """
    plans = [dict(event.data["plan"]) for event in events if event.step == "plan" and "plan" in event.data]
    carried = [plan for plan in plans if plan["change"] != NONE and not _is_repair(release, plan)]
    return next(reversed(carried), plans[-1] if plans else {})


def _is_repair(release: str, plan: Mapping[str, Any]) -> bool:
    return bool(plan["change"] == POLICY and plan.get("live_release") == release)


def _weights(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the weights over time of every try of the shift, those that were reverted too."""
    tries = [event.data for event in events if event.step == "shift"]
    found = [data.get("history") or data.get("error", {}).get("details", {}).get("history") or [] for data in tries]
    return [row for rows in found for row in rows]


def _inherited(ports: Ports, done: Mapping[str, StepState], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt of the release whose serving set this one took over, if it changed nothing but policy."""
    replaces = _data(done, "promote", "replaces")
    return get_receipt(ports.store, replaces) if replaces and plan.get("change") == POLICY else {}


def _data(done: Mapping[str, StepState], step: str, key: str) -> Any:
    return done[step].data.get(key) if step in done else None
