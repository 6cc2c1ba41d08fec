"""One file's way onto the disk: from a source, verified into its place, with its progress taken back if that fails."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import IntegrityError, K2Error
from tasks.node.program import ProgressLines, Stop
from tasks.node.staging_result import Staged
from tasks.node.verified_file import (
    PLAIN,
    Writing,
    adopt_verified,
    disk_error,
    make_directory,
    temp_path,
    write_verified,
)
from tasks.ports import Fetcher

if TYPE_CHECKING:
    from tasks.core.lock import LockedFile
    from tasks.core.marker import StagedFile
    from tasks.ports import Block, Source


class Fetch:
    """Fetches one file into a directory, from one source after another if need be."""

    def __init__(
        self, directory: Path, file: LockedFile, progress: ProgressLines, stop: Stop, writing: Writing = PLAIN
    ) -> None:
        self._directory = directory
        self._progress = progress
        self._writing = writing
        self.file = file
        self.stop = stop
        self._began, self._tries = time.monotonic(), 0
        self.wrong: list[str] = []
        """What wrong bytes were, each time that they were."""
        self.source_failed = False
        """Whether the last failure was the source's, and not that of this node's own disk."""

    def staged(self, source: Source | Fetcher) -> Staged:
        """Return the file as it stands verified, or raise what the source and who writes or adopts its bytes do."""
        self._tries += 1
        try:
            file = self._take(source)
        except IntegrityError as error:
            self.wrong.append(error.got)
            raise
        return Staged(file, True, time.monotonic() - self._began, self._tries, source.name)

    def _take(self, source: Source | Fetcher) -> StagedFile:
        counted_bytes = 0

        def advance(count_bytes: int) -> None:
            nonlocal counted_bytes
            counted_bytes += count_bytes
            self._progress.advance(count_bytes)

        self.source_failed = True
        try:
            if isinstance(source, Fetcher):
                return self._adopted(source, advance)
            with contextlib.closing(self._watched(source.open(self.file))) as blocks:
                return write_verified(self._directory, self.file.path, self.file, blocks, advance, self._writing)
        except K2Error:
            self._progress.advance(-counted_bytes)
            raise

    def _adopted(self, fetcher: Fetcher, advance: Callable[[int], None]) -> StagedFile:
        temp = temp_path(self._directory, self.file.path, self.file)
        try:
            make_directory(temp.parent)
            _remove(temp)
            fetcher.fetch(self.file, temp, self.stop)
            self.source_failed = False
            return adopt_verified(self._directory, self.file.path, self.file, temp, advance)
        except OSError as error:
            raise disk_error(error, temp) from error
        finally:
            with contextlib.suppress(OSError):
                _remove(temp)

    def _watched(self, blocks: Iterator[Block]) -> Generator[Block, None, None]:
        self.source_failed = True
        for block in blocks:
            self.source_failed = False
            self.stop.check()
            yield block
            self.source_failed = True
        self.source_failed = False


def _remove(temp: Path) -> None:
    """Remove what an engine has left there, whatever it is."""
    if temp.is_dir() and not temp.is_symlink():
        shutil.rmtree(temp)
    else:
        temp.unlink(missing_ok=True)
