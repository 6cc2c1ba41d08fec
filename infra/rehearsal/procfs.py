"""What /proc says about processes: identity, CPU time, and who inherited an environment variable."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStat:
    """One line of ``/proc/<pid>/stat``, as far as it is needed here."""

    pid: int
    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> ProcessStat | None:
        """Read the line; None when there is no such process."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        # The command name stands in brackets and may itself hold spaces and brackets.
        fields = text[text.rindex(")") + 2 :].split()
        cpu_ticks = sum(int(value) for value in fields[11:15])  # utime, stime, cutime, cstime
        return cls(pid, fields[0], int(fields[1]), int(fields[3]), cpu_ticks, int(fields[19]))


def _all_stats() -> Iterator[ProcessStat]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := ProcessStat.read(int(entry.name))):
            yield stat


def cpu_seconds(pids: Iterable[int]) -> float:
    """Sum the CPU time of the processes, their descendants and their sessions, children that have ended included."""
    roots = set(pids)
    stats = {stat.pid: stat for stat in _all_stats()}

    def ours(stat: ProcessStat) -> bool:
        seen: ProcessStat | None = stat
        while seen is not None:
            if seen.pid in roots or seen.session in roots:
                return True
            seen = stats.get(seen.parent)
        return False

    return sum(stat.cpu_ticks for stat in stats.values() if ours(stat)) / _CLOCK_TICKS_PER_S


def identified(pid: int, start_ticks: int) -> bool:
    """Tell whether this very process is still running (a zombie is not)."""
    stat = ProcessStat.read(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def signal_group(pgid: int, signum: int) -> None:
    """Signal a process group; nothing happens if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def kill_marked(marker: str) -> list[int]:
    """SIGKILL every process whose environment holds ``marker`` (NAME=value); return their pids."""
    killed = []
    for stat in _all_stats():
        if stat.pid == os.getpid() or stat.state in "ZX":
            continue
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{stat.pid}/environ").read_bytes().split(b"\0"):
                os.kill(stat.pid, signal.SIGKILL)
                killed.append(stat.pid)
    return killed


def boot_id() -> str:
    """Return the id of this boot of the machine: pids of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
