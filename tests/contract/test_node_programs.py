"""Pull and stage as they run on a node: real processes, real SeaweedFS, real huggingface_hub, kills in the middle."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests

from infra.rehearsal import objectstore
from infra.rehearsal.hub import publish
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.lock import Lock, LockedFile, classify, make_lock
from tasks.core.marker import MARKER_FILE
from tasks.node.directory_lock import LOCKS_DIR
from tasks.node.verified_file import PARTIAL_DIR
from tests.contract.slow_relay import relayed

REPO = "moonshotai/Kimi-K2-Instruct"
BIG = "model-1-of-2.safetensors"
PART = 5 * 1024 * 1024
SLOW_BYTES_PER_S = 500_000
SECRET = "a-secret-that-must-not-be-printed"


@dataclass(frozen=True)
class Site:
    store: S3Store
    environment: dict[str, str]
    files: dict[str, bytes]
    lock: Lock
    inject: Path
    hub_url: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectstore.ObjectStore]:
    with Supervisor(tmp_path_factory.mktemp("store")) as supervisor:
        yield objectstore.start(supervisor)


@pytest.fixture
def site(server: objectstore.ObjectStore, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A Hub with one revision, and an empty bucket that knows the lock."""
    source = random.Random(request.node.name)
    files = {
        BIG: source.randbytes(4 * PART + 1000),
        "model-2-of-2.safetensors": source.randbytes(200_000),
        "config.json": b"{}\n",
    }
    for path, data in files.items():
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / path).write_bytes(data)
    commit = publish(tmp_path / "hub", REPO, tmp_path / "checkpoint")
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    lock = make_lock(REPO, commit, [LockedFile(p, len(d), classify(p), sha256=digests[p]) for p, d in files.items()])
    inject = tmp_path / "inject"
    inject.mkdir()
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(tmp_path / "hub"), "--host", "127.0.0.1"]
    command += ["--port", "0", "--inject-dir", str(inject)]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    url = hub.stdout.readline().split()[-1]
    bucket = "b" + digests[BIG][:12]
    store = S3Store(server.endpoint, bucket, StoreCredentials(server.keys.access_key, server.keys.secret_key))
    store.ensure_bucket()
    store.put(f"locks/{lock.digest}.json", lock.to_bytes())
    environment = {
        **os.environ,
        "K2_STORE_ENDPOINT": server.endpoint,
        "K2_STORE_BUCKET": bucket,
        "K2_STORE_ACCESS_KEY": server.keys.access_key,
        "K2_STORE_SECRET_KEY": server.keys.secret_key,
        "HF_ENDPOINT": url,
        "HF_TOKEN": SECRET,
        "K2_TERMINATION_LOG": str(tmp_path / "termination"),
    }
    yield Site(store, environment, files, lock, inject, url)
    hub.terminate()
    hub.wait(30)
    # Each bucket holds seven of the server's volumes; there would not be enough for all tests.
    signed = server.keys.headers("DELETE", f"{server.host}:{server.port}", f"/{bucket}")
    requests.delete(f"{server.endpoint}/{bucket}", headers=signed, timeout=30).raise_for_status()


@contextmanager
def slowed(site: Site, variable: str, after_bytes: int) -> Iterator[Site]:
    """Let so many bytes of a server's answers through at once and the rest at SLOW_BYTES_PER_S.

    Half a minute of a transfer that is in its middle: whoever wants to end a program there has the time to.
    """
    url = site.environment[variable]
    with relayed(url, "127.0.0.1", slow_after_bytes=after_bytes, bytes_per_s=SLOW_BYTES_PER_S) as slow:
        yield replace(site, environment=site.environment | {variable: slow})


class Program:
    """A node program that runs."""

    def __init__(self, site: Site, name: str, *arguments: str) -> None:
        self.log = Path(site.environment["K2_TERMINATION_LOG"])
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"tasks.node.{name}", "--lock-digest", site.lock.digest, *arguments]
        self._secrets = (SECRET, site.environment["K2_STORE_SECRET_KEY"])
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=site.environment
        )

    def end(self) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """Return exit code, termination message and progress lines."""
        out, err = self.process.communicate(timeout=90)
        message = json.loads(self.log.read_text()) if self.log.exists() else {}
        for secret in self._secrets:
            assert secret not in out + err + json.dumps(message)
        progress = [json.loads(line)["progress"] for line in out.splitlines()]
        return self.process.returncode, message, progress

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)


