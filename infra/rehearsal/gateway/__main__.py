"""`python -m infra.rehearsal.gateway`: the route controller and its Envoy."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from infra.rehearsal.gateway.admin import EnvoyError
from infra.rehearsal.gateway.bootstrap import Address
from infra.rehearsal.gateway.controller import run
from infra.rehearsal.kubeconnection import Connection


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.rehearsal.gateway", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True, help="directory of the rehearsal site")
    parser.add_argument("--listen", type=Address.parse, required=True, help="127.x.y.z:port for users")
    parser.add_argument("--admin", type=Address.parse, required=True, help="127.x.y.z:port of Envoy's admin pages")
    parser.add_argument("--namespace", default="k2")
    return parser.parse_args()


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connection = Connection.from_kubeconfig(arguments.kubeconfig)
    await run(connection, arguments.site.absolute(), arguments.listen, arguments.admin, arguments.namespace, stop)


def main() -> int:
    """Run until SIGTERM; return 1 when Envoy cannot be started."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(_main(arguments))
    except EnvoyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
