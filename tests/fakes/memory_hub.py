"""A Hub in memory: one repository at one commit, small files named by blob id as the real one does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tasks.core.errors import InputError
from tasks.core.identity import git_blob_sha1_hex
from tasks.core.lock import LockedFile, classify
from tasks.ports import HubRevision


@dataclass
class MemoryHub:
    """Implements ports.Hub. `served` replaces the bytes of a path by others than are listed."""

    repo: str
    revision: str
    files: Mapping[str, bytes]
    served: dict[str, bytes] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)

    def resolve(self, repo: str, revision: str) -> str:
        return self.revision

    def list_revision(self, repo: str, revision: str) -> HubRevision:
        self._check(repo, revision)
        return HubRevision(repo, revision, tuple(map(self._entry, self.files)))

    def _entry(self, path: str) -> LockedFile:
        data, kind = self.files[path], classify(path)
        if kind == "shard":
            return LockedFile(path, len(data), kind, sha256=hashlib.sha256(data).hexdigest())
        return LockedFile(path, len(data), kind, git_sha1=git_blob_sha1_hex(data))

    def read_file(self, repo: str, revision: str, path: str, max_bytes: int) -> bytes:
        self._check(repo, revision)
        return self.served.get(path, self.files[path])

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        self.opened.append(path)
        yield self.read_file(repo, revision, path, 1 << 40)[offset:]

    def _check(self, repo: str, revision: str) -> None:
        if (repo, revision) != (self.repo, self.revision):
            raise InputError("K2-INP-002", "There is no such revision.", where=repo, got=revision)
