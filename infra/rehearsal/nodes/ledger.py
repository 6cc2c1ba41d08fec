"""Which processes run for which container: for people to read, and for the next agent to clean up after this one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.rehearsal.procfs import ProcessStat, boot_id, identified, kill_marked, signal_group

OWNER_VARIABLE = "K2_REHEARSAL_NODE_AGENT"
"""Set in every container to the site's nodes directory: a process that carries it belongs to that site's agent."""

_DEBOUNCE_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessRecord:
    """One process that the agent started; `start_ticks` tells a reused pid from the one that was meant."""

    node: str
    namespace: str
    pod: str
    pod_uid: str
    container: str
    pid: int
    start_ticks: int
    executable: str
    argv: tuple[str, ...]
    log_path: str
    started_at: str


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file in one step, so that a reader never sees a half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 when it is gone."""
    stat = ProcessStat.read(pid)
    return stat.start_ticks if stat else 0


class ProcessLedger:
    """Keeps `processes.json` (what runs, readable) and `pids.json` (for the clean-up) in step with the truth."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._records: dict[int, ProcessRecord] = {}
        self._pending: asyncio.TimerHandle | None = None

    def add(self, record: ProcessRecord) -> None:
        """Enter a started process."""
        self._records[record.pid] = record
        self._schedule()

    def remove(self, pid: int) -> None:
        """Strike out a process that has ended."""
        if self._records.pop(pid, None) is not None:
            self._schedule()

    def records(self) -> list[ProcessRecord]:
        """Return the running processes."""
        return list(self._records.values())

    def flush(self) -> None:
        """Write both files now."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        records = sorted(self._records.values(), key=lambda record: (record.node, record.pod, record.container))
        rows = [asdict(record) for record in records]
        write_atomically(self._directory / "processes.json", json.dumps({"processes": rows}, indent=1))
        pids = [{"pid": record.pid, "start_ticks": record.start_ticks} for record in records]
        content = {"boot_id": boot_id(), "processes": pids}
        write_atomically(self._directory / "pids.json", json.dumps(content))

    def _schedule(self) -> None:
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(_DEBOUNCE_S, self.flush)


def kill_leftovers(directory: Path) -> list[int]:
    """Kill the processes that an earlier agent of the same directory left running, and return their pids.

    A recorded pid counts only with its recorded start time; processes that are not recorded count when their
    environment names this directory, which also finds the children of containers.
    """
    killed = [pid for pid, ticks in _recorded(directory) if identified(pid, ticks)]
    for pid in killed:
        signal_group(pid, signal.SIGKILL)
    return sorted({*killed, *kill_marked(f"{OWNER_VARIABLE}={directory}")})


def _recorded(directory: Path) -> list[tuple[int, int]]:
    path = directory / "pids.json"
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
    except ValueError:
        log.warning("%s is not readable; only marked processes are cleaned up", path)
        return []
    # Pids and start times of another boot of the machine mean nothing.
    rows = content["processes"] if content["boot_id"] == boot_id() else []
    return [(row["pid"], row["start_ticks"]) for row in rows]
