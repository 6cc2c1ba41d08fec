"""`python -m infra.rehearsal.client`: user traffic until SIGTERM, with a report that is rewritten each second."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from infra.rehearsal.client.traffic import Client, Plan


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.rehearsal.client", description=__doc__)
    parser.add_argument("--url", required=True, help="address of the gateway")
    parser.add_argument("--out", type=Path, required=True, help="the report (JSON)")
    parser.add_argument("--model", default="kimi-k2")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--rate-per-s", type=float, help="most requests begun in a second; default: no limit")
    parser.add_argument("--stream-share", type=float, default=0.5, help="part of the requests that stream, 0 to 1")
    parser.add_argument("--max-requests", type=int)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of one request")
    parser.add_argument(
        "--parked-apart", action="store_true", help="count 503 with Retry-After as parked, not as failed"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    plan = Plan(
        url=arguments.url.rstrip("/"),
        model=arguments.model,
        concurrency=arguments.concurrency,
        rate_per_s=arguments.rate_per_s,
        stream_share=arguments.stream_share,
        max_requests=arguments.max_requests,
        parked_apart=arguments.parked_apart,
        timeout_s=arguments.timeout_s,
        seed=arguments.seed,
    )
    await Client(plan, arguments.out).run(stop)


def main() -> int:
    """Run until SIGTERM or --max-requests; the counts are in the report, not in the exit code."""
    asyncio.run(_main(_arguments()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
