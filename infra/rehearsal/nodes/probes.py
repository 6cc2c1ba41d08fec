"""The probes of a running container."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.nodes.containers import Launch, StartError, run_to_end

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeTiming:
    """When a probe runs and how many results count, with the API's defaults and its minimum of one second."""

    initial_delay_s: float
    period_s: float
    timeout_s: float
    failure_threshold: int
    success_threshold: int

    @classmethod
    def of(cls, probe: JsonObject) -> ProbeTiming:
        """Return the timing of a probe as written in a container."""
        return cls(
            initial_delay_s=float(probe.get("initialDelaySeconds") or 0),
            period_s=max(float(probe.get("periodSeconds") or 10), 1.0),
            timeout_s=max(float(probe.get("timeoutSeconds") or 1), 1.0),
            failure_threshold=int(probe.get("failureThreshold") or 3),
            success_threshold=int(probe.get("successThreshold") or 1),
        )


class Tally:
    """Counts results in a row and says when they cross a threshold. Pure."""

    def __init__(self, timing: ProbeTiming) -> None:
        self._timing = timing
        self._run = 0
        self._last: bool | None = None

    def add(self, success: bool) -> bool | None:
        """Take one result; return the verdict once enough equal results came in a row, else None."""
        self._run = self._run + 1 if success == self._last else 1
        self._last = success
        needed = self._timing.success_threshold if success else self._timing.failure_threshold
        return success if self._run >= needed else None


@dataclass(frozen=True)
class ProbeResult:
    """One attempt, with the reason of a failure as a kubelet words it."""

    success: bool
    message: str = ""


@dataclass(frozen=True)
class ProbeTarget:
    """What the handlers of a container's probes need to know about it."""

    pod_ip: str
    ports: dict[str, int]
    session: aiohttp.ClientSession
    command: Callable[[list[str]], list[str]]
    environment: dict[str, str]
    directory: Path

    def port(self, value: int | str) -> int:
        """Return a port given by number or by name; ValueError for a name that no port has."""
        return self.ports[value] if isinstance(value, str) and value in self.ports else int(value)

    async def attempt(self, probe: JsonObject, timeout_s: float) -> ProbeResult:
        """Carry out one probe or hook handler."""
        try:
            return await self._attempt(probe, timeout_s)
        except ValueError as error:
            return ProbeResult(False, f"the probe cannot be carried out: {error}")

    async def _attempt(self, probe: JsonObject, timeout_s: float) -> ProbeResult:
        if "httpGet" in probe:
            return await self._http(probe["httpGet"], timeout_s)
        if "tcpSocket" in probe:
            action = probe["tcpSocket"]
            return await self._tcp(action.get("host") or self.pod_ip, self.port(action["port"]), timeout_s)
        if "grpc" in probe:
            return await self._tcp(self.pod_ip, int(probe["grpc"]["port"]), timeout_s)
        if "exec" in probe:
            return await self._exec(probe["exec"].get("command") or [], timeout_s)
        if "sleep" in probe:
            await asyncio.sleep(float(probe["sleep"]["seconds"]))
        return ProbeResult(True)

    async def _http(self, action: JsonObject, timeout_s: float) -> ProbeResult:
        scheme = str(action.get("scheme") or "HTTP").lower()
        host = action.get("host") or self.pod_ip
        url = f"{scheme}://{host}:{self.port(action['port'])}/{str(action.get('path') or '/').lstrip('/')}"
        headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
        try:
            async with self.session.get(
                url,
                headers={"User-Agent": "kube-probe/1.36", "Connection": "close"} | headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                ssl=_UNVERIFIED if scheme == "https" else True,
            ) as response:
                if 200 <= response.status < 400:
                    return ProbeResult(True)
                return ProbeResult(False, f"HTTP probe failed with statuscode: {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return ProbeResult(False, f'Get "{url}": {error or type(error).__name__}')

    async def _tcp(self, host: str, port: int, timeout_s: float) -> ProbeResult:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
        except (OSError, TimeoutError) as error:
            return ProbeResult(False, f"dial tcp {host}:{port}: {error or type(error).__name__}")
        writer.close()
        return ProbeResult(True)

    async def _exec(self, command: list[str], timeout_s: float) -> ProbeResult:
        launch = Launch(self.command(command), self.environment, self.directory, Path(os.devnull))
        try:
            ended = await run_to_end(launch, timeout_s)
        except StartError as error:
            return ProbeResult(False, str(error))
        if ended is None:
            return ProbeResult(False, f"command {command[0]!r} timed out after {timeout_s:g} s")
        return ProbeResult(ended.code == 0, f"command {command[0]!r} exited with {ended.code}")


class ProbeListener(Protocol):
    """Learns what the probes of one container found."""

    def probe_started(self) -> None:
        """The startup probe succeeded, or there is none."""

    def probe_ready(self, ready: bool) -> None:
        """The readiness probe changed its mind."""

    def probe_failed(self, kind: str, message: str) -> None:
        """One attempt failed."""

    def probe_unhealthy(self, kind: str) -> None:
        """The startup or liveness probe failed for good: the container must be restarted."""


async def run_probes(container: JsonObject, target: ProbeTarget, listener: ProbeListener) -> None:
    """Run a container's probes until cancelled: startup first, then readiness and liveness side by side."""
    startup = container.get("startupProbe")
    if startup:
        verdict = await _until_verdict(startup, target, listener)
        if not verdict:
            listener.probe_unhealthy("Startup")
            return
    listener.probe_started()
    async with asyncio.TaskGroup() as group:
        if container.get("readinessProbe"):
            group.create_task(_readiness(container["readinessProbe"], target, listener))
        else:
            listener.probe_ready(True)
        if container.get("livenessProbe"):
            group.create_task(_liveness(container["livenessProbe"], target, listener))


async def _until_verdict(probe: JsonObject, target: ProbeTarget, listener: ProbeListener) -> bool:
    timing = ProbeTiming.of(probe)
    tally = Tally(timing)
    verdict: bool | None = None

    def take(result: ProbeResult) -> bool:
        nonlocal verdict
        if not result.success:
            listener.probe_failed("Startup", result.message)
        verdict = tally.add(result.success)
        return verdict is not None

    await _repeat(probe, timing, target, take)
    return bool(verdict)


async def _readiness(probe: JsonObject, target: ProbeTarget, listener: ProbeListener) -> None:
    timing = ProbeTiming.of(probe)
    tally = Tally(timing)

    def take(result: ProbeResult) -> bool:
        if not result.success:
            listener.probe_failed("Readiness", result.message)
        verdict = tally.add(result.success)
        if verdict is not None:
            listener.probe_ready(verdict)
        return False

    await _repeat(probe, timing, target, take)


async def _liveness(probe: JsonObject, target: ProbeTarget, listener: ProbeListener) -> None:
    timing = ProbeTiming.of(probe)
    tally = Tally(timing)

    def take(result: ProbeResult) -> bool:
        if not result.success:
            listener.probe_failed("Liveness", result.message)
        return tally.add(result.success) is False

    await _repeat(probe, timing, target, take)
    listener.probe_unhealthy("Liveness")


async def _repeat(
    probe: JsonObject, timing: ProbeTiming, target: ProbeTarget, take: Callable[[ProbeResult], bool]
) -> None:
    await asyncio.sleep(timing.initial_delay_s)
    while not take(await target.attempt(probe, timing.timeout_s)):
        await asyncio.sleep(timing.period_s)


def _unverified() -> ssl.SSLContext:
    # A kubelet does not verify the certificate of an HTTPS probe either.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_UNVERIFIED = _unverified()
