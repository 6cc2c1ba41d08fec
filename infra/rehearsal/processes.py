"""Child processes of a rehearsal site: started, watched, recorded and stopped by identity, never by name.

A process is known by its pid *and* its start time (``/proc/<pid>/stat``, field 22), so that a pid that the kernel gave
to somebody else is never signalled. Everything that a site starts carries ``K2_REHEARSAL_SITE_ID`` in its environment:
grandchildren that left their parent's process group are found by it when the site stops.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.rehearsal.addresses import SubnetLease, free_ports
from infra.rehearsal.errors import SiteError
from infra.rehearsal.procfs import ProcessStat, boot_id, cpu_seconds, kill_marked, signal_group
from infra.rehearsal.records import (
    SITE_ID_VARIABLE,
    STATE_FILE,
    STATE_VERSION,
    RecordedProcess,
    recorded,
    remove_files,
    stop_recorded,
)

__all__ = [
    "SITE_ID_VARIABLE",
    "Child",
    "ProcessSpec",
    "RecordedProcess",
    "SiteError",
    "SubnetLease",
    "Supervisor",
    "cpu_seconds",
    "free_ports",
    "inherited",
    "log_tail",
    "recorded",
    "stop_recorded",
]

_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# PR_SET_PDEATHSIG fires when the *thread* that forked ends: one thread, as long-lived as the program, forks them all.
_FORKER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forker")


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """Return the last lines of a log file, indented for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"    ({error})"
    tail = [line[:300] for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in tail) or "    (empty)"


@dataclass(frozen=True)
class ProcessSpec:
    """What to run, how it says that it is ready, and how it is stopped."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this program's own environment."""
    unset: tuple[str, ...] = ()
    """Prefixes of variables that are not inherited: a person's settings must not reach into the site, or out of it."""
    cwd: Path | None = None
    address: str = ""
    """Where it listens, for people and for the site's list of real parts."""
    ready: Callable[[], bool] | None = None
    """Called until it returns True; an OSError, a SiteError or a bad answer counts as not yet."""
    ready_within_s: float = 60.0
    grace_s: float = 5.0
    """From SIGTERM to SIGKILL of the whole group."""
    death_signal: int = signal.SIGTERM
    """What the child gets when the supervising program dies (not used when the site is kept)."""
    leavings: tuple[str, ...] = ()
    """Files outside the site's directory that the program leaves behind; removed after its end."""


