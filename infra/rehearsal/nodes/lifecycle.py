"""One container of a pod across its restarts."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.rehearsal.kubeclient import JsonObject
from infra.rehearsal.nodes.containers import ContainerProcess, Exit, Launch, StartError
from infra.rehearsal.nodes.launches import ConfigError
from infra.rehearsal.nodes.machines import timestamp
from infra.rehearsal.nodes.probes import ProbeTarget, run_probes
from infra.rehearsal.nodes.status import TERMINATION_MESSAGE_BYTES, ContainerState, backoff_s, terminated

_CONFIG_RETRY_S = 2.0
_STABLE_S = 60.0
_START_ERROR_CODE = 128
_LOG_TAIL_BYTES = 2048

log = logging.getLogger(__name__)


class PodContext(Protocol):
    """What a container needs from the pod it belongs to."""

    stopping: asyncio.Event

    def changed(self) -> None:
        """Have the pod's status written soon."""

    async def launch(self, container: JsonObject, run: int) -> Launch:
        """Return what to start for one run of a container."""

    def target(self, container: JsonObject, launch: Launch) -> ProbeTarget:
        """Return what the container's probes are aimed at."""

    def process_started(self, container: str, process: ContainerProcess, launch: Launch) -> None:
        """Enter a process into the books."""

    def process_ended(self, process: ContainerProcess) -> None:
        """Strike a process out of the books."""

    def event(self, reason: str, message: str, *, warning: bool = True) -> None:
        """Record a Kubernetes event about the pod."""


@dataclass(frozen=True)
class RestartRule:
    """Whether a container that has ended starts again."""

    always: bool
    on_failure: bool

    @classmethod
    def of(cls, policy: str, *, init: bool, sidecar: bool) -> RestartRule:
        """Return the rule that a pod's restartPolicy means for a container of it."""
        if sidecar:
            return cls(always=True, on_failure=True)
        return cls(always=policy == "Always" and not init, on_failure=policy in ("Always", "OnFailure"))

    def restart(self, exit_code: int) -> bool:
        """Tell whether to start again after this exit code."""
        return self.always or (self.on_failure and exit_code != 0)


