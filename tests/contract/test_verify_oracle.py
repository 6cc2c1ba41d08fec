"""`k2ctl verify` held against `hf cache verify` on damaged trees, and against a Hub server that is not ours (olah)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.hub import publish
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock
from tasks.node.program import Stop
from tasks.node.stored_files import read_stored
from tests.contract.damaged_trees import CODE, SHARD, TREES, Tree, damage
from tests.contract.hub import olah_site
from tests.contract.verdict_table import (
    REPO,
    Judged,
    Row,
    hf_verify,
    hub_environment,
    hub_server,
    judge,
    make_checkpoint,
    table,
    write_lock,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "verdicts.txt"
BY_NAME = {tree.name: tree for tree in TREES}


@dataclass(frozen=True)
class Site:
    """A checkpoint, the Hub that serves it, and its lock."""

    checkpoint: Path
    url: str
    commit: str
    lock_file: Path
    lock: Lock


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The rehearsal's Hub server with a small checkpoint."""
    place = tmp_path_factory.mktemp("oracle")
    checkpoint = make_checkpoint(place / "checkpoint")
    commit = publish(place / "hub", REPO, checkpoint)
    with hub_server(place / "hub") as url:
        yield Site(checkpoint, url, commit, place / "lock.json", write_lock(url, commit, place / "lock.json"))


