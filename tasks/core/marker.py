"""The staging marker: what a node held when it was verified, and the cheap check before an engine starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import IntegrityError
from tasks.core.identity import canonical_bytes, digest_of, sha256_hex
from tasks.core.lock import Lock
from tasks.core.verify import ObservedFile, compare

MARKER_FILE = ".k2-staged.json"
MARKER_VERSION = 1


@dataclass(frozen=True)
class StagedFile:
    """One verified file with the identity that it had on the node's disk then."""

    path: str
    size_bytes: int
    sha256: str
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class FileStat:
    """A file's stat now; what can be read without reading its content."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Marker:
    """A node's statement that every file of a lock was hashed there in the pass that wrote it."""

    lock_digest: str
    repo: str
    revision: str
    node: str
    node_uid: str
    files: tuple[StagedFile, ...]
    verified_at: str
    tool: str

    def to_data(self) -> dict[str, Any]:
        """Return the marker as plain data in its file format."""
        return {
            "version": MARKER_VERSION,
            "lock_digest": self.lock_digest,
            "repo": self.repo,
            "revision": self.revision,
            "node": self.node,
            "node_uid": self.node_uid,
            "verified_at": self.verified_at,
            "tool": self.tool,
            "files": [
                {
                    "path": f.path,
                    "size_bytes": f.size_bytes,
                    "sha256": f.sha256,
                    "mtime_ns": f.mtime_ns,
                    "inode": f.inode,
                }
                for f in self.files
            ],
        }

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the marker file."""
        return canonical_bytes(self.to_data())

    @property
    def digest(self) -> str:
        """The sha256 of the canonical bytes."""
        return sha256_hex(self.to_bytes())

    @property
    def content_digest(self) -> str:
        """The digest of what was proved: which machine holds which bytes of which lock.

        When that was, and the files' times and inodes, are left out: a file that was repaired from the store changes
        those and proves the same.
        """
        files = [{"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in self.files]
        kept = ("version", "lock_digest", "repo", "revision", "node", "node_uid")
        data = self.to_data()
        return digest_of({**{key: data[key] for key in kept}, "files": sorted(files, key=lambda f: str(f["path"]))})


def marker_from_data(data: Mapping[str, Any]) -> Marker:
    """Return the marker of a parsed marker file; raise IntegrityError if it is not one."""
    try:
        if data["version"] != MARKER_VERSION:
            raise IntegrityError(
                "K2-INT-004",
                "The marker has an unknown version.",
                got=str(data["version"]),
                expected=str(MARKER_VERSION),
            )
        files = tuple(
            StagedFile(f["path"], int(f["size_bytes"]), f["sha256"], int(f["mtime_ns"]), int(f["inode"]))
            for f in data["files"]
        )
        return Marker(
            data["lock_digest"],
            data["repo"],
            data["revision"],
            data["node"],
            data["node_uid"],
            files,
            data["verified_at"],
            data["tool"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError("K2-INT-004", f"The marker is not well formed: {error!r}.") from error


def check_marker_against_lock(marker: Marker, lock: Lock, node: str) -> None:
    """Check that a marker speaks of this lock, this node and every file of the lock (the barrier of I2).

    Raises:
        IntegrityError: another lock, another node, or a file that is missing or has another digest.
    """
    if marker.lock_digest != lock.digest:
        raise IntegrityError(
            "K2-INT-004", "The marker is of another lock.", where=node, got=marker.lock_digest, expected=lock.digest
        )
    if marker.node != node:
        raise IntegrityError("K2-INT-004", "The marker is of another node.", where=node, got=marker.node, expected=node)
    result = compare(lock, (ObservedFile(f.path, f.size_bytes, f.sha256) for f in marker.files))
    if not result.ok:
        problem = result.first_problem()
        raise IntegrityError(
            "K2-INT-002",
            "The marker of a node does not cover the lock.",
            where=f"{node}: {problem.path}",
            got=problem.got,
            expected=problem.expected,
        )


def check_marker_against_disk(marker: Marker, lock_digest: str, stats: Iterable[FileStat]) -> None:
    """Check, without reading content, that the files are the very ones that were verified (the init container of I2).

    Raises:
        IntegrityError: another lock digest, a file gone, or one whose size, mtime or inode has changed.
    """
    if marker.lock_digest != lock_digest:
        raise IntegrityError(
            "K2-INT-004",
            "The marker is of another lock.",
            where=marker.node,
            got=marker.lock_digest,
            expected=lock_digest,
        )
    found = {stat.path: stat for stat in stats}
    for file in marker.files:
        stat = found.get(file.path)
        expected = f"size {file.size_bytes}, mtime_ns {file.mtime_ns}, inode {file.inode}"
        got = f"size {stat.size_bytes}, mtime_ns {stat.mtime_ns}, inode {stat.inode}" if stat else "no such file"
        if got != expected:
            raise IntegrityError(
                "K2-INT-002",
                "A staged file is not the one that was verified.",
                where=f"{marker.node}: {file.path}",
                got=got,
                expected=expected,
            )
