"""One retry rule for all tasks: the error itself says whether trying again can help."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from tasks.core.errors import After, K2Error

RETRIES = 2
RETRY_DELAY_S = 3.0


def may_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed task run is tried again: when its error answers `After`, never for a static cause."""
    try:
        state.result()
    except K2Error as error:
        return isinstance(error.retry, After)
    except BaseException:
        return False
    return False
