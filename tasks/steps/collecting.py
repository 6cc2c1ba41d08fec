"""Step `collect`: weights that nothing needs any more go, from the nodes and from the store, through a trash (I10).

List first, then ask who needs what, then act: so whoever begins to use something after the list either stands in what
is read afterwards, or has left a trace on the node by which the act is refused there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.collection import (
    DELETE,
    KEEP,
    TRASH,
    Decision,
    Inventory,
    decide,
    inventory_from_data,
)
from tasks.core.errors import After, IntegrityError, K2Error, UnavailableError
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock
from tasks.core.node_state import engine_tolerations, why_unusable
from tasks.core.render import staged_label
from tasks.core.units import format_bytes
from tasks.core.worker_jobs import render_collect_job
from tasks.steps.context import Ports
from tasks.steps.documents import get_lock, put_by_digest
from tasks.steps.jobs import JobResult, follow_jobs
from tasks.steps.pool import pool_nodes
from tasks.steps.store_collecting import StoreReport, collect_store, list_store
from tasks.steps.tool_image import tool_image
from tasks.steps.weights_needed import Needed, read_needed

_DEADLINE_S = 3600.0
_TRIES = 3


@dataclass(frozen=True)
class Survey:
    """What stands on the nodes, what is to be done with it, and which nodes could not be looked at."""

    inventories: Mapping[str, Inventory]
    decisions: Sequence[Decision]
    unread: Mapping[str, str]
    needed: Needed

    def of(self, node: str, action: str) -> list[Decision]:
        """Return the decisions of one kind on one node."""
        return [found for found in self.decisions if (found.node, found.action) == (node, action)]


def list_step(ports: Ports, nodes: Sequence[str] = (), trash_age_s: float | None = None) -> dict[str, Any]:
    """Return what stands on the nodes and in the store, and what a collection would do with it. Changes nothing."""
    age_s = _age(ports, trash_age_s)
    survey = _survey(ports, nodes, age_s)
    store = list_store(ports, survey.needed, age_s)
    return _report(ports, "listed", survey, store, {}, age_s)


def collect_step(ports: Ports, nodes: Sequence[str] = (), trash_age_s: float | None = None) -> dict[str, Any]:
    """Move to the trash what nothing needs, delete from it what is old enough, and return what became of everything.

    Args:
        ports: of the site; the caller is its caretaker.
        nodes: only these; all of the pool if none is named.
        trash_age_s: how old what is in the trash has to be; the site's own figure if none is given.

    Raises:
        K2Error: who needs what could not be read. Nothing was touched then.
    """
    age_s = _age(ports, trash_age_s)
    survey = _survey(ports, nodes, age_s)
    acts = [node for node in survey.inventories if survey.of(node, TRASH) or survey.of(node, DELETE)]
    orders = {node: put_by_digest(ports.store, "collections", _order(ports, survey, node, age_s)) for node in acts}
    _take_labels(ports, survey)
    done, failed = _carry_out(ports, orders)
    store = collect_store(ports, age_s)
    report = _report(ports, "collected", survey, store, done, age_s)
    for node, why in failed.items():
        report["unread"][node] = why
    _forget_lists(ports)
    ports.progress.table("collection", _shown(report), "Collection of weights")
    return report


def _age(ports: Ports, trash_age_s: float | None) -> float:
    return ports.site.staging.trash_age_s if trash_age_s is None else trash_age_s


def _survey(ports: Ports, named: Sequence[str], trash_age_s: float) -> Survey:
    """List all nodes, and only then read who needs what."""
    chosen, tolerations = pool_nodes(ports, named), engine_tolerations(ports.templates)
    unread = {name: why for name, node in chosen.items() if (why := why_unusable(node, tolerations))}
    results = _run(ports, "list weights", {name: "" for name in chosen if name not in unread})
    inventories = {}
    for name, result in results.items():
        if isinstance(result, K2Error):
            unread[name] = str(result)
        else:
            inventories[name] = inventory_from_data(_read_list(ports, name, result))
    needed = read_needed(ports)
    now = ports.clock.now()
    decisions = [
        decision for found in inventories.values() for decision in decide(found, needed.needs, trash_age_s, now)
    ]
    return Survey(inventories, decisions, unread, needed)


def _run(ports: Ports, step: str, orders: Mapping[str, str]) -> dict[str, JobResult | K2Error]:
    """Run the Job of each node with its order, and return what came of each.

    A Job of another order that still runs is attached to, as it has the same name: then ours is started after it.
    """
    image, results, waiting = tool_image(ports), dict[str, JobResult | K2Error](), dict(orders)
    for _ in range(_TRIES):
        if not waiting:
            break
        jobs = [render_collect_job(ports.site, ports.templates, image, node, order) for node, order in waiting.items()]
        ended = follow_jobs(ports, step, jobs, 0, _DEADLINE_S, stop_at_failure=False)
        for node, result in zip(list(waiting), ended, strict=True):
            results[node] = result
            if isinstance(result, K2Error) or result.message.get("order") == waiting[node] or not waiting[node]:
                del waiting[node]
    for node in waiting:
        results[node] = UnavailableError(
            "K2-UNA-003", "Another collection works on the node.", where=node, retry=After(60.0)
        )
    return results


def _read_list(ports: Ports, node: str, result: JobResult) -> dict[str, Any]:
    """Return the list that a node's Job has written; IntegrityError if it is not the one that its message names."""
    digest = str(result.message.get("inventory", ""))
    try:
        data, _ = ports.store.get(f"inventories/{digest}.json")
    except KeyError as error:
        raise UnavailableError("K2-UNA-003", "A node's list is not in the store.", where=node) from error
    if sha256_hex(data) != digest or json.loads(data).get("node") != node:
        raise IntegrityError("K2-INT-003", "A node's list is not the one that it wrote.", where=node, got=digest)
    body: dict[str, Any] = json.loads(data)
    return body


