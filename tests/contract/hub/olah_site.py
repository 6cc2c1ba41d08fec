"""A Hub server that is not ours: olah on a git repository with LFS pointers, offline, with no upstream."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from infra.rehearsal.processes import ProcessSpec, Supervisor, free_ports
from tests.fakes.memory_hub import LFS_SUFFIXES

_GIT_TIMEOUT_S = 60
_AUTHOR = {"NAME": "k2 tests", "EMAIL": "tests@localhost", "DATE": "2026-01-01T00:00:00Z"}


def mirror(root: Path, repo: str, files: Mapping[str, bytes]) -> str:
    """Make the git repository that olah serves as `repo` and return its commit; large files are in LFS."""
    directory = root / "models" / repo
    directory.mkdir(parents=True)
    _git(directory, "init", "--quiet", "--initial-branch=main")
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(_pointer(directory, data) if path.endswith(LFS_SUFFIXES) else data)
    _git(directory, "add", "--all")
    _git(directory, "commit", "--quiet", "--message=checkpoint")
    return _git(directory, "rev-parse", "HEAD").strip()


def start(supervisor: Supervisor, mirrors: Path, host: str = "127.0.0.1") -> str:
    """Start olah on the mirrors; wait until it answers, and return its URL."""
    port, nobody = free_ports(2, host)
    directory = supervisor.site_dir / "olah"
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "olah.toml"
    # Nobody listens at its upstream; offline it does not ask there.
    config.write_text(
        f"""[basic]
host = "{host}"
port = {port}
repos-path = {json.dumps(str(directory / "cache"))}
mirrors-path = [{json.dumps(str(mirrors))}]
hf-scheme = "http"
hf-netloc = "{host}:{nobody}"
hf-lfs-netloc = "{host}:{nobody}"

[accessibility]
offline = true
"""
    )
    url = f"http://{host}:{port}"
    supervisor.start(
        ProcessSpec(
            "olah",
            (_program(), "-c", str(config), "--log-path", str(directory / "logs")),
            env={"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
            cwd=directory,
            address=url,
            ready=lambda: _answers(url),
        )
    )
    return url


def _program() -> str:
    beside = Path(sys.executable).parent / "olah-cli"
    return str(beside) if beside.exists() else shutil.which("olah-cli") or "olah-cli"


def _pointer(directory: Path, data: bytes) -> bytes:
    """Keep a file as git-lfs does and return what git holds in its place."""
    digest = hashlib.sha256(data).hexdigest()
    path = directory / ".git" / "lfs" / "objects" / digest[:2] / digest[2:4] / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n".encode()


def _git(directory: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{name}": value for role in ("AUTHOR", "COMMITTER") for name, value in _AUTHOR.items()}
    mine = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who}
    # A variable of whoever runs this (GIT_DIR in a hook) must not lead to another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | mine
    done = subprocess.run(
        ["git", *arguments], cwd=directory, env=env, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S
    )
    return done.stdout


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/models/nobody/nothing/revision/main", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
