"""Counts the contract cases of each port and turns the run red where the fake and the real thing differ.

A port is a directory below tests/contract. A test in it whose id has `fake`, `real` or another implementation's name
is a port case of that one; a test in a file named test_wire*.py is a wire case, on the real thing only. Every port
case must pass on every implementation of its port: what is passed on one and not on another fails the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

import pytest

IMPLEMENTATIONS = ("fake", "real", "olah")
"""Ids of a case's implementation. A port has the first two, and another one if a case of it ran on that."""
WIRE_FILES = "test_wire*.py"


class Outcome(Protocol):
    """What a pytest report says of one phase of one test."""

    nodeid: str
    when: str | None
    outcome: str


@dataclass
class PortCases:
    """What came of a port's cases: names of port cases by implementation and outcome, and names of the others."""

    passed: dict[str, set[str]] = field(default_factory=dict)
    failed: dict[str, set[str]] = field(default_factory=dict)
    wire: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    astray: set[str] = field(default_factory=set)
    """Passed tests that are neither: no implementation in their id and no wire file."""

    @property
    def implementations(self) -> list[str]:
        """The implementations that the port has."""
        return [name for name in IMPLEMENTATIONS if name in ("fake", "real") or name in {*self.passed, *self.failed}]

    def problems(self, *, whole: bool) -> list[str]:
        """Return what is wrong, a line each; of a part of the cases only what is wrong with each by itself."""
        found = [f"skipped: {name}" for name in sorted(self.skipped)]
        if not whole:
            return found
        everywhere: set[str] = set().union(*self.passed.values())
        for name in self.implementations:
            ran = self.passed.get(name, set()) | self.failed.get(name, set())
            found += [f"not on {name}: {case}" for case in sorted(everywhere - ran)]
            found += [f"failed on {name}: {case}" for case in sorted(everywhere & self.failed.get(name, set()))]
        return found + [f"neither a port case nor a wire case: {name}" for name in sorted(self.astray)]


@dataclass(eq=False)  # pytest keeps its plugins in sets
class PortTable:
    """A pytest plugin. `root` is the directory whose subdirectories are ports, `rootdir` what node ids start from."""

    root: Path
    rootdir: Path
    ports: dict[str, PortCases] = field(default_factory=dict)
    whole: bool = True

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, config: pytest.Config) -> None:
        """Remember whether single cases were asked for: they cannot be compared with those that were not."""
        if any("::" in argument for argument in config.args):
            self.whole = False

    @pytest.hookimpl
    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remember that cases were left out (-k, -m, --lf)."""
        if items:
            self.whole = False

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        self.take(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would pass although its cases are not the same on all implementations."""
        if session.exitstatus == pytest.ExitCode.OK and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, and beneath it what is wrong."""
        rows = self.rows()
        if not rows:
            return
        terminalreporter.section("contract cases passed")
        for line in aligned(rows):
            terminalreporter.write_line(line)
        if not self.whole:
            terminalreporter.write_line("some cases were left out of this run: fake and real are not compared")
        for line in self.problems():
            terminalreporter.write_line(line, red=True)

    def take(self, report: Outcome) -> None:
        """Count one phase of a test: its call, or whatever else did not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        path, _, test = report.nodeid.partition("::")
        port, file = self._place(path)
        if not port:
            return
        cases = self.ports.setdefault(port, PortCases())
        name, implementation = case_of(test)
        case = f"{file}::{name}"
        if report.outcome == "skipped":
            cases.skipped.add(f"{file}::{test}")
        elif PurePosixPath(file).match(WIRE_FILES):
            (cases.wire.add if report.outcome == "passed" else cases.wire.discard)(f"{file}::{test}")
        elif not implementation:
            cases.astray.add(case)
        elif report.outcome == "passed":
            cases.passed.setdefault(implementation, set()).add(case)
        else:
            cases.failed.setdefault(implementation, set()).add(case)
            cases.passed.get(implementation, set()).discard(case)  # failed at its end

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: a head and one row a port."""
        ports = self._ports()
        shown = [name for name in IMPLEMENTATIONS if any(name in cases.implementations for cases in ports.values())]
        head = ("port", *(f"{'port cases on ' if name in ('fake', 'real') else 'on '}{name}" for name in shown))
        rows = [(*head, "wire cases on real")]
        for port, cases in sorted(ports.items()):
            counts = [str(len(cases.passed.get(name, ()))) if name in cases.implementations else "-" for name in shown]
            rows.append((port, *counts, str(len(cases.wire))))
        return rows if ports else []

    def problems(self) -> list[str]:
        """Return what is wrong with any port, a line each."""
        ports = sorted(self._ports().items())
        return [f"{port}: {line}" for port, cases in ports for line in cases.problems(whole=self.whole)]

    def _ports(self) -> Mapping[str, PortCases]:
        """Return the directories that hold a port or wire case; the others hold tests of something else."""
        return {name: c for name, c in self.ports.items() if c.passed or c.failed or c.wire or c.skipped}

    def _place(self, path: str) -> tuple[str, str]:
        """Return a test file's port and its path below that; two empty strings for a file of no port."""
        try:
            inside = (self.rootdir / path).relative_to(self.root).parts
        except ValueError:
            return "", ""
        return (inside[0], "/".join(inside[1:])) if len(inside) > 1 else ("", "")


def case_of(test: str) -> tuple[str, str]:
    """Return a test's name without its implementation, and the implementation or an empty string."""
    function, bracket, rest = test.partition("[")
    parts = rest.removesuffix("]").split("-") if bracket else []
    for name in IMPLEMENTATIONS:
        if name in parts:
            parts.remove(name)
            return f"{function}[{'-'.join(parts)}]" if parts else function, name
    return test, ""


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines of columns: the first to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
