"""`k2ctl verify` against `hf cache verify` on the same checkout in the page cache, as processes, interleaved.

make bench BENCH=verify, or `python tests/bench/verify.py --gb 1 --rounds 3 --dir /mnt/scratch`. Beside them, in the
same rounds, OpenSSL alone: one process over all files, then two that share them. That is what two threads can win on
this machine now. At the end both verdicts on a corrupted copy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from infra.rehearsal.hub import publish
from tasks.core.lock import Lock, LockedFile, classify, make_lock

BIN = Path(sys.executable).parent
REPO = "bench/verify"
GOAL = 1.6
_BLOCK_BYTES = 8 * 1024 * 1024
_TIMEOUT_S = 900
_SMALL = {"config.json": b'{"architectures": ["DeepseekV3ForCausalLM"]}\n', "modeling.py": b"pass\n"}


@dataclass(frozen=True)
class Run:
    """One run: seconds, CPU seconds of all its processes, bytes read from disk, exit code of the last, its output."""

    wall_s: float
    cpu_s: float
    disk_bytes: int
    exit_code: int
    output: str

    @property
    def cores(self) -> float:
        """How many CPUs it was given; on a busy machine fewer than it wanted."""
        return self.cpu_s / self.wall_s


def run(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> Run:
    """Run commands at the same time and wait for all of them."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, env=environment) for command in commands
        ]
        ended = [os.wait4(process.pid, 0) for process in processes]
        wall_s = time.perf_counter() - began
        output.seek(0)
        text = output.read().decode()
    for process, (_, status, _) in zip(processes, ended, strict=True):
        process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
    disk_bytes = sum(usage.ru_inblock * 512 for _, _, usage in ended)
    return Run(wall_s, cpu_s, disk_bytes, max(process.returncode for process in processes), text)