def pull(site: Site, *more: str, puller: int = 0, of: int = 1) -> Program:
    return Program(site, "pull", "--puller", str(puller), "--of", str(of), "--part-bytes", str(PART), *more)


def stage(site: Site, root: Path, *more: str) -> Program:
    root.mkdir(exist_ok=True)
    return Program(site, "stage", "--root", str(root), "--node", "node-1", "--node-uid", "uid-1", *more)


def blob(site: Site, path: str = BIG) -> str:
    return f"blobs/{hashlib.sha256(site.files[path]).hexdigest()}"


def hub_bytes(site: Site) -> int:
    stats = requests.get(f"{site.hub_url}/_rehearsal/stats", timeout=30).json()
    return int(stats["bytes_served"])


def assert_pulled(site: Site) -> None:
    for path, data in site.files.items():
        assert site.store.get(blob(site, path))[0] == data
        assert json.loads(site.store.get(blob(site, path) + ".ok")[0])["size_bytes"] == len(data)
        assert site.store.unfinished_upload(blob(site, path)) is None


def tree(root: Path, site: Site) -> dict[str, bytes]:
    directory = root / site.lock.model_dir
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def largest_bytes(directory: Path) -> int:
    """Return the size of the largest file; what is renamed away meanwhile does not count."""
    sizes = [0]
    for path in directory.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def fill(site: Site) -> None:
    for path, data in site.files.items():
        site.store.put(blob(site, path), data)


def test_two_pullers_bring_everything_and_then_nothing(site: Site) -> None:
    programs = [pull(site, puller=i, of=2) for i in range(2)]
    codes = [program.process.wait(90) for program in programs]
    assert codes == [0, 0]
    assert_pulled(site)
    served = hub_bytes(site)
    assert served == site.lock.total_bytes
    code, message, progress = pull(site).end()
    assert code == 0
    assert message.pop("seconds") < 60
    assert message == {
        "puller": 0,
        "of": 1,
        "files": 3,
        "files_present": 3,
        "bytes_fetched": 0,
        "source": site.hub_url,
        "verified_anew": 0,
        "orphans": {"uploads": 0, "bytes": 0},
        "processes": 1,
        "moved": [],
    }
    assert hub_bytes(site) == served
    assert progress[-1]["files_done"] == progress[-1]["files_total"] == 0


def test_a_pull_killed_in_an_upload_goes_on_with_it(site: Site) -> None:
    with slowed(site, "HF_ENDPOINT", 3 * PART) as slow:
        program = pull(slow)
        program.wait_until(lambda: len((site.store.unfinished_upload(blob(site)) or ("", []))[1]) >= 2)
        program.kill()
        program.process.wait(30)
    left = site.store.unfinished_upload(blob(site))
    assert left is not None
    assert site.store.head(blob(site)) is None
    assert not program.log.exists()
    again = pull(site)
    code, message, progress = again.end()
    assert code == 0
    assert message["bytes_fetched"] >= len(site.files[BIG])  # hashed from its first byte
    assert_pulled(site)
    assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"] == message["bytes_fetched"]
    assert [BIG, len(site.files[BIG]), 1] in [[path, size, streams] for path, size, _, streams in message["moved"]]


def test_the_hub_serving_one_wrong_byte_ends_the_pull(site: Site) -> None:
    (site.inject / "shard-bitflip.json").write_text(json.dumps({"path": BIG, "offset": PART + 7}))
    code, message, _ = pull(site).end()
    assert (code, message["exit_code"], message["code"]) == (5, 5, "K2-INT-001")
    assert message["where"] == f"{REPO}@{site.lock.revision} {BIG}"
    assert message["expected"] == f"sha256 {blob(site)[6:]}"
    assert message["got"] != message["expected"]
    assert site.store.head(blob(site)) is None
    assert site.store.head(blob(site) + ".ok") is None
    assert site.store.unfinished_upload(blob(site)) is None
    (site.inject / "shard-bitflip.json").unlink()
    assert pull(site).end()[0] == 0
    assert_pulled(site)


