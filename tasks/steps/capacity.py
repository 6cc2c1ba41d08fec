"""Steps `plan` and `preflight`: what is there, what would change, and whether the chosen nodes can carry it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.arguments import check_arguments
from tasks.core.errors import InputError, IntegrityError, NotReadyError, RightsError
from tasks.core.identity import sha256_hex
from tasks.core.node_state import engine_tolerations, lately_ready, why_unusable
from tasks.core.plan import LiveRelease, NodeFacts, Occupant, Plan, make_plan, plan_rows
from tasks.core.render import RELEASE_ANNOTATION, SERVING_LABEL, render_serving
from tasks.core.route import LIVE_ROUTE, read_route
from tasks.core.spec import plain
from tasks.core.units import format_bytes
from tasks.core.worker_jobs import render_probe_job
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import live_release
from tasks.steps.jobs import run_jobs
from tasks.steps.patience import Deadline
from tasks.steps.quotas import check_room
from tasks.steps.receipts import check_immutable, is_recorded
from tasks.steps.rights import check_rights
from tasks.steps.weights import blobs_present

GPU = "nvidia.com/gpu"
_STAGED_PREFIX = "staged.k2-release.io/"
_CONFIG_MAX_BYTES = 1_000_000
_PROBE_DEADLINE_S = 300.0
_ENDED = ("Succeeded", "Failed")
_NODE_PATIENCE_S = 30.0
_NODE_POLL_S = 1.0


def wait_for_nodes(ports: Ports) -> None:
    """Wait, half a minute at most, for nodes of the pool that were Ready until half a minute ago.

    Without it a plan that is made just after an outage of the API server does without good nodes, or fails.
    """
    deadline, said = Deadline(ports, _NODE_PATIENCE_S), False
    while lost := _lately_lost(ports):
        if deadline.passed:
            return
        if not said:
            ports.progress.say(
                f"nodes: {', '.join(lost)} not Ready since a moment ago; waiting {_NODE_PATIENCE_S:.0f} s"
            )
            said = True
        ports.clock.sleep(_NODE_POLL_S)


def _lately_lost(ports: Ports) -> list[str]:
    nodes, now = ports.cluster.list_objects("Node", ports.site.node_selector), ports.clock.now()
    return [str(node["metadata"]["name"]) for node in nodes if lately_ready(node, now, _NODE_PATIENCE_S)]


def read_nodes(ports: Ports, serving: str) -> list[NodeFacts]:
    """Return the facts of the pool's nodes; GPUs of our pods that carry `serving` count as the candidate's own.

    Pods of all namespaces take GPUs, so those of all are read.
    """
    pods = [
        pod
        for pod in ports.cluster.list_objects("Pod", everywhere=True)
        if pod.get("status", {}).get("phase") not in _ENDED
    ]
    facts, releases, tolerations = [], _releases(ports), engine_tolerations(ports.templates)
    for node in ports.cluster.list_objects("Node", ports.site.node_selector):
        name = node["metadata"]["name"]
        here = [pod for pod in pods if pod["spec"].get("nodeName") == name]
        own = [pod for pod in here if _is_of(pod, serving, ports.site.namespace)]
        why_not = why_unusable(node, tolerations)
        labels = node["metadata"].get("labels", {})
        facts.append(
            NodeFacts(
                name=name,
                uid=node["metadata"]["uid"],
                usable=not why_not,
                why_not=why_not,
                gpus_total=int(node.get("status", {}).get("allocatable", {}).get(GPU, 0)),
                gpus_used=sum(map(_gpus, here)),
                used_by=tuple(_occupant(pod, ports.site.namespace, releases) for pod in here if _gpus(pod)),
                gpus_used_by_candidate=sum(map(_gpus, own)),
                staged=tuple(key.removeprefix(_STAGED_PREFIX) for key in labels if key.startswith(_STAGED_PREFIX)),
            )
        )
    return facts


def _is_of(pod: Mapping[str, Any], serving: str, namespace: str) -> bool:
    metadata = pod["metadata"]
    ours = metadata.get("namespace", namespace) == namespace
    return bool(ours and metadata.get("labels", {}).get(SERVING_LABEL) == serving)


def _releases(ports: Ports) -> dict[str, str]:
    """Return serving label -> the release that brought the set up."""
    groups = [group["metadata"] for group in ports.cluster.list_objects("LeaderWorkerSet")]
    return {
        group["labels"][SERVING_LABEL]: group["annotations"][RELEASE_ANNOTATION]
        for group in groups
        if SERVING_LABEL in group.get("labels", {}) and RELEASE_ANNOTATION in group.get("annotations", {})
    }


def _occupant(pod: Mapping[str, Any], namespace: str, releases: Mapping[str, str]) -> Occupant:
    metadata = pod["metadata"]
    release = releases.get(metadata.get("labels", {}).get(SERVING_LABEL, ""), "")
    return Occupant(f"{metadata.get('namespace', namespace)}/{metadata['name']}", release)


def _gpus(pod: Mapping[str, Any]) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["spec"].get("containers", []))


def make_release_plan(ports: Ports, subject: Subject) -> Plan:
    """Return the plan from what the cluster and the store say now; reads only.

    Raises:
        InputError: a release of this id was promoted with another content (K2-INP-001).
        CapacityError: there are not enough free nodes.
        RightsError: our identity may not read what the plan is made from (K2-RGT-001).
    """
    check_immutable(ports.store, subject)
    try:
        return _make_plan(ports, subject)
    except RightsError:
        check_rights(ports)  # names everything that is missing, not only what the plan came upon first
        raise


def _make_plan(ports: Ports, subject: Subject) -> Plan:
    wait_for_nodes(ports)
    objects = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    return make_plan(
        subject.release,
        subject.lock,
        ports.site,
        _live(ports),
        _stable_serving(ports),
        read_nodes(ports, subject.serving),
        blobs_present(ports.store, subject.lock),
        [f"{obj['kind']}/{obj['metadata']['name']}" for obj in objects],
    )


def _live(ports: Ports) -> LiveRelease | None:
    live = live_release(ports.store)
    return replace(live, recorded=is_recorded(ports.store, live.release)) if live else None


def _stable_serving(ports: Ports) -> str:
    """Return the serving label of the set that the route was last given to users; empty where there is no route.

    What weights a human hand wrote since is the business of whoever moves traffic: a plan only reads.
    """
    obj = ports.cluster.get("HTTPRoute", LIVE_ROUTE)
    return read_route({**obj, "spec": {}}).stable.serving if obj else ""


def plan_step(ports: Ports, subject: Subject) -> tuple[Plan, dict[str, Any]]:
    """Make the plan, publish it, and return it with what is recorded of it."""
    plan = make_release_plan(ports, subject)
    ports.progress.table("plan", plan_rows(plan, plan.usd_per_hour), f"Plan of {subject.release.id}")
    return plan, {"plan": plain(plan), "note": f"change {plan.change}, nodes {', '.join(plan.nodes) or 'none'}"}


def preflight_step(ports: Ports, subject: Subject, nodes: Sequence[str]) -> dict[str, Any]:
    """Check rights, arguments, nodes, GPUs, disk and, by the server's dry run, every object; creates only probe Jobs.

    Raises:
        RightsError: our identity lacks rights that this or a later step uses (K2-RGT-001).
        InputError: an argument rule is broken (K2-INP-005), or the API refuses an object (K2-INP-008).
        NotReadyError: a chosen node is not usable now (K2-RDY-004).
        CapacityError: a quota of the namespace has no room for the release (K2-CAP-003), or a node has none for the
            weights (K2-CAP-002).
    """
    rights = check_rights(ports)
    findings = check_arguments(
        subject.release.profile, read_model_config(ports, subject), subject.release.gates.workload
    )
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        raise InputError(
            "K2-INP-005",
            first.summary,
            where=first.where,
            got=first.got,
            expected=first.expected,
            hint=first.remedy,
            details={"findings": plain(findings)},
        )
    quotas = check_room(ports, subject, nodes, _check_nodes(ports, subject, nodes))
    objects = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    for obj in objects:
        ports.cluster.apply(obj, dry_run=True)
    rows = _probe_disks(ports, subject, nodes)
    shown = [{**row, **{key: format_bytes(row[key]) for key in row if key.endswith("_bytes")}} for row in rows]
    ports.progress.table("preflight", shown, f"Preflight of {subject.release.id}")
    return {
        "nodes": rows,
        "objects_checked": len(objects),
        "findings": plain(findings),
        "rights": len(ports.rights),
        "note": f"{rights}, {len(nodes)} nodes probed, {len(objects)} objects by server dry run, "
        f"room under {quotas} quotas, "
        f"{len(findings)} warnings",
    }


def read_model_config(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Return the model's config.json of the lock, its bytes checked: from the store once it is there, or the Hub."""
    file = subject.lock.file("config.json")
    try:
        (data, _), where = ports.store.get(f"blobs/{file.sha256}"), f"blobs/{file.sha256}"
    except KeyError:
        data = ports.hub.read_file(subject.lock.repo, subject.lock.revision, file.path, _CONFIG_MAX_BYTES)
        where = ports.site.hub.endpoint
    if sha256_hex(data) != file.sha256:
        raise IntegrityError(
            "K2-INT-001",
            "config.json is not the file of the lock.",
            where=f"{where} ({file.path})",
            got=sha256_hex(data),
            expected=file.sha256,
        )
    return dict(json.loads(data))


