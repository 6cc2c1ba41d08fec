"""Hashing a staged directory: our verifier against coreutils' sha256sum on the same files, interleaved.

make bench BENCH=verify. Files are in the page cache: this compares CPU and threads, not disks. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tasks.core.identity import sha256_hex
from tasks.core.lock import LockedFile, make_lock
from tasks.node.program import Stop
from tasks.node.verify_files import verify_directory

_FILES, _FILE_BYTES, _ROUNDS = 8, 64_000_000, 5


def _timed(act: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of an act, its child processes included."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(kind) for kind in kinds]
    began = time.perf_counter()
    act()
    wall_s = time.perf_counter() - began
    after = [resource.getrusage(kind) for kind in kinds]
    cpu_s = sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in zip(after, before, strict=True))
    return wall_s, cpu_s


def main() -> None:
    """Run both on the same files in turn and print medians and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        directory, block = Path(name), os.urandom(1_000_000)
        files = []
        for number in range(_FILES):
            data = number.to_bytes(8, "little") + block * (_FILE_BYTES // len(block))
            (directory / f"model-{number + 1}-of-{_FILES}.safetensors").write_bytes(data)
            files.append(
                LockedFile(f"model-{number + 1}-of-{_FILES}.safetensors", len(data), "shard", sha256_hex(data))
            )
        lock = make_lock("bench/verify", "0" * 40, files)
        paths = [str(directory / file.path) for file in lock.files]
        ours, theirs = [], []
        for _ in range(_ROUNDS):
            ours.append(_timed(lambda: verify_directory(directory, lock, "bench", os.cpu_count() or 1, Stop())))
            theirs.append(_timed(lambda: subprocess.run(["sha256sum", *paths], check=True, capture_output=True)))
    wall = {"ours": [w for w, _ in ours], "sha256sum": [w for w, _ in theirs]}
    cpu = {"ours": [c for _, c in ours], "sha256sum": [c for _, c in theirs]}
    result = {
        "bench": "verify",
        "rival": "coreutils sha256sum, one process, same files",
        "bytes": lock.total_bytes,
        "rounds": _ROUNDS,
        "threads": os.cpu_count(),
        "wall_s_median": {who: round(statistics.median(values), 3) for who, values in wall.items()},
        "cpu_s_median": {who: round(statistics.median(values), 3) for who, values in cpu.items()},
        "wall_ratio": round(statistics.median(wall["sha256sum"]) / statistics.median(wall["ours"]), 2),
        "cpu_ratio": round(statistics.median(cpu["sha256sum"]) / statistics.median(cpu["ours"]), 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    print(f"{_FILES} files of {_FILE_BYTES} bytes, {_ROUNDS} rounds each, interleaved")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
