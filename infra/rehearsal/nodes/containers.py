"""One container as one local process group: started, watched and ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The program could not be started at all (not found, not executable)."""


@dataclass(frozen=True)
class Launch:
    """Everything that a process needs to start."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log_path: Path


@dataclass(frozen=True)
class Exit:
    """How a process ended; a death by signal has the exit code 128 + signal, as container runtimes report it."""

    code: int
    signal: int = 0


class ContainerProcess:
    """A running process group. The kernel kills its leader when the agent dies, so that nothing is left behind."""

    def __init__(self, launch: Launch) -> None:
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        launch.directory.mkdir(parents=True, exist_ok=True)
        with launch.log_path.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    list(launch.argv),
                    env=dict(launch.environment),
                    cwd=launch.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise StartError(f'exec: "{launch.argv[0]}": {error.strerror or error}') from error
        self.pid = self._process.pid
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Exit] = loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._reap)

    @property
    def running(self) -> bool:
        """Tell whether the process has not ended yet."""
        return not self._ended.done()

    async def wait(self) -> Exit:
        """Return how the process ended, once it has."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> Exit:
        """End the process group: SIGTERM, then SIGKILL after the grace period."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), timeout=max(grace_s, 0.01))
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # What the program left behind in its group goes with it, as with the first process of a container. It is
        # signalled before the leader is reaped: until then the group's number cannot belong to anything else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._ended.set_result(Exit(128 - code, -code) if code < 0 else Exit(code))


async def run_to_end(launch: Launch, timeout_s: float) -> Exit | None:
    """Run a short program (a probe, a hook) and return how it ended; None when it took too long and was killed."""
    process = ContainerProcess(launch)
    try:
        return await asyncio.wait_for(process.wait(), timeout=timeout_s)
    except TimeoutError:
        return None
    finally:
        process.signal(signal.SIGKILL)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
