"""One stager at a time on a node and in a checkpoint's directory, by locks that the kernel releases with their holder.

The lock of the node keeps stagers of two checkpoints apart: both would count the same free bytes as theirs. The time of
a lock's file says when somebody last took it to change something: a list that was made before that is history.
"""

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
def hold_node(root: Path, lock_digest: str, wait_s: float, stop: Stop) -> Iterator[None]:
    """Hold the right to write weights to this node while the block runs; wait for another holder to end.

    Args:
        root: the node's directory for weights.
        lock_digest: what is staged; who waits is told.
        wait_s: how long to wait.
        stop: ends the wait.

    Raises:
        UnavailableError: it is still held after `wait_s`, or a signal said stop.
    """
    with _held(root / LOCKS_DIR / "node.lock", lock_digest, wait_s, stop):
        yield


@contextlib.contextmanager
def hold(root: Path, revision: str, wait_s: float, stop: Stop) -> Iterator[None]:
    """Hold the staging lock of a revision while the block runs; wait for another holder to end.

    The lock is of the revision and not of the lock digest, because the directory it guards is of the revision.

    Raises:
        UnavailableError: it is still held after `wait_s`, or a signal said stop.
    """
    with _held(_of_revision(root, revision), f"revision {revision}", wait_s, stop):
        yield


@contextlib.contextmanager
def hold_scrub(root: Path, revision: str, stop: Stop) -> Iterator[None]:
    """Keep other scrubs of a revision out while the block runs; stagers, who come first, take no notice.

    Raises:
        UnavailableError: another scrub reads there.
    """
    with _held(root / LOCKS_DIR / f"scrub-{revision[:12]}.lock", f"scrub of {revision}", 0.0, stop, who="scrub"):
        yield


@contextlib.contextmanager
def undisturbed(root: Path, revision: str) -> Iterator[bool]:
    """Keep stagers and scrubs of a revision out while the block runs, leaving no trace; say if that could be done.

    Nobody is waited for, and the files' times stay: whoever looks at what others did must not look like one of them.
    """
    paths = (_of_revision(root, revision), root / LOCKS_DIR / f"scrub-{revision[:12]}.lock")
    make_directory(root / LOCKS_DIR)
    with contextlib.ExitStack() as stack:
        free = True
        for path in paths:
            fd = _open_without_trace(path)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free


def _open_without_trace(path: Path) -> int:
    """Return a descriptor of a lock's file; one that has to be made gets a time that says that nobody took it yet."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.utime(fd, ns=(0, 0))
        return fd


def taken_at_ns(root: Path, revision: str) -> int:
    """Return when the staging lock of a revision was last taken; 0 if never."""
    try:
        return _of_revision(root, revision).lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def node_is_held(root: Path) -> bool:
    """Return whether somebody writes weights to this node now."""
    return _is_held(root / LOCKS_DIR / "node.lock")


def is_held(root: Path, revision: str) -> bool:
    """Return whether somebody holds the staging lock of a revision now."""
    return _is_held(_of_revision(root, revision))


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _of_revision(root: Path, revision: str) -> Path:
    return root / LOCKS_DIR / f"{revision[:12]}.lock"


@contextlib.contextmanager
def _held(path: Path, what: str, wait_s: float, stop: Stop, who: str = "stager") -> Iterator[None]:
    make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(fd, path, wait_s, stop, who)
        os.utime(fd)
        # For whoever waits, and no more: a disk that is full keeps nobody from staging what needs no room.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.environ.get('POD_NAME', f'pid {os.getpid()}')}, {what}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _acquire(fd: int, path: Path, wait_s: float, stop: Stop, who: str) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 400, 0).decode(errors="replace")
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    "K2-UNA-001",
                    f"Another {who} still works in this directory after {wait_s:g} s.",
                    where=str(path),
                    got=holder,
                    expected="nobody",
                    hint=f"`fuser {path}` on the node names its process; run the release again when it has ended.",
                    retry=After(30.0),
                ) from error
            if not told:
                say(f"another {who} ({holder}) holds {path}: waiting for it")
                told = True
            stop.sleep(_POLL_S)
        else:
            return
