"""Runs one engine process: ``python -m infra.rehearsal.engine <arguments of sglang.launch_server>``."""

from __future__ import annotations

import os
import sys

from infra.rehearsal.engine import BANNER, arguments, journal, performance, process


def main(argv: list[str]) -> int:
    """Runs the engine named by ``argv`` until it is told to stop; answers its exit code."""
    print(BANNER, flush=True)
    namespace = arguments.parse(argv)
    journal.configure(namespace.log_level)
    try:
        engine = arguments.resolve(namespace, argv)
    except (arguments.ArgumentFault, OSError, ValueError) as fault:
        journal.exception("launch_server", fault)
        return 1
    model = performance.load().for_group(engine)
    return process.run(engine, model, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
