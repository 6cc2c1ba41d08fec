"""`k2ctl verify` of a directory, a store and all nodes: one document, every problem, the right exit code."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flows import cli
from flows.console.verifying import printable
from tasks import wiring
from tasks.core.errors import IntegrityError, UnavailableError
from tasks.core.lock import LockedFile, make_lock
from tasks.core.render import staged_label
from tasks.steps.documents import get_lock, get_receipt
from tests.fakes.checkpoints import REPO, REVISION, contents, fill, lock_of
from tests.fakes.memory_store import MemoryStore
from tests.fakes.pipeline import make_live
from tests.fakes.site_files import write_release, write_site
from tests.fakes.small_world import World, release

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "manifests" / "schemas" / "verification.json").read_text())
FILES = contents(shards=2)
LOCK = lock_of(FILES)
SHARD = "model-1-of-2.safetensors"
WHAT = release("k2-new-1")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["verify", *argv])
    out = capsys.readouterr()
    return int(code), out.out, out.err


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    """Run with --json; what is on standard output is one document of the schema, whatever was found."""
    code, out, err = run(capsys, *argv, "--json")
    said = json.loads(out)
    jsonschema.validate(said, SCHEMA)
    assert code == (said["error"]["exit_code"] if "error" in said else 0)
    return code, said, err


@pytest.fixture
def lock_file(tmp_path: Path) -> str:
    path = tmp_path / "a.lock.json"
    path.write_bytes(LOCK.to_bytes())
    return str(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    for path, data in FILES.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A site file, the world behind it, and commands that reach that world."""
    path = write_site(tmp_path)
    write_release(tmp_path, WHAT)
    world = World(releases_dir=str(tmp_path / "releases"))
    monkeypatch.setattr(wiring, "connect", lambda path, run, progress, model="", access=None: world.ports(run))
    monkeypatch.setenv("K2_SITE", str(path))
    return world


def test_the_schema_is_one_and_refuses_what_it_should() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "ok": True}, SCHEMA)


def test_a_right_directory(capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path) -> None:
    code, said, err = document(capsys, lock_file, "--dir", str(tree))
    assert (code, said["ok"], said["files"], said["bytes"], err) == (0, True, len(FILES), LOCK.total_bytes, "")
    assert (said["files_ok"], said["directory"], said["digest"]) == (len(FILES), str(tree), LOCK.digest)
    code, out, err = run(capsys, lock_file, "--dir", str(tree))
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(FILES)} files of the lock {LOCK.digest[:12]}: {len(FILES)} ok; 600 kB read in ")


