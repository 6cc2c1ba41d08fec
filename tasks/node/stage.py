"""Stages a lock on this node: every file verified in the pass that writes it, a marker last.

In this order: one stager at a time on the node; no symlinks, one file system; orphans of dead stagers swept; what is
wrong or not of the lock moved to a quarantine; room checked before the first byte; files that no marker vouches for
hashed in place; each missing file streamed from the store as soon as the store has it; the marker; the directory closed
for writing. A run that fails leaves no marker. Run again, it keeps what was verified and fetches only the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.node.arrivals import StoreArrivals
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.program import Stop, run
from tasks.node.rate_limit import RateLimit
from tasks.node.sources import StoreSource
from tasks.node.stager import Stager
from tasks.node.staging_result import Node
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import CACHE_MODES, Writing
from tasks.node.workers import attempt

__all__ = ["Node", "Stager", "main"]

_TRIES = 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.stage",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + """
example:
  python -m tasks.node.stage --root /models --lock-digest 3f0c...e1 --node node-1 --node-uid 7b1e-...

exit codes: 0 staged and marked, 2 wrong input, 5 bytes differ from the lock, 8 no room, 11 store or disk: try again
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="the node's NVMe directory for weights (/models)")
    parser.add_argument("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    parser.add_argument("--node", required=True, help="name of the node; stands in the marker")
    parser.add_argument("--node-uid", required=True, help="uid of the Node object: a rebuilt node trusts no old marker")
    parser.add_argument("--reserve-bytes", type=int, default=0, help="bytes that must stay free (default: 0)")
    parser.add_argument("--threads", type=int, default=3, help="files at once (default: 3)")
    parser.add_argument("--source-stall-s", type=float, default=30.0, help="no byte for so long is a stall (30)")
    parser.add_argument(
        "--source-wait-s",
        type=float,
        default=0.0,
        help="begin before the store is filled, take each file when it is there, and give up when for so long no new "
        "one is (default 0: everything is there)",
    )
    parser.add_argument(
        "--cache-mode",
        choices=CACHE_MODES,
        default="keep",
        help="keep: what is written stays in the page cache, for an engine that starts soon; drop: nothing of it "
        "does, beside an engine that serves (default: keep)",
    )
    parser.add_argument(
        "--limit-bytes-per-s", type=float, default=0.0, help="read and write no faster (default 0: no limit)"
    )
    parser.add_argument("--lock-wait-s", type=float, default=3600.0, help="how long to wait for another stager (3600)")
    return parser


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    store = store_from_environment(arguments.source_stall_s)
    lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
    node = Node(arguments.node, arguments.node_uid)
    limit = RateLimit(arguments.limit_bytes_per_s, stop.sleep) if arguments.limit_bytes_per_s else None
    stager = Stager(
        StoreSource(store),
        store,
        arguments.root,
        lock,
        node,
        arguments.reserve_bytes,
        stop,
        writing=Writing(arguments.cache_mode, limit),
        arrivals=StoreArrivals(store) if arguments.source_wait_s else None,
        source_wait_s=arguments.source_wait_s,
    )
    return stager.stage(arguments.threads, arguments.lock_wait_s)


def main(argv: list[str] | None = None) -> int:
    """Stage a lock on this node and return the exit code."""
    arguments = _parser().parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
