"""Where things that are built or fetched once a machine are kept: outside the checkout, one directory a version.

``${K2_CACHE or XDG_CACHE_HOME/k2-release or ~/.cache/k2-release}/<what>/<key>/``
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from infra.rehearsal.errors import SiteError

Report = Callable[[str], None]

LONGEST_S = 3600
"""How long anything may take that is made once a machine, in seconds."""
REPORT_EVERY_S = 15


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where things that are built or fetched once are kept."""
    if chosen := environ.get("K2_CACHE"):
        return Path(chosen)
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k2-release"


def directory_key(parts: Sequence[Path]) -> str:
    """Return 12 hex digits over the names and contents of the files."""
    digest = hashlib.sha256()
    for path in parts:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def exclusive(lock_path: Path, report: Report, timeout_s: float = LONGEST_S) -> Iterator[None]:
    """Hold the lock file; say every now and then that another program holds it."""
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    started_s, next_report_s = time.monotonic(), 0.0
    with lock_path.open("w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                raise SiteError(f"another program has held {lock_path} for {waited_s:.0f} s; is it still building?")
            if waited_s >= next_report_s:
                report(f"  another program is building the same thing; waiting ({waited_s:.0f} s)")
                next_report_s = waited_s + REPORT_EVERY_S
            time.sleep(0.2)
        yield
