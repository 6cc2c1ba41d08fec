"""`k2ctl verify --nodes`: what each node's verify Job found, as a table; one bad node hides no other."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from flows.console.verifying import lock_fields, print_document, print_problem
from tasks.core.errors import ExitCode
from tasks.core.lock import Lock
from tasks.core.units import format_bytes, format_duration
from tasks.steps.context import Ports
from tasks.steps.verifying import NodeFindings, gravest, live_tool_image, staged_nodes, verify_nodes


def verify_all_nodes(args: Namespace, ports: Ports, lock: Lock, tool_image: str) -> int:
    """Verify every node that carries the staged label of the lock, and exit as the gravest error says."""
    nodes, began = staged_nodes(ports, lock), time.monotonic()
    found = verify_nodes(ports, lock, tool_image or live_tool_image(ports), nodes, args.at_once)
    seconds, error = time.monotonic() - began, gravest(found)
    if args.json:
        print_document(_document(lock, found, seconds))
    else:
        _show(lock, found, seconds)
    if error is None:
        return ExitCode.DONE
    print(error.as_text(), file=sys.stderr)
    return error.exit_code


def _document(lock: Lock, found: Sequence[NodeFindings], seconds: float) -> dict[str, Any]:
    error = gravest(found)
    read_bytes = sum(one.read_bytes for one in found)
    ended = {"outcome": "failed", "error": error.as_data()} if error else {"outcome": "done"}
    return {
        "version": 1,
        "ok": error is None,
        **ended,
        **lock_fields(lock),
        "files_ok": sum(one.files for one in found),
        "bytes": read_bytes,
        "seconds": round(seconds, 3),
        "gb_per_s": round(read_bytes / seconds / 1e9, 3) if seconds > 0 else 0.0,
        "nodes": [_row(one) for one in found],
        "problems": [{"node": one.node, **_problem(problem)} for one in found for problem in one.problems],
        "extra": [],
        "ignored": [],
    }


def _row(one: NodeFindings) -> dict[str, Any]:
    row = {"node": one.node, "ok": one.error is None, "files_ok": one.files, "problems": one.count}
    return row | ({"error": one.error.as_data()} if one.error else {})


def _problem(problem: dict[str, Any]) -> dict[str, str]:
    fields = ("path", "verdict", "got", "expected")
    return {name: str(problem.get(name, "differs" if name == "verdict" else "")) for name in fields}


def _show(lock: Lock, found: Sequence[NodeFindings], seconds: float) -> None:
    width = max(len("node"), *(len(one.node) for one in found)) + 2
    print(f"{'node':<{width}}{'':<4}{'files':>6}  says")
    for one in found:
        says = "every byte is right" if one.error is None else f"{one.error.code} {one.error.summary}"
        print(f"{one.node:<{width}}{'ok' if one.error is None else 'NO':<4}{one.files:>6}  {says}")
    for one in found:
        for problem in map(_problem, one.problems):
            print_problem(problem["verdict"], f"{one.node}: {problem['path']}", problem["got"], problem["expected"])
        if (unnamed := one.count - len(one.problems)) > 0:
            print(f"{'':<13}{one.node}: {unnamed} more, in the log of its verify Job")
    good = sum(one.error is None for one in found)
    print(
        f"{good} of {len(found)} nodes hold the {len(lock.files)} files of the lock {lock.digest[:12]}, "
        f"{format_bytes(lock.total_bytes)} each; {format_duration(seconds)}"
    )
