"""The rule of the contract suites: what passes on the fake passes on the real thing, and the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
    from pathlib import Path
    from tests.contract.port_table import PortTable

    def pytest_configure(config):
        config.pluginmanager.register(PortTable(Path(__file__).parent, config.rootpath))
"""
SAME = """
    import pytest

    @pytest.fixture(params=["fake", "real"])
    def thing(request):
        return request.param

    @pytest.mark.parametrize("size", [1, 2])
    def test_holds(thing, size):
        assert thing

    def test_is_there(thing):
        assert thing
"""
WIRE = "def test_a_cut_line(): pass\n"


def run(tmp_path: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Run pytest on a tree of ports; return its exit code and what it printed."""
    root = tmp_path / "suite"
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={ROOT}", f"--rootdir={tmp_path}", *(arguments or ["suite"])]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def cells(output: str, port: str) -> list[str]:
    """Return the counts in a port's row."""
    return next(line.split()[1:] for line in output.splitlines() if line.startswith(f"{port} "))


def test_the_table_has_a_row_for_each_port(tmp_path: Path) -> None:
    two = {"store/test_store.py": SAME, "store/test_wire_store.py": WIRE}
    two |= {"store/conftest.py": "", "site/conftest.py": ""}
    three = SAME.replace('"real"]', '"real", "olah"]')
    code, output = run(tmp_path, two | {"hub/test_hub.py": three, "test_other.py": WIRE, "site/test_nodes.py": WIRE})
    assert code == 0, output
    assert cells(output, "store") == ["3", "3", "-", "1"]
    assert cells(output, "hub") == ["3", "3", "3", "0"]
    assert not any(line.startswith("site ") for line in output.splitlines())


@pytest.mark.parametrize("missing", ["fake", "real"])
def test_a_case_that_is_missing_on_one_is_red(tmp_path: Path, missing: str) -> None:
    there = "real" if missing == "fake" else "fake"
    more = f"""
    import pytest

    @pytest.mark.parametrize("thing", ["{there}"])
    def test_one_only(thing):
        pass
    """
    code, output = run(tmp_path, {"store/test_store.py": SAME, "store/test_more.py": more})
    assert code == 1, output
    assert f"store: not on {missing}: test_more.py::test_one_only" in output


def test_a_case_that_fails_on_one_is_red_and_named(tmp_path: Path) -> None:
    code, output = run(tmp_path, {"store/test_store.py": SAME.replace("assert thing", "assert thing == 'real'")})
    assert code == 1
    assert "store: failed on fake: test_store.py::test_is_there" in output
    assert cells(output, "store") == ["0", "3", "0"]


@pytest.mark.parametrize("how", ["skip('no server')", "xfail('some day')"])
@pytest.mark.parametrize("where", ["store/test_store.py", "store/test_wire_store.py"])
def test_a_skipped_case_is_red(tmp_path: Path, where: str, how: str) -> None:
    more = f"""
    import pytest

    @pytest.mark.parametrize("thing", ["fake", "real"])
    def test_some_day(thing):
        pytest.{how}
    """
    code, output = run(tmp_path, {"store/test_store.py": SAME, where.replace("_store.py", "_more.py"): more})
    assert code == 1, output
    assert "store: skipped: " in output


def test_a_case_of_no_implementation_is_red(tmp_path: Path) -> None:
    code, output = run(tmp_path, {"store/test_store.py": SAME, "store/test_more.py": WIRE})
    assert code == 1, output
    assert "store: neither a port case nor a wire case: test_more.py::test_a_cut_line" in output


def test_an_implementation_more_has_to_pass_them_all(tmp_path: Path) -> None:
    more = SAME.replace('["fake", "real"]', '["fake", "real", "olah"]').replace("test_", "test_also_")
    code, output = run(tmp_path, {"hub/test_hub.py": SAME, "hub/test_more.py": more})
    assert code == 1, output
    assert "hub: not on olah: test_hub.py::test_is_there" in output


@pytest.mark.parametrize("part", [["suite/store/test_store.py::test_is_there[real]"], ["-k", "real", "suite"]])
def test_single_cases_can_be_run(tmp_path: Path, part: list[str]) -> None:
    code, output = run(tmp_path, {"store/test_store.py": SAME}, *part)
    assert code == 0, output
    assert "not compared" in output
    assert cells(output, "store")[0] == "0"


def test_one_port_can_be_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, {"store/test_store.py": SAME, "hub/test_hub.py": WIRE}, "suite/store")
    assert code == 0, output
    assert "not compared" not in output
    assert cells(output, "store") == ["3", "3", "0"]