def inherited(unset: tuple[str, ...]) -> dict[str, str]:
    """Return this program's environment without the variables that begin with one of the prefixes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(unset)}


class Child:
    """A running (or ended) child process."""

    def __init__(self, spec: ProcessSpec, popen: subprocess.Popen[bytes], log_path: Path) -> None:
        self.spec = spec
        self.pid = popen.pid
        self.log_path = log_path
        self.started_at_s = time.monotonic()
        self._popen = popen
        stat = ProcessStat.read(popen.pid)
        self.start_ticks = stat.start_ticks if stat else 0
        self.cpu_after_end_s = 0.0

    @property
    def name(self) -> str:
        """The process's name in the site."""
        return self.spec.name

    @property
    def executable(self) -> Path:
        """The program file that this process runs now, as the kernel says it."""
        return Path(f"/proc/{self.pid}/exe").readlink()

    def alive(self) -> bool:
        """Tell whether the process runs. Never reaps it, so its pid stays its own until `end`."""
        return self.exit_code() is None

    def exit_code(self) -> int | None:
        """Return the exit code (minus the signal's number if one ended it), or None while it runs."""
        if self._popen.returncode is not None:
            return int(self._popen.returncode)
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def end(self, grace_s: float | None = None) -> int:
        """SIGTERM the group, SIGKILL what is left of it after the grace, reap; return the exit code.

        A grace of 0 is SIGKILL at once.
        """
        if self._popen.returncode is not None:
            return int(self._popen.returncode)
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        # The pid cannot have been reused: it is ours until wait4 below.
        if grace_s > 0:
            signal_group(self.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        signal_group(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        self.cpu_after_end_s = usage.ru_utime + usage.ru_stime
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        remove_files(self.spec.leavings)
        return int(self._popen.returncode)

    def record(self) -> dict[str, Any]:
        """Return what a later program needs to find and stop this process."""
        return {
            "name": self.name,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "argv": list(self.spec.argv),
            "address": self.spec.address,
            "log": str(self.log_path),
            "grace_s": self.spec.grace_s,
            "leavings": list(self.spec.leavings),
        }


class Supervisor:
    """Starts the site's processes and stops exactly those, in reverse order.

    With ``keep`` the processes outlive this program: leaving the ``with`` block does not stop them, and
    `stop_recorded` does, from any later program. Without it they die with this program, even if it is killed: the
    kernel sends each its ``death_signal``, and a watchdog process stops those that do not end by it.
    ``hold_fds`` are passed to every child: a lock on such a descriptor lasts as long as the site has a process.
    """

    def __init__(self, site_dir: Path, *, keep: bool = False, hold_fds: Sequence[int] = ()) -> None:
        self.site_dir = site_dir.resolve()
        self.keep = keep
        self.site_id = secrets.token_hex(8)
        self._hold_fds = tuple(hold_fds)
        self._children: dict[str, Child] = {}
        self._order: dict[str, int] = {}
        self._ended_cpu_s = 0.0
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        (self.site_dir / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self.keep:
            self.stop_all()

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes that were started and not yet stopped, in the order of their first start."""
        with self._lock:
            return tuple(sorted(self._children.values(), key=lambda child: self._order[child.name]))

    def child(self, name: str) -> Child:
        """Return the process of that name."""
        with self._lock:
            if name not in self._children:
                raise SiteError(f"no process {name} in this site; there are: {', '.join(self._children) or 'none'}")
            return self._children[name]

    def start(self, spec: ProcessSpec, *, wait: bool = True) -> Child:
        """Start the process with its own session and log file; wait until it is ready unless told otherwise."""
        with self._lock:
            if spec.name in self._children:
                raise SiteError(f"{spec.name} is already running (pid {self._children[spec.name].pid})")
            log_path = self.site_dir / "logs" / f"{spec.name}.log"
            popen = _FORKER.submit(self._fork, spec, log_path).result(timeout=60)
            child = Child(spec, popen, log_path)
            self._children[spec.name] = child
            self._order.setdefault(spec.name, len(self._order))  # a restarted process keeps its place
            self._write_state()
            if self._watchdog is None and not self.keep:
                self._watchdog = _start_watchdog(self.site_dir)
        if wait:
            self.wait_ready(child)
        return child

    def _fork(self, spec: ProcessSpec, log_path: Path) -> subprocess.Popen[bytes]:
        env = {**inherited(spec.unset), **spec.env, SITE_ID_VARIABLE: self.site_id}
        parent_pid = os.getpid()

        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(spec.death_signal))
            if os.getppid() != parent_pid:  # it died before the line above
                os._exit(127)

        try:
            with log_path.open("ab") as log:
                return subprocess.Popen(
                    spec.argv,
                    env=env,
                    cwd=spec.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=self._hold_fds,
                    preexec_fn=None if self.keep else die_with_parent,
                )
        except OSError as error:
            raise SiteError(f"{spec.name} could not be started: {error}") from error

    def wait_ready(self, child: Child, poll_s: float = 0.1) -> None:
        """Wait until the process says that it is ready; SiteError if it dies or the deadline passes first."""
        ready, last = child.spec.ready, ""
        if ready is None:
            return
        deadline_s = time.monotonic() + child.spec.ready_within_s
        while time.monotonic() < deadline_s:
            self._require_alive(child)
            try:
                if ready():
                    return
            except (OSError, http.client.HTTPException, ValueError, SiteError) as error:
                last = f" (last answer: {error})"
            time.sleep(poll_s)
        raise SiteError(
            f"{child.name} was not ready within {child.spec.ready_within_s:g} s{last}\n"
            f"  last lines of {child.log_path}:\n{log_tail(child.log_path)}"
        )

    @staticmethod
    def _require_alive(child: Child) -> None:
        if (code := child.exit_code()) is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise SiteError(
                f"{child.name} (pid {child.pid}) {how} after {time.monotonic() - child.started_at_s:.1f} s\n"
                f"  last lines of {child.log_path}:\n{log_tail(child.log_path)}"
            )

    def check(self) -> None:
        """Raise SiteError for the first process that has died unasked."""
        for child in self.children:
            self._require_alive(child)

    def stop(self, name: str, *, grace_s: float | None = None) -> int:
        """Stop one process and its group; return its exit code."""
        child = self.child(name)
        code = child.end(grace_s)
        with self._lock:
            self._children.pop(name, None)
            self._ended_cpu_s += child.cpu_after_end_s
            self._write_state()
        return code

    def restart(self, name: str, *, grace_s: float | None = None) -> Child:
        """Stop the process (``grace_s=0`` kills it) and start it again as it was; wait until it is ready."""
        spec = self.child(name).spec
        self.stop(name, grace_s=grace_s)
        return self.start(spec)

    def stop_all(self) -> None:
        """Stop every process in reverse order of start, then whatever they left behind."""
        for child in reversed(self.children):
            self.stop(child.name)
        kill_marked(f"{SITE_ID_VARIABLE}={self.site_id}")
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None

    def cpu_seconds(self) -> float:
        """Return the CPU time of everything that was started, ended processes included."""
        return self._ended_cpu_s + cpu_seconds(child.pid for child in self.children)

    def _write_state(self) -> None:
        state = {
            "version": STATE_VERSION,
            "site_id": self.site_id,
            "keep": self.keep,
            "boot_id": boot_id(),
            "supervisor_pid": os.getpid(),
            "processes": [child.record() for child in self.children],
        }
        temporary = self.site_dir / f".{STATE_FILE}.{os.getpid()}"
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        temporary.replace(self.site_dir / STATE_FILE)


def _start_watchdog(site_dir: Path) -> subprocess.Popen[bytes]:
    """Start a process that notices by the end of its stdin that this program is gone, however it went."""
    argv = (sys.executable, "-m", "infra.rehearsal.records", str(site_dir))
    root = Path(__file__).parents[2]
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
