"""The files of a site and its releases as a person writes them, for the releases of `small_world`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.core.spec import Release, plain
from tests.fakes.small_world import PROFILE


def write_site(directory: Path, **changes: Any) -> Path:
    """Write a site file with an empty directory of releases beside it and return its path; `changes` are its fields."""
    (directory / "releases").mkdir(exist_ok=True)
    (directory / "store.json").write_text('{"access_key": "a", "secret_key": "b"}')
    path = directory / "site.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "name": "memory",
                "kubeconfig": "kubeconfig",
                "store": {"endpoint": "http://127.0.0.1:1", "bucket": "k2-test", "credentials_file": "store.json"},
                "gateway": {"url": "http://127.0.0.1:1", "name": "front-door", "stats_url": "http://127.0.0.1:1"},
                "node_selector": {"k2-release.io/pool": "h200"},
                "nvme_path": "/mnt/nvme/k2",
                "usd_per_gpu_hour": 2.3,
            }
            | changes
        )
    )
    return path


def write_release(directory: Path, release: Release) -> Path:
    """Write a release under the releases of a site and return the file's path."""
    base, own = PROFILE.group("decode").args, release.profile.group("decode").args
    data: dict[str, Any] = {
        "version": 1,
        "id": release.id,
        "repo": release.repo,
        "revision": release.revision,
        "images": plain(release.images),
        "profile": PROFILE.name,
        "args": {"decode": {key: value for key, value in own.items() if base.get(key) != value}},
        "gates": plain(release.gates),
        "traffic": plain(release.traffic),
        "retention": plain(release.retention),
    }
    path = directory / "releases" / f"{release.id}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path
