"""The lock: one revision of a repository as a list of files with sizes and digests.

Everything downstream is compared with the lock, and the lock's own digest is over canonical bytes that we own, so it
does not change when a library or an optional field does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import InputError
from tasks.core.identity import canonical_bytes, check_relative_path, check_repo, check_revision, sha256_hex

LOCK_VERSION = 1
INDEX_FILE = "model.safetensors.index.json"
_EXECUTABLE_SUFFIXES = (".py",)
_SHA256, _SHA1 = re.compile(r"([0-9a-f]{64})?"), re.compile(r"([0-9a-f]{40})?")


@dataclass(frozen=True)
class LockedFile:
    """One file of the revision: `sha256` for LFS and accepted files, `git_sha1` as the Hub gives it for small ones.

    `kind`: `shard` (safetensors), `code` (executed under trust-remote-code), `other`.
    """

    path: str
    size_bytes: int
    kind: str
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True)
class Lock:
    """A revision, its files in path order, and nothing else."""

    repo: str
    revision: str
    files: tuple[LockedFile, ...]

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def shards(self) -> tuple[LockedFile, ...]:
        """The safetensors files."""
        return tuple(file for file in self.files if file.kind == "shard")

    def file(self, path: str) -> LockedFile:
        """Return the entry of a path; raise KeyError if the lock has none."""
        for file in self.files:
            if file.path == path:
                return file
        raise KeyError(path)

    def to_data(self) -> dict[str, Any]:
        """Return the lock as plain data in its file format."""
        return {
            "version": LOCK_VERSION,
            "repo": self.repo,
            "revision": self.revision,
            "total_bytes": self.total_bytes,
            "files": [
                {
                    key: value
                    for key, value in (
                        ("path", f.path),
                        ("size_bytes", f.size_bytes),
                        ("kind", f.kind),
                        ("sha256", f.sha256),
                        ("git_sha1", f.git_sha1),
                    )
                    if value != ""
                }
                for f in self.files
            ],
        }

    def to_bytes(self) -> bytes:
        """Return the canonical bytes: what is stored and what the digest is over."""
        return canonical_bytes(self.to_data())

    @property
    def digest(self) -> str:
        """The sha256 of the canonical bytes."""
        return sha256_hex(self.to_bytes())

    @property
    def file_name(self) -> str:
        """The name under manifests/locks/."""
        return f"{self.repo.replace('/', '--')}@{self.revision[:8]}.lock.json"

    @property
    def model_dir(self) -> str:
        """The directory below the staging root: one per commit, so no update is ever in place."""
        return f"{self.repo.replace('/', '--')}/{self.revision}"


def classify(path: str) -> str:
    """Return the kind of a file by its name."""
    if path.endswith(".safetensors"):
        return "shard"
    return "code" if path.endswith(_EXECUTABLE_SUFFIXES) else "other"


def make_lock(repo: str, revision: str, files: Iterable[LockedFile]) -> Lock:
    """Return a lock after the checks that need no bytes.

    Raises:
        InputError: the revision is no commit, a path is unsafe or twice there, a file has no digest or a negative
            size, or there is no shard at all.
    """
    check_repo(repo)
    check_revision(revision)
    ordered = tuple(sorted(files, key=lambda file: file.path))
    seen: set[str] = set()
    for file in ordered:
        check_relative_path(file.path)
        if file.path in seen:
            raise InputError("K2-INP-004", "A path stands twice in the revision.", where=file.path)
        seen.add(file.path)
        if file.size_bytes < 0 or not (file.sha256 or file.git_sha1) or not _well_formed(file):
            raise InputError(
                "K2-INP-004",
                "A file of the revision has no usable size and digest.",
                where=file.path,
                got=f"size {file.size_bytes}, sha256 {file.sha256 or 'none'}, blob id {file.git_sha1 or 'none'}",
                expected="a size and a sha256 (64 hex digits) or git blob id (40)",
            )
        if file.kind == "shard" and not file.sha256:
            raise InputError(
                "K2-INP-004",
                "A shard has no sha256 on the Hub.",
                where=file.path,
                got="git blob id only",
                expected="lfs.sha256",
            )
    if not any(file.kind == "shard" for file in ordered):
        raise InputError("K2-INP-004", "The revision holds no safetensors shard.", where=f"{repo}@{revision}")
    return Lock(repo, revision, ordered)


def _well_formed(file: LockedFile) -> bool:
    """Return whether the digests are hex: they become names in the store, and a Hub or mirror is not trusted."""
    return bool(_SHA256.fullmatch(file.sha256) and _SHA1.fullmatch(file.git_sha1))


def lock_from_data(data: Mapping[str, Any]) -> Lock:
    """Return the lock of a parsed lock file.

    Raises:
        InputError: wrong version, a missing or wrong field, or any failure of `make_lock`.
    """
    if not isinstance(data, Mapping):
        raise InputError("K2-INP-001", "The lock file is not well formed: no object.", where="lock")
    if data.get("version") != LOCK_VERSION:
        raise InputError(
            "K2-INP-006",
            "The lock file has a version that this tool does not know.",
            where="version",
            got=str(data.get("version")),
            expected=str(LOCK_VERSION),
        )
    try:
        files = [
            LockedFile(
                path=f["path"],
                size_bytes=int(f["size_bytes"]),
                kind=f["kind"],
                sha256=f.get("sha256", ""),
                git_sha1=f.get("git_sha1", ""),
            )
            for f in data["files"]
        ]
        lock = make_lock(data["repo"], data["revision"], files)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("K2-INP-001", f"The lock file is not well formed: {error!r}.", where="lock") from error
    if lock.total_bytes != data.get("total_bytes"):
        raise InputError(
            "K2-INP-001",
            "The lock file's total is not the sum of its files.",
            where="total_bytes",
            got=str(data.get("total_bytes")),
            expected=str(lock.total_bytes),
        )
    return lock


def accept_small_files(lock: Lock, sha256_by_path: Mapping[str, str]) -> Lock:
    """Return the lock with our own sha256 added to files that the Hub names by git blob id alone.

    The caller has checked each of those files against its git blob id first.
    """
    return Lock(
        lock.repo,
        lock.revision,
        tuple(
            file
            if file.sha256
            else LockedFile(file.path, file.size_bytes, file.kind, sha256_by_path[file.path], file.git_sha1)
            for file in lock.files
        ),
    )


def check_index(lock: Lock, index: Mapping[str, Any]) -> None:
    """Check that the index names exactly the shards of the lock.

    Raises:
        InputError: a shard of the index is not in the lock, or a shard of the lock holds no tensor.
    """
    named: set[str] = set(index.get("weight_map", {}).values())
    locked = {file.path for file in lock.shards}
    if named != locked:
        missing, extra = sorted(named - locked), sorted(locked - named)
        raise InputError(
            "K2-INP-004",
            "The index and the list of shards disagree.",
            where=INDEX_FILE,
            got=f"{len(locked)} shards, without tensors: {_some(extra)}",
            expected=f"{len(named)} shards, missing: {_some(missing)}",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