class ContainerLifecycle:
    """Starts a container, probes it, and starts it again as its rule says, until it is done or told to stop."""

    def __init__(
        self, container: JsonObject, state: ContainerState, rule: RestartRule, pod: PodContext, *, probed: bool
    ) -> None:
        self.container = container
        self.state = state
        self.settled = asyncio.Event()
        self._rule = rule
        self._pod = pod
        self._probed = probed
        self._process: ContainerProcess | None = None
        self._unhealthy_stop: asyncio.Task[Exit] | None = None
        self._launch: Launch | None = None

    async def run(self) -> int | None:
        """Run until the container will not be started again; return its exit code, None if it never ran."""
        failures = 0
        code: int | None = None
        while not self._pod.stopping.is_set():
            launch = await self._prepare()
            # Asked again: whoever stopped the pod meanwhile found no process to stop.
            if launch is None or self._pod.stopping.is_set():
                break
            began = time.monotonic()
            code = await self._run_once(launch)
            if self._pod.stopping.is_set() or not self._rule.restart(code):
                break
            failures = 1 if time.monotonic() - began > _STABLE_S else failures + 1
            if await self._back_off(failures):
                break
            self.state.restart_count += 1
        self.settled.set()
        return code

    def restarts_after(self, exit_code: int) -> bool:
        """Tell whether the container starts again after this exit code."""
        return self._rule.restart(exit_code)

    async def stop(self, grace_s: float) -> None:
        """End the running process, after its preStop hook, within the grace period."""
        process, launch = self._process, self._launch
        if process is None or launch is None or not process.running:
            return
        deadline = time.monotonic() + grace_s
        hook = (self.container.get("lifecycle") or {}).get("preStop")
        if hook and grace_s > 0:
            target = self._pod.target(self.container, launch)
            try:
                await asyncio.wait_for(target.attempt(hook, grace_s), grace_s)
            except TimeoutError:
                self._pod.event("FailedPreStopHook", "PreStopHook did not end within the grace period")
        await process.stop(deadline - time.monotonic())

    def kill(self) -> None:
        """End the running process at once."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def probe_started(self) -> None:
        """Note that the container has started."""
        self.state.started = True
        self.settled.set()
        self._pod.changed()

    def probe_ready(self, ready: bool) -> None:
        """Note what the readiness probe says."""
        if self.state.ready != ready:
            self.state.ready = ready
            self._pod.changed()

    def probe_failed(self, kind: str, message: str) -> None:
        """Record a failed attempt as an event."""
        self._pod.event("Unhealthy", f"{kind} probe failed: {message}")

    def probe_unhealthy(self, kind: str) -> None:
        """Stop the process; the lifecycle then starts it again if its rule says so."""
        name = self.container["name"]
        self._pod.event("Killing", f"Container {name} failed {kind.lower()} probe, will be restarted", warning=False)
        if self._process is not None:
            probe = self.container.get(f"{kind.lower()}Probe") or {}
            grace_s = float(probe.get("terminationGracePeriodSeconds") or 5)
            self._unhealthy_stop = asyncio.create_task(self._process.stop(grace_s))

    async def _prepare(self) -> Launch | None:
        while not self._pod.stopping.is_set():
            try:
                return await self._pod.launch(self.container, self.state.restart_count)
            except ConfigError as error:
                self.state.wait(error.reason, str(error))
                self._pod.changed()
                self._pod.event("Failed", f"Error: {error}")
                await self._sleep(_CONFIG_RETRY_S)
        return None

    async def _run_once(self, launch: Launch) -> int:
        try:
            process = ContainerProcess(launch)
        except StartError as error:
            self._show_end(Exit(_START_ERROR_CODE), timestamp(), launch, str(error), "StartError")
            self._pod.event("Failed", f"Error: failed to start container {self.container['name']}: {error}")
            return _START_ERROR_CODE
        self._process, self._launch = process, launch
        started_at = timestamp()
        self._show_start(process, started_at)
        self._pod.process_started(self.container["name"], process, launch)
        probes = self._start_probes(launch)
        try:
            ended = await process.wait()
        finally:
            if probes is not None:
                probes.cancel()
            self._pod.process_ended(process)
        self._process = None
        self._show_end(ended, started_at, launch)
        return ended.code

    def _start_probes(self, launch: Launch) -> asyncio.Task[None] | None:
        if not self._probed:
            return None
        target = self._pod.target(self.container, launch)
        return asyncio.create_task(run_probes(self.container, target, self))

    def _show_start(self, process: ContainerProcess, started_at: str) -> None:
        state = self.state
        if "terminated" in state.state:
            state.last_state = state.state
        state.container_id = f"process://{process.pid:x}-{state.restart_count}-{time.time_ns():x}"
        state.state = {"running": {"startedAt": started_at}}
        state.ready = state.started = False
        self._pod.changed()

    def _show_end(self, ended: Exit, started_at: str, launch: Launch, message: str = "", reason: str = "") -> None:
        state = self.state
        state.state = terminated(
            exit_code=ended.code,
            signal=ended.signal,
            started_at=started_at,
            finished_at=timestamp(),
            message=message or self._last_words(launch, ended.code),
            container_id=state.container_id,
            reason=reason,
        )
        # An init container that has done its work counts as ready.
        state.ready = not self._probed and ended.code == 0
        state.started = False
        self._pod.changed()

    async def _back_off(self, failures: int) -> bool:
        delay_s = backoff_s(failures)
        if failures > 1:
            name = self.container["name"]
            message = f"back-off {delay_s:g}s restarting failed container={name}"
            self.state.wait("CrashLoopBackOff", message)
            self._pod.changed()
            self._pod.event("BackOff", f"Back-off restarting failed container {name}")
        return await self._sleep(delay_s)

    async def _sleep(self, seconds: float) -> bool:
        """Sleep; return True at once when the pod is stopping."""
        try:
            await asyncio.wait_for(self._pod.stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _last_words(self, launch: Launch, code: int) -> str:
        path = Path(launch.environment["K2_TERMINATION_LOG"])
        message = path.read_bytes()[:TERMINATION_MESSAGE_BYTES] if path.is_file() else b""
        fallback = self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and fallback and code != 0 and launch.log_path.is_file():
            message = launch.log_path.read_bytes()[-_LOG_TAIL_BYTES:]
        return message.decode(errors="replace")
