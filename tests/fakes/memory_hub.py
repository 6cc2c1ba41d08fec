"""A Hub in memory: one repository at one commit, small files named by blob id as the real one does.

The port cases in tests/contract/hub run on this and on two real Hub servers; where they differ this is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tasks.core.errors import InputError, UnavailableError
from tasks.core.identity import check_repo, check_revision, git_blob_sha1_hex
from tasks.core.lock import LockedFile, classify
from tasks.ports import HubRevision

BLOCK_BYTES = 256 * 1024
LFS_SUFFIXES = (".safetensors", ".model", ".bin", ".gguf")


@dataclass
class MemoryHub:
    """Implements ports.Hub; its branch is main. `served` replaces the bytes of a path by others than are listed."""

    repo: str
    revision: str
    files: Mapping[str, bytes]
    served: dict[str, bytes] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def resolve(self, repo: str, revision: str) -> str:
        check_repo(repo)
        if repo != self.repo or revision not in ("main", self.revision):
            raise self._absent(repo, revision)
        return self.revision

    def list_revision(self, repo: str, revision: str) -> HubRevision:
        self._check(repo, revision)
        return HubRevision(repo, revision, tuple(map(self._entry, sorted(self.files))))

    def _entry(self, path: str) -> LockedFile:
        data, kind = self.files[path], classify(path)
        if path.endswith(LFS_SUFFIXES):
            return LockedFile(path, len(data), kind, sha256=hashlib.sha256(data).hexdigest())
        return LockedFile(path, len(data), kind, git_sha1=git_blob_sha1_hex(data))

    def read_file(self, repo: str, revision: str, path: str, max_bytes: int) -> bytes:
        data = self._content(repo, revision, path)
        if len(data) > max_bytes:
            raise InputError(
                "K2-INP-004", "A file is larger than it can rightly be.", where=f"{repo}@{revision} {path}"
            )
        return data

    def read_range(self, repo: str, revision: str, path: str, offset: int, size_bytes: int) -> bytes:
        data = self._content(repo, revision, path)
        if offset > len(data):
            raise UnavailableError("K2-UNA-001", "The file is shorter than the place to go on from.", where=path)
        self.ranges.append((path, offset, size_bytes))
        return data[offset : offset + size_bytes]

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        self.opened.append(path)
        data = self._content(repo, revision, path)
        if offset > len(data):
            raise UnavailableError("K2-UNA-001", "The file is shorter than the place to go on from.", where=path)
        for start in range(offset, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    def _content(self, repo: str, revision: str, path: str) -> bytes:
        self._check(repo, revision)
        if path not in self.files:
            raise InputError("K2-INP-004", "The revision has no such file.", where=f"{repo}@{revision} {path}")
        return self.served.get(path, self.files[path])

    def _check(self, repo: str, revision: str) -> None:
        check_repo(repo)
        check_revision(revision)
        if (repo, revision) != (self.repo, self.revision):
            raise self._absent(repo, revision)

    def _absent(self, repo: str, revision: str) -> InputError:
        return InputError("K2-INP-002", "There is no such revision.", where=repo, got=revision)


@dataclass
class DownHub:
    """A Hub that answers nothing; `asked` names each call."""

    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            self.asked.append(name)
            raise UnavailableError("K2-UNA-001", "The Hub did not answer: ConnectError.", where="http://127.0.0.1:1")

        return call
