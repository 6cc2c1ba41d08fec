"""Lock files and the signature files beside them, on the disk of whoever runs `k2ctl`."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.core.errors import InputError
from tasks.core.lock import Lock, lock_from_data


def read_lock_file(path: Path) -> Lock:
    """Return the lock of a file; InputError if it cannot be read or is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "K2-INP-001", "The lock file cannot be read.", where=str(path), got=str(error), expected="a lock file"
        ) from error
    return lock_from_data(data)


def signature_path(lock_path: Path) -> Path:
    """Return the place of the signature beside a lock file: NAME.lock.json has NAME.lock.sig."""
    return lock_path.with_suffix(".sig")


def read_signature_file(path: Path) -> bytes:
    """Return the bytes of a signature file; InputError if there is none."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            "K2-INP-001",
            "The signature file cannot be read.",
            where=str(path),
            got=error.strerror or type(error).__name__,
            expected="a signature file",
            hint="k2ctl lock-sign LOCK --key KEY writes one beside the lock; --signature FILE names another place",
        ) from error


def write_file(path: str, data: bytes, option: str = "--output") -> None:
    """Write a file that was asked for, its directory too; InputError if that place cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
    except OSError as error:
        raise InputError(
            "K2-INP-001",
            "The file cannot be written.",
            where=path,
            got=error.strerror or type(error).__name__,
            expected="a place that can be written",
            hint=f"give another {option}",
        ) from error
