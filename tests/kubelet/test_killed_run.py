"""A run that is killed: its watcher puts the machine back, with nothing of the run left but its record."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubelet import host_state, machine
from tests.kubelet.conftest import wait_for
from tests.kubelet.putting_back import Record, read_record

# What a run does to the machine, in small, and the end that nobody can prepare for.
RUN = """
import os, signal, subprocess, sys
from pathlib import Path
from infra.rehearsal.processes import SITE_ID_VARIABLE
from tests.kubelet import host_state, node, putting_back

directory, record_path = Path(sys.argv[1]), Path(sys.argv[2])
record = putting_back.Record(host_state.read(), str(directory), node.BRIDGE, "killed-run")
record.write(record_path)
putting_back.start_watcher(record_path)
node.make_bridge(node.choose_network())
Path("/proc/sys/vm/overcommit_memory").write_text("1")
Path("/run/containerd/k2").mkdir(parents=True)
(directory / "mounted").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "k2", directory / "mounted"], check=True)
for hierarchy in ("memory", "."):
    if (host_state.CGROUPS / hierarchy / "cgroup.procs").exists():
        group = host_state.CGROUPS / hierarchy / "kubepods" / "pod"
        group.mkdir(parents=True)
        pod = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (group / "cgroup.procs").write_text(str(pod.pid))
shim = subprocess.Popen(["sleep", "600"], env={SITE_ID_VARIABLE: "killed-run"}, start_new_session=True)
print(pod.pid, shim.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_cleaned_up_by_its_watcher(tmp_path: Path) -> None:
    machine.refuse_what_cannot_work()
    with machine.one_at_a_time() as lock:
        record_path, directory = lock.with_name("killed.json"), tmp_path / "k2-kubelet-killed"
        directory.mkdir()
        before = host_state.read()
        argv = [sys.executable, "-c", RUN, str(directory), str(record_path)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL
        pids = [int(pid) for pid in done.stdout.split()]
        wait_for("the watcher's end of work", lambda: not record_path.exists())
        assert host_state.differences(before, host_state.read()) == []
        assert not directory.exists()
        assert [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()] == []


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(host_state.read(), "/d", "b", "id")
    record.write(tmp_path / "r.json")
    assert read_record(tmp_path / "r.json") == record


@pytest.mark.parametrize("section", ["sysctl", "mount", "cgroup", "interface", "route", "file"])
def test_a_change_of_any_kind_is_seen(section: str) -> None:
    before = host_state.read()
    after = {**before, section: {**before[section], "new": "there"}}
    assert host_state.differences(before, after) == [f"{section} new: none -> there"]
    assert host_state.differences(after, before) == [f"{section} new: there -> none"]
