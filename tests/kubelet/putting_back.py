"""Puts the machine back as it was before the tier: at its end, and by a process of its own if the tests are killed.

What was there before is written to a file before anything is changed. `python -m tests.kubelet.putting_back FILE` waits
until whoever holds the other end of its stdin is gone, and puts back what that one has not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.rehearsal.processes import SITE_ID_VARIABLE
from infra.rehearsal.procfs import kill_marked
from tests.kubelet import host_state
from tests.kubelet.host_state import HostState

NAME = "k2-kubelet"
"""Stands in the names of our directory and of the pods' network."""
_WITHIN_S = 30.0
# pkg/kubelet/cm and pkg/util/sysctl of Kubernetes 1.36; the last is the bridge plugin's, when it is a gateway.
SYSCTLS = (
    "kernel.keys.root_maxbytes",
    "kernel.keys.root_maxkeys",
    "kernel.panic",
    "kernel.panic_on_oops",
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "net.ipv4.ip_forward",
)


@dataclass(frozen=True)
class Record:
    """What is needed to put the machine back."""

    before: HostState
    directory: str
    """Everything of ours is below it: data, sockets, pod directories, mounts."""
    bridge: str
    site_id: str
    """Processes that we started, and theirs, carry it in their environment."""

    def write(self, path: Path) -> None:
        """Keep the record, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def read_record(path: Path) -> Record:
    """Return a record that `write` left."""
    return Record(**json.loads(path.read_text()))


def put_back(record: Record) -> list[str]:
    """Undo what is left of the tier, the directory excepted, and return a line for each thing that was done."""
    return [
        *_end_processes(record),
        *_unmount(record),
        *_remove_interfaces(record),
        *_remove_cgroups(record),
        *_remove_files(record),
        *_write_sysctls(record),
    ]


def _end_processes(record: Record) -> list[str]:
    """Kill what carries our mark, and what lives in pods' cgroups: there were none before, so they are ours."""
    killed: set[int] = set()

    def all_ended() -> bool:
        pids = {*kill_marked(f"{SITE_ID_VARIABLE}={record.site_id}"), *_pids_in(_new_cgroups(record))}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        return not pids

    _until(all_ended)
    return [f"killed {len(killed)} processes that were left"] if killed else []


def _new_cgroups(record: Record) -> list[Path]:
    """Return the pods' cgroups that were not there before, each after those below it."""
    there = record.before["cgroup"]
    return [
        path
        for path in host_state.cgroup_directories()
        if str(path) not in there and host_state.CGROUP_ROOTS & set(path.relative_to(host_state.CGROUPS).parts)
    ]


def _pids_in(cgroups: list[Path]) -> list[int]:
    pids: list[int] = []
    for path in cgroups:
        with contextlib.suppress(OSError):
            pids += [int(line) for line in (path / "cgroup.procs").read_text().split()]
    return pids


def _unmount(record: Record) -> list[str]:
    ours = [place for place in host_state.mount_points() if Path(place).is_relative_to(record.directory)]
    for place in reversed(ours):
        _run("umount", "--lazy", place)
    return [f"unmounted {len(ours)} mounts below {record.directory}"] if ours else []


def _remove_interfaces(record: Record) -> list[str]:
    """Remove our bridge and the pods' ends on it; a pair goes with the network namespace of its other end, too."""
    new = [name for name in _interfaces() if name not in record.before["interface"]]
    ours = [name for name in new if name == record.bridge or _master(name) == record.bridge]
    for name in sorted(ours, key=lambda name: name == record.bridge):
        _run("ip", "link", "delete", name)
    return [f"removed the interfaces {', '.join(ours)}"] if ours else []


def _interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir() if path.is_dir())


def _master(name: str) -> str:
    link = Path("/sys/class/net") / name / "master"
    return link.resolve().name if link.exists() else ""


def _remove_cgroups(record: Record) -> list[str]:
    count = len(_new_cgroups(record))

    def all_gone() -> bool:
        # A cgroup whose last process has just ended refuses to go for a moment.
        for path in _new_cgroups(record):
            with contextlib.suppress(OSError):
                path.rmdir()
        return not _new_cgroups(record)

    _until(all_gone)
    return [f"removed {count} cgroups"] if count else []


def _remove_files(record: Record) -> list[str]:
    """Remove the directories of the system that were not there before; where one was, only what bears our name."""
    there, removed = record.before["file"], 0
    for root in map(Path, host_state.FOREIGN):
        if root.is_dir() and str(root) not in there:
            removed += 1 + sum(1 for _ in root.rglob("*"))
            shutil.rmtree(root)
        elif root.is_dir():
            ours = [path for path in root.rglob(f"*{NAME}*") if str(path) not in there and not path.is_dir()]
            for path in ours:
                path.unlink()
            removed += len(ours)
    return [f"removed {removed} files and directories outside our own"] if removed else []


def _write_sysctls(record: Record) -> list[str]:
    """Write back every setting that the kubelet is known to change and that is not as it was."""
    now, lines = host_state.read()["sysctl"], []
    for name in SYSCTLS:
        before = record.before["sysctl"].get(name)
        if before is not None and now.get(name) != before:
            Path("/proc/sys", name.replace(".", "/")).write_text(before)
            lines.append(f"{name}: {now.get(name)} -> {before}")
    return lines


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WITHIN_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _run(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, timeout=30, check=False)  # what is left shows in the comparison


def start_watcher(record_path: Path) -> subprocess.Popen[bytes]:
    """Start the process that puts the machine back when this one is gone and has not done it."""
    argv = (sys.executable, "-m", "tests.kubelet.putting_back", str(record_path))
    null = subprocess.DEVNULL
    root = Path(__file__).parents[2]
    return subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


def finish(record_path: Path, record: Record) -> None:
    """Say that the machine is as it was: the directory and the record go."""
    if not any(Path(place).is_relative_to(record.directory) for place in host_state.mount_points()):
        shutil.rmtree(record.directory, ignore_errors=True)
    record_path.unlink(missing_ok=True)


def main() -> int:
    """Wait for the end of whoever started us, then do what is left to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    path = Path(sys.argv[1])
    if path.exists():
        record = read_record(path)
        put_back(record)
        finish(path, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
