"""One act of the staging bench, in a process of its own: `python -m tests.bench.parts.acts '{"act": ..., ...}'`.

It loads all it needs, then does the act and prints what it cost as one JSON line: wall and CPU seconds (of child
processes too), bytes read from and written to disks (/proc/self/io), and the peak of the process's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tasks.core.lock import Lock, LockedFile, lock_from_data

BUCKET = "bench"
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Setting:
    """What an act works on."""

    act: str
    url: str
    lock_file: str
    out: str
    threads: int
    cache_mode: str = "keep"
    s5cmd: str = ""

    @property
    def lock(self) -> Lock:
        """The files that are staged."""
        return lock_from_data(json.loads(Path(self.lock_file).read_bytes()))


def _store(setting: Setting) -> Any:
    from tasks.adapters.store import S3Store, StoreCredentials

    store = S3Store(setting.url, BUCKET, StoreCredentials("bench", "bench"))
    next(store.open(f"locks/{setting.lock.digest}.json"))  # boto3 is loaded and its client made
    return store


def _each(setting: Setting, work: Callable[[LockedFile], object]) -> None:
    with ThreadPoolExecutor(setting.threads) as pool:
        list(pool.map(work, setting.lock.files))


def _writing(setting: Setting, open_file: Callable[[LockedFile], Iterator[Any]]) -> Callable[[], None]:
    from tasks.node.verified_file import Writing, write_verified

    def one(file: LockedFile) -> None:
        with contextlib.closing(open_file(file)) as blocks:  # type: ignore[type-var]
            write_verified(Path(setting.out), file.path, file, blocks, lambda count: None, Writing(setting.cache_mode))

    return lambda: _each(setting, one)


def verified(setting: Setting) -> Callable[[], None]:
    """Files from the store as a stager writes them."""
    store = _store(setting)
    return _writing(setting, lambda file: store.open(f"blobs/{file.sha256}"))


def unverified(setting: Setting) -> Callable[[], None]:
    """The same code without the hash: the same requests, blocks, writes, fsyncs and renames."""
    from tasks.node import verified_file

    nothing = SimpleNamespace(update=lambda view: None, hexdigest=lambda: "")
    verified_file.hashlib = SimpleNamespace(sha256=lambda: nothing)  # type: ignore[attr-defined]
    verified_file.check_content = lambda *_: None  # type: ignore[assignment]
    return verified(setting)


def hub(setting: Setting) -> Callable[[], None]:
    """Files as a stager writes them that reads from the Hub itself."""
    from tasks.adapters.hub import HfHub

    adapter, lock = HfHub(setting.url), setting.lock
    adapter.resolve(lock.repo, lock.revision)
    return _writing(setting, lambda file: adapter.open_file(lock.repo, lock.revision, file.path, 0))


def stage(setting: Setting) -> Callable[[], None]:
    """The whole program of a staging Job: the lock, room, files, the marker and its copy in the store."""
    from tasks.node import stage as program

    _store(setting)
    os.environ |= {
        "K2_STORE_ENDPOINT": setting.url,
        "K2_STORE_BUCKET": BUCKET,
        "K2_STORE_ACCESS_KEY": "bench",
        "K2_STORE_SECRET_KEY": "bench",
        "K2_TERMINATION_LOG": "/dev/null",
    }
    argv = ["--root", setting.out, "--lock-digest", setting.lock.digest, "--node", "bench", "--node-uid", "bench"]

    def act() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            if program.main([*argv, "--threads", str(setting.threads)]):
                raise SystemExit("the stager failed")

    return act


def hub_then_verify(setting: Setting) -> Callable[[], None]:
    """huggingface_hub's download of the revision and its own check of it, as `hf download` and `hf cache verify` do."""
    os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"HF_HOME": f"{setting.out}/.home"}
    from huggingface_hub import HfApi, snapshot_download

    api, lock = HfApi(endpoint=setting.url, token=False), setting.lock

    def act() -> None:
        snapshot_download(
            lock.repo,
            revision=lock.revision,
            local_dir=setting.out,
            endpoint=setting.url,
            token=False,
            max_workers=setting.threads,
        )
        found = api.verify_repo_checksums(lock.repo, revision=lock.revision, local_dir=setting.out)
        if found.mismatches or found.missing_paths or found.checked_count != len(lock.files):
            raise SystemExit(f"the rival's check failed: {found}")

    return act


