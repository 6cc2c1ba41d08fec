"""A child process that tells what it does and never outlives its parent: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAD = """
import os, signal, sys, time
from tasks.node.watched_child import WatchedChild
"""


def script(body: str) -> subprocess.CompletedProcess[str]:
    """Run a parent of its own: nobody forks the process that runs the tests."""
    return subprocess.run([sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=60, check=False)


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_arrive_and_the_end_is_seen() -> None:
    done = script(
        """
child = WatchedChild(lambda tell: [tell({"n": n, "text": "x" * 100_000}) for n in range(5)] and None)
lines = []
while not child.silent:
    lines += child.lines(1.0)
print([line["n"] for line in lines], child.wait(10), flush=True)
"""
    )
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3, 4] 0\n", "")


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "-9"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "-11"),
        ("1 / 0", "1"),
        ("sys.exit(3)", "1"),
        ("tell({'text': 'half'}), os._exit(0)", "0"),
    ],
)
def test_a_death_is_told_by_its_status_and_the_parent_lives(work: str, status: str) -> None:
    done = script(
        f"""
child = WatchedChild(lambda tell: ({work}))
while not child.silent:
    child.lines(1.0)
print(child.wait(10), child.end(1), flush=True)
"""
    )
    assert done.stdout == f"{status} {status}\n"
    assert ("ZeroDivisionError" in done.stderr) == (work == "1 / 0")


def test_half_a_line_of_a_dying_child_is_no_line() -> None:
    done = script(
        """
def work(tell):
    tell({"whole": 1})
    os.write(4, b'{"half": ')
    os.kill(os.getpid(), signal.SIGKILL)

child = WatchedChild(work)
lines = []
while not child.silent:
    lines += child.lines(1.0)
print(lines, flush=True)
"""
    )
    assert done.stdout == "[{'whole': 1}]\n"


def test_one_that_does_not_hear_is_killed_after_the_grace() -> None:
    done = script(
        """
def work(tell):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell({})
    time.sleep(60)

child = WatchedChild(work)
child.lines(10.0)
began = time.monotonic()
print(child.end(0.3), 0.3 <= time.monotonic() - began < 10, flush=True)
"""
    )
    assert done.stdout == "-9 True\n"


def test_one_that_floods_the_pipe_can_be_ended() -> None:
    done = script(
        """
def work(tell):
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    while not stop:
        tell({"text": "x" * 60_000})

child = WatchedChild(work)
child.lines(10.0)
print(child.end(10.0), flush=True)
"""
    )
    assert done.stdout == "0\n"


PARENT = (
    HEAD
    + """
def work(tell):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    {work}

child = WatchedChild(work)
time.sleep(60)
"""
)


@pytest.fixture(params=["time.sleep(60)", "[(tell({'text': 'x' * 60_000}), time.sleep(0.01)) for _ in range(6000)]"])
def parent(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", PARENT.replace("{work}", request.param)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait(30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_however_that_dies(parent: tuple[subprocess.Popen[str], int], number: int) -> None:
    process, child = parent
    assert not gone(child)
    os.kill(process.pid, number)
    process.wait(30)
    wait_until_gone(child)


def test_the_parent_imports_nothing_heavy() -> None:
    """Its memory and its start are paid for by every pull: what moves bytes is imported in the child."""
    code = (
        "import sys, tasks.node.pull; "
        "print([m for m in ('boto3', 'botocore', 'httpx2', 'huggingface_hub', 'concurrent.futures', 'ssl', 'ctypes', "
        "'tasks.adapters.store', 'tasks.adapters.hub', 'tasks.node.transfer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
