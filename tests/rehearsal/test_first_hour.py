"""The README's first hour, run as it is written: every command ends as its comment says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent


def blocks() -> list[str]:
    """The shell blocks of the walk, in order."""
    walk = (ROOT / "README.md").read_text().split("## The first hour")[1].split("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", walk, re.DOTALL | re.MULTILINE)


@pytest.fixture
def walk(tmp_path: Path) -> tuple[list[str], str]:
    """Exit code and arguments of every k2ctl command of the walk, and all that was printed."""
    log, programs = tmp_path / "commands", tmp_path / "bin"
    programs.mkdir()
    shim = programs / "k2ctl"
    real = shlex.quote(str(PROGRAMS / "k2ctl"))
    # The flow that the walk kills has to be the very process whose pid the shell knows.
    shim.write_text(
        f'#!/bin/bash\n[[ "$*" == *--local* ]] && exec {real} "$@"\n'
        f'{real} "$@"; code=$?; echo "$code $*" >> {shlex.quote(str(log))}; exit $code\n'
    )
    shim.chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{PROGRAMS}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    env.pop("K2_SITE", None)
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(blocks())], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    finally:
        subprocess.run([PROGRAMS / "k2ctl", "rehearse", "--stop"], env=env, capture_output=True, timeout=120)
    return log.read_text().splitlines(), done.stdout + done.stderr


def test_every_command_of_the_first_hour_ends_as_it_says(walk: tuple[list[str], str]) -> None:
    commands, printed = walk
    assert [line for line in commands if not line.endswith(" status")] == [
        "0 rehearse --keep",
        "0 status k2-rehearsal-2",
        "0 ask What is 17 + 25?",
        "0 plan k2-rehearsal-2",
        "0 release k2-rehearsal-2",
        "0 receipt k2-rehearsal-2",
        "0 receipt k2-rehearsal-2 --verify",
        "0 receipt k2-rehearsal-2 --json",
        "5 receipt k2-rehearsal-2 --verify",
        "0 plan k2-rehearsal-3",
        "0 release k2-rehearsal-3 -y",
        "0 receipt k2-rehearsal-2 --verify",
        "0 rehearse --stop",
    ], printed[-4000:]
    assert all(line.startswith("0 ") for line in commands if line.endswith(" status")), commands
    for said in (
        "nothing to do",
        "exit 5",
        "model-7-of-61.safetensors",
        "passed before on these very pods",
        '"failed": 0',
        '"cut_streams": 0',
    ):
        assert said in printed, f"{said!r} is not in: {printed[-4000:]}"
