"""Why the scheduler finds no node for a pod: its own message, counted by reason, and what helps against each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.diagnosis import Diagnosis
from tasks.core.node_state import suits, unmet_labels, why_unusable

Object = Mapping[str, Any]

RESOURCE, AFFINITY, TAINT, CORDON, PODS, OTHER = "resource", "affinity", "taint", "cordon", "pods", "other"

_VERDICT = re.compile(
    r"(?P<available>\d+)/(?P<nodes>\d+) nodes are available: (?P<reasons>.+?)(?:\.(?: (?P<rest>.*))?)?$"
)
_REASONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (RESOURCE, re.compile(r"Insufficient (?P<what>\S+)")),
    (AFFINITY, re.compile(r"node\(s\) didn't match (?:Pod's )?node (?:affinity|selector)")),
    # Older schedulers add the taint as `{key: value}`; that of Kubernetes 1.36 does not: keys come from the nodes.
    (TAINT, re.compile(r"node\(s\) had untolerated taint(?:\(s\)| \{(?P<what>[^:}]+)[^}]*\})")),
    (CORDON, re.compile(r"node\(s\) were unschedulable")),
    (PODS, re.compile(r"Too many pods")),
)
_GPU = "nvidia.com/gpu"
_NAMED = 4


@dataclass(frozen=True)
class Refusal:
    """One reason of the scheduler: how many nodes it holds for, and the resource or taint that it is about."""

    kind: str
    nodes: int
    reason: str
    what: str = ""

    def __str__(self) -> str:
        if self.kind == RESOURCE:
            return f"{self.nodes} have too little {self.what} left"
        if self.kind == TAINT:
            return f"{self.nodes} have a taint that it does not tolerate" + (f" ({self.what})" if self.what else "")
        words = {AFFINITY: "do not carry the labels that it wants", CORDON: "are cordoned", PODS: "take no more pods"}
        return f"{self.nodes} {words[self.kind]}" if self.kind in words else f"{self.nodes}: {self.reason}"


@dataclass(frozen=True)
class SchedulerVerdict:
    """The scheduler's message, taken apart. One node may be counted under several reasons.

    `preemption` is what became of the attempt to make room by taking pods of lower priority away.
    """

    nodes: int
    refusals: tuple[Refusal, ...]
    preemption: str

    def of(self, kind: str) -> tuple[Refusal, ...]:
        """Return the reasons of a kind."""
        return tuple(refusal for refusal in self.refusals if refusal.kind == kind)

    @property
    def summary(self) -> str:
        """What a person reads first: nodes counted by reason."""
        return f"Of {self.nodes} nodes {', '.join(map(str, self.refusals))}."


def read_verdict(message: str) -> SchedulerVerdict | None:
    """Return what a PodScheduled condition's message says, or None if it is not the scheduler's count of nodes."""
    found = _VERDICT.match(message.strip())
    if found is None:
        return None
    refusals = tuple(_refusal(part) for part in re.split(r", (?=\d+ )", found["reasons"]))
    _, _, preemption = (found["rest"] or "").partition("preemption: ")
    return SchedulerVerdict(int(found["nodes"]), refusals, preemption.rstrip("."))


def _refusal(part: str) -> Refusal:
    count, _, reason = part.partition(" ")
    for kind, pattern in _REASONS:
        if (match := pattern.match(reason)) is not None:
            return Refusal(kind, int(count), reason, (match.groupdict().get("what") or "").strip())
    return Refusal(OTHER, int(count), reason)


def unschedulable(pod: Object, message: str, nodes: Sequence[Object]) -> tuple[str, str, str]:
    """Return (summary, detail, resolution) of a pod that no node takes.

    The scheduler counts nodes and names none, so those that have the pod's labels and are closed to it are named here.
    """
    verdict = read_verdict(message)
    spec = pod["spec"]
    suitable = [node for node in nodes if suits(node, spec)]
    closed = {
        str(n["metadata"]["name"]): why for n in suitable if (why := why_unusable(n, spec.get("tolerations") or ()))
    }
    summary = "The scheduler finds no node for a pod." + (f" {verdict.summary}" if verdict else "")
    named = f" Closed: {_listed([f'{name}: {why}' for name, why in closed.items()])}." if closed else ""
    lacking = _lacking(nodes, spec) if nodes and not suitable else ""
    remedies = [*_reopen(closed), *_make_room(verdict), *([_LABELS] if lacking or _only_affinity(verdict) else [])]
    return (
        summary,
        message + named + (f" {lacking}." if lacking else ""),
        " ".join(remedies) or f"kubectl describe pod {pod['metadata']['name']}; free nodes for it.",
    )


_LABELS = (
    "No node has all labels that the pod wants: run the release again, it stages and places nodes; "
    "`kubectl get nodes --show-labels` shows what they carry."
)


def pending_diagnosis(pod: Object, message: str, nodes: Sequence[Object], rank: int) -> Diagnosis:
    """Return the diagnosis of a pod that no node takes."""
    summary, detail, resolution = unschedulable(pod, message, nodes)
    return Diagnosis("error", "capacity", summary, detail, resolution, str(pod["metadata"]["name"]), "", rank)


def _reopen(closed: Mapping[str, str]) -> Iterator[str]:
    cordoned = [name for name, why in closed.items() if why == "cordoned"]
    tainted = {name: why.removeprefix("tainted ") for name, why in closed.items() if why.startswith("tainted ")}
    silent = [name for name, why in closed.items() if why.startswith("not Ready")]
    if cordoned:
        yield f"Cordoned: kubectl uncordon {' '.join(cordoned)}, once fit for use."
    for name, key in tainted.items():
        yield f"Tainted: kubectl taint node {name} {key}-, once fit for use."
    if silent:
        yield f"Not Ready: kubectl describe node {' '.join(silent)}; repair or cordon, then run the release again."


def _make_room(verdict: SchedulerVerdict | None) -> Iterator[str]:
    lacking = [refusal.what for refusal in (verdict.of(RESOURCE) if verdict else ())]
    if _GPU in lacking:
        yield (
            "Free GPUs: `k2ctl plan RELEASE` names who holds them, `k2ctl retire RELEASE -y` takes down a set that is "
            "not live; engines take no other pod's place."
        )
    elif lacking:
        yield f"The nodes have too little {' and '.join(lacking)} for it: lower what the profile asks for."
    if verdict and verdict.of(PODS):
        yield "The nodes take no more pods: delete ended Jobs, or raise the kubelet's limit."


def _only_affinity(verdict: SchedulerVerdict | None) -> bool:
    return verdict is not None and {refusal.kind for refusal in verdict.refusals} == {AFFINITY}


def _lacking(nodes: Iterable[Object], spec: Object) -> str:
    """Return which of the wanted labels how many nodes lack, the label that most lack first."""
    known = list(nodes)
    counts: dict[str, int] = {}
    for node in known:
        for label in unmet_labels(node, spec):
            counts[label] = counts.get(label, 0) + 1
    if not counts:
        return ""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return f"Wanted labels, and how many of {len(known)} nodes lack them: " + _listed([f"{k} {n}" for k, n in ordered])


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _NAMED
    return ", ".join(items[:_NAMED]) + (f" and {more} more" if more > 0 else "")