def test_every_problem_is_said_and_what_puts_it_right(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    (tree / SHARD).write_bytes(b"\xff" + FILES[SHARD][1:])
    (tree / "config.json").unlink()
    (tree / "code/empty.py").write_bytes(b"x")
    (tree / "more.bin").write_bytes(b"x")
    code, said, err = document(capsys, lock_file, "--dir", str(tree))
    assert (code, said["ok"], said["extra"]) == (5, False, ["more.bin"])
    assert {row["path"]: row["verdict"] for row in said["problems"]} == {
        SHARD: "differs",
        "config.json": "missing",
        "code/empty.py": "differs",
    }
    assert (said["error"]["code"], said["files_ok"]) == ("K2-INT-002", len(FILES) - 3)
    assert f"--local-dir {tree} --force-download" in err
    code, out, _ = run(capsys, lock_file, "--dir", str(tree))
    assert code == 5
    digest = hashlib.sha256(b"\xff" + FILES[SHARD][1:]).hexdigest()
    assert f"differs      {SHARD}\n             got: {digest}, expected: {LOCK.file(SHARD).sha256}\n" in out
    assert "extra        more.bin\n" in out


def test_missing_files_alone_are_fetched_without_force(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    (tree / "config.json").unlink()
    _, said, _ = document(capsys, lock_file, "--dir", str(tree))
    assert said["error"]["next"] == f"hf download {REPO} config.json --revision {REVISION} --local-dir {tree}"


def test_nobody_is_told_to_download_into_a_stagers_directory(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    (tree / "config.json").unlink()
    (tree / ".k2-staged.json").write_bytes(b"{}\n")
    _, said, _ = document(capsys, lock_file, "--dir", str(tree))
    assert said["error"]["next"].startswith("a stager's directory: delete the wrong files")


def test_a_clone_without_its_large_files_is_told_to_fetch_them(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    file = LOCK.file(SHARD)
    (tree / ".git").mkdir()
    (tree / SHARD).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.sha256}\nsize {file.size_bytes}\n"
    )
    code, said, _ = document(capsys, lock_file, "--dir", str(tree))
    assert (code, said["problems"][0]["verdict"], said["extra"]) == (5, "pointer", [])
    assert said["error"]["next"] == f"git -C {tree} lfs pull"


def test_extra_files_fail_only_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    for number in range(25):
        (tree / f"extra-{number:02}").write_bytes(b"")
    assert document(capsys, lock_file, "--dir", str(tree))[0] == 0
    code, said, _ = document(capsys, lock_file, "--dir", str(tree), "--fail-on-extra")
    assert (code, len(said["extra"]), said["problems"]) == (5, 25, [])
    assert "... and 5 more" in run(capsys, lock_file, "--dir", str(tree))[1]


def test_a_file_that_cannot_be_read_is_exit_11_and_after_a_wrong_one_exit_5(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.node import checkout

    def broken(fd: int, buffers: Any, _readv: Any = os.readv) -> int:
        if os.fstat(fd).st_size == len(FILES[SHARD]):
            raise OSError(5, "Input/output error")
        return int(_readv(fd, buffers))

    monkeypatch.setattr(checkout.os, "readv", broken)
    code, said, _ = document(capsys, lock_file, "--dir", str(tree))
    assert (code, said["error"]["where"]) == (11, f"{tree}: {SHARD}")
    (tree / "config.json").write_bytes(b"[]\n")
    code, said, _ = document(capsys, lock_file, "--dir", str(tree))
    assert (code, said["error"]["where"], len(said["problems"])) == (5, f"{tree}: config.json", 2)


def test_the_hubs_cache_is_verified_through_its_links(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True)
    for path, data in FILES.items():
        blob, link = repository / "blobs" / hashlib.sha256(data).hexdigest(), repository / "snapshots" / REVISION / path
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    code, said, _ = document(capsys, lock_file, "--dir", str(tmp_path / "hub"))
    assert (code, said["links"], said["directory"]) == (0, len(FILES), str(repository / "snapshots" / REVISION))
    assert f", {len(FILES)} through links;" in run(capsys, lock_file, "--dir", str(repository))[1]
    (repository / "blobs" / LOCK.file(SHARD).sha256).unlink()
    code, said, _ = document(capsys, lock_file, "--dir", str(repository))
    assert (code, said["problems"][0]["verdict"]) == (5, "missing")
    assert f"--cache-dir {tmp_path / 'hub'}" in said["error"]["next"]


def test_a_name_cannot_write_on_the_terminal(capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path) -> None:
    (tree / "a\x1b[2Jb").write_bytes(b"")
    Path(os.fsdecode(bytes(tree) + b"/\xff")).write_bytes(b"")
    out = run(capsys, lock_file, "--dir", str(tree))[1]
    assert "\x1b" not in out
    assert "extra        a\\x1b[2Jb\n" in out
    assert printable(os.fsdecode(b"\xff")) == "\\udcff"
    assert len(document(capsys, lock_file, "--dir", str(tree))[1]["extra"]) == 2


@pytest.mark.parametrize("words", [[], ["--dir", "d", "--nodes"], ["--dir", "d", "--store"], ["--dir", ""]])
def test_one_place_is_named(capsys: pytest.CaptureFixture[str], lock_file: str, words: list[str]) -> None:
    assert run(capsys, lock_file, *words)[0] == 2


@pytest.mark.parametrize("name", ["none.lock.json", "locks/none", "k2-nobody-1", "0" * 64])
def test_a_lock_that_is_none_of_a_file_a_digest_and_a_release(
    capsys: pytest.CaptureFixture[str], site: World, tree: Path, name: str
) -> None:
    assert run(capsys, name, "--dir", str(tree))[0] == 2


def test_a_lock_may_be_named_by_its_digest_or_by_a_release(
    capsys: pytest.CaptureFixture[str], site: World, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    for path, data in site.hub.files.items():
        (tmp_path / "mine" / path).write_bytes(data)
    assert document(capsys, WHAT.id, "--dir", str(tmp_path / "mine"))[0] == 0  # locked anew at the Hub
    make_live(site.ports(), WHAT)
    site.hub.files = {}
    digest = get_receipt(site.store, WHAT.id)["lock"]["digest"]
    for name in (WHAT.id, digest):
        code, said, _ = document(capsys, name, "--dir", str(tmp_path / "mine"))
        assert (code, said["digest"]) == (0, digest)


def test_the_store_of_the_site(capsys: pytest.CaptureFixture[str], site: World) -> None:
    make_live(site.ports(), WHAT)
    code, said, _ = document(capsys, WHAT.id, "--store")
    assert (code, said["layout"], said["store"], said["without_statement"]) == (0, "blobs", "s3://k2/", [])
    lock = get_lock(site.store, said["digest"])
    first, second = (f"blobs/{file.sha256}" for file in lock.shards)
    site.store.objects[first] = b"x" * lock.shards[0].size_bytes
    del site.store.objects[f"{second}.ok"]
    code, said, err = document(capsys, WHAT.id, "--store")
    assert (code, said["without_statement"]) == (5, [second])
    assert [(row["path"], row["key"]) for row in said["problems"]] == [(lock.shards[0].path, first)]
    assert f"where:    s3://k2/: {first}" in err
    out = run(capsys, WHAT.id, "--store")[1]
    assert f"no statement: {second}.ok" in out
    assert f"differs      {first}\n" in out


def test_another_bucket_at_the_endpoint_of_the_site(
    capsys: pytest.CaptureFixture[str], site: World, lock_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = [], MemoryStore()
    fill(other, FILES)
    monkeypatch.setattr(wiring, "open_store", lambda of: asked.append((of.store.bucket, of.store.endpoint)) or other)
    code, said, _ = document(capsys, lock_file, "--store", "s3://mirror")
    assert (code, said["store"]) == (0, "s3://mirror/")
    assert asked == [("mirror", site.site.store.endpoint)]
    assert run(capsys, lock_file, "--store", "http://elsewhere/k2")[0] == 2


def staged(site: World) -> str:
    """Make a release live on three nodes and return its lock's digest."""
    make_live(site.ports(), WHAT)
    return str(get_receipt(site.store, WHAT.id)["lock"]["digest"])


def nodes_of(site: World, digest: str) -> list[str]:
    labelled = site.cluster.list_objects("Node", {staged_label(digest): "true"})
    return sorted(node["metadata"]["name"] for node in labelled)


def test_every_staged_node_is_read(capsys: pytest.CaptureFixture[str], site: World) -> None:
    digest = staged(site)
    names = nodes_of(site, digest)
    assert len(names) >= 3
    code, said, _ = document(capsys, WHAT.id, "--nodes")
    assert (code, [row["node"] for row in said["nodes"]]) == (0, names)
    assert said["bytes"] == len(names) * said["total_bytes"]
    out = run(capsys, digest, "--nodes")[1]
    assert out.splitlines()[1].split() == ["node-1", "ok", "5", "every", "byte", "is", "right"]
    assert out.splitlines()[-1].startswith(f"{len(names)} of {len(names)} nodes hold the 5 files of the lock")


def test_one_bad_node_hides_no_other(capsys: pytest.CaptureFixture[str], site: World) -> None:
    digest = staged(site)
    names = nodes_of(site, digest)
    problems = [{"path": f"shard-{n}", "got": "a", "expected": "b", "verdict": "differs"} for n in (1, 2)]
    wrong = IntegrityError(
        "K2-INT-002", "Other bytes.", where="node-2: shard-1", details={"problems": problems, "count": 3}
    )
    site.broken_jobs[f"k2-verify-{digest[:8]}-node-1"] = UnavailableError("K2-UNA-003", "No answer.").as_data()
    site.broken_jobs[f"k2-verify-{digest[:8]}-node-2"] = wrong.as_data()
    code, said, _ = document(capsys, WHAT.id, "--nodes", "--at-once", "1")
    assert (code, said["error"]["where"]) == (5, "node-2: shard-1")
    rows = {row["node"]: (row["ok"], row["files_ok"], row["problems"]) for row in said["nodes"]}
    assert rows == {"node-1": (False, 0, 0), "node-2": (False, 2, 3)} | dict.fromkeys(names[2:], (True, 5, 0))
    assert [(row["node"], row["path"]) for row in said["problems"]] == [("node-2", "shard-1"), ("node-2", "shard-2")]
    out = run(capsys, WHAT.id, "--nodes")[1]
    assert "node-1  NO       0  K2-UNA-003 No answer." in out
    assert "node-2: 1 more, in the log of its verify Job" in out
    assert out.splitlines()[-1].startswith(f"{len(names) - 2} of {len(names)} nodes")


def test_no_more_nodes_at_once_than_asked_for(
    capsys: pytest.CaptureFixture[str], site: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.steps import verifying

    staged(site)
    sizes: list[int] = []
    follow = verifying.follow_jobs
    monkeypatch.setattr(
        verifying,
        "follow_jobs",
        lambda ports, step, jobs, *a, **k: sizes.append(len(jobs)) or follow(ports, step, jobs, *a, **k),
    )
    _, said, _ = document(capsys, WHAT.id, "--nodes", "--at-once", "2")
    count = len(said["nodes"])
    assert sizes == [2] * (count // 2) + [1] * (count % 2)


def test_a_node_that_looked_at_fewer_files_is_not_believed(
    capsys: pytest.CaptureFixture[str], site: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(site)
    monkeypatch.setattr(site, "_program", lambda module, options: {"node": options["--node"], "checked": 4})
    code, said, _ = document(capsys, WHAT.id, "--nodes")
    assert (code, said["error"]["got"]) == (5, "4 files")


def test_no_node_with_the_lock_is_no_proof(capsys: pytest.CaptureFixture[str], site: World, lock_file: str) -> None:
    staged(site)
    code, _, err = run(capsys, lock_file, "--nodes")
    assert (code, f"kubectl get nodes -l {staged_label(LOCK.digest)}=true" in err) == (2, True)


def test_a_lock_without_a_release_takes_the_tool_image_of_the_live_one(
    capsys: pytest.CaptureFixture[str], site: World
) -> None:
    digest = staged(site)
    assert document(capsys, digest, "--nodes")[0] == 0
    job = site.cluster.get("Job", f"k2-verify-{digest[:8]}-node-1")
    assert job is not None
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == WHAT.images.tool
    del site.store.objects["live.json"]
    code, _, err = run(capsys, digest, "--nodes")
    assert (code, "k2ctl verify RELEASE --nodes" in err) == (2, True)


PROGRAM = (
    "import sys, flows.cli\n"
    "code = flows.cli.main(sys.argv[1:])\n"
    "libraries = {'prefect', 'kubernetes', 'boto3', 'botocore', 'huggingface_hub', 'requests', 'yaml', 'pydantic'}\n"
    "print(code, sorted(libraries & sys.modules.keys()), file=sys.stderr)"
)


def test_no_library_is_loaded_for_a_directory(lock_file: str, tree: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "verify", lock_file, "--dir", str(tree), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert done.stderr.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_the_middle_of_a_large_file(tmp_path: Path, number: int) -> None:
    size_bytes = 200_000_000_000  # a hole: more than can be read in the time of this test
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree" / "a.safetensors").open("wb") as file:
        file.truncate(size_bytes)
    lock = make_lock(REPO, REVISION, [LockedFile("a.safetensors", size_bytes, "shard", sha256="0" * 64)])
    (tmp_path / "lock.json").write_bytes(lock.to_bytes())
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "verify",
        str(tmp_path / "lock.json"),
        "--dir",
        str(tmp_path / "tree"),
    ]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    reading = Path(f"/proc/{process.pid}/io")
    deadline = time.monotonic() + 60
    while int(reading.read_text().split()[1]) < 100_000_000:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, json.loads(out)["outcome"]) == (130, "interrupted")
    assert "nothing was written" in err


def test_signals_mean_again_what_they_meant_before(
    capsys: pytest.CaptureFixture[str], lock_file: str, tree: Path
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(capsys, lock_file, "--dir", str(tree))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
