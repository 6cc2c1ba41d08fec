"""A receipt as a person reads it: who let what through, where it stands, what every step and gate said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.units import format_bytes, utc_time

_SHORT = 12


def receipt_lines(body: Mapping[str, Any]) -> list[str]:
    """Return a receipt's lines; digests are shortened here, the whole receipt has them in full."""
    lock, plan = body["lock"], body.get("plan") or {}
    facts = [
        ("release", body["release"]["id"]),
        ("site", body.get("site", "")),
        ("change", _change(plan)),
        ("approver", body.get("approver") or "nobody is named"),
        ("weights of", f"{lock['repo']}@{lock['revision'][:_SHORT]}"),
        ("lock", f"{lock['digest'][:_SHORT]}, {lock['files']} files, {format_bytes(lock['total_bytes'])}"),
        ("serving", body["serving_digest"][:_SHORT]),
        ("policy", body["policy_digest"][:_SHORT]),
        ("manifests", str(body.get("manifests_digest") or "none")[:_SHORT]),
        *((f"{name} image", _short_image(str(image))) for name, image in sorted(body["images"].items())),
        ("tool", body.get("tool", "")),
    ]
    return [
        *(f"{name:<14}{value}" for name, value in facts),
        *_node_lines(body),
        *_step_lines(body["steps"]),
        *_gate_lines(body["gates"]),
        *_weight_lines(body.get("weights", [])),
        *(f"simulated     {what}" for what in body.get("simulated", [])),
    ]


def _change(plan: Mapping[str, Any]) -> str:
    replaced = plan.get("live_release")
    return f"{plan.get('change', 'unknown')}" + (f", in place of {replaced}" if replaced else "")


def _short_image(image: str) -> str:
    name, at, digest = image.partition("@sha256:")
    return f"{name}{at}{digest[:_SHORT]}"


def _node_lines(body: Mapping[str, Any]) -> list[str]:
    """Return a line for each node: the marker that proves its files, and the pod that stood on it."""
    pods = {row["node"]: f"{row['role']} rank {row['node_rank']}, {row['pod']}" for row in body.get("placement", [])}
    return [
        f"node          {row['node']:<12} {row.get('files', '?')} files, marker {row['marker_content_sha256'][:_SHORT]}"
        f"  {pods.get(row['node'], '')}".rstrip()
        for row in body["nodes"]
    ]


def _step_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"step          {step['name']:<12} {step['outcome']:<11}{step['seconds']:>9.1f} s"
        + (f", predicted {step['predicted_s']:.1f} s" if "predicted_s" in step else "")
        + (f", {step['attempts']} tries" if step["attempts"] > 1 else "")
        for step in steps
    ]


def _gate_lines(gates: Mapping[str, Any]) -> list[str]:
    """Return each gate's parts with got, expected, unit and scope."""
    lines = []
    for name, gate in sorted(gates.items()):
        lines.append(f"gate          {name}: {gate['verdict']['outcome']} ({gate.get('note', '')})")
        for part in gate["verdict"].get("parts", []):
            scope = f" [{part['scope']}]" if part.get("scope") else ""
            wanted = f", expected {part['expected']}" if part.get("expected") else ""
            lines.append(f"              {part['gate']}: {part['got']} {part.get('unit', '')}{wanted}{scope}".rstrip())
    return lines


def _weight_lines(weights: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"weight        {utc_time(row['at'])}  {row['candidate_percent']:>3}%  {row['phase']}, {row['why']}"
        for row in weights
    ]
