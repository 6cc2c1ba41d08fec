"""The real node programs on the hosts of a private network, held until all are ready, then let go at once.

Each is a fork of the bench, which has imported them, that enters its host's namespace and calls the program's `main`:
sixteen nodes have sixteen machines to start Python on, this one has not. Before its first transfer a program says on
stderr what it is going to move. There it is stopped (SIGSTOP) until all others have come as far: so what is measured is
the transfer, not how one machine starts many programs one after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.bench.limited.network import Host, die_with_parent

LIMIT_S = 240.0
# What the programs say when they know what to move: stage and exchange, and pull.
_READY = (b" to write (", b" to fetch")
_TAIL = 1500
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Run:
    """How long programs took from being let go to the last one's end, their CPU time, and what each said of itself."""

    seconds: float
    cpu_s: float
    outcomes: tuple[Mapping[str, Any], ...]


@dataclass
class _Child:
    name: str
    pid: int
    errors: int
    message: Path
    said: bytearray = field(default_factory=bytearray)
    code: int = -1
    cpu_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        return any(line in self.said for line in _READY)

    def reap(self) -> None:
        _, status, used = os.wait4(self.pid, 0)
        self.code, self.cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Start:
    """A program `tasks.node.NAME` to start on a host with these arguments."""

    name: str
    host: Host
    arguments: Sequence[str]


class Programs:
    """Runs node programs on many hosts together. The process that uses it has no threads: it forks."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = {"PATH": os.environ["PATH"], "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
        self._count = 0
        # What the programs import with their first request, sixteen times at once otherwise.
        import httpx2
        from huggingface_hub import hf_hub_url  # noqa: F401
        from huggingface_hub.utils._headers import build_hf_headers

        build_hf_headers(token=False, library_name="k2-release")
        httpx2.Client().close()

    def run(self, starts: Sequence[Start]) -> Run:
        """Run programs, all let go at once; RuntimeError with its last words if one fails."""
        self._count += 1
        directory = self._directory / f"{self._count}"
        directory.mkdir(parents=True)
        children: list[_Child] = []
        try:
            for index, start in enumerate(starts):
                children.append(self._fork(start, directory / f"{index}.json"))
            seconds = _follow(children)
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.reap()
                os.close(child.errors)
        for child in children:
            if child.code:
                said = child.said[-_TAIL:].decode(errors="replace")
                raise RuntimeError(f"{child.name} ended with {child.code}:\n{said}")
        outcomes = tuple(json.loads(child.message.read_text()) for child in children)
        return Run(seconds, sum(child.cpu_s for child in children), outcomes)

    def _fork(self, start: Start, message: Path) -> _Child:
        module = importlib.import_module(f"tasks.node.{start.name}")
        sys.stdout.flush()
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            self._become(module, start, message, writing)
        os.close(writing)
        return _Child(f"{start.name} on {start.host.name}", pid, reading, message)

    def _become(self, module: Any, start: Start, message: Path, errors: int) -> NoReturn:
        """Be a node's program from here on."""
        code, host = 70, start.host
        try:
            os.setsid()  # the scheduler gives each session its share, as if it were a machine of its own
            die_with_parent()
            os.dup2(errors, 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            with Path(f"/proc/{host.pid}/ns/net").open() as namespace:
                if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"no way into the namespace of {host.name}")
            own = {"K2_TERMINATION_LOG": str(message), "POD_IP": host.addresses["inside"], "NODE_NAME": host.name}
            os.environ.clear()
            os.environ.update(self._environment | own)
            code = module.main(list(start.arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 70
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _follow(children: Sequence[_Child]) -> float:
    """Stop each child when it is ready, let all go, and return the seconds from there to the end of the last."""
    deadline, waiting, began = time.monotonic() + LIMIT_S, set(range(len(children))), 0.0
    with selectors.DefaultSelector() as selector:
        for index, child in enumerate(children):
            selector.register(child.errors, selectors.EVENT_READ, index)
        while selector.get_map():
            events = selector.select(deadline - time.monotonic())
            if not events:
                raise RuntimeError(f"{', '.join(child.name for child in children)}: not done in {LIMIT_S:.0f} s")
            for key, _ in events:
                child = children[key.data]
                said = os.read(child.errors, 65536)
                child.said += said
                if not said:
                    selector.unregister(child.errors)
                if key.data in waiting and (child.is_ready or not said):
                    waiting.discard(key.data)
                    if said:
                        os.killpg(child.pid, signal.SIGSTOP)
                    if not waiting:
                        began = time.monotonic()
                        for each in children:
                            os.killpg(each.pid, signal.SIGCONT)
    return time.monotonic() - began
