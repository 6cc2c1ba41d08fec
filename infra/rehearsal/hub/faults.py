"""Faults that a file in the injection directory switches on while it is there.

| file | parameters | effect |
|---|---|---|
| `shard-bitflip.json` | `path`, `offset` | the lowest bit of that byte is served wrong; size and listed digest stay |
| `hub-429.json` | `count`, `retry_after_s` (1), `scope` (`api` or `resolvers`) | 429 with Retry-After and RateLimit |
| `hub-5xx.json` | `count`, `status` (503) | an error of the server |
| `hub-cut.json` | `path`, `after_bytes`, `count` | the connection is closed in the middle of that file |
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


@dataclass
class Faults:
    """Reads `<directory>/<name>.json`: present is active, removed is off, replaced starts its count anew."""

    directory: Path | None
    taken: dict[str, int] = field(default_factory=dict)
    _used: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def flipped_byte(self, path: str) -> int | None:
        """Offset of the byte to serve with one bit flipped in the file `path`, or None."""
        active = self._read("shard-bitflip")
        if active is None or active[1].get("path") != path:
            return None
        return int(active[1].get("offset", 0))

    def take(self, name: str, **only: str) -> dict[str, Any] | None:
        """Uses up one of the `count` occurrences of a fault and returns its parameters, or None if it is off.

        Without a `count` the fault goes on as long as its file is there. A key of `only` that the parameters name
        must have that value.
        """
        active = self._read(name)
        if active is None:
            return None
        identity, parameters = active
        if any(parameters.get(key, value) != value for key, value in only.items()):
            return None
        seen, used = self._used.get(name, (identity, 0))
        used = used if seen == identity else 0
        if "count" in parameters and used >= int(parameters["count"]):
            return None
        self._used[name] = (identity, used + 1)
        self.note(name)
        return parameters

    def note(self, name: str) -> None:
        """Counts one occurrence of a fault."""
        self.taken[name] = self.taken.get(name, 0) + 1

    def _read(self, name: str) -> tuple[tuple[int, int], dict[str, Any]] | None:
        if self.directory is None:
            return None
        path = self.directory / f"{name}.json"
        try:
            status = path.stat()
            parameters = json.loads(path.read_text(encoding="utf-8") or "{}")
        except FileNotFoundError:
            return None
        except json.JSONDecodeError:
            _log.warning("%s is not JSON (being written?); taken as off", path)
            return None
        return (status.st_ino, status.st_mtime_ns), parameters
