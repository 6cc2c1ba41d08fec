"""The command line's own complaints, as errors of ours."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from tasks.core.errors import InputError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors of ours, so that `--json` has its document for them too."""

    def error(self, message: str) -> NoReturn:
        """Say how the command is used, and raise."""
        self.print_usage(sys.stderr)
        raise InputError(
            "K2-INP-001",
            "The command line is wrong.",
            where=self.prog,
            got=message,
            expected="arguments as in its help",
            hint=f"{self.prog} --help",
        )


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def seconds(text: str) -> float:
    """Return a number of seconds from 0 on."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return number


def named(text: str) -> str:
    """Return a word that is not empty: an unset variable of a shell must not pass for no option."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
