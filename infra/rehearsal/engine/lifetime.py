"""Steps that every process of a group goes through alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

from infra.rehearsal.engine import journal
from infra.rehearsal.engine.arguments import EngineArguments
from infra.rehearsal.engine.performance import PerformanceModel

TERMINATED_EARLY = 143


async def either(terminated: asyncio.Event, *work: Awaitable[Any]) -> bool:
    """Runs the pieces of work until the first one ends, or SIGTERM; True when it was SIGTERM. Faults are raised."""
    tasks = [asyncio.ensure_future(piece) for piece in (terminated.wait(), *work)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    return tasks[0] in done


async def distributed(engine: EngineArguments, model: PerformanceModel, joined: Coroutine[Any, Any, None]) -> None:
    """Waits for the whole group, with SGLang's lines about it."""
    started = time.monotonic()
    journal.info("Init torch distributed begin.", engine.rank)
    await joined
    await asyncio.sleep(model.startup_s("distributed"))
    journal.info(f"Init torch distributed ends. elapsed={time.monotonic() - started:.2f} s", engine.rank)
