"""Says whether anybody on this machine has a file open, also from containers whose processes cannot be seen here.

The kernel grants a write lease on a file only while nobody else has it open, by whatever path and in whatever
namespace; a mapping counts, as it keeps the file open. Only the file's owner gets one, which these programs are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NAMED = 3


@dataclass(frozen=True)
class InUse:
    """A file that somebody has open, or of which that cannot be told (`why`)."""

    path: Path
    why: str


def ignore_lease_breaks() -> None:
    """Let a lease that somebody else breaks end nothing: the signal's default would end the program."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


@contextlib.contextmanager
def leased(files: Iterable[Path]) -> Iterator[InUse | None]:
    """Hold a write lease on each file while the block runs, or yield the first that is in use and hold none.

    While they are held, whoever opens one of the files waits for the end of the block: keep it short.
    """
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        problem = None
        for path in files:
            problem = _lease(stack, path)
            if problem is not None:
                stack.close()
                break
        yield problem


def in_use(files: Iterable[Path]) -> InUse | None:
    """Return the first file that somebody has open, or of which that cannot be told; None if none is."""
    for path in files:
        with leased([path]) as problem:
            if problem is not None:
                return problem
    return None


def _lease(stack: contextlib.ExitStack, path: Path) -> InUse | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        # Another's lease on it is broken by our open, and holds until then.
        return InUse(path, f"cannot be opened: {error.strerror}")
    stack.callback(os.close, fd)  # which gives the lease back
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            holders = processes_with(path)
            return InUse(path, f"open in {', '.join(holders)}" if holders else "open in a process of another container")
        return InUse(path, f"whether it is open cannot be told: {error.strerror}")
    return None


def regular_files(directory: Path) -> list[Path]:
    """Return every regular file below a directory; links are neither followed nor named."""
    found = []
    for base, _, names in os.walk(directory):
        for name in names:
            path = Path(base, name)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    found.append(path)
    return sorted(found)


def processes_with(path: Path) -> list[str]:
    """Return `pid (name)` of some processes that have a file open or mapped, of those that can be seen from here."""
    wanted = path.stat()
    key = (wanted.st_dev, wanted.st_ino)
    mapped = f" {os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x} {wanted.st_ino} "
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if _has_open(process, key) or mapped in (process / "maps").read_text():
                found.append(f"{process.name} ({(process / 'comm').read_text().strip()})")
        if len(found) == _NAMED:
            break
    return found


def _has_open(process: Path, key: tuple[int, int]) -> bool:
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            stats = fd.stat()
            if (stats.st_dev, stats.st_ino) == key:
                return True
    return False


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
