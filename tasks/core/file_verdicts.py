"""What was found of each file of a lock in some place: a directory, a store, a node. Pure: it judges, others read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.core.lock import Lock, LockedFile

OK = "ok"
MISSING = "missing"
DIFFERS = "differs"
NOT_REGULAR = "not-regular"
POINTER = "pointer"
UNREADABLE = "unreadable"
POINTER_MAX_BYTES = 1024
"""git-lfs calls nothing longer a pointer."""

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n")


@dataclass(frozen=True)
class FileVerdict:
    """What was found of one file of the lock.

    `verdict` is one of the names above; all but `ok` are problems. `place` is its name there where that is not its
    path (the key in a store), `link` whether it was reached through a link.
    """

    path: str
    verdict: str
    got: str = ""
    expected: str = ""
    place: str = ""
    read_bytes: int = 0
    link: bool = False

    @property
    def ok(self) -> bool:
        """True only for a file whose bytes were read and have the digest of the lock."""
        return self.verdict == OK


@dataclass(frozen=True)
class Findings:
    """The verdict on every file of a lock, in the lock's order, and what else stands in that place."""

    verdicts: tuple[FileVerdict, ...]
    extra: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[FileVerdict, ...]:
        """The files that are not ok."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)

    @property
    def differs(self) -> bool:
        """Whether some file is known to be another one: more than one that could not be read."""
        return any(verdict.verdict != UNREADABLE for verdict in self.problems)

    @property
    def read_bytes(self) -> int:
        """The bytes that were read."""
        return sum(verdict.read_bytes for verdict in self.verdicts)

    @property
    def links(self) -> int:
        """How many files were reached through a link."""
        return sum(verdict.link for verdict in self.verdicts)

    def counted(self) -> str:
        """Return how many files have which verdict: `59 ok, 1 differs, 1 missing`."""
        counts = Counter(verdict.verdict for verdict in self.verdicts)
        return ", ".join(f"{counts[name]} {name}" for name in sorted(counts, key=lambda name: (name != OK, name)))


def in_order(lock: Lock, verdicts: Iterable[FileVerdict]) -> tuple[FileVerdict, ...]:
    """Return one verdict for each file of the lock, in its order; a file that nobody judged is a problem too."""
    found = {verdict.path: verdict for verdict in verdicts}
    return tuple(
        found.get(file.path, FileVerdict(file.path, UNREADABLE, "not looked at", file.sha256)) for file in lock.files
    )


def judge_size(file: LockedFile, size_bytes: int) -> FileVerdict | None:
    """Return the verdict on a file that has another size than the lock says, which no reading can change; else None."""
    if size_bytes == file.size_bytes:
        return None
    return FileVerdict(file.path, DIFFERS, f"{size_bytes} bytes", f"{file.size_bytes} bytes")


def judge_digest(file: LockedFile, read_bytes: int, sha256: str) -> FileVerdict:
    """Return the verdict on a file whose bytes were all read. A lock without a sha256 proves nothing."""
    if read_bytes != file.size_bytes:
        got = f"{read_bytes} bytes" if read_bytes < file.size_bytes else f"more than {file.size_bytes} bytes"
        return FileVerdict(file.path, DIFFERS, got, f"{file.size_bytes} bytes", read_bytes=read_bytes)
    if not file.sha256 or sha256 != file.sha256:
        return FileVerdict(file.path, DIFFERS, sha256, file.sha256 or "a sha256 in the lock", read_bytes=read_bytes)
    return FileVerdict(file.path, OK, read_bytes=read_bytes)


def judge_pointer(file: LockedFile, content: bytes) -> FileVerdict | None:
    """Return the verdict on a git-lfs pointer that stands where the file should be; None if it is no pointer."""
    found = _POINTER.match(content)
    if found is None:
        return None
    named = found.group(1).decode()
    of = "this file" if named == file.sha256 else f"sha256 {named}"
    return FileVerdict(file.path, POINTER, f"a git-lfs pointer to {of}", file.sha256)


def ignored_root(path: str) -> str:
    """Return the part of a path for which it is no extra file, or an empty string.

    By the rule of `hf cache verify` and no wider: git's own directory, and the notes that huggingface_hub keeps beside
    a download. A staged directory's marker is an extra file like any other.
    """
    parts = path.split("/")
    for at, part in enumerate(parts):
        if part == ".git":
            return "/".join(parts[: at + 1])
        if part == ".cache" and parts[at + 1 : at + 2] == ["huggingface"]:
            return "/".join(parts[: at + 2])
    return ""
