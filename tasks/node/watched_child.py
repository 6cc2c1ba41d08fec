"""A child process that tells its parent in JSON lines what it does, and that never outlives it.

It is a fork, made before anything heavy is imported: it costs a millisecond and no second start of the interpreter,
and a fresh one after a death starts from the same clean state. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_READ_BYTES = 64 * 1024

Tell = Callable[[Mapping[str, Any]], None]


class WatchedChild:
    """One child process, started at once.

    Args:
        work: what the child does; it gets the function that tells the parent a line. Its return or exception ends the
            child.
    """

    def __init__(self, work: Callable[[Tell], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            _be_the_child(work, write_end, parent)
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._pipe: int | None = read_end
        self._rest = b""
        self._status: int | None = None

    @property
    def silent(self) -> bool:
        """Whether the child has closed its side: it is dead, or about to be."""
        return self._pipe is None

    def lines(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what the child has told, waiting for so long for it to tell something."""
        if self._pipe is None:
            return []
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return []
        while True:
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                os.close(self._pipe)
                self._pipe = None
                break
            self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        return [line for text in whole if (line := _parsed(text)) is not None]

    def end(self, grace_s: float) -> int:
        """End the child: SIGTERM, and SIGKILL if it is still there after the grace; return its status."""
        self._signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            self._signal(signal.SIGKILL)
        return self.wait(60.0) or 0

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code of the child, or minus the signal that killed it; None if it lives after so long."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                self.lines(_POLL_S)  # a full pipe would keep it from ending
                time.sleep(_POLL_S)
        return self._status

    def _signal(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None  # cut off by a death
    return line if isinstance(line, dict) else None


def _be_the_child(work: Callable[[Tell], None], pipe: int, parent: int) -> NoReturn:
    """Do the work and end the process, whatever happens; nothing of the parent's frames may go on in it."""
    code = 1
    try:
        _die_with(parent)
        lock = threading.Lock()

        def tell(line: Mapping[str, Any]) -> None:
            data = json.dumps(line).encode() + b"\n"
            with lock:
                try:
                    while data:
                        data = data[os.write(pipe, data) :]
                except BrokenPipeError:
                    os._exit(1)  # nobody hears us: the parent is gone

        work(tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    import ctypes  # for the child alone

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before that