def _order(ports: Ports, survey: Survey, node: str, trash_age_s: float) -> dict[str, Any]:
    inventory, needs = survey.inventories[node], survey.needed.needs
    there = [*(found.path for found in inventory.checkpoints), *(found.path for found in inventory.trash)]
    return {
        "version": 1,
        "node": node,
        "run": ports.run,
        "now": ports.clock.now(),
        "trash_age_s": trash_age_s,
        "protect": sorted({*needs.claims, *needs.of(node, there)}),
        "move": {found.path: found.token for found in survey.of(node, TRASH)},
        "delete": [found.name for found in survey.of(node, DELETE)],
    }


def _take_labels(ports: Ports, survey: Survey) -> None:
    """Take the labels of what is about to go from the nodes, and the markers' copies: no engine is to be sent there.

    At once or not at all: what was decided from what was just read is not written minutes later.
    """
    going = {node: {found.path for found in survey.of(node, TRASH)} for node in survey.inventories}
    going = {node: paths for node, paths in going.items() if paths}
    if not going:
        return
    nodes, locks = pool_nodes(ports, list(going)), _stored_locks(ports)
    for node, paths in going.items():
        digests = {digest for digest, lock in locks.items() if lock.model_dir in paths}
        digests |= {f.lock_digest for f in survey.inventories[node].checkpoints if f.path in paths and f.lock_digest}
        labels = {staged_label(digest) for digest in digests} & (nodes[node]["metadata"].get("labels") or {}).keys()
        if labels:
            patch = {"metadata": {"labels": dict.fromkeys(sorted(labels))}}
            ports.cluster.impatient.merge_patch("Node", node, patch)
    for node in going:
        for item in ports.store.list_objects(f"markers/{node}/"):
            digest = item.key.rpartition("/")[2].removesuffix(".json")
            if digest in locks and locks[digest].model_dir in going[node]:
                ports.store.delete(item.key)


def _stored_locks(ports: Ports) -> dict[str, Lock]:
    digests = [item.key.removeprefix("locks/").removesuffix(".json") for item in ports.store.list_objects("locks/")]
    return {digest: get_lock(ports.store, digest) for digest in digests}


def _carry_out(ports: Ports, orders: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the orders and return what each node has done, and why another has not."""
    done, failed = {}, {}
    for node, result in _run(ports, "collect weights", orders).items():
        try:
            if isinstance(result, K2Error):
                raise result
            done[node] = _read_list(ports, node, result)
        except K2Error as error:
            failed[node] = f"not known to be done: {error}"
    return done, failed


def _forget_lists(ports: Ports) -> None:
    """Delete the lists of this run and of earlier ones: they were of a moment."""
    for item in ports.store.list_objects("inventories/"):
        ports.store.delete(item.key)


def _report(
    ports: Ports, outcome: str, survey: Survey, store: StoreReport, done: Mapping[str, Any], trash_age_s: float
) -> dict[str, Any]:
    rows = [_row(found, done.get(found.node)) for found in survey.decisions]
    moved = [row for row in rows if row["action"] == TRASH]
    deleted = [row for row in rows if row["action"] == DELETE]
    nodes = [
        {
            "node": found.node,
            "free_bytes": int(done[found.node]["free_bytes"]) if found.node in done else found.free_bytes,
            "total_bytes": found.total_bytes,
            "others": list(found.others),
        }
        for found in survey.inventories.values()
    ]
    changed = moved or deleted or store.rows
    return {
        "outcome": outcome if outcome == "listed" or changed else "unchanged",
        "trash_age_s": trash_age_s,
        "nodes": nodes,
        "checkpoints": rows,
        "store": store.as_data(),
        "unread": dict(survey.unread),
        "note": _note(moved, deleted, store, survey.unread),
    }


def _row(found: Decision, done: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the row of a directory: as decided, or as its node has told that it went."""
    action, why = found.action, found.why
    told = (done or {}).get("done") or {}
    kept = told.get("kept", {})
    if action != KEEP and (refusal := kept.get(found.name or found.path)):
        action, why = KEEP, refusal
    row = {"node": found.node, "path": found.path, "size_bytes": found.size_bytes, "action": action, "why": why}
    name = found.name or told.get("moved", {}).get(found.path, "")
    return row | ({"trash": name} if name else {})


def _note(
    moved: Sequence[Mapping[str, Any]],
    deleted: Sequence[Mapping[str, Any]],
    store: StoreReport,
    unread: Mapping[str, str],
) -> str:
    def total(rows: Sequence[Mapping[str, Any]]) -> str:
        return f"{len(rows)} checkpoints ({format_bytes(sum(int(row['size_bytes']) for row in rows))})"

    missing = f"; {len(unread)} nodes were not looked at" if unread else ""
    return f"nodes: {total(moved)} to the trash, {total(deleted)} deleted from it; store: {store.note}{missing}"


def _shown(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "size_bytes": format_bytes(row["size_bytes"])} for row in report["checkpoints"]]
