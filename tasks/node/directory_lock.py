"""One stager at a time in a checkpoint's directory, by a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import After, UnavailableError
from tasks.node.program import Stop, say
from tasks.node.verified_file import make_directory

LOCKS_DIR = ".k2-locks"
_POLL_S = 0.2


@contextlib.contextmanager
def hold(root: Path, revision: str, wait_s: float, stop: Stop) -> Iterator[None]:
    """Hold the staging lock of a revision while the block runs; wait for another holder to end.

    The lock is of the revision and not of the lock digest, because the directory it guards is of the revision.

    Raises:
        UnavailableError: it is still held after `wait_s`, or a signal said stop.
    """
    path = root / LOCKS_DIR / f"{revision[:12]}.lock"
    make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(fd, path, wait_s, stop)
        yield
    finally:
        os.close(fd)


def _acquire(fd: int, path: Path, wait_s: float, stop: Stop) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    "K2-UNA-001",
                    f"Another stager still works in this directory after {wait_s:g} s.",
                    where=str(path),
                    hint=f"`fuser {path}` on the node names its process; run the release again when it has ended.",
                    retry=After(30.0),
                ) from error
            if not told:
                say(f"another stager holds {path}: waiting for it")
                told = True
            stop.sleep(_POLL_S)
        else:
            return