def s5cmd(setting: Setting) -> Callable[[], None]:
    """`s5cmd run` with a cp for each file: so many files at once, else its defaults."""
    out = Path(setting.out)
    commands = "".join(f"cp s3://{BUCKET}/blobs/{file.sha256} {out / file.path}\n" for file in setting.lock.files)
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "none"}
    program = [setting.s5cmd, "--endpoint-url", setting.url, "--numworkers", str(setting.threads), "run"]
    return lambda: _done(subprocess.run(program, input=commands.encode(), env=environment, stdout=subprocess.DEVNULL))


def _done(done: subprocess.CompletedProcess[bytes]) -> None:
    done.check_returncode()


def boto3(setting: Setting) -> Callable[[], None]:
    """boto3's transfer manager (`download_file`) with its defaults, so many files at once."""
    client = _store(setting)._client
    out = Path(setting.out)
    return lambda: _each(
        setting, lambda file: client.download_file(BUCKET, f"blobs/{file.sha256}", str(out / file.path))
    )


def only_hash(setting: Setting) -> Callable[[], None]:
    """sha256 of as many bytes in as many threads, from one buffer that stays in the processor's cache."""
    return _hashing(setting, _BLOCK_BYTES)


def only_hash_from_memory(setting: Setting) -> Callable[[], None]:
    """The same from a buffer that no cache of a core holds: what arrives by a network is somewhere in between."""
    return _hashing(setting, 64 * _BLOCK_BYTES)


def _hashing(setting: Setting, buffer_bytes: int) -> Callable[[], None]:
    buffer = memoryview(bytearray(os.urandom(_BLOCK_BYTES) * (buffer_bytes // _BLOCK_BYTES)))

    def one(file: LockedFile) -> None:
        digest, done = hashlib.sha256(), 0
        while done < file.size_bytes:
            begin = done % len(buffer)
            block = buffer[begin : begin + min(_BLOCK_BYTES, file.size_bytes - done)]
            digest.update(block)
            done += len(block)

    return lambda: _each(setting, one)


ACTS: dict[str, Callable[[Setting], Callable[[], None]]] = {
    "verified": verified,
    "unverified": unverified,
    "hub": hub,
    "stage": stage,
    "hub_then_verify": hub_then_verify,
    "s5cmd": s5cmd,
    "boto3": boto3,
    "only_hash": only_hash,
    "only_hash_from_memory": only_hash_from_memory,
}


def _warm_memory(setting: Setting) -> None:
    """Let the machine have as much memory at hand as the act fills.

    A page new to a virtual machine costs more than all we measure (2 CPU seconds a GB, seen), and is new again a few
    seconds after it was freed: without this, whoever comes right after another act would be cheaper.
    """
    block = bytes(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=setting.out) as file:
        for _ in range(setting.lock.total_bytes // len(block)):
            file.write(block)


def _cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def _disk_bytes() -> dict[str, int]:
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in pairs if name in ("read_bytes", "write_bytes")}


def main() -> None:
    """Do the act that the first argument says, and print what it cost."""
    setting = Setting(**json.loads(sys.argv[1]))
    act = ACTS[setting.act](setting)
    if not setting.act.startswith("only_hash"):
        _warm_memory(setting)
    disk, cpu, began = _disk_bytes(), _cpu_s(), time.perf_counter()
    act()
    wall_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu
    disk = {name: value - disk[name] for name, value in _disk_bytes().items()}
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(row.split()[1]) for row in status if row.startswith("VmHWM"))
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "rss_peak_bytes": peak_kib * 1024, **disk}))


if __name__ == "__main__":
    main()
