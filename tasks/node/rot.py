"""What is wrong with a staged file, where it differs, and what became of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import K2Error

if TYPE_CHECKING:
    from tasks.ports import Block

_PAGE_BYTES = 4096
_SHOWN = 240
NO_FILE = "no regular file"


class Differences:
    """Where an old file differs from the bytes that come in its place: between which offsets, in pages of 4 KiB.

    Used as a context: the old file is open in it. What cannot be read counts as different.
    """

    def __init__(self, old: Path) -> None:
        self._old = old
        self._fd = -1
        self._offset = 0
        self._page = -1
        self._last: tuple[int, bytes, bytes] | None = None
        self.first = -1
        self.pages = 0

    def __enter__(self) -> Differences:
        self._fd = os.open(self._old, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)

    def compare(self, block: Block) -> None:
        """Compare the next bytes."""
        data = memoryview(block)
        old = self._read(len(data))
        if old != data:
            start = 0
            while start < len(data):
                end = min(len(data), start + _PAGE_BYTES - (self._offset + start) % _PAGE_BYTES)
                self._compare_page(self._offset + start, data[start:end], old[start:end])
                start = end
        self._offset += len(data)

    def _compare_page(self, at: int, new: memoryview, old: bytes) -> None:
        if new == old:
            return
        if self.first < 0:
            self.first = at + next(_differing(bytes(new), old))
        # The last one is looked into when it is asked for: a whole file may differ.
        self._last = (at, bytes(new), old)
        self.pages += at // _PAGE_BYTES != self._page
        self._page = at // _PAGE_BYTES

    def _read(self, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, self._offset)
        except OSError:
            return b""

    def as_row(self) -> dict[str, int]:
        """Return the first and the last byte that differ and the pages that have some; nothing if none does."""
        if self._last is None:
            return {}
        at, new, old = self._last
        return {
            "differs_from": self.first,
            "differs_to": at + max(_differing(new, old)),
            "differing_4k_pages": self.pages,
        }


def _differing(new: bytes, old: bytes) -> Iterator[int]:
    return (i for i, byte in enumerate(new) if i >= len(old) or old[i] != byte)


@dataclass
class Rot:
    """One file that is not what the lock says.

    `problem`: content, size, missing, unreadable, or no regular file. `still_open` says who still reads the old one,
    `is_gone` that somebody else has put another file there before it could be replaced.
    """

    path: str
    problem: str
    got: str
    expected: str
    repaired: bool = False
    source: str = ""
    why_not: str = ""
    quarantined: bool = False
    still_open: str = ""
    differences: Differences | None = None
    is_gone: bool = False

    @property
    def sha256(self) -> str:
        """The digest of what was read; empty where nothing was."""
        return self.got.removeprefix("sha256 ") if self.got.startswith("sha256 ") else ""

    def put_right(self, source: str, differences: Differences | None) -> None:
        """Note that the right file is in its place."""
        self.repaired, self.source, self.differences = True, source, differences

    def give_up(self, error: K2Error) -> None:
        """Note why it could not be put right."""
        self.why_not = (f"{error.code} {error.summary}" + (f" ({error.where})" if error.where else ""))[:_SHOWN]

    def as_row(self) -> dict[str, Any]:
        """Return it as plain data."""
        row = {
            "path": self.path,
            "problem": self.problem,
            "got": self.got,
            "expected": self.expected,
            "repaired": self.repaired,
        }
        more: dict[str, Any] = {"source": self.source, "why_not": self.why_not, "still_open": self.still_open}
        row |= {key: value for key, value in more.items() if value}
        if self.quarantined:
            row["quarantined"] = True
        return row | (self.differences.as_row() if self.differences is not None else {})
