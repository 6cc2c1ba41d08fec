"""Comparison of what is there with what the lock says. Pure: it gets observations and returns a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.core.lock import Lock


@dataclass(frozen=True)
class ObservedFile:
    """A file as somebody found it; `sha256` empty when it was not hashed."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Mismatch:
    """One file that is not what the lock says."""

    path: str
    got: str
    expected: str


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing a place with a lock."""

    checked: int
    mismatched: tuple[Mismatch, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when every file of the lock is there with its digest. Extra files do not count."""
        return not self.mismatched and not self.missing

    def first_problem(self) -> Mismatch:
        """Return the first problem; raise IndexError when there is none."""
        problems = (*self.mismatched, *(Mismatch(path, "no such file", "a file of the lock") for path in self.missing))
        return problems[0]


def compare(lock: Lock, observed: Iterable[ObservedFile]) -> Verification:
    """Return what differs between the lock and the observed files.

    A size never proves anything: a file without an observed sha256 is a mismatch, also when its size is right
    (huggingface_hub#3643: a download reported as a success with the right sizes and the wrong bytes).
    """
    found = {file.path: file for file in observed}
    mismatched, missing = [], []
    for file in lock.files:
        got = found.get(file.path)
        if got is None:
            missing.append(file.path)
        elif got.size_bytes != file.size_bytes:
            mismatched.append(Mismatch(file.path, f"{got.size_bytes} bytes", f"{file.size_bytes} bytes"))
        elif not file.sha256 or got.sha256 != file.sha256:
            mismatched.append(Mismatch(file.path, got.sha256 or "not hashed", file.sha256 or "a sha256 in the lock"))
    extra = tuple(sorted(found.keys() - {file.path for file in lock.files}))
    return Verification(len(lock.files), tuple(mismatched), tuple(missing), extra)
