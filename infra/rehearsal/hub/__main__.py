"""`python -m infra.rehearsal.hub`: serves published repositories on a loopback address until SIGTERM."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from infra.rehearsal.hub.server import DEFAULT_PAGE_SIZE, HubServer, HubSettings

# Transfers that are under way get this long to end after SIGTERM, and as long again to notice that they may not.
_SHUTDOWN_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server; the line `hub: listening on <url>` on stdout says that it is ready."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(_serve(parsed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.rehearsal.hub", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of the published repositories")
    parser.add_argument("--host", type=_loopback, required=True, help="loopback address to listen on (127.x.y.z)")
    parser.add_argument("--port", type=int, required=True, help="port; 0 takes a free one")
    parser.add_argument("--lfs-port", type=int, help="second port to redirect LFS content to, like the Hub's CDN")
    inject = os.environ.get("K2_REHEARSAL_INJECT")
    parser.add_argument("--inject-dir", type=Path, default=inject, help="directory of fault files")
    parser.add_argument("--token", help="the token with access to gated and private repositories")
    parser.add_argument("--rate-bytes-per-s", type=int, help="pace of all content together")
    parser.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE, help="entries a page of tree listings")
    return parser


def _loopback(host: str) -> str:
    if not host.startswith("127."):
        raise argparse.ArgumentTypeError(f"not a loopback address: {host}")
    return host


async def _serve(parsed: argparse.Namespace) -> None:
    settings = HubSettings(
        root=parsed.root,
        inject_dir=parsed.inject_dir,
        token=parsed.token,
        bytes_per_s=parsed.rate_bytes_per_s,
        page_size=parsed.page_size,
        lfs_origin=f"http://{parsed.host}:{parsed.lfs_port}" if parsed.lfs_port else None,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(HubServer(settings).application(), access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        for port in filter(lambda port: port is not None, (parsed.port, parsed.lfs_port)):
            await web.TCPSite(runner, parsed.host, port).start()
        host, port = runner.addresses[0][:2]
        sys.stdout.write(f"hub: listening on http://{host}:{port}\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
