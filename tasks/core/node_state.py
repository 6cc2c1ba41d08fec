"""Whether a node takes a pod: cordons, readiness, taints against tolerations, labels against required affinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tasks.core.lease import parse_micro_time

Object = Mapping[str, Any]

_REPELLING = ("NoSchedule", "NoExecute")


def why_unusable(node: Object, tolerations: Iterable[Object] = ()) -> str:
    """Return why a node takes no pod with these tolerations, in few words; empty if it does."""
    if _spec(node).get("unschedulable"):
        return "cordoned"
    ready = _ready(node)
    if ready.get("status") != "True":
        return f"not Ready ({ready.get('reason', 'no status')})"
    key = repelling_taint(node, tolerations)
    return f"tainted {key}" if key else ""


def lately_ready(node: Object, now: float, within_s: float) -> bool:
    """Say whether a node is not Ready, and was until less than so many seconds ago (or by an odd clock: will be).

    After an API server's outage the node controller takes every node for lost until it has heard of it again.
    """
    ready = _ready(node)
    changed = parse_micro_time(ready.get("lastTransitionTime"))
    return ready.get("status") in ("False", "Unknown") and abs(now - changed) < within_s


def _ready(node: Object) -> Object:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == "Ready"), {})


def engine_tolerations(templates: Mapping[str, Any]) -> tuple[Object, ...]:
    """Return the taints that engines, and the Jobs before them, tolerate."""
    return tuple(templates["decode"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"].get("tolerations") or ())


def repelling_taint(node: Object, tolerations: Iterable[Object]) -> str:
    """Return the key of the first taint that keeps such a pod away; empty if none does."""
    known = tuple(tolerations)
    for taint in _spec(node).get("taints") or ():
        if taint.get("effect") in _REPELLING and not any(_tolerates(one, taint) for one in known):
            return str(taint["key"])
    return ""


def _spec(node: Object) -> Object:
    return node.get("spec") or {}


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator", "Equal") == "Exists":
        return key in ("", taint["key"])
    return bool(key == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or ""))


def suits(node: Object, pod_spec: Object) -> bool:
    """Say whether a node has the labels and the name that a pod requires."""
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    terms = _required_terms(pod_spec)
    return not terms or any(_suits_term(node, term) for term in terms)


def unmet_labels(node: Object, pod_spec: Object) -> tuple[str, ...]:
    """Return the labels that a pod requires and a node has not, as `key=value`, over all of the pod's terms."""
    labels = node["metadata"].get("labels") or {}
    wanted = [
        f"{key}={value}" for key, value in (pod_spec.get("nodeSelector") or {}).items() if labels.get(key) != value
    ]
    for term in _required_terms(pod_spec):
        wanted += [_written(e) for e in term.get("matchExpressions") or () if not _holds(e, labels)]
    return tuple(dict.fromkeys(wanted))


def _required_terms(pod_spec: Object) -> tuple[Object, ...]:
    found: Any = pod_spec
    for field in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        found = found.get(field) or {}
    return tuple(found.get("nodeSelectorTerms") or ())


def _suits_term(node: Object, term: Object) -> bool:
    metadata = node["metadata"]
    labels, fields = metadata.get("labels") or {}, {"metadata.name": metadata["name"]}
    return all(_holds(e, labels) for e in term.get("matchExpressions") or ()) and all(
        _holds(e, fields) for e in term.get("matchFields") or ()
    )


def _holds(expression: Object, have: Mapping[str, Any]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or ()
    if operator == "In":
        return have.get(key) in values
    if operator == "NotIn":
        return have.get(key) not in values
    if operator == "Exists":
        return key in have
    if operator == "DoesNotExist":
        return key not in have
    # Gt and Lt; nothing of ours uses them, and a wrong guess would blame the wrong node.
    return True


def _written(expression: Object) -> str:
    values = ",".join(map(str, expression.get("values") or ()))
    if expression["operator"] in ("In", "Exists"):
        return str(expression["key"]) + (f"={values}" if values else "")
    return f"{expression['key']} {expression['operator']} {values}".rstrip()
