"""Writes log lines in SGLang's form: ``[2026-11-30 02:39:40 DP8 TP8 EP8] message`` on stderr."""

from __future__ import annotations

import logging
import sys
import traceback

_log = logging.getLogger("sglang")


def configure(level: str) -> None:
    """Sends every line of this process to stderr from the named level up."""
    logging.basicConfig(
        level=getattr(logging, level.upper(), logging.INFO),
        format="[%(asctime)s%(rank)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    # aiohttp's own loggers do not know the rank field.
    logging.getLogger().handlers[0].addFilter(_fill_rank)
    for noisy in ("aiohttp.server", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)


def _fill_rank(record: logging.LogRecord) -> bool:
    if not hasattr(record, "rank"):
        record.rank = ""
    return True


def rank_prefix(first_rank: int, attn_dp_size: int, ep_size: int) -> str:
    """Answers the rank part of a scheduler's line; one line stands for all local ranks of a node."""
    data_parallel = f" DP{first_rank}" if attn_dp_size > 1 else ""
    expert_parallel = f" EP{first_rank}" if ep_size > 1 else ""
    return f"{data_parallel} TP{first_rank}{expert_parallel}"


def info(message: str, rank: str = "") -> None:
    """Writes one line at level INFO."""
    _log.info(message, extra={"rank": rank})


def warning(message: str, rank: str = "") -> None:
    """Writes one line at level WARNING."""
    _log.warning(message, extra={"rank": rank})


def error(message: str, rank: str = "") -> None:
    """Writes one line at level ERROR."""
    _log.error(message, extra={"rank": rank})


def exception(part: str, fault: BaseException, rank: str = "") -> None:
    """Writes a fault the way SGLang's processes do before they die."""
    trace = "".join(traceback.format_exception(fault)).rstrip()
    _log.error(f"{part} hit an exception: {trace}", extra={"rank": rank})


def progress(line: str) -> None:
    """Writes one raw line (tqdm's are not log records)."""
    print(line, file=sys.stderr, flush=True)
