"""The staging bench's skeleton on small files: every act that needs no rival runs, and the figures have their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_prints_its_figures_as_one_json_line() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:  # on a disk: /tmp may be in memory
        done = subprocess.run(
            [sys.executable, "tests/bench/staging.py"],
            cwd=ROOT,
            env={**os.environ, "K2_BENCH_QUICK": "1", "K2_BENCH_DIR": scratch},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert list(Path(scratch).iterdir()) == []
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["workload"]["quick"] is True
    for name in ("verified_over_unverified", "cpu_verified", "cpu_unverified", "cpu_hash", "rss_peak_bytes"):
        assert result[name] > 0, name
    # What does not depend on how fast a machine is.
    assert result["disk_read_bytes"] == 0
    assert 1 <= result["disk_write_bytes"] < 1.05
    assert set(result["phase"]) and result["hardware"]["cpus"]
