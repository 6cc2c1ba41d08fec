"""The rehearsal's real orchestrator: a Prefect server on SQLite and one process worker.

``python -m infra.rehearsal.orchestrator DIR`` starts both alone, prints where, and stops them on Enter or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.rehearsal.cache import Report, cache_directory, exclusive
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import Child, ProcessSpec, Supervisor, free_ports, inherited

POOL = "k2-rehearsal"
# A person's own Prefect settings (a database, a key, a profile) must not reach into the site.
_FOREIGN = ("PREFECT_",)
_REQUEST_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Orchestrator:
    """A running Prefect server and how to reach it."""

    host: str
    port: int
    home: Path
    version: str
    """As the running server says it."""
    process: Child

    @property
    def api_url(self) -> str:
        """The API's address, as PREFECT_API_URL."""
        return f"http://{self.host}:{self.port}/api"

    @property
    def ui_url(self) -> str:
        """The address for a browser."""
        return f"http://{self.host}:{self.port}"

    @property
    def client_env(self) -> dict[str, str]:
        """Return what a client of this server needs in its environment."""
        return _client_env(self.home, self.host, self.port)

    def request(self, method: str, path: str, body: object | None = None) -> tuple[int, Any]:
        """Send one request to the API; return the status and the parsed answer."""
        return _request(self.host, self.port, method, f"/api{path}", body)

    def ensure_pool(self, name: str = POOL) -> None:
        """Create the process work pool if it is not there; its worker fills in the job template."""
        status, answer = self.request("POST", "/work_pools/", {"name": name, "type": "process"})
        if status not in (200, 201, 409):
            raise SiteError(f"work pool {name} was not created: HTTP {status}: {str(answer)[:300]}")

    def deploy(self, prefect_file: Path, *, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Register every deployment of a prefect.yaml, as ``prefect deploy --all`` does; return what it printed.

        Entrypoints are relative to ``cwd``, the project's root. ``env`` is what templates in the file may use.
        """
        argv = (sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file))
        return _prefect_command(argv, cwd=cwd, env={**self.client_env, **(env or {})})


def start_server(
    supervisor: Supervisor, *, host: str = "127.0.0.1", env: Mapping[str, str] | None = None, report: Report = print
) -> Orchestrator:
    """Start the Prefect server in <site>/prefect, wait until it is healthy and has the work pool."""
    home, port = supervisor.site_dir / "prefect", free_ports(1, host)[0]
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "prefect.db").exists():
        shutil.copyfile(_migrated_database(report), home / "prefect.db")
    url = f"http://{host}:{port}"
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_UI_URL": url,
        "PREFECT_API_URL": f"{url}/api",
    }
    argv = (sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port))
    spec = ProcessSpec(
        "prefect-server",
        argv,
        env={**settings, **(env or {})},
        unset=_FOREIGN,
        cwd=home,
        address=url,
        ready=lambda: _request(host, port, "GET", "/api/health")[0] == 200,
        ready_within_s=120,
        grace_s=5,
    )
    child = supervisor.start(spec)
    version = str(_request(host, port, "GET", "/api/admin/version")[1])
    orchestrator = Orchestrator(host, port, home, version, child)
    orchestrator.ensure_pool()
    return orchestrator


def start_worker(
    supervisor: Supervisor,
    orchestrator: Orchestrator,
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    pool: str = POOL,
    name: str = "prefect-worker",
    wait: bool = True,
) -> Child:
    """Start a process worker; ``env`` reaches the flows that it runs (K2_SITE and the like)."""

    def online() -> bool:
        status, workers = orchestrator.request("POST", f"/work_pools/{pool}/workers/filter", {})
        return status == 200 and any(worker["name"] == name and worker["status"] == "ONLINE" for worker in workers)

    argv = (sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name)
    spec = ProcessSpec(
        name,
        argv,
        env={
            **orchestrator.client_env,
            "PREFECT_WORKER_QUERY_SECONDS": "1",  # 10 by default: half a rehearsal's patience
            **(env or {}),
        },
        unset=_FOREIGN,
        cwd=cwd,
        address=orchestrator.api_url,
        ready=online,
        ready_within_s=120,
        grace_s=5,
    )
    return supervisor.start(spec, wait=wait)


def _client_env(home: Path, host: str, port: int) -> dict[str, str]:
    url = f"http://{host}:{port}"
    no_proxy = [os.environ[name] for name in ("NO_PROXY", "no_proxy") if os.environ.get(name)]
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_URL": url,
        # A wrong address must fail, not start a second server with a database of its own.
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "DO_NOT_TRACK": "1",
        "NO_PROXY": ",".join([*no_proxy, host, "127.0.0.1", "localhost"]),
    }


def _migrated_database(report: Report) -> Path:
    """Return an empty SQLite database at this Prefect's schema: the migrations cost six CPU seconds, once."""
    version = importlib.metadata.version("prefect")
    template = cache_directory() / "prefect" / f"{version}.db"
    if template.exists():
        return template
    with exclusive(template.with_suffix(".lock"), report):
        if not template.exists():
            report(f"preparing the database of Prefect {version}, once (about 10 s)")
            with tempfile.TemporaryDirectory(dir=template.parent) as home:
                database = Path(home) / "prefect.db"
                env = {
                    "PREFECT_HOME": home,
                    "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
                    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                    "DO_NOT_TRACK": "1",
                }
                argv = (sys.executable, "-m", "prefect", "--no-prompt", "server", "database", "upgrade", "-y")
                _prefect_command(argv, cwd=Path(home), env=env)
                database.replace(template)
    return template


def _prefect_command(argv: tuple[str, ...], *, cwd: Path, env: Mapping[str, str]) -> str:
    environment = {**inherited(_FOREIGN), **env}
    try:
        result = subprocess.run(
            argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SiteError(f"{' '.join(argv[2:])} took more than {_COMMAND_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        tail = "\n".join(f"    {line}" for line in (result.stdout + result.stderr).splitlines()[-15:])
        raise SiteError(f"{' '.join(argv[2:])} exited with {result.returncode}:\n{tail}")
    return result.stdout


def _request(host: str, port: int, method: str, path: str, body: object | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


def main() -> int:
    """Start a server and a worker alone, say where, stop them on Enter or Ctrl-C."""
    site_dir = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="k2-orchestrator-"))
    with Supervisor(site_dir) as supervisor:
        started_s = time.monotonic()
        orchestrator = start_server(supervisor, report=lambda line: print(line, file=sys.stderr, flush=True))
        print(f"Prefect {orchestrator.version} at {orchestrator.ui_url} after {time.monotonic() - started_s:.1f} s")
        worker = start_worker(supervisor, orchestrator, cwd=Path.cwd())
        print(f"worker {worker.name} online after {time.monotonic() - started_s:.1f} s", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.readline()
        print(f"stopping ({supervisor.cpu_seconds():.1f} CPU seconds so far)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
