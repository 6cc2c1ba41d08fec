"""A pull: what its supervisor costs, what a byte costs, and whether one file needs several streams.

make bench BENCH=pull. The Hub is the rehearsal's, the store SeaweedFS, both on this machine and its CPUs; rounds are
interleaved, figures are medians. For the streams each connection to the Hub is held to one rate by a relay. The last
line is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.rehearsal import objectstore
from infra.rehearsal.hub import publish
from infra.rehearsal.processes import Supervisor
from tasks.adapters.hub import HfHub
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock, LockedFile, classify, make_lock

REPO = "moonshotai/Kimi-K2-Instruct"
_ROUNDS = 5
_SMALL = (3, 1_000_000)
_LARGE = (3, 100_000_000)
_STREAMED = (8, 8_000_000)
_CONNECTION_BYTES_PER_S = 8_000_000
_AT_ONCE = 4

UNWATCHED = """
import argparse, sys
from tasks.node import pull
from tasks.node.program import Stop
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
names = argparse.Namespace(lock_digest=options["--lock-digest"], puller=0, of=1, part_bytes=pull.DEFAULT_PART_BYTES,
    threads=3, stall_s=30.0, min_bytes_per_s=10_000, orphan_idle_s=7200.0, orphan_left_s=86400.0)
pull._pull(names, Stop(), 3, [], lambda line: None)
"""


@dataclass(frozen=True)
class Checkpoint:
    """Files at the Hub."""

    directory: Path
    lock: Lock


def _checkpoint(root: Path, name: str, count: int, size_bytes: int) -> Checkpoint:
    directory = root / name
    directory.mkdir()
    files = []
    for number in range(count):
        path, data = f"model-{number + 1}-of-{count}.safetensors", os.urandom(size_bytes)
        (directory / path).write_bytes(data)
        files.append(LockedFile(path, size_bytes, classify(path), sha256=hashlib.sha256(data).hexdigest()))
    return Checkpoint(directory, make_lock(REPO, publish(root / "hub", REPO, directory), files))


@contextmanager
def _hub(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(root / "hub"), "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    process.wait(30)


@contextmanager
def _held(url: str) -> Iterator[str]:
    """Yield the URL of a relay to a server that holds the answers of each connection to one rate."""
    target = urlsplit(url)

    def copy(source: socket.socket, sink: socket.socket, held: bool) -> None:
        began, through = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while block := source.recv(64 * 1024):
                through += len(block)
                if held:
                    time.sleep(max(0.0, through / _CONNECTION_BYTES_PER_S - (time.monotonic() - began)))
                sink.sendall(block)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((target.hostname, target.port), 30)
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _timed(act: Callable[[], object]) -> dict[str, float]:
    """Wall and CPU seconds of an act that runs in child processes, theirs included."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    act()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": wall_s, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}


def _supervision(run: Callable[[Checkpoint, bool], object], small: Checkpoint, large: Checkpoint) -> dict[str, Any]:
    """What the supervisor adds to a pull, and what a byte costs with it."""
    watched, alone, bulk = [], [], []
    for _ in range(_ROUNDS):
        watched.append(_timed(lambda: run(small, True)))
        alone.append(_timed(lambda: run(small, False)))
        bulk.append(_timed(lambda: run(large, True)))
    figures = {"small_watched": _medians(watched), "small_alone": _medians(alone), "large_watched": _medians(bulk)}
    cpu_per_gb = figures["large_watched"]["cpu_s"] / large.lock.total_bytes * 1e9
    return {**figures, "large_cpu_s_per_gb": round(cpu_per_gb, 2), "peak_rss_mib": _peak_rss_mib()}


def _peak_rss_mib() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024


def _streams(url: str, files: Checkpoint) -> dict[str, float]:
    """Seconds for all files: one stream at once, several files at once, several ranges of one file at once."""
    hub, lock = HfHub(url), files.lock

    def read(file: LockedFile, start: int, end: int) -> None:
        received = start
        for block in hub.open_file(lock.repo, lock.revision, file.path, start):
            received += len(block)
            if received >= end:
                return

    def ranges(file: LockedFile, pool: ThreadPoolExecutor) -> None:
        piece = -(-file.size_bytes // _AT_ONCE)
        bounds = [(at, min(at + piece, file.size_bytes)) for at in range(0, file.size_bytes, piece)]
        list(pool.map(lambda bound: read(file, *bound), bounds))

    def files_at_once(count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda file: read(file, 0, file.size_bytes), lock.files))

    def ranges_at_once() -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for file in lock.files:
                ranges(file, pool)

    ways: dict[str, Callable[[], None]] = {
        "one_stream": lambda: files_at_once(1),
        "files_at_once": lambda: files_at_once(_AT_ONCE),
        "ranges_at_once": ranges_at_once,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, act in ways.items():
            began = time.perf_counter()
            act()
            seconds[way].append(time.perf_counter() - began)
    return {way: round(statistics.median(values), 2) for way, values in seconds.items()}


def main() -> None:
    """Measure all three and print them."""
    with tempfile.TemporaryDirectory(prefix="k2-bench-pull-") as name, Supervisor(Path(name) / "site") as supervisor:
        root, store = Path(name), objectstore.start(supervisor)
        small, large, streamed = (
            _checkpoint(root, kind, *shape)
            for kind, shape in (("small", _SMALL), ("large", _LARGE), ("streamed", _STREAMED))
        )
        keys = StoreCredentials(store.keys.access_key, store.keys.secret_key)
        bucket = S3Store(store.endpoint, "k2-bench", keys)
        bucket.ensure_bucket()
        with _hub(root) as url, _held(url) as held:
            environment = {
                **os.environ,
                "K2_STORE_ENDPOINT": store.endpoint,
                "K2_STORE_BUCKET": "k2-bench",
                "K2_STORE_ACCESS_KEY": keys.access_key,
                "K2_STORE_SECRET_KEY": keys.secret_key,
                "HF_ENDPOINT": url,
            }

            def run(checkpoint: Checkpoint, watched: bool) -> None:
                for item in bucket.list_objects("blobs/"):
                    bucket.delete(item.key)
                bucket.put(f"locks/{checkpoint.lock.digest}.json", checkpoint.lock.to_bytes())
                program = ["-m", "tasks.node.pull", "--puller", "0", "--of", "1"] if watched else ["-c", UNWATCHED]
                command = [sys.executable, *program, "--lock-digest", checkpoint.lock.digest]
                subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)

            result = {
                "bench": "pull",
                "rounds": _ROUNDS,
                "supervision": _supervision(run, small, large),
                "streams_s": _streams(held, streamed),
                "streams_shape": f"{_STREAMED[0]} files of {_STREAMED[1]} bytes, {_AT_ONCE} at once, "
                f"{_CONNECTION_BYTES_PER_S} bytes/s a connection",
                "large_shape": f"{_LARGE[0]} files of {_LARGE[1]} bytes, 3 threads, parts of 64 MiB",
                "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, shared; load {os.getloadavg()[0]:.1f}",
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
