"""Files by way of Dragonfly, for sites that run it: `dfget` brings a file from its peers, or from where it came from.

Not run against a real Dragonfly by us; written by the source of its client 1.5.1. What matters of that source:

- Its digest option is checked by the daemon, and only where the daemon writes the file itself. With
  `--transfer-from-dfdaemon`, which is used here so that the file is ours alone and no hard link into the daemon's
  storage, nobody checks it. It is given all the same; what counts is our own hash of the file, read back.
- The file has its whole length from the beginning (fallocate): a length proves nothing, and is no progress.
- Every failure is exit code 1.
- Token and keys are read from variables (`DFGET_HF_TOKEN`, `DFGET_STORAGE_...`), so none stands in the argv.
- What is fetched is known to peers by its URL and revision, unless something else is named: here its sha256.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from tasks.core.errors import After, InputError, UnavailableError
from tasks.node.environment import required

if TYPE_CHECKING:
    from tasks.core.lock import Lock, LockedFile
    from tasks.ports import Stopping

_POLL_S = 0.1
_END_S = 5.0
_SAID_BYTES = 400
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True)
class Origin:
    """Where Dragonfly gets a file that no peer has: its URL, further arguments, and variables that may be secret."""

    url_of: Callable[[LockedFile], str]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


def hub_origin_from_environment(lock: Lock) -> Origin:
    """Return the Hub that the environment names, at the locked commit."""
    token = _hub_token()
    environment = {"DFGET_HF_BASE_URL": required("HF_ENDPOINT"), **({"DFGET_HF_TOKEN": token} if token else {})}
    return Origin(lambda file: f"hf://{lock.repo}/{quote(file.path)}", ("--hf-revision", lock.revision), environment)


def _hub_token() -> str:
    """Return the Hub's token, from a file that can be replaced if one is named; empty for none."""
    path = os.environ.get("HF_TOKEN_PATH", "")
    if not path:
        return os.environ.get("HF_TOKEN", "").strip()
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "K2-INP-001", "The Hub token cannot be read.", where=path, got=type(error).__name__, expected="a token"
        ) from None


def store_origin_from_environment() -> Origin:
    """Return the blobs of the store that the environment names."""
    bucket = required("K2_STORE_BUCKET")
    environment = {
        "DFGET_STORAGE_ENDPOINT": required("K2_STORE_ENDPOINT"),
        "DFGET_STORAGE_REGION": os.environ.get("K2_STORE_REGION", "us-east-1"),
        "DFGET_STORAGE_ACCESS_KEY_ID": required("K2_STORE_ACCESS_KEY"),
        "DFGET_STORAGE_ACCESS_KEY_SECRET": required("K2_STORE_SECRET_KEY"),
    }
    return Origin(lambda file: f"s3://{bucket}/blobs/{file.sha256}", (), environment)


class Dfget:
    """Implements `ports.Fetcher` by running dfget once for each file.

    Args:
        command: the program, a name on PATH or a path.
        origin: where files come from that no peer has.
        stall_s: no sign of life for so long, and it is ended.
    """

    def __init__(self, command: str, origin: Origin, stall_s: float = 60.0) -> None:
        self._command = command
        self._origin = origin
        self._stall_s = stall_s

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"Dragonfly ({self._command})"

    def fetch(self, file: LockedFile, temp: Path, stop: Stopping) -> None:
        """Put a file's bytes, unverified, into a file that is not there yet.

        Raises:
            InputError: there is no such program.
            UnavailableError: it failed, stalled, or left nothing; `temp` may be there then, with anything in it.
        """
        with self._started(file, temp) as (child, said):
            self._await(file, temp, child, stop)
        if child.returncode != 0:
            raise self._failed(file, f"ended with exit code {child.returncode}", said)
        if not temp.exists():
            raise self._failed(file, "says that it is done, but left no file", said)

    @contextlib.contextmanager
    def _started(self, file: LockedFile, temp: Path) -> Iterator[tuple[subprocess.Popen[bytes], _Said]]:
        """Run the program in a session of its own, of which nothing is left when the block ends."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            child = subprocess.Popen(
                self._argv(file, temp),
                env={**inherited, **self._origin.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(
                "K2-INP-001",
                f"Dragonfly's dfget cannot be run: {error.strerror}.",
                where=self._command,
                expected="the client of Dragonfly in the tool's image",
                hint="Put dfget into the image, or leave staging.p2p_command of the site empty.",
            ) from error
        said = _Said(child.stdout)
        try:
            yield child, said
        finally:
            # Not reaped yet: until then the group's number belongs to nobody else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(_END_S)
            said.end()

    def _argv(self, file: LockedFile, temp: Path) -> list[str]:
        digest = f"sha256:{file.sha256}"
        return [
            self._command,
            self._origin.url_of(file),
            "--output",
            str(temp),
            "--digest",
            digest,
            "--content-for-calculating-task-id",
            digest,
            "--transfer-from-dfdaemon",
            "--no-progress",
            *self._origin.arguments,
        ]

    def _await(self, file: LockedFile, temp: Path, child: subprocess.Popen[bytes], stop: Stopping) -> None:
        sign, since = _sign_of_life(child.pid, temp), time.monotonic()
        # Reaped only after its group was signalled: see _started.
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            stop.sleep(_POLL_S)
            now = _sign_of_life(child.pid, temp)
            if now != sign:
                sign, since = now, time.monotonic()
            elif time.monotonic() - since >= self._stall_s:
                raise UnavailableError(
                    "K2-UNA-001",
                    f"Dragonfly's dfget stalled: no byte for {self._stall_s:g} s.",
                    where=file.path,
                    retry=After(2.0),
                )

    def _failed(self, file: LockedFile, how: str, said: _Said) -> UnavailableError:
        text = said.without(value for name, value in self._origin.environment.items() if _is_secret(name))
        return UnavailableError(
            "K2-UNA-001",
            f"Dragonfly's dfget {how}.",
            where=file.path,
            got=text or "nothing said",
            hint="Is dfdaemon up on the node (its socket is /var/run/dragonfly/dfdaemon.sock)? "
            "With staging.p2p_command left empty, nodes take the file without Dragonfly.",
            retry=After(5.0),
        )


def _is_secret(variable: str) -> bool:
    return variable.endswith(("TOKEN", "KEY_ID", "KEY_SECRET"))


def _sign_of_life(pid: int, temp: Path) -> tuple[str, int]:
    """Return what changes while a program moves bytes: what it has read and written, and when the file was written."""
    counted, written_ns = "", 0
    with contextlib.suppress(OSError):
        counted = Path(f"/proc/{pid}/io").read_text()
    with contextlib.suppress(OSError):
        written_ns = temp.stat().st_mtime_ns
    return counted, written_ns


class _Said:
    """Keeps the last that a program said, however much that is, for whoever has to know why it failed."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._last: deque[int] = deque(maxlen=_SAID_BYTES)
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError, ValueError):
            while block := self._stream.read1(64 * 1024):  # type: ignore[attr-defined]
                self._last.extend(block[-_SAID_BYTES:])

    def end(self) -> None:
        """Take what is still there; the program has ended."""
        self._thread.join(_END_S)
        if self._stream is not None:
            self._stream.close()

    def without(self, secrets: Iterable[str]) -> str:
        """Return it as one line, without secrets and without queries of URLs, which may be signatures (I6)."""
        text = " ".join(bytes(self._last).decode(errors="replace").split())
        for secret in secrets:
            text = text.replace(secret, "***") if secret else text
        return re.sub(r"\?\S+", "?...", text)
