"""Starts the Hub or the store of the bench in the namespace that this runs in; ends when its stdin does.

The rehearsal's own Hub and SeaweedFS, on an address of the private network instead of a loopback one. The first line on
stdout says, as JSON, how to reach it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

from infra.rehearsal import objectstore
from infra.rehearsal.hub.server import HubServer, HubSettings
from infra.rehearsal.processes import Supervisor

BUCKET = "k2-bench"


async def _serve_hub(directory: Path, host: str) -> None:
    runner = web.AppRunner(HubServer(HubSettings(directory)).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 8080).start()
    _say({"endpoint": f"http://{host}:8080"})
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _serve_store(directory: Path, host: str) -> None:
    with Supervisor(directory) as supervisor:
        store = objectstore.start(supervisor, host=host)
        store.ensure_bucket(BUCKET)
        keys = {"access_key": store.keys.access_key, "secret_key": store.keys.secret_key}
        _say({"endpoint": store.endpoint, "bucket": BUCKET, **keys})
        sys.stdin.read()


def _say(facts: dict[str, str]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    what, place, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    place.mkdir(parents=True, exist_ok=True)
    if what == "hub":
        asyncio.run(_serve_hub(place, address))
    else:
        _serve_store(place, address)
