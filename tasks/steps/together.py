"""Two recorded steps at the same time: the first that fails ends the other, and its error is the one that is told."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from tasks.core.errors import K2Error, UnavailableError

_LOOK_S = 0.2
_LEAVE_S = 10.0
"""How long a flow that is told to end waits for its second step; the orchestrator kills it half a minute later."""


class HaltedError(UnavailableError):
    """A step was ended because of the other one."""

    failed = True
    """Whether the other one failed; else the flow was told to end, and what runs on the cluster goes on."""


class Together:
    """A step in this thread and, from a moment on, a second one in a thread of its own.

    Each gets a function to look with (`watch`), which raises HaltedError once the other one has failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, BaseException] | None = None
        self._thread: threading.Thread | None = None
        self._result: Any = None

    @property
    def begun(self) -> bool:
        """Whether the second step was started."""
        return self._thread is not None

    def watch(self, step: str) -> Callable[[], None]:
        """Return what a step looks with: it raises HaltedError once the other step has failed."""

        def look() -> None:
            with self._lock:
                first = self._first
            if first is not None and first[0] != step:
                raise _halted(step, *first)

        return look

    def begin(self, step: str, act: Callable[[], Any]) -> None:
        """Start the second step. It sees this thread's context: the orchestrator's run and its log."""

        def run() -> None:
            try:
                self._result = act()
            except BaseException as error:
                self._failed(step, error)

        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(run,), name=step, daemon=True)
        self._thread.start()

    def first(self, step: str, act: Callable[[], Any]) -> Any:
        """Carry out the step of this thread and return what it returned.

        If it fails, or the other one has, the other one is waited for, and what failed first is raised.
        """
        try:
            return act()
        except BaseException as error:
            self._failed(step, error)
            self._wait(math.inf if isinstance(error, Exception) else _LEAVE_S)
            raise self._cause() from None

    def second(self) -> Any:
        """Wait for the second step and return what it returned; raise what it failed with."""
        try:
            self._wait(math.inf)
        except BaseException as error:
            # This thread is told to end: so is the other.
            self._failed("", error)
            self._wait(_LEAVE_S)
            raise
        if self._first is not None:
            raise self._cause() from None
        return self._result

    def _failed(self, step: str, error: BaseException) -> None:
        with self._lock:
            self._first = self._first or (step, error)

    def _cause(self) -> BaseException:
        assert self._first is not None
        return self._first[1]

    def _wait(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_LOOK_S)


def _halted(step: str, other: str, error: BaseException) -> HaltedError:
    failed = isinstance(error, Exception)
    halted = HaltedError(
        "K2-UNA-005",
        f"The step {step} was ended because {other or 'the flow'} {'failed' if failed else 'was told to end'}.",
        got=f"{error.code} {error.summary}" if isinstance(error, K2Error) else type(error).__name__,
    )
    halted.failed = failed
    return halted
