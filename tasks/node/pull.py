"""Fetches this puller's share of a lock from the Hub into the object store, verified in the same pass.

What moves bytes runs in a child process. A stream that breaks, stands or drips goes on in it from the byte where it
broke; a file that does not move in spite of that has the child killed and another one started, which takes up what is
left; the third time the pull fails and says what was seen. See tasks.node.puller for what a share is and
tasks.node.transfer for how a blob moves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tasks.core.errors import InputError, K2Error
from tasks.core.staging import PULLS_AT_ONCE
from tasks.node.byte_watch import Patience
from tasks.node.program import Stop, run
from tasks.node.supervision import Supervision
from tasks.node.watched_child import Tell, WatchedChild

# What the child needs is imported in the child: this process stays small and starts at once.

DEFAULT_PART_BYTES = 64 * 1024 * 1024
_KILL_AFTER_STALLS = 3
_LEAST_SILENT_S = 30.0
_TRIES = 4


def _supervise(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    def start(threads: int, last: Sequence[str]) -> WatchedChild:
        return WatchedChild(partial(_be_told, arguments, stop, threads, last))

    window_s = arguments.kill_after_s or _KILL_AFTER_STALLS * arguments.stall_s
    patience = Patience(window_s, arguments.min_bytes_per_s, max(window_s, _LEAST_SILENT_S))
    result = Supervision(start, arguments.threads, patience, stop, processes=arguments.processes).run()
    return {"puller": arguments.puller, "of": arguments.of, **result}


def _be_told(arguments: argparse.Namespace, stop: Stop, threads: int, last: Sequence[str], tell: Tell) -> None:
    """Do the work in the child, and tell how it ended."""
    try:
        tell({"outcome": _pull(arguments, stop, threads, last, tell)})
    except K2Error as error:
        tell({"error": error.as_data()})
    except Exception as error:
        tell({"error": K2Error("K2-UNX-001", f"{type(error).__name__}: {error}"[:300]).as_data()})
        raise


def _pull(arguments: argparse.Namespace, stop: Stop, threads: int, last: Sequence[str], tell: Tell) -> dict[str, Any]:
    from tasks.node.environment import hub_from_environment, required, store_from_environment
    from tasks.node.meter import Reports
    from tasks.node.orphans import Sweep
    from tasks.node.puller import concerns, pull, share
    from tasks.node.steady_stream import Pace
    from tasks.node.stored_lock import read_lock
    from tasks.node.transfer import Route
    from tasks.node.workers import attempt

    _check(arguments)
    store, hub = store_from_environment(arguments.stall_s), hub_from_environment(arguments.stall_s)
    hub.warm_up()
    reports = Reports(tell)
    with reports.running():
        lock = attempt(partial(read_lock, store, arguments.lock_digest), stop, integrity_tries=1, tries=_TRIES)
        pace = Pace(arguments.stall_s, arguments.min_bytes_per_s)
        route = Route(hub, store, lock, required("HF_ENDPOINT"), arguments.part_bytes, pace)
        files = sorted(share(lock, arguments.puller, arguments.of), key=lambda file: file.path in last)
        sweeping = Sweep(
            concerns(lock, arguments.puller, arguments.of), arguments.orphan_idle_s, arguments.orphan_left_s
        )
        return {"source": route.source, **pull(route, files, threads, stop, reports, sweeping)}


def _check(arguments: argparse.Namespace) -> None:
    from tasks.node.transfer import MIN_PART_BYTES

    if not 0 <= arguments.puller < arguments.of:
        raise InputError(
            "K2-INP-001", "--puller must be from 0 to --of less 1.", where="--puller", got=str(arguments.puller)
        )
    if arguments.part_bytes < MIN_PART_BYTES:
        raise InputError(
            "K2-INP-001",
            "S3 takes no smaller parts.",
            where="--part-bytes",
            got=str(arguments.part_bytes),
            expected=f"at least {MIN_PART_BYTES}",
        )


def main(argv: list[str] | None = None) -> int:
    """Pull a share of a lock and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.pull",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lock-digest", required=True, help="sha256 of the lock; read from locks/<digest>.json")
    add("--puller", type=int, required=True, help="number of this puller, from 0")
    add("--of", type=int, required=True, help="count of pullers")
    add("--part-bytes", type=int, default=DEFAULT_PART_BYTES, help="size of an upload part (64 MiB)")
    add(
        "--threads",
        type=int,
        default=PULLS_AT_ONCE,
        help="blobs at once, a stream each (8); each holds a part in memory",
    )
    add("--stall-s", type=float, default=30.0, help="no byte for so long: the stream is opened anew (30)")
    add("--min-bytes-per-s", type=int, default=10_000, help="less than that over such a time is no byte (10000)")
    add(
        "--kill-after-s",
        type=float,
        default=0.0,
        help="a file that stands for so long in spite of that has its process killed (three times --stall-s)",
    )
    add("--processes", type=int, default=3, help="so many are tried one after another on one file (3)")
    add(
        "--orphan-idle-s",
        type=float,
        default=2 * 3600.0,
        help="unfinished uploads that nobody will go on with are "
        "ended when nobody has written to them for so long (7200)",
    )
    add("--orphan-left-s", type=float, default=24 * 3600.0, help="and all others after so long (86400)")
    arguments = parser.parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_supervise, arguments, stop))


_EPILOG = """environment:
  K2_STORE_ENDPOINT, K2_STORE_BUCKET         the object store
  K2_STORE_ACCESS_KEY, K2_STORE_SECRET_KEY   its credentials (from a Secret)
  K2_TERMINATION_LOG                         where the outcome is left (default: /dev/termination-log)
  HF_ENDPOINT                                the Hub or a mirror of it
  HF_TOKEN, or HF_TOKEN_PATH for a file      a token if the Hub needs one; read anew at each request

exit codes: 0 the share is in the store, 2 wrong input, 5 the Hub serves other bytes than the lock says (or the store
keeps other ones than it was sent), 11 Hub or store: try again
"""


if __name__ == "__main__":
    sys.exit(main())
