"""Which files of a checkpoint were read and found right, and when: how a scrub that was cut off goes on.

A small document of the node, beside the checkpoints, whose directories are closed for writing. It proves nothing to
anybody but the scrub: engines are started by the marker alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.identity import canonical_bytes
from tasks.core.lock import LockedFile
from tasks.core.marker import FileStat, StagedFile
from tasks.node.verified_file import make_directory, write_document

RECORDS_DIR = ".k2-scrub"
RECORD_VERSION = 1
RESUMED_WITHIN_S = 7 * 86400.0
"""A file that was read longer ago is read again, also when the scrub that read it was never finished."""


@dataclass(frozen=True)
class _Read:
    file: StagedFile
    at: float


class ScrubRecord:
    """The files that one pass over a checkpoint has read and found right, kept on the disk after each.

    Args:
        root: the node's directory for weights.
        lock_digest: of the lock that it is held against; a record of another one does not count.
        now: seconds since the epoch.
    """

    def __init__(self, root: Path, lock_digest: str, now: Callable[[], float] = time.time) -> None:
        self._path = root / RECORDS_DIR / f"{lock_digest}.json"
        self._lock_digest = lock_digest
        self._now = now
        self._sweep()
        self._read = self._unfinished()
        self.resumed_files = len(self._read)

    def holds(self, file: LockedFile, stat: FileStat | None) -> bool:
        """Return whether a file was read in this pass and still is the very one that was read."""
        entry = self._read.get(file.path)
        return (
            entry is not None
            and stat is not None
            and entry.file.sha256 == file.sha256
            and (entry.file.size_bytes, entry.file.mtime_ns, entry.file.inode)
            == (stat.size_bytes, stat.mtime_ns, stat.inode)
        )

    def note(self, file: StagedFile) -> None:
        """Keep that a file was read now and has the bytes of the lock."""
        self._read[file.path] = _Read(file, self._now())
        self._write(finished_at=None)

    def of(self, files: Iterable[LockedFile]) -> tuple[StagedFile, ...]:
        """Return files of a lock as they were read, by path; KeyError for one that was not."""
        return tuple(self._read[path].file for path in sorted(file.path for file in files))

    def finish(self) -> None:
        """Keep that every file was read: the next scrub reads all of them anew."""
        self._write(finished_at=self._now())

    def _write(self, finished_at: float | None) -> None:
        files = {
            path: {
                "size_bytes": read.file.size_bytes,
                "sha256": read.file.sha256,
                "mtime_ns": read.file.mtime_ns,
                "inode": read.file.inode,
                "read_at": read.at,
            }
            for path, read in self._read.items()
        }
        data = {
            "version": RECORD_VERSION,
            "lock_digest": self._lock_digest,
            "finished_at": finished_at,
            "files": files,
        }
        make_directory(self._path.parent)
        write_document(self._path, canonical_bytes(data))

    def _unfinished(self) -> dict[str, _Read]:
        """Return what an unfinished pass has read lately; nothing if there is none or it cannot be read."""
        try:
            data = json.loads(self._path.read_bytes())
            if data["version"] != RECORD_VERSION or data["lock_digest"] != self._lock_digest or data["finished_at"]:
                return {}
            return {path: read for path, row in data["files"].items() if self._is_fresh(read := _row(path, row))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _is_fresh(self, read: _Read) -> bool:
        # A time that is still to come is that of a clock that has jumped since.
        return 0.0 <= self._now() - read.at <= RESUMED_WITHIN_S

    def _sweep(self) -> None:
        for temp in self._path.parent.glob(f"{self._path.name}.*.tmp"):
            temp.unlink(missing_ok=True)


def _row(path: str, row: Mapping[str, Any]) -> _Read:
    file = StagedFile(path, int(row["size_bytes"]), str(row["sha256"]), int(row["mtime_ns"]), int(row["inode"]))
    return _Read(file, float(row["read_at"]))
