"""The lock: one revision of a repository as a list of files with sizes and digests.

Everything downstream is compared with the lock, and the lock's own digest is over canonical bytes that we own, so it
does not change when a library or an optional field does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import InputError
from tasks.core.identity import canonical_bytes, check_repo, check_revision, sha256_hex
from tasks.core.paths import check_paths_together, check_relative_path

LOCK_VERSION = 1
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
        InputError: the revision is no commit, a path is unsafe or cannot stand beside another, a file has no digest or
            a negative size, or there is no shard at all.
    """
    check_repo(repo)
    check_revision(revision)
    ordered = tuple(sorted(files, key=lambda file: file.path))
    for file in ordered:
        check_relative_path(file.path)
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
    check_paths_together(file.path for file in ordered)
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
                size_bytes=_count(f["size_bytes"]),
                kind=f["kind"],
                sha256=f.get("sha256", ""),
                git_sha1=f.get("git_sha1", ""),
            )
            for f in data["files"]
        ]
        lock = make_lock(data["repo"], data["revision"], files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
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


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def check_accepted(lock: Lock) -> Lock:
    """Return the lock if every file of it has a sha256; raise InputError for one that was never accepted."""
    for file in lock.files:
        if not file.sha256:
            raise InputError(
                "K2-INP-004",
                "A file of the lock has no sha256: the lock was never accepted.",
                where=file.path,
                got=f"git blob id {file.git_sha1}",
                expected="a sha256",
                hint=f"make it anew: k2ctl lock {lock.repo} --revision {lock.revision}",
            )
    return lock


def first_difference(lock: Lock, other: Lock) -> tuple[str, str, str]:
    """Return the first path at which two locks differ and what each says of it; empty texts if no file differs."""
    here, there = ({file.path: file for file in each.files} for each in (lock, other))
    for path in sorted({*here, *there}):
        if here.get(path) != there.get(path):
            return path, _told(here.get(path)), _told(there.get(path))
    return "", "", ""


def _told(file: LockedFile | None) -> str:
    return f"{file.size_bytes} bytes, {file.sha256 or file.git_sha1}" if file else "no such file"


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
