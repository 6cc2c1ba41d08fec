"""Real child processes: they start, are noticed when they die, and exactly they are stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.rehearsal.processes import (
    ProcessSpec,
    SiteError,
    SubnetLease,
    Supervisor,
    cpu_seconds,
    free_ports,
    inherited,
    recorded,
    stop_recorded,
)

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-S", "-c")


def shell(name: str, script: str, **changes: object) -> ProcessSpec:
    return ProcessSpec(name, ("/bin/sh", "-c", script), **{"grace_s": 30.0, **changes})  # type: ignore[arg-type]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def marker(path: Path):
    """A readiness check: the file is there."""
    return path.exists


def test_starts_waits_until_ready_logs_and_stops(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        spec = shell("one", f"echo hello $WHO; touch {tmp_path}/up; exec sleep 60", env={"WHO": "you"})
        child = supervisor.start(ProcessSpec(**{**vars(spec), "ready": marker(tmp_path / "up")}))
        assert child.alive() and child.exit_code() is None
        assert eventually(lambda: child.executable.name in ("sleep", "busybox", "coreutils"))
        assert (tmp_path / "logs" / "one.log").read_text() == "hello you\n"
        supervisor.check()
    assert not running(child.pid)
    assert json.loads((tmp_path / "state.json").read_text())["processes"] == []


def test_stops_in_reverse_order_even_after_a_restart(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        for name in ("first", "second"):
            up, order = tmp_path / f"{name}.up", tmp_path / "order"
            script = f"trap 'echo {name} >> {order}; exit 0' TERM; touch {up}; while :; do sleep 0.02; done"
            supervisor.start(shell(name, script, ready=marker(up)))
        old = supervisor.child("first").pid
        (tmp_path / "first.up").unlink()
        assert supervisor.restart("first", grace_s=0).pid != old
        assert not (tmp_path / "order").exists(), "a grace of 0 s is SIGKILL at once"
    assert (tmp_path / "order").read_text().split() == ["second", "first"]


def test_a_death_before_readiness_is_told_with_the_log(tmp_path):
    with Supervisor(tmp_path) as supervisor, pytest.raises(SiteError) as raised:
        supervisor.start(shell("brittle", "echo cannot bind; exit 3", ready=lambda: False))
    text = str(raised.value)
    assert "brittle" in text and "exited with code 3" in text and "cannot bind" in text
    assert str(tmp_path / "logs" / "brittle.log") in text


def test_a_missed_deadline_is_told_with_the_last_answer(tmp_path):
    def refused() -> bool:
        assert eventually(lambda: "still loading" in (tmp_path / "logs" / "slow.log").read_text())
        raise ConnectionRefusedError("nobody there")

    with Supervisor(tmp_path) as supervisor, pytest.raises(SiteError) as raised:
        supervisor.start(shell("slow", "echo still loading; exec sleep 60", ready=refused, ready_within_s=0.3))
    assert "slow was not ready within 0.3 s" in str(raised.value)
    assert "nobody there" in str(raised.value) and "still loading" in str(raised.value)


def test_a_later_death_is_noticed_and_names_the_signal(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("victim", "exec sleep 60"))
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: not child.alive())
        with pytest.raises(SiteError, match=r"victim .* was ended by SIGKILL"):
            supervisor.check()


def test_a_program_that_is_not_there_is_an_error_with_its_name(tmp_path):
    with Supervisor(tmp_path) as supervisor, pytest.raises(SiteError, match="ghost could not be started"):
        supervisor.start(ProcessSpec("ghost", ("/nonexistent/program",)))


def test_a_name_runs_once(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(shell("twin", "exec sleep 60"))
        with pytest.raises(SiteError, match="already running"):
            supervisor.start(shell("twin", "exec sleep 60"))


def test_a_program_that_ignores_sigterm_and_its_children_are_killed(tmp_path):
    script = f"trap '' TERM; sleep 61 & echo $! > {tmp_path}/grandchild; touch {tmp_path}/up; while :; do sleep 1; done"
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(shell("stubborn", script, grace_s=0.2, ready=marker(tmp_path / "up")))
        grandchild = int((tmp_path / "grandchild").read_text())
    assert not running(child.pid)
    assert eventually(lambda: not running(grandchild))


def test_a_grandchild_in_a_session_of_its_own_is_found_by_the_sites_id(tmp_path):
    told = f"echo $$ > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/runaway"
    script = f"setsid sh -c '{told}; exec sleep 62' & while [ ! -e {tmp_path}/seen ]; do sleep 0.02; done"
    with Supervisor(tmp_path) as supervisor:
        parent = supervisor.start(shell("parent", script, ready=marker(tmp_path / "runaway")))
        runaway = int((tmp_path / "runaway").read_text())
        (tmp_path / "seen").touch()
        assert eventually(lambda: not parent.alive())
        assert running(runaway)
    assert eventually(lambda: not running(runaway))


def test_leavings_are_removed(tmp_path):
    leaving = tmp_path / "elsewhere.sock"
    with Supervisor(tmp_path) as supervisor:
        spec = shell("messy", f"touch {leaving}; exec sleep 60", leavings=(str(leaving),), ready=marker(leaving))
        supervisor.start(spec)
    assert not leaving.exists()


PARENT = """
import sys, time
from pathlib import Path
from infra.rehearsal.processes import ProcessSpec, Supervisor
supervisor = Supervisor(Path(sys.argv[1]), keep=sys.argv[2] == "keep")
import threading
started = []
thread = threading.Thread(target=lambda: started.append(supervisor.start(ProcessSpec("child", tuple(sys.argv[3:])))))
thread.start(); thread.join()
print(started[0].pid, flush=True)
time.sleep(60)
"""


def start_parent(site: Path, keep: str, *child: str) -> tuple["subprocess.Popen[str]", int]:
    argv = [sys.executable, "-c", PARENT, str(site), keep, *(child or ("sleep", "63"))]
    parent = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    return parent, int(parent.stdout.readline())


def test_children_die_with_a_killed_parent_but_not_with_the_thread_that_started_them(tmp_path):
    parent, child = start_parent(tmp_path, "no")
    with parent:
        time.sleep(0.2)
        assert running(child)
        parent.kill()
    assert eventually(lambda: not running(child))


def test_a_child_that_ignores_its_parents_death_is_stopped_by_the_watchdog(tmp_path):
    lives_on = f"while :; do [ ! -e {tmp_path}/told ] || : > {tmp_path}/ignored; sleep 0.02; done"
    script = f"trap ': > {tmp_path}/told' TERM; : > {tmp_path}/up; {lives_on}"
    parent, child = start_parent(tmp_path, "no", "/bin/sh", "-c", script)
    with parent:
        assert eventually((tmp_path / "up").exists)
        parent.kill()
    assert eventually((tmp_path / "ignored").exists)
    assert eventually(lambda: not running(child))


def test_a_kept_site_outlives_its_parent_and_is_stopped_from_its_record(tmp_path):
    parent, child = start_parent(tmp_path, "keep")
    with parent:
        parent.kill()
    time.sleep(0.2)
    assert running(child)
    assert [process.name for process in recorded(tmp_path)] == ["child"]
    assert stop_recorded(tmp_path) == ("child",)
    assert eventually(lambda: not running(child))
    assert stop_recorded(tmp_path) == ()


def test_a_record_never_stops_a_stranger_that_got_the_pid(tmp_path):
    with subprocess.Popen(["sleep", "64"], start_new_session=True) as stranger:
        time.sleep(0.05)  # start times count in hundredths of a second
        with Supervisor(tmp_path) as supervisor:
            supervisor.start(shell("mine", "exec sleep 60"))
            state = json.loads((tmp_path / "state.json").read_text())
        state["processes"][0]["pid"] = stranger.pid  # as if the kernel had given the pid to somebody else
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert stop_recorded(tmp_path) == ()
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("content", [None, "{", '{"version": 99}'])
def test_a_directory_without_a_usable_record_says_so(tmp_path, content):
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(SiteError, match=r"state\.json"):
        stop_recorded(tmp_path)


BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_cpu_seconds_count_children_that_run_and_children_that_ended(tmp_path):
    ended = shell("ended", f'{sys.executable} -S -c "{BURN}"; touch {tmp_path}/done; exec sleep 60')
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(ProcessSpec(**{**vars(ended), "ready": marker(tmp_path / "done")}))
        assert 0.25 <= cpu_seconds([child.pid]) < 2.0
        before = supervisor.cpu_seconds()
        supervisor.stop("ended")
        assert supervisor.cpu_seconds() >= before - 0.05  # what ended is still counted


def test_inherited_drops_what_must_not_reach_into_the_site(monkeypatch):
    monkeypatch.setenv("PREFECT_API_KEY", "x")
    monkeypatch.setenv("KEPT", "y")
    environment = inherited(("PREFECT_",))
    assert "PREFECT_API_KEY" not in environment and environment["KEPT"] == "y"
    assert inherited(()) == dict(os.environ)


def test_free_ports_are_distinct_and_not_given_twice():
    first, second = free_ports(20), free_ports(20, "127.0.0.1", "127.0.0.2")
    assert len(set(first) | set(second)) == 40


@pytest.fixture
def nobody_listens(monkeypatch):
    """Other sites of this machine come and go during a test: what is left to decide is who holds a lock."""
    monkeypatch.setattr("infra.rehearsal.addresses._listening_subnets", set)


def test_two_sites_get_two_subnets_and_a_released_one_is_free_again(tmp_path, nobody_listens):
    with SubnetLease.acquire(tmp_path) as one:
        with SubnetLease.acquire(tmp_path) as two:
            assert one.network != two.network
            assert one.address(3, 7).endswith(".3.7")
        with SubnetLease.acquire(tmp_path) as again:
            assert again.network == two.network


def test_a_subnet_on_which_somebody_listens_is_not_given(tmp_path):
    with SubnetLease.acquire(tmp_path) as lease:
        network, address = lease.network, lease.address(0, 1)
    with socket.create_server((address, 0)), SubnetLease.acquire(tmp_path) as other:
        assert other.network != network


def test_a_kept_process_holds_the_subnet_after_its_starter_let_go(tmp_path, nobody_listens):
    lease = SubnetLease.acquire(tmp_path / "locks")
    with Supervisor(tmp_path / "site", hold_fds=(lease.fileno(),)) as supervisor:
        supervisor.start(shell("holder", "exec sleep 60"))
        lease.release()
        with SubnetLease.acquire(tmp_path / "locks") as other:
            assert other.network != lease.network
    with SubnetLease.acquire(tmp_path / "locks") as after:
        assert after.network == lease.network
