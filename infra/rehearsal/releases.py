"""The release files of a rehearsal: an older release, and the candidate in the variants that the rehearsal can show."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from infra.rehearsal.site import REPO

OLD, NEW = "k2-rehearsal-1", "k2-rehearsal-2"


def _tree_digest(package: str) -> str:
    """Return a digest of a package's own Python files: the rehearsal's images are these sources."""
    root = Path(str(files(package)))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def images() -> dict[str, str]:
    """Return image names whose digests are over what really runs here."""
    router = hashlib.sha256(f"sglang-router {version('sglang-router')}".encode()).hexdigest()
    return {
        "engine": f"rehearsal/engine-simulator@sha256:{_tree_digest('infra.rehearsal.engine')}",
        "router": f"rehearsal/sglang-router@sha256:{router}",
        "tool": f"rehearsal/k2-release@sha256:{_tree_digest('tasks')}",
    }


def release_data(release_id: str, revision: str, profile: str, **changes: Any) -> dict[str, Any]:
    """Return a release as it is written to a file; `changes` replace top-level fields."""
    return {
        "version": 1,
        "id": release_id,
        "repo": REPO,
        "revision": revision,
        "images": images(),
        "profile": profile,
        "gates": gates(),
        "traffic": traffic(),
        "retention": {"hold_s": 3.0},
        **changes,
    }


def traffic(bake_s: float = 4.0) -> dict[str, Any]:
    """Return the traffic plan of a rehearsal: production's steps, seconds where production has minutes."""
    return {
        "steps_percent": [1, 10, 50, 100],
        "bake_s": bake_s,
        "check_interval_s": min(1.0, bake_s / 2),
        "min_samples": 4,
        "max_error_share": 0.1,
        "max_p95_s": 1.0,
    }


def gates() -> dict[str, Any]:
    """Return the gates of a rehearsal: limits far from the simulator's usual figures, so that a busy laptop passes."""
    return {
        "smoke_min_correct_share": 1.0,
        "workload": {"input_tokens": 64, "output_tokens": 16, "requests": 48, "concurrency": 8},
        "limits": [
            {"metric": "e2e_output_tok_per_s", "op": ">=", "value": 60.0, "unit": "tok/s"},
            {"metric": "e2e_latency_p95_s", "op": "<=", "value": 3.0, "unit": "s"},
            {"metric": "e2e_error_share", "op": "<=", "value": 0.0, "unit": "share"},
        ],
        "baseline_ratio": 0.4,
    }


def write_release(directory: Path, data: dict[str, Any]) -> Path:
    """Write a release file by its id and return its path."""
    path = directory / f"{data['id']}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
