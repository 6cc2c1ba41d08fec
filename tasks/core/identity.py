"""Names and digests: what makes two things the same thing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from tasks.core.errors import InputError

_REVISION = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_RELEASE_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")


def canonical_bytes(value: Any) -> bytes:
    """Return the one byte form of plain data over which digests are taken: sorted keys, no spaces, UTF-8, newline."""
    return (
        json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    )


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the sha256 of bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_parts(sha256s: Sequence[str]) -> str:
    """Return what S3 states as the sha256 of an object that was made out of parts with these digests."""
    return f"{sha256_hex(b''.join(map(bytes.fromhex, sha256s)))}-{len(sha256s)}"


def digest_of(value: Any) -> str:
    """Return the sha256 of the canonical bytes of plain data."""
    return sha256_hex(canonical_bytes(value))


def git_blob_sha1_hex(data: bytes) -> str:
    """Return the git blob id of a file's content: how the Hub names small files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def check_revision(revision: str) -> str:
    """Return the revision if it is a full commit; raise InputError for a branch, a tag or a short form."""
    if not _REVISION.fullmatch(revision):
        raise InputError(
            "K2-INP-002",
            "The revision must be a full commit, never a branch or a short form.",
            where="revision",
            got=revision,
            expected="40 hex digits",
        )
    return revision


def check_repo(repo: str) -> str:
    """Return the repository name if it has the Hub's `owner/name` form; raise InputError otherwise."""
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise InputError(
            "K2-INP-001", "The repository is not of the form owner/name.", where="repo", got=repo, expected="owner/name"
        )
    return repo


def check_release_id(release_id: str) -> str:
    """Return the id if it can name Kubernetes objects and store keys; raise InputError otherwise."""
    if not _RELEASE_ID.fullmatch(release_id):
        raise InputError(
            "K2-INP-001",
            "The release id is not usable as a name.",
            where="id",
            got=release_id,
            expected="lower-case letters, digits and hyphens, at most 48, such as k2-20261130-1",
        )
    return release_id
