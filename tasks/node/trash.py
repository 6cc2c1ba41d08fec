"""The trash of a node: whole checkpoints that nothing needed, for as long as they can be taken back.

`.k2-trash/<time>-<org>--<name>@<revision>` on the same file system. Taken back by hand: `mv` it to
`<org>--<name>/<revision>`; the next release of these weights finds every file as it was.
"""

from __future__ import annotations

import calendar
import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.core.marker import MARKER_FILE
from tasks.node.staged_directory import open_for_writing
from tasks.node.verified_file import fsync_directory, make_directory

TRASH_DIR = ".k2-trash"
_STAMP = "%Y%m%dT%H%M%SZ"
_NAME = re.compile(r"(?P<stamp>\d{8}T\d{6}Z)-(?P<model>[^/@]+)@(?P<revision>[0-9a-f]{40})")


@dataclass(frozen=True)
class Entry:
    """One checkpoint in the trash: its name there, the path it had, and when it was moved by the mover's clock."""

    name: str
    path: str
    moved_at: float


class Trash:
    """The trash below a node's directory for weights."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place = root / TRASH_DIR

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Return what is in the trash, and the names there that are not ours."""
        found, others = [], []
        for path in sorted(self._place.iterdir()) if self._place.is_dir() else ():
            entry = _entry(path.name)
            if entry is None or path.is_symlink() or not path.is_dir():
                others.append(f"{TRASH_DIR}/{path.name}")
            else:
                found.append(entry)
        return found, others

    def directory(self, name: str) -> Path:
        """Return where an entry stands."""
        return self._place / name

    def age_s(self, name: str) -> float:
        """Return an entry's age by this node's clock: a rename sets the time of the inode."""
        return time.time() - self.directory(name).lstat().st_ctime

    def take(self, path: str, now: float) -> str:
        """Move a checkpoint's directory into the trash, durably, and return its name there; OSError if it cannot be."""
        source = self._root / path
        model, _, revision = path.partition("/")
        name = f"{time.strftime(_STAMP, time.gmtime(now))}-{model}@{revision}"
        make_directory(self._place)
        if self.directory(name).exists():
            raise FileExistsError(f"{name} is in the trash already")
        with _movable(source, self.directory(name)):
            source.rename(self.directory(name))
        fsync_directory(self._place)
        fsync_directory(source.parent)
        with contextlib.suppress(OSError):
            source.parent.rmdir()  # unless it has other revisions
        return name

    def delete(self, name: str) -> None:
        """Delete an entry for good, its marker first: half of it must not pass for the whole after a death."""
        directory = self.directory(name)
        open_for_writing(directory)
        (directory / MARKER_FILE).unlink(missing_ok=True)
        fsync_directory(directory)
        shutil.rmtree(directory)
        fsync_directory(self._place)


@contextlib.contextmanager
def _movable(source: Path, target: Path) -> Iterator[None]:
    """Open a directory for the move: it holds the name of its parent, so that it is written to."""
    mode = source.stat().st_mode & 0o7777
    source.chmod(mode | 0o700)
    try:
        yield
    finally:
        (target if target.exists() else source).chmod(mode)


def _entry(name: str) -> Entry | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        moved_at = float(calendar.timegm(time.strptime(found["stamp"], _STAMP)))
    except ValueError:
        return None
    return Entry(name, f"{found['model']}/{found['revision']}", moved_at)
