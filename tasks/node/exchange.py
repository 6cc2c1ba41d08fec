"""Puts every file of a lock on this node's disk: its own share from the Hub, the rest from the other nodes.

Each file is owned by one of the nodes, which all compute the same deal. The owner pulls it straight onto its own disk,
hashed in the pass that writes it, and serves it to the others from then on; they hash what they get as they write it.
Nobody is trusted: a node that gives other bytes is named, and the file taken from elsewhere. A node that is lost is
replaced by the next one in rotation. A node serves until all others have everything, or its time is over.

All else is as in tasks.node.stage: the same directory, the same marker, the same lock against a second stager. With no
other node this is a stager that takes everything from the Hub.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import InputError
from tasks.core.lock import Lock
from tasks.core.standing import Patience
from tasks.node.environment import ENVIRONMENT_HELP, hub_from_environment, required, store_from_environment
from tasks.node.exchange_stager import ExchangeStager, Manner, Party
from tasks.node.peer_source import Pace
from tasks.node.program import Stop, run
from tasks.node.rate_limit import RateLimit
from tasks.node.sources import HubSource, StoreSource
from tasks.node.staging_result import Node
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import CACHE_MODES, Writing
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Source, Store

PORT = 30070
_TRIES = 4


def _party(arguments: argparse.Namespace) -> Party:
    nodes, guests = _names(arguments.nodes), _names(arguments.guests)
    everybody = (*nodes, *guests)
    if not nodes or len(set(everybody)) != len(everybody) or arguments.node not in everybody:
        raise InputError(
            "K2-INP-001",
            "The nodes of the exchange have to be named, each once, this one too.",
            where="--nodes, --guests",
            got=", ".join(everybody) or "none",
            expected=f"names with {arguments.node} among them",
        )
    return Party(nodes, guests, arguments.run)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _manner(arguments: argparse.Namespace, party: Party) -> Manner:
    alone = not party.others(arguments.node)
    return Manner(
        host="" if alone else arguments.host or required("POD_IP"),
        port=arguments.port,
        pull_threads=arguments.pull_threads,
        threads=arguments.threads,
        serve_s=arguments.serve_s,
        deny_s=2 * arguments.lost_s,
        patience=Patience(join_s=arguments.join_s, lost_s=arguments.lost_s),
        pace=Pace(stall_s=arguments.stall_s),
    )


def _origin(arguments: argparse.Namespace, store: Store, lock: Lock) -> Source:
    return (
        StoreSource(store) if arguments.origin == "store" else HubSource(hub_from_environment(arguments.stall_s), lock)
    )


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    party = _party(arguments)
    store = store_from_environment(arguments.stall_s)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    limit = RateLimit(arguments.limit_bytes_per_s, stop.sleep) if arguments.limit_bytes_per_s else None
    stager = ExchangeStager(
        _origin(arguments, store, lock),
        store,
        arguments.root,
        lock,
        Node(arguments.node, arguments.node_uid),
        arguments.reserve_bytes,
        stop,
        party,
        _manner(arguments, party),
        Writing(arguments.cache_mode, limit),
    )
    return stager.exchange(arguments.lock_wait_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.exchange",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """  HF_ENDPOINT, HF_TOKEN                      the Hub or a mirror of it, and a token if it needs one
  POD_IP                                     the address to serve on

example:
  python -m tasks.node.exchange --root /models --lock-digest 3f0c...e1 --node node-1 --node-uid 7b1e-... \\
    --nodes node-1,node-2,node-3 --run 5c1d

exit codes: 0 staged and marked, 2 wrong input, 5 the Hub serves other bytes than the lock says, 8 no room,
11 Hub, store, nodes or disk: try again
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="the node's NVMe directory for weights (/models)")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--node", required=True, help="name of the node; stands in the marker")
    parser.add_argument("--node-uid", required=True, help="uid of the Node object: a rebuilt node trusts no old marker")
    parser.add_argument("--nodes", required=True, help="the nodes that own the files, comma between, same on all")
    parser.add_argument("--guests", default="", help="further nodes, which get everything and own nothing")
    parser.add_argument("--run", default="", help="what the nodes that were started together have in common")
    parser.add_argument("--origin", choices=("hub", "store"), default="hub", help="where an owner pulls from (hub)")
    parser.add_argument("--fetch-command", default="", help="get it by this program of Dragonfly, such as dfget")
    parser.add_argument("--host", default="", help="address to serve on (default: POD_IP)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to serve on ({PORT})")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--threads", type=int, default=3, help="files at once from other nodes (3)")
    parser.add_argument("--pull-threads", type=int, default=3, help="files at once from the origin (3)")
    parser.add_argument("--stall-s", type=float, default=30.0, help="no byte for so long is a stall (30)")
    parser.add_argument("--join-s", type=float, default=60.0, help="how long other nodes may take to come (60)")
    parser.add_argument("--lost-s", type=float, default=15.0, help="silent for so long, a node is lost (15)")
    parser.add_argument("--serve-s", type=float, default=1800.0, help="serves for so long at most when done (1800)")
    parser.add_argument(
        "--cache-mode",
        choices=CACHE_MODES,
        default="keep",
        help="keep: what is written stays in the page cache, for an engine that starts soon, and is served from there; "
        "drop: nothing of it does, beside an engine that serves (default: keep)",
    )
    parser.add_argument(
        "--limit-bytes-per-s", type=float, default=0.0, help="read and write no faster (default 0: no limit)"
    )
    parser.add_argument("--lock-wait-s", type=float, default=3600.0, help="how long to wait for another stager (3600)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Take part in an exchange and return the exit code."""
    arguments = _parser().parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
