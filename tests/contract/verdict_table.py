"""Judges damaged trees by `hf cache verify` and by `k2ctl verify`, and lists where the two differ.

`python -m tests.contract.verdict_table > tests/golden/verdicts.txt` writes the table anew; read the diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from flows import cli
from infra.rehearsal.checkpoint import write_checkpoint
from infra.rehearsal.hub import publish
from tasks.adapters.hub import HfHub
from tasks.core.lock import Lock
from tasks.steps.locking import make_accepted_lock
from tests.contract.damaged_trees import TREES, Tree, damage

REPO = "moonshotai/Kimi-K2-Instruct"
BIN = Path(sys.executable).parent
HEAD = """\
Damaged checkouts, judged by `hf cache verify` of huggingface_hub and by `k2ctl verify`: pass or FAIL.
+missing: with --fail-on-missing-files. +extra: with --fail-on-missing-files and --fail-on-extra-files (theirs), with
--fail-on-extra (ours). Ours fails wherever theirs does. "stricter": where it fails and theirs does not.
"""


@dataclass(frozen=True)
class Judged:
    """What a verifier found: names of wrong, missing and extra files; `broke` if it ended without a verdict."""

    wrong: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()
    broke: bool = False

    @property
    def columns(self) -> tuple[bool, bool, bool]:
        """Whether it fails plainly, with missing files counted, and with extra files counted as well."""
        plain = bool(self.wrong) or self.broke
        return plain, plain or bool(self.missing), plain or bool(self.missing or self.extra)


@dataclass(frozen=True)
class Row:
    """One tree and both judgements; `exits` are the exit codes of ours, plain and with extra files counted."""

    tree: str
    theirs: Judged
    ours: Judged
    exits: tuple[int, int]
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def our_columns(self) -> tuple[bool, bool]:
        """Whether ours fails, and with extra files counted; by its exit codes."""
        return self.exits[0] != 0, self.exits[1] != 0

    @property
    def laxer(self) -> list[str]:
        """Where theirs fails and ours does not, or names a file that ours does not name."""
        theirs, (plain, extra) = self.theirs.columns, self.our_columns
        found = [name for name, t, o in zip(("plain", "+missing"), theirs, (plain, plain), strict=False) if t and not o]
        found += ["+extra"] if theirs[2] and not extra else []
        found += sorted(self.theirs.wrong - self.ours.wrong)
        found += sorted(self.theirs.missing - self.ours.wrong - self.ours.missing)
        return found + sorted(self.theirs.extra - self.ours.extra)

    @property
    def stricter(self) -> list[str]:
        """Where ours fails and theirs does not."""
        theirs, (plain, extra) = self.theirs.columns, self.our_columns
        names = ("plain", "+missing", "+extra")
        return [name for name, t, o in zip(names, theirs, (plain, plain, extra), strict=True) if o and not t]


def their_judgement(url: str, commit: str, directory: Path) -> Judged:
    """Return what huggingface_hub's own verification says; this is what `hf cache verify` prints."""
    found = HfApi(endpoint=url, token=False).verify_repo_checksums(REPO, revision=commit, local_dir=str(directory))
    wrong = frozenset(mismatch["path"] for mismatch in found.mismatches)
    return Judged(wrong, frozenset(found.missing_paths), frozenset(found.extra_paths))


def our_judgement(lock: Path, directory: Path) -> tuple[Judged, tuple[int, int], dict[str, Any]]:
    """Return what `k2ctl verify` says, its two exit codes, and its document."""
    words, exits, document = ["verify", str(lock), "--dir", str(directory), "--json"], [], {}
    for more in ([], ["--fail-on-extra"]):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            exits.append(int(cli.main([*words, *more])))
        document = document or json.loads(output.getvalue())
    return _judged(document), (exits[0], exits[1]), document


def _judged(document: dict[str, Any]) -> Judged:
    rows = document["problems"]
    wrong = frozenset(row["path"] for row in rows if row["verdict"] != "missing")
    return Judged(wrong, frozenset(row["path"] for row in rows) - wrong, frozenset(document["extra"]))


def without_rights(words: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program as somebody who may read only what the modes of his own files allow: root may read all."""
    caps = "-dac_override,-dac_read_search"
    prefix = ["setpriv", "--bounding-set", caps, "--inh-caps", caps] if os.geteuid() == 0 else []
    return subprocess.run([*prefix, *words], capture_output=True, text=True, timeout=60, env=environment, check=False)


def hf_verify(url: str, commit: str, directory: Path) -> list[str]:
    """Return the words of the real command line of huggingface_hub; its endpoint is an environment variable."""
    return [str(BIN / "hf"), "cache", "verify", REPO, "--revision", commit, "--local-dir", str(directory)]


def hub_environment(url: str, home: Path) -> dict[str, str]:
    """Return an environment in which `hf` asks this Hub and no other."""
    return {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_COLOR": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def judge(tree: Tree, checkpoint: Path, at: Path, url: str, commit: str, lock: Path) -> Row:
    """Return both judgements on one tree."""
    directory = damage(tree, checkpoint, at)
    if not tree.without_rights:
        return Row(tree.name, their_judgement(url, commit, directory), *our_judgement(lock, directory))
    environment = hub_environment(url, at.parent / "home")
    theirs = without_rights(hf_verify(url, commit, directory), environment)
    named = frozenset(re.findall(r"- (\S+): expected", theirs.stdout))
    ours = [
        without_rights([str(BIN / "k2ctl"), "verify", str(lock), "--dir", str(directory), "--json", *more], environment)
        for more in ([], ["--fail-on-extra"])
    ]
    document = json.loads(ours[0].stdout)
    broke = Judged(wrong=named, broke=theirs.returncode != 0 and not named)
    return Row(tree.name, broke, _judged(document), (ours[0].returncode, ours[1].returncode), document)


@contextmanager
def hub_server(root: Path) -> Iterator[str]:
    """Run the rehearsal's Hub server on a directory and yield its URL."""
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(root), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def make_checkpoint(directory: Path) -> Path:
    """Write the checkpoint of which trees are copies: four shards, the second and third of one size."""
    write_checkpoint(directory, 1, shard_scale=288, layers=4, experts=8)
    return directory


def write_lock(url: str, commit: str, path: Path) -> Lock:
    """Write the lock of the commit as the Hub tells it, and return it."""
    lock, _ = make_accepted_lock(HfHub(url), REPO, commit)
    path.write_bytes(lock.to_bytes())
    return lock


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    width = max(len(row.tree) for row in rows) + 2
    lines = [f"{'':<{width}}{'hf':<6}{'+missing':<10}{'+extra':<8}{'ours':<6}{'+extra':<8}stricter"]
    for row in rows:
        cells = ["FAIL" if fails else "pass" for fails in (*row.theirs.columns, *row.our_columns)]
        widths = (6, 10, 8, 6, 8)
        shown = "".join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True))
        lines.append(f"{row.tree:<{width}}{shown}{', '.join(row.stricter)}".rstrip())
    return HEAD + "\n" + "\n".join(lines) + "\n"


def main() -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        checkpoint = make_checkpoint(place / "checkpoint")
        commit = publish(place / "hub", REPO, checkpoint)
        with hub_server(place / "hub") as url:
            write_lock(url, commit, place / "lock.json")
            rows = [
                judge(tree, checkpoint, place / f"tree-{number}", url, commit, place / "lock.json")
                for number, tree in enumerate(TREES)
            ]
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
