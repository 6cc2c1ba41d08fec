"""Where a wrong file of a checkpoint goes: out of the way, with what was wrong, and only as many as there is room for.

Nothing wrong stays under a name that an engine reads, and nothing is deleted that somebody may want to look at. But
evidence gives way to weights: whoever needs the room empties the quarantine first.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from tasks.node.verified_file import fsync_directory, make_directory, write_document

QUARANTINE_DIR = ".k2-quarantine"
KEPT = 3
"""Files that are kept, the newest: of Kimi K2 at most 58 GB."""


class Quarantine:
    """The wrong files of one checkpoint's directory, numbered as they came.

    Threads may share it; the caller's process holds the directory's lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._place = directory / QUARANTINE_DIR
        self._lock = threading.RLock()

    def take(self, path: str, reason: str, sha256: str = "", expected: str = "", was: str = "") -> None:
        """Move a file there, durably, with a note beside it; older ones than the newest few are deleted.

        Args:
            path: relative path of the file.
            reason: what is wrong, in few words.
            sha256: of its bytes, where they were read.
            expected: the sha256 that the lock has for the path, if it has one.
            was: the path that it had, where a right file stands under that one already.
        """
        with self._lock:
            self._take(path, reason, sha256, expected, was or path)
            self.sweep()

    def _take(self, path: str, reason: str, sha256: str, expected: str, was: str) -> None:
        source = self._directory / path
        make_directory(self._place)
        number = max(self._numbers(), default=0) + 1
        note = {
            "path": was,
            "size_bytes": source.lstat().st_size,
            "sha256": sha256,
            "expected_sha256": expected,
            "reason": reason,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        # The note first: a death in between leaves a note without a file, which the next sweep takes away.
        write_document(self._note(number), json.dumps(note, sort_keys=True).encode())
        source.rename(self._file(number))
        fsync_directory(self._place)
        fsync_directory(source.parent)

    def sweep(self, keep: int = KEPT) -> int:
        """Delete all but the newest files and return the bytes that this frees."""
        with self._lock:
            numbers, freed_bytes = self._numbers(), 0
            files = [number for number in numbers if self._file(number).exists()]
            kept = set(files[-keep:] if keep else ())
            for number in numbers:
                if number not in kept:
                    freed_bytes += _size(self._file(number))
                    self._file(number).unlink(missing_ok=True)
                    self._note(number).unlink(missing_ok=True)
            return freed_bytes

    @property
    def size_bytes(self) -> int:
        """The bytes that it holds: what emptying it would free."""
        return sum(_size(self._file(number)) for number in self._numbers())

    def _numbers(self) -> list[int]:
        if not self._place.is_dir():
            return []
        names = {entry.name.partition(".")[0] for entry in self._place.iterdir()}
        return sorted(int(name) for name in names if name.isdecimal())

    def _file(self, number: int) -> Path:
        return self._place / f"{number:06d}.bytes"

    def _note(self, number: int) -> Path:
        return self._place / f"{number:06d}.json"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