def write_checkout(directory: Path, total_bytes: int, files: int) -> Lock:
    """Write shards and small files, hashed as they are written, and return their lock."""
    directory.mkdir(parents=True)
    block, locked = bytearray(os.urandom(_BLOCK_BYTES)), []
    for number in range(1, files + 1):
        name, left, digest = f"model-{number}-of-{files}.safetensors", total_bytes // files, hashlib.sha256()
        with (directory / name).open("wb", buffering=0) as file:
            while left:
                block[:8] = (number * 1_000_003 + left).to_bytes(8, "little")
                view = memoryview(block)[: min(left, len(block))]
                file.write(view)
                digest.update(view)
                left -= len(view)
        locked.append(LockedFile(name, total_bytes // files, "shard", digest.hexdigest()))
    for name, data in _SMALL.items():
        (directory / name).write_bytes(data)
        locked.append(LockedFile(name, len(data), classify(name), hashlib.sha256(data).hexdigest()))
    return make_lock(REPO, "0" * 40, locked)


def corrupt_copy(directory: Path, copy: Path) -> set[str]:
    """Make a copy of links with one byte flipped in a shard and a small file changed; return the two paths."""
    shutil.copytree(directory, copy, copy_function=os.link)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    for path in (shard, copy / "config.json"):
        path.unlink()
        shutil.copyfile(directory / path.name, path)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    return {shard.name, "config.json"}


@contextmanager
def hub_server(root: Path) -> Iterator[str]:
    """Run the rehearsal's Hub server on a directory and yield its URL: `hf cache verify` asks a Hub for the digests."""
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(root), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def commands_of(directory: Path, lock: Path, commit: str, shards: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the processes of each contestant; several run at the same time."""
    dgst = ["openssl", "dgst", "-sha256"]
    hf = [str(BIN / "hf"), "cache", "verify", REPO, "--revision", commit, "--local-dir", str(directory)]
    return {
        "ours": [[str(BIN / "k2ctl"), "verify", str(lock), "--dir", str(directory), "--json"]],
        "hf": [[*hf, "--fail-on-missing-files"]],
        "openssl_1": [[*dgst, *shards]],
        "openssl_2": [[*dgst, *shards[0::2]], [*dgst, *shards[1::2]]],
    }


def measure(commands: dict[str, list[list[str]]], rounds: int, environment: dict[str, str]) -> dict[str, list[Run]]:
    """Run every contestant once a round, each round in another order."""
    names, runs = list(commands), {name: [] for name in commands}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            done = run(commands[name], environment)
            if done.exit_code != 0:
                sys.exit(f"{name} exits {done.exit_code}: {done.output[-1000:]}")
            runs[name].append(done)
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {runs[name][-1].wall_s:.2f} s" for name in names), flush=True
        )
    return runs


def verdicts(commands: dict[str, list[list[str]]], environment: dict[str, str]) -> dict[str, set[str]]:
    """Return the wrong files that each verifier names; one that does not exit as wrong names none."""
    ours, theirs = run(commands["ours"], environment), run(commands["hf"], environment)
    return {
        "ours": {row["path"] for row in json.loads(ours.output)["problems"]} if ours.exit_code == 5 else set(),
        "hf": set(re.findall(r"- (\S+): expected", theirs.output)) if theirs.exit_code == 1 else set(),
    }


def median(runs: Sequence[Run], field: str) -> float:
    """Return the median of one figure."""
    return round(statistics.median(getattr(one, field) for one in runs), 3)


def main() -> int:
    """Measure, print a line a round, and one JSON object last; exit 1 if the verdicts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the checkout (default: 8)")
    parser.add_argument("--files", type=int, default=8, help="shards (default: 8)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write it (default: a temporary directory)")
    arguments = parser.parse_args()
    total_bytes = int(arguments.gb * 1e9)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        place = Path(name)
        if shutil.disk_usage(place).free < 1.3 * total_bytes:
            sys.exit(f"{place} has no room for {arguments.gb:g} GB: give a smaller --gb or another --dir")
        lock = write_checkout(place / "checkout", total_bytes, arguments.files)
        commit = publish(
            place / "hub", REPO, place / "checkout"
        )  # hard links; its reading leaves all in the page cache
        (place / "lock.json").write_bytes(lock.to_bytes())
        wrong = corrupt_copy(place / "checkout", place / "copy")
        with hub_server(place / "hub") as url:
            environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(place / "home"), "NO_COLOR": "1"}
            environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
            shards = [str(place / "checkout" / file.path) for file in lock.shards]
            commands = commands_of(place / "checkout", place / "lock.json", commit, shards)
            runs = measure(commands, arguments.rounds, environment)
            on_copy = commands_of(place / "copy", place / "lock.json", commit, shards)
            named = verdicts(on_copy, environment)
    print(json.dumps(result_of(lock, runs, named, wrong)))
    return 0 if named["ours"] == named["hf"] == wrong else 1


def result_of(lock: Lock, runs: dict[str, list[Run]], named: dict[str, set[str]], wrong: set[str]) -> dict[str, object]:
    """Return the figures of a measurement."""
    wall_s = {name: median(of, "wall_s") for name, of in runs.items()}
    ratio = wall_s["hf"] / wall_s["ours"]
    return {
        "bench": "verify",
        "rival": f"hf cache verify of huggingface_hub {version('huggingface_hub')}",
        "bytes": lock.total_bytes,
        "files": len(lock.files),
        "rounds": len(runs["ours"]),
        "hf_over_ours": round(ratio, 2),
        "hf_over_ours_by_round": [round(h.wall_s / o.wall_s, 2) for h, o in zip(runs["hf"], runs["ours"], strict=True)],
        "openssl_one_over_two": round(wall_s["openssl_1"] / wall_s["openssl_2"], 2),
        "goal": GOAL,
        "goal_met": ratio >= GOAL,
        "wall_s_median": wall_s,
        "cpu_s_median": {name: median(of, "cpu_s") for name, of in runs.items()},
        "cores_median": {name: median(of, "cores") for name, of in runs.items()},
        "disk_bytes": {name: sum(one.disk_bytes for one in of) for name, of in runs.items()},
        "corrupted_copy": {"same_verdicts": named["ours"] == named["hf"] == wrong, "wrong": sorted(wrong)},
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, page cache warm",
    }


if __name__ == "__main__":
    sys.exit(main())
