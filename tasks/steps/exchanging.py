"""Weights onto nodes without a store in between: by an exchange among the nodes, or each from the Hub."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import IntegrityError, K2Error
from tasks.core.lock import Lock
from tasks.core.standing import LEFT, note_from_bytes
from tasks.core.ways import HUB
from tasks.core.worker_jobs import render_exchange_jobs, render_hub_stage_job
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import JobResult, Watch, follow_jobs
from tasks.steps.node_holder import NodeHolder

_DEADLINE_S = 4 * 3600.0


@dataclass(frozen=True)
class Party:
    """Who takes part and how: the chosen nodes, spares, the uids of both, and those whose GPUs are in use."""

    topology: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    uids: Mapping[str, str]
    in_use: frozenset[str]


@dataclass(frozen=True)
class Held:
    """A party whose nodes' Leases are held; spares that another release is staging on are `busy`, and not in it."""

    party: Party
    busy: Mapping[str, K2Error]
    watch: Watch

    @property
    def spares(self) -> tuple[str, ...]:
        """The spares that take part."""
        return tuple(node for node in self.party.spares if node not in self.busy)


@contextmanager
def holding_all(ports: Ports, subject: Subject, party: Party, busy_wait_s: float, watch: Watch) -> Iterator[Held]:
    """Hold the Leases of a party's nodes while the block runs; only the chosen ones are waited for."""
    holder, busy = NodeHolder(ports, subject), dict[str, K2Error]()

    def look() -> None:
        watch()
        holder.keep()

    with holder.holding(party.nodes, busy_wait_s, watch):
        for node in party.spares:
            try:
                holder.acquire([node], 0.0)
            except K2Error as error:
                busy[node] = error
        yield Held(party, busy, look)


def exchange(
    ports: Ports, subject: Subject, held: Held, spare_deadline_s: float
) -> tuple[list[JobResult], dict[str, JobResult | K2Error]]:
    """Run one Job on each node; return the results of the chosen ones in order, and of the spares by name.

    All Jobs run at the same time, as the nodes need each other; one that fails keeps no other from ending. Spares own
    nothing: the chosen nodes wait for none of them. A spare that is not done so long after the last chosen node, or
    after twice the time that those took, is left to its Job.

    Raises:
        K2Error: the gravest of what the chosen nodes failed with.
    """
    jobs, nodes = _render(ports, subject, held), held.party.nodes
    names = [str(job["metadata"]["name"]) for job in jobs]
    ended = follow_jobs(
        ports,
        "stage",
        jobs,
        subject.lock.total_bytes * len(jobs),
        _DEADLINE_S,
        stop_at_failure=False,
        watch=held.watch,
        optional=names[len(nodes) :],
        optional_s=lambda elapsed_s: max(spare_deadline_s, 2 * elapsed_s),
    )
    _sweep_notes(ports, subject.lock)
    done = _all_done(ports, nodes, ended[: len(nodes)])
    return done, {**held.busy, **dict(zip(held.spares, ended[len(nodes) :], strict=True))}


def _render(ports: Ports, subject: Subject, held: Held) -> Sequence[dict[str, Any]]:
    lock, site, templates, tool = subject.lock, ports.site, ports.templates, subject.release.images.tool
    nodes, spares, uids, in_use = held.party.nodes, held.spares, held.party.uids, held.party.in_use
    if held.party.topology == HUB:
        return [
            render_hub_stage_job(lock, site, templates, tool, node, uids[node], serving=node in in_use)
            for node in (*nodes, *spares)
        ]
    owners, guests = ({name: uids[name] for name in names} for names in (nodes, spares))
    # Not the flow's run: a step that is tried again in it starts other processes than the ones that have left.
    run = secrets.token_hex(4)
    return render_exchange_jobs(lock, site, templates, tool, owners, guests, run, in_use)


def _all_done(ports: Ports, nodes: Sequence[str], ended: Sequence[JobResult | K2Error]) -> list[JobResult]:
    errors = [result for result in ended if isinstance(result, K2Error)]
    if errors:
        gravest = next((error for error in errors if isinstance(error, IntegrityError)), errors[0])
        for node, result in zip(nodes, ended, strict=True):
            if isinstance(result, K2Error) and result is not gravest:
                ports.progress.say(f"also: {node}: {result}")
        raise gravest
    return [result for result in ended if isinstance(result, JobResult)]


def _sweep_notes(ports: Ports, lock: Lock) -> None:
    """Remove what nodes that have left said of themselves; nobody reads it any more."""
    for item in ports.store.list_objects(f"exchange/{lock.digest}/"):
        if not item.key.endswith(".json"):
            continue
        try:
            note = note_from_bytes(ports.store.get(item.key)[0])
        except KeyError:
            continue
        if note is not None and note.state == LEFT:
            ports.store.delete(f"{item.key.removesuffix('.json')}.beat")
            ports.store.delete(item.key)
