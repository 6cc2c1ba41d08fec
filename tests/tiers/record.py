"""Runs a heavier tier and keeps its result as JSON beside this file: what ran, at which commit, on what machine.

make record TIER=name. A tier is one of TIERS; its last line that is a JSON object is kept too.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "python"), "-m", "pytest", "-q", "--timeout=900"]

# name -> (command, how often it is run; times are medians)
TIERS: dict[str, tuple[list[str], int]] = {
    "rehearse": ([str(BIN / "k2ctl"), "rehearse", "--json"], 3),
    "rehearse-full": ([str(BIN / "k2ctl"), "rehearse", "--full", "--json"], 1),
    "test-rehearsal": ([*PYTEST, "tests/rehearsal"], 1),
    "test-kubelet": ([*PYTEST, "tests/kubelet"], 1),
    "bench-verify": ([str(BIN / "python"), "tests/bench/verify.py"], 1),
    "bench-pull": ([str(BIN / "python"), "tests/bench/pull.py"], 1),
    "bench-staging": ([str(BIN / "python"), "tests/bench/staging.py"], 1),
    "bench-topologies": ([str(BIN / "python"), "tests/bench/topologies.py"], 1),
}


def main() -> int:
    """Run the tier and write its JSON; exit as the tier did."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TIERS:
        print(f"which tier? one of: {', '.join(TIERS)}", file=sys.stderr)
        return 2
    command, times = TIERS[name]
    runs = [_run(command) for _ in range(times)]
    document = {
        "tier": name,
        "command": " ".join(Path(part).name if part.startswith("/") else part for part in command),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "exit_codes": [run["exit_code"] for run in runs],
        "wall_s": [run["wall_s"] for run in runs],
        "wall_s_median": statistics.median(run["wall_s"] for run in runs),
        "last": runs[-1]["result"],
    }
    path = Path(__file__).parent / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
    return max(run["exit_code"] for run in runs)


def _run(command: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout[-8000:])
    return {
        "exit_code": done.returncode,
        "wall_s": round(time.monotonic() - began, 1),
        "result": _result(done.stdout),
    }


def _result(output: str) -> Any:
    """Return what a run says of itself: its JSON without what only this machine knows, or its last line."""
    lines = output.strip().splitlines()
    for text in (output, lines[-1] if lines else ""):
        try:
            document = json.loads(text)
        except ValueError:
            continue
        if isinstance(document, dict):
            keep = ("outcome", "release", "exit_code", "steps", "client", "wall_s", "cpu_s", "one_time_build_s")
            return {key: document[key] for key in keep if key in document} or document
    return lines[-1] if lines else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