def test_a_hub_that_limits_and_cuts_is_waited_for(site: Site) -> None:
    (site.inject / "hub-429.json").write_text(json.dumps({"count": 1, "retry_after_s": 1}))
    (site.inject / "hub-cut.json").write_text(json.dumps({"path": BIG, "after_bytes": 7_000_000, "count": 2}))
    code, message, _ = pull(site).end()
    assert code == 0
    assert_pulled(site)
    assert message["bytes_fetched"] == site.lock.total_bytes


def test_a_pull_that_is_told_to_stop_ends_in_time(site: Site) -> None:
    with slowed(site, "HF_ENDPOINT", 0) as slow:
        program = pull(slow)
        program.wait_until(lambda: site.store.unfinished_upload(blob(site)) is not None)
        program.kill(signal.SIGTERM)
        before = time.monotonic()
        code, message, _ = program.end()
    assert time.monotonic() - before < 20  # the Job's own grace period
    assert (code, message["exit_code"]) == (11, 11)
    assert site.store.head(blob(site)) is None


def test_staging_twice_at_once_and_again(site: Site, tmp_path: Path) -> None:
    fill(site)
    root = tmp_path / "models"
    first, second = stage(site, root), stage(site, root)
    outcomes = [first.end(), second.end()]
    assert [code for code, _, _ in outcomes] == [0, 0]
    found = tree(root, site)
    marker = found.pop(MARKER_FILE)
    assert found == site.files
    assert site.store.get(f"markers/node-1/{site.lock.digest}.json")[0] == marker
    code, message, _ = stage(site, root).end()
    assert code == 0
    assert message.pop("seconds") > 0
    assert message == {
        "node": "node-1",
        "lock_digest": site.lock.digest,
        "marker_sha256": hashlib.sha256(marker).hexdigest(),
        "files": 3,
        "bytes_written": 0,
        "files_kept": 3,
        "attempts": 0,
        "quarantined": 0,
        "moved": [],
        "worst": [],
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stager_ended_in_a_file_leaves_nothing_unverified(site: Site, tmp_path: Path, number: int) -> None:
    fill(site)
    root = tmp_path / "models"
    partial = root / site.lock.model_dir / PARTIAL_DIR
    with slowed(site, "K2_STORE_ENDPOINT", PART) as slow:
        program = stage(slow, root)
        program.wait_until(lambda: largest_bytes(partial) > len(site.files["model-2-of-2.safetensors"]))
        program.kill(number)
        code, message, _ = program.end()
    assert code != 0
    found = tree(root, site)
    assert MARKER_FILE not in found
    assert all(path.startswith(PARTIAL_DIR) or data == site.files[path] for path, data in found.items())
    if number == signal.SIGTERM:
        assert (code, message["exit_code"]) == (11, 11)
        assert list(partial.iterdir()) == []
    assert stage(site, root).end()[0] == 0
    found = tree(root, site)
    assert found.pop(MARKER_FILE)
    assert found == site.files


def test_a_stager_beside_a_pull_takes_each_file_when_it_is_there(site: Site, tmp_path: Path) -> None:
    root = tmp_path / "models"
    with slowed(site, "HF_ENDPOINT", 3 * PART) as slow:
        stager = stage(site, root, "--source-wait-s", "60")
        stager.log = tmp_path / "stage-termination"  # the pull has its own
        puller = pull(slow)
        small = root / site.lock.model_dir / "model-2-of-2.safetensors"
        stager.wait_until(small.exists)
        assert puller.process.poll() is None  # the largest file is still on its way
        assert site.store.head(blob(site)) is None
        puller.kill()
        puller.process.wait(30)
    assert not (root / site.lock.model_dir / MARKER_FILE).exists()
    assert pull(site).end()[0] == 0
    assert stager.end()[0] == 0
    found = tree(root, site)
    assert found.pop(MARKER_FILE)
    assert found == site.files


def test_a_stager_whose_pull_has_died_gives_up_and_names_the_file(site: Site, tmp_path: Path) -> None:
    fill(site)
    for path in site.files:
        site.store.put(blob(site, path) + ".ok", b"{}")
    site.store.delete(blob(site) + ".ok")
    code, message, _ = stage(site, tmp_path / "models", "--source-wait-s", "0.5").end()
    assert (code, message["code"], message["where"]) == (11, "K2-UNA-001", f"node-1: {BIG}")
    assert message["expected"] == f"{blob(site)} and its .ok"
    assert MARKER_FILE not in tree(tmp_path / "models", site)


@contextmanager
def in_phase(site: Site, root: Path, phase: str) -> Iterator[Program]:
    """Start a stager and yield it when it is in the middle of a phase."""
    directory = root / site.lock.model_dir
    locks = root / LOCKS_DIR
    root.mkdir()
    if phase == "waiting for another stager":
        locks.mkdir()
        with (locks / "node.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            program = stage(site, root)
            time.sleep(1.0)  # there is nothing to see of a program that waits
            yield program
        return
    if phase == "waiting for a file":
        for path in site.files:
            site.store.put(blob(site, path) + ".ok", b"{}")
        site.store.delete(blob(site) + ".ok")
        program = stage(site, root, "--source-wait-s", "60")
        program.wait_until((directory / "model-2-of-2.safetensors").exists)
    elif phase == "hashing":
        (directory).mkdir(parents=True)
        (directory / BIG).write_bytes(site.files[BIG])
        program = stage(site, root, "--limit-bytes-per-s", "2000000")
        program.wait_until((locks / f"{site.lock.revision[:12]}.lock").exists)
        time.sleep(0.7)
    else:
        program = stage(site, root, "--limit-bytes-per-s", "2000000")
        program.wait_until(lambda: largest_bytes(directory / PARTIAL_DIR) > 300_000)
    yield program


@pytest.mark.parametrize("phase", ["waiting for another stager", "waiting for a file", "hashing", "writing slowly"])
def test_a_stager_that_is_told_to_stop_leaves_no_litter(site: Site, tmp_path: Path, phase: str) -> None:
    fill(site)
    root = tmp_path / "models"
    with in_phase(site, root, phase) as program:
        assert program.process.poll() is None
        program.kill(signal.SIGTERM)
        began = time.monotonic()
        code, message, _ = program.end()
    assert time.monotonic() - began < 20  # the Job's own grace period
    assert (code, message["code"]) == (11, "K2-UNA-001")
    assert "Stopped by a signal" in message["summary"]
    found = [path for path in root.rglob("*") if path.is_file() and LOCKS_DIR not in path.parts]
    assert [path for path in found if path.read_bytes() != site.files.get(path.name)] == []
    assert stage(site, root).end()[0] == 0


def test_a_wrong_blob_in_the_store_ends_the_stager(site: Site, tmp_path: Path) -> None:
    fill(site)
    wrong = bytearray(site.files[BIG])
    wrong[PART] ^= 1
    site.store.put(blob(site), bytes(wrong))
    code, message, _ = stage(site, tmp_path / "models").end()
    assert (code, message["code"], message["where"]) == (5, "K2-INT-001", f"node-1: {BIG}")
    assert message["got"] == f"sha256 {hashlib.sha256(wrong).hexdigest()}"
    assert MARKER_FILE not in tree(tmp_path / "models", site)
    assert BIG not in tree(tmp_path / "models", site)


def test_a_changed_byte_is_named_by_the_verification(site: Site, tmp_path: Path) -> None:
    fill(site)
    root = tmp_path / "models"
    assert stage(site, root).end()[0] == 0
    directory = root / site.lock.model_dir
    arguments = ("verify_files", "--dir", str(directory), "--node", "node-1")
    code, message, _ = Program(site, *arguments).end()
    assert (code, message) == (0, {"node": "node-1", "checked": 3, "bytes": site.lock.total_bytes})
    path = directory / BIG
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(PART)
        file.write(bytes([site.files[BIG][PART] ^ 1]))
    code, message, _ = Program(site, *arguments).end()
    assert (code, message["exit_code"], message["where"]) == (5, 5, f"node-1: {BIG}")
    assert message["got"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert message["expected"] == blob(site)[6:]


@pytest.mark.parametrize("name", ["pull", "stage", "probe", "verify_files", "marker_check"])
def test_help_teaches(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tasks.node.{name}", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "exit codes" in done.stdout
