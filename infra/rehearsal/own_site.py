"""A site of the user's own, as a rehearsal sees it: only the users' client runs here, everything else is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from infra.rehearsal.processes import Supervisor
from infra.rehearsal.users import parked_answer, start_client, stop_client
from tasks.core.spec import Site


class OwnSite:
    """Sends users to the gateway of a site; leaving the context stops them, and nothing else."""

    def __init__(self, site: Site, site_path: Path, directory: Path, model: str) -> None:
        self.site_path = site_path
        self.directory = directory
        self._site = site
        self._model = model
        self._supervisor = Supervisor(directory)

    def __enter__(self) -> OwnSite:
        self._supervisor.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._supervisor.__exit__(*exc)

    def start_client(self, rate_per_s: float) -> Path:
        """Start the client that sends user traffic the whole time; return the path of its report."""
        out = self.directory / "client.json"
        return start_client(self._supervisor, self._site.gateway.url, out, rate_per_s, self._model)

    def stop_client(self) -> dict[str, Any]:
        """Let the client finish what is in flight, stop it, and return its counts."""
        return stop_client(self._supervisor, self.directory / "client.json")

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the command and the client: those of the cluster are not seen from here."""
        return self._supervisor.cpu_seconds() + time.process_time()

    def hub_stats(self) -> dict[str, Any]:
        """Return nothing: a Hub does not say what it has served."""
        return {}

    def parked_answer(self) -> dict[str, Any] | None:
        """Return what a user gets who is answered by nobody but the parking backend; None if somebody serves."""
        return parked_answer(self._site.gateway.url)

    def real_parts(self) -> list[dict[str, Any]]:
        """Return what the site file says is real; its processes are not ours to look at."""
        return [{"name": line, "by": "the site file"} for line in self._site.real]
