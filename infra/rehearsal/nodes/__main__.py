"""`python -m infra.rehearsal.nodes`: run the nodes of a rehearsal site until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.rehearsal.kubeclient import KubeClient
from infra.rehearsal.kubeconnection import Connection
from infra.rehearsal.nodes.agent import AgentError, NodeAgent
from infra.rehearsal.nodes.launches import SitePaths
from infra.rehearsal.nodes.machines import Machine, MachineSpec

_MAX_NODES = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the agent, and return the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        asyncio.run(_run(options))
    except AgentError as error:
        print(f"node agent: {error}", file=sys.stderr)
        return 1
    return 0


def machines(options: argparse.Namespace) -> list[Machine]:
    """Return the machines that the command line asks for."""
    spec = MachineSpec(gpus=options.gpus, pool=options.pool)
    nodes = SitePaths(options.site.resolve()).nodes
    return [
        Machine(f"{options.prefix}{index}", index, options.subnet, nodes / f"{options.prefix}{index}", spec)
        for index in range(1, options.nodes + 1)
    ]


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    certificate = (options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
    async with KubeClient(Connection.from_kubeconfig(options.kubeconfig), user_agent="k2-node-agent") as client:
        site = SitePaths(options.site.resolve())
        agent = NodeAgent(client, site, machines(options), certificate=certificate)
        await agent.run(stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.rehearsal.nodes", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="kubeconfig of the user k2-node-agent")
    parser.add_argument("--site", type=Path, required=True, help="directory of the rehearsal site")
    parser.add_argument("--subnet", type=_subnet, required=True, help="the site's part of 127/8, as in 127.5")
    parser.add_argument("--nodes", type=_count, default=6, help="how many nodes (default %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="nvidia.com/gpu of each node (default %(default)s)")
    parser.add_argument("--prefix", default="node-", help="what node names begin with (default %(default)s)")
    parser.add_argument("--pool", default="h200", help="value of the label k2-release.io/pool")
    parser.add_argument("--tls-cert", type=Path, help="certificate of the log servers (default: made here)")
    parser.add_argument("--tls-key", type=Path, help="key of that certificate")
    return parser


def _subnet(text: str) -> str:
    if not re.fullmatch(r"127\.\d{1,3}", text):
        raise argparse.ArgumentTypeError("must look like 127.N")
    ipaddress.ip_address(f"{text}.0.1")
    return text


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MAX_NODES:
        raise argparse.ArgumentTypeError(f"must be between 1 and {_MAX_NODES}")
    return number


if __name__ == "__main__":
    sys.exit(main())
