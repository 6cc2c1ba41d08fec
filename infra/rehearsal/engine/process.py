"""Runs one engine process and turns its end into an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.group import GroupLost
from infra.rehearsal.engine.performance import PerformanceModel
from infra.rehearsal.engine.phases import PhaseFault


def run(engine: EngineArguments, model: PerformanceModel, env: Mapping[str, str]) -> int:
    """Runs the process to its end; answers its exit code. A lost group ends it at once, connections cut."""
    try:
        code = asyncio.run(_main(engine, model, env))
        # The interpreter restores the default action while it ends: a SIGTERM then must not become the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return code
    except (PhaseFault, OSError, ValueError) as fault:
        journal.exception("Scheduler", fault, engine.rank)
        return 1


async def _main(engine: EngineArguments, model: PerformanceModel, env: Mapping[str, str]) -> int:
    terminated = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(number: int, frame: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: on the way out already
            loop.call_soon_threadsafe(terminated.set)

    # Not the loop's own handlers: those end with the loop, and a SIGTERM during the way out would kill the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    try:
        return await _life(engine, model, env, terminated)
    except GroupLost as lost:
        journal.error(f"{lost}", engine.rank)
        journal.error("Killing this process: the process group is broken.", engine.rank)
        sys.stderr.flush()
        # As after a NCCL failure: no drain, no goodbye.
        os._exit(1)


def _life(
    engine: EngineArguments, model: PerformanceModel, env: Mapping[str, str], terminated: asyncio.Event
) -> Coroutine[Any, Any, int]:
    # Imported by need: a worker runs without the HTTP library, at half the memory.
    if engine.is_leader:
        from infra.rehearsal.engine.leader import lead

        return lead(engine, model, env, terminated)
    from infra.rehearsal.engine.worker import follow

    return follow(engine, model, env, terminated)