@pytest.fixture(scope="module")
def rows(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Both judgements on every tree."""
    place = tmp_path_factory.mktemp("trees")
    return {
        tree.name: judge(tree, site.checkpoint, place / str(number), site.url, site.commit, site.lock_file)
        for number, tree in enumerate(TREES)
    }


@pytest.mark.parametrize("name", BY_NAME)
def test_ours_is_never_laxer(rows: dict[str, Row], name: str) -> None:
    assert rows[name].laxer == []


def test_where_ours_is_stricter_is_listed(rows: dict[str, Row]) -> None:
    assert len(TREES) >= 20
    assert table(list(rows.values())) == GOLDEN.read_text(), (
        "read the diff, then: python -m tests.contract.verdict_table > tests/golden/verdicts.txt"
    )


@pytest.mark.parametrize(
    ("laxer", "theirs"),
    [
        ("plain", Judged(wrong=frozenset({"a"}))),
        ("plain", Judged(broke=True)),
        ("+missing", Judged(missing=frozenset({"a"}))),
        ("+extra", Judged(extra=frozenset({"a"}))),
    ],
)
def test_a_laxer_judgement_of_ours_would_be_seen(laxer: str, theirs: Judged) -> None:
    assert laxer in Row("a tree", theirs, Judged(), (0, 0)).laxer
    assert Row("a tree", Judged(wrong=frozenset("a")), Judged(wrong=frozenset("b")), (5, 5)).laxer == ["a"]


@pytest.mark.parametrize(
    ("name", "flags", "column"),
    [
        ("nothing wrong", ["--fail-on-missing-files", "--fail-on-extra-files"], 2),
        ("middle byte of a shard flipped", [], 0),
        ("everything is missing", [], 0),
        ("everything is missing", ["--fail-on-missing-files"], 1),
        ("extra code", ["--fail-on-missing-files", "--fail-on-extra-files"], 2),
    ],
)
def test_the_command_line_of_hf_ends_as_its_library_judges(
    site: Site, rows: dict[str, Row], tmp_path: Path, name: str, flags: list[str], column: int
) -> None:
    directory = damage(BY_NAME[name], site.checkpoint, tmp_path / "tree")
    environment = hub_environment(site.url, tmp_path / "home")
    command = [*hf_verify(site.url, site.commit, directory), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == int(rows[name].theirs.columns[column]), done.stderr


VERDICTS = {
    "nothing wrong": {},
    "middle byte of a shard flipped": {SHARD: "differs"},
    "shard cut to 1000 bytes": {SHARD: "differs"},
    "code is missing": {CODE: "missing"},
    "a link to the right bytes elsewhere": {},
    "a link that leads nowhere": {SHARD: "missing"},
    "a link to a device": {SHARD: "not-regular"},
    "a directory that is a link": {f"docs/{name}_guidance.md": "not-regular" for name in ("deploy", "tool_call")},
    "a directory in place of a file": {CODE: "not-regular"},
    "a pipe in place of a file": {CODE: "not-regular"},
    "a file that may not be read": {CODE: "unreadable"},
    "a git-lfs pointer, not smudged": {SHARD: "pointer"},
    "a git-lfs pointer to another file": {SHARD: "pointer"},
    "the Hub's cache, links of links": {},
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_wrong_is_called_by_its_name(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    assert {problem["path"]: problem["verdict"] for problem in row.document["problems"]} == VERDICTS[name]
    unread = set(VERDICTS[name].values()) == {"unreadable"}
    assert row.exits[0] == (11 if unread else 5 if VERDICTS[name] else 0)


def test_files_reached_through_links_are_counted(rows: dict[str, Row], site: Site) -> None:
    assert rows["the Hub's cache"].document["links"] == len(site.lock.files)
    assert rows["a link to the right bytes elsewhere"].document["links"] == 1
    assert rows["nothing wrong"].document["links"] == 0
    assert rows["a git checkout"].document["ignored"] == [".git", "docs/.cache/huggingface", "docs/.git"]


@dataclass(frozen=True)
class Olah:
    """olah, serving the same checkpoint at the same commit."""

    url: str
    commit: str
    lock_file: Path
    lock: Lock


@pytest.fixture(scope="module")
def olah(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Olah]:
    """olah on a git mirror of the checkpoint, its commit made anew with the Hub's author and message."""
    files = {
        path.relative_to(site.checkpoint).as_posix(): path.read_bytes()
        for path in site.checkpoint.rglob("*")
        if path.is_file()
    }
    with Supervisor(tmp_path_factory.mktemp("olah")) as supervisor:
        mirrors = supervisor.site_dir / "mirrors"
        olah_site.mirror(mirrors, REPO, files)
        commit = _commit_as_published(mirrors / "models" / REPO)
        url, lock_file = olah_site.start(supervisor, mirrors), supervisor.site_dir / "lock.json"
        yield Olah(url, commit, lock_file, write_lock(url, commit, lock_file))


def _commit_as_published(repository: Path) -> str:
    who = {"NAME": "rehearsal", "EMAIL": "rehearsal@localhost", "DATE": "@0 +0000"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {f"GIT_{role}_{name}": value for role in ("AUTHOR", "COMMITTER") for name, value in who.items()}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=repository, env=env, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    commit = git("commit-tree", "HEAD^{tree}", "-m", "publish")
    git("update-ref", "refs/heads/main", commit)
    return commit


def test_a_lock_made_through_olah_is_the_lock_made_directly(site: Site, olah: Olah) -> None:
    assert olah.commit == site.commit
    assert olah.lock == site.lock
    assert olah.lock_file.read_bytes() == site.lock_file.read_bytes()


@pytest.mark.parametrize("name", [tree.name for tree in TREES if not tree.without_rights])
def test_through_olah_the_verdicts_are_the_same(
    site: Site, olah: Olah, rows: dict[str, Row], tmp_path: Path, name: str
) -> None:
    tree: Tree = BY_NAME[name]
    row = judge(tree, site.checkpoint, tmp_path / "tree", olah.url, olah.commit, olah.lock_file)
    assert (row.theirs, row.ours, row.exits) == (rows[name].theirs, rows[name].ours, rows[name].exits)


@pytest.fixture(scope="module")
def pulled(
    site: Site, olah: Olah, seaweedfs: objectstore.ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> S3Store:
    """A bucket that the real puller has filled through olah."""
    bucket = "verify-" + site.lock.digest[:12]
    keys = seaweedfs.keys
    store = S3Store(seaweedfs.endpoint, bucket, StoreCredentials(keys.access_key, keys.secret_key))
    store.ensure_bucket()
    store.put(f"locks/{site.lock.digest}.json", site.lock.to_bytes())
    environment = {
        **os.environ,
        "K2_STORE_ENDPOINT": seaweedfs.endpoint,
        "K2_STORE_BUCKET": bucket,
        "K2_STORE_ACCESS_KEY": keys.access_key,
        "K2_STORE_SECRET_KEY": keys.secret_key,
        "HF_ENDPOINT": olah.url,
        "K2_TERMINATION_LOG": str(tmp_path_factory.mktemp("pull") / "termination"),
    }
    command = [sys.executable, "-m", "tasks.node.pull", "--lock-digest", site.lock.digest, "--puller", "0", "--of", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return store


def test_what_was_pulled_through_olah_is_verified_in_the_store(site: Site, pulled: S3Store) -> None:
    stored = read_stored(pulled, "", site.lock, threads=2, stop=Stop())
    assert (stored.findings.problems, stored.without_statement, stored.layout) == ((), (), "blobs")
    assert stored.findings.read_bytes == sum({file.sha256: file.size_bytes for file in site.lock.files}.values())
    key = f"blobs/{site.lock.file(SHARD).sha256}"
    right, _ = pulled.get(key)
    wrong = bytes([right[0] ^ 1]) + right[1:]
    pulled.put(key, wrong)
    pulled.delete(f"{key}.ok")
    try:
        stored = read_stored(pulled, "", site.lock, threads=2, stop=Stop())
    finally:
        pulled.put(key, right)
        pulled.put(f"{key}.ok", json.dumps({"sha256": key[6:]}).encode())
    (problem,) = stored.findings.problems
    assert (problem.path, problem.place, problem.verdict) == (SHARD, key, "differs")
    assert problem.got == hashlib.sha256(wrong).hexdigest()
    assert stored.without_statement == (key,)
