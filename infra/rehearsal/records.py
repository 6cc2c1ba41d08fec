"""What a site wrote down about its processes, so that any later program can stop exactly them.

``python -m infra.rehearsal.records DIR`` is the watchdog of a running site: it stops the site when its stdin ends.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.rehearsal.errors import SiteError
from infra.rehearsal.procfs import boot_id, identified, kill_marked, signal_group

SITE_ID_VARIABLE = "K2_REHEARSAL_SITE_ID"
STATE_FILE = "state.json"
STATE_VERSION = 1
_WATCHDOG_GRACE_S = 2.0


def remove_files(files: Iterable[str]) -> None:
    """Delete the files that are there."""
    for file in files:
        Path(file).unlink(missing_ok=True)


@dataclass(frozen=True)
class RecordedProcess:
    """A process as the site's state file names it."""

    name: str
    pid: int
    start_ticks: int
    address: str
    log: str
    grace_s: float
    leavings: tuple[str, ...]

    def alive(self) -> bool:
        """Tell whether this very process, not another with its pid, still runs."""
        return identified(self.pid, self.start_ticks)


def _read_state(site_dir: Path) -> dict[str, Any]:
    path = site_dir / STATE_FILE
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        raise SiteError(f"{site_dir} holds no {STATE_FILE}: no rehearsal site was started there") from None
    except ValueError as error:
        raise SiteError(f"{path} is not JSON: {error}") from error
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise SiteError(f"{path} is not of version {STATE_VERSION}; stop the site with the k2ctl that started it")
    return state


def recorded(site_dir: Path) -> tuple[RecordedProcess, ...]:
    """Return the processes that the site's state file names; none if the machine was rebooted since."""
    state = _read_state(site_dir)
    if state["boot_id"] != boot_id():
        return ()
    names = ("name", "pid", "start_ticks", "address", "log", "grace_s", "leavings")
    return tuple(RecordedProcess(**{name: entry[name] for name in names}) for entry in state["processes"])


def stop_recorded(site_dir: Path, *, grace_s: float | None = None) -> tuple[str, ...]:
    """Stop a site from another program, in reverse order of start; return the names of what was stopped.

    ``grace_s`` replaces each process's own time from SIGTERM to SIGKILL.
    """
    state, stopped = _read_state(site_dir), []
    for process in reversed(recorded(site_dir)):
        if not process.alive():
            remove_files(process.leavings)
            continue
        signal_group(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + (process.grace_s if grace_s is None else grace_s)
        while process.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if process.alive():
            signal_group(process.pid, signal.SIGKILL)
        remove_files(process.leavings)
        stopped.append(process.name)
    if state["boot_id"] == boot_id():
        kill_marked(f"{SITE_ID_VARIABLE}={state['site_id']}")
    state["processes"] = []
    (site_dir / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")
    return tuple(stopped)


def main() -> None:
    """Wait until stdin ends, which it does with the program that holds its other end, and stop the site."""
    sys.stdin.buffer.read()
    stop_recorded(Path(sys.argv[1]), grace_s=_WATCHDOG_GRACE_S)


if __name__ == "__main__":
    main()
