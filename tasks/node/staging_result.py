"""What a stager says of its work, as a termination message: the totals, and the files that were worst."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.lock import Lock
from tasks.core.marker import Marker, StagedFile

_LIMIT_BYTES = 3900
"""Kubernetes cuts termination messages at 4096, which would break their JSON."""
_ROWS = 6


@dataclass(frozen=True)
class Node:
    """The node that is staged: its name and the uid of its Node object."""

    name: str
    uid: str


@dataclass(frozen=True)
class Staged:
    """One file as it stands verified on the node: whether its bytes had to be written, and what that took.

    `attempts` counts the streams that were opened for it; `source` is whoever gave the bytes.
    """

    file: StagedFile
    written: bool
    seconds: float
    attempts: int
    source: str

    def row(self) -> dict[str, Any]:
        """Return the file's row of the result."""
        return {
            "path": self.file.path,
            "bytes": self.file.size_bytes,
            "seconds": round(self.seconds, 3),
            "attempts": self.attempts,
            "source": self.source,
        }


def staging_result(
    node: Node,
    lock: Lock,
    marker: Marker,
    done: Sequence[Staged],
    moved: Sequence[Mapping[str, str]],
    seconds: float,
) -> dict[str, Any]:
    """Return the result of a node's staging, cut so that it fits into a termination message.

    Args:
        done: the files that were hashed or written; those that a marker vouched for are not among them.
        moved: path and got of what went to the quarantine.
        seconds: from the first look at the directory to its closing.
    """
    written = [staged for staged in done if staged.written]
    worst = sorted(done, key=lambda staged: (-staged.attempts, -staged.seconds, staged.file.path))
    result: dict[str, Any] = {
        "node": node.name,
        "lock_digest": lock.digest,
        "marker_sha256": marker.digest,
        "files": len(lock.files),
        "bytes_written": sum(staged.file.size_bytes for staged in written),
        "files_kept": len(lock.files) - len(written),
        "seconds": round(seconds, 3),
        "attempts": sum(staged.attempts for staged in written),
        "quarantined": len(moved),
        "moved": [dict(row) for row in moved[:_ROWS]],
        "worst": [staged.row() for staged in worst[:_ROWS]],
    }
    return fitted(result)


def fitted(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without so many of its rows as keep it from fitting into a termination message."""
    for rows in ("worst", "moved"):
        while result[rows] and len(json.dumps(result, separators=(",", ":"))) > _LIMIT_BYTES:
            result[rows].pop()
    return result