def _probe_disks(ports: Ports, subject: Subject, nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Run a probe Job on each chosen node and return what it found; CapacityError names the first that is too full."""
    jobs = [
        render_probe_job(subject.lock, ports.site, ports.templates, subject.release.images.tool, node) for node in nodes
    ]
    results = run_jobs(ports, "preflight", jobs, 0, _PROBE_DEADLINE_S)
    for node, result in zip(nodes, results, strict=True):
        if note := result.message.get("note"):
            kind = result.message.get("file_system") or "an unknown file system"
            ports.progress.say(f"preflight: weights of {node} lie on {kind}: {note}")
    return [
        {
            "node": node,
            "free_bytes": int(r.message["free_bytes"]),
            "needed_bytes": int(r.message["needed_bytes"]),
            "free_inodes": int(r.message["free_inodes"]),
            "reclaimable_bytes": int(r.message.get("reclaimable_bytes", 0)),
            "trash_bytes": int(r.message.get("trash_bytes", 0)),
            "file_system": str(r.message.get("file_system", "")),
        }
        for node, r in zip(nodes, results, strict=True)
    ]


def _check_nodes(ports: Ports, subject: Subject, chosen: Sequence[str]) -> list[str]:
    """Raise NotReadyError if a chosen node has a problem; return all nodes that weights are staged on."""
    wait_for_nodes(ports)
    facts = {node.name: node for node in read_nodes(ports, subject.serving)}
    problems = []
    for name in chosen:
        node = facts.get(name)
        if node is None or not node.usable:
            problems.append({"node": name, "problem": node.why_not if node else "no such node"})
        elif node.gpus_total != subject.release.profile.gpus_per_node:
            problems.append(
                {"node": name, "problem": f"{node.gpus_total} of {subject.release.profile.gpus_per_node} GPUs"}
            )
    if problems:
        raise NotReadyError(
            "K2-RDY-004",
            f"{len(problems)} of {len(chosen)} chosen nodes have problems.",
            where=problems[0]["node"],
            got=problems[0]["problem"],
            expected="Ready with all GPUs",
            details={"problems": problems},
        )
    return [name for name, node in facts.items() if node.carries(subject.release.profile.gpus_per_node)]
