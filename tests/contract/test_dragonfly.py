"""Dragonfly's dfget, as a stand-in that lies in every way: what it says is no evidence, and nothing of it is left.

The stand-in takes the options that client 1.5.1 has and refuses others. It is not Dragonfly, which was not run here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.core.errors import InputError, IntegrityError, K2Error, UnavailableError
from tasks.core.lock import LockedFile
from tasks.node.dragonfly import Dfget, hub_origin_from_environment, store_origin_from_environment
from tasks.node.exchange_stager import ExchangeStager, Manner, Party
from tasks.node.fetching import Fetch
from tasks.node.program import ProgressLines, Stop
from tasks.node.staging_result import Node
from tasks.node.verified_file import PARTIAL_DIR
from tests.fakes.checkpoints import contents, lock_of
from tests.fakes.memory_store import MemoryStore

FILES = contents(shards=3, shard_bytes=200_000)
LOCK = lock_of(FILES)
PATH = "model-2-of-3.safetensors"
FILE = LOCK.file(PATH)
TOKEN = "hf_a-token-that-nobody-may-read"

# The options of dfget 1.5.1 that we use, as its command line has them.
STAND_IN = """#!{python} -SE
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("url")
for option in ("--output", "--digest", "--content-for-calculating-task-id", "--hf-revision"):
    parser.add_argument(option)
for flag in ("--transfer-from-dfdaemon", "--no-progress"):
    parser.add_argument(flag, action="store_true")
args = parser.parse_args()
if os.path.lexists(args.output):
    sys.exit("output path is already exist")
here = {here!r}
with open(here + "/calls", "a") as calls:
    calls.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
right = open(here + "/blobs/" + args.digest.removeprefix("sha256:"), "rb").read()
def write(data, path=args.output):
    with open(path, "wb") as file:
        file.write(data)
{how}
"""
WAYS = {
    "right": "write(right)",
    "one bit": "write(right[:-1] + bytes([right[-1] ^ 1]))",
    "zeros of the right length": "write(bytes(len(right)))",
    "short": "write(right[:-1])",
    "long": "write(right + b'x')",
    "empty": "write(b'')",
    "another file": "write(b'<html>504</html>')",
    "fails": (
        "write(right[:5000])\\n"
        "print('Message: GET https://cdn/x?X-Amz-Signature=abc', os.environ.get('DFGET_HF_TOKEN'))\\n"
        "sys.exit(1)"
    ),
    "fails with everything there": "write(right); sys.exit(1)",
    "leaves nothing": "pass",
    "dies": "write(right[:5000]); os.kill(os.getpid(), 9)",
    "hangs": "write(bytes(len(right))); time.sleep(60)",
    "hangs with a child": "write(right[:10]); os.fork(); time.sleep(60)",
    "a hard link": "write(right, here + '/inside'); os.link(here + '/inside', args.output)",
    "a symlink": "write(right, here + '/inside'); os.symlink(here + '/inside', args.output)",
    "a directory": "os.mkdir(args.output)",
    "a child that writes on": (
        "write(right)\\nif os.fork() == 0:\\n    time.sleep(0.3)\\n    open(args.output, 'r+b').write(b'XXXX')"
    ),
    "much to say": "write(right[:10]); sys.stdout.write('spam' * 2_000_000); sys.exit(1)",
}


@dataclass
class Place:
    """A stand-in, and the directory that files are fetched into."""

    here: Path
    models: Path

    def dfget(self, how: str, stall_s: float = 1.0) -> Dfget:
        program = self.here / "dfget"
        program.write_text(
            STAND_IN.format(python=sys.executable, here=str(self.here), how=WAYS[how].replace("\\n", "\n"))
        )
        program.chmod(0o755)
        return Dfget(str(program), hub_origin_from_environment(LOCK), stall_s)

    def fetch(self, dfget: Dfget, stop: Stop | None = None, file: LockedFile = FILE) -> Fetch:
        fetch = Fetch(self.models, file, ProgressLines(file.size_bytes, 1), stop or Stop())
        fetch.staged(dfget)
        return fetch

    def left(self) -> list[str]:
        return sorted(
            str(p.relative_to(self.models))
            for p in self.models.rglob("*")
            if not p.is_dir() or p.parent.name == PARTIAL_DIR
        )

    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in (self.here / "calls").read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("UNRELATED_SECRET", "x")
    made = Place(tmp_path / "here", tmp_path / "models")
    (made.here / "blobs").mkdir(parents=True)
    made.models.mkdir()
    for data in FILES.values():
        (made.here / "blobs" / hashlib.sha256(data).hexdigest()).write_bytes(data)
    return made


def test_a_file_is_fetched_by_its_digest_and_no_secret_stands_in_the_argv(place: Place) -> None:
    place.fetch(place.dfget("right"))
    assert (place.models / PATH).read_bytes() == FILES[PATH]
    assert (place.models / PATH).stat().st_mode & 0o777 == 0o444
    assert place.left() == [PATH]
    argv, environment = place.calls()[0]
    assert argv[0] == f"hf://{LOCK.repo}/{PATH}"
    assert argv[argv.index("--digest") + 1] == f"sha256:{FILE.sha256}"
    assert argv[argv.index("--hf-revision") + 1] == LOCK.revision
    assert TOKEN not in " ".join(argv)
    assert environment["DFGET_HF_TOKEN"] == TOKEN
    assert environment["DFGET_HF_BASE_URL"] == "https://hub.example.com"
    assert "UNRELATED_SECRET" not in environment


@pytest.mark.parametrize("how", [how for how in WAYS if how not in ("right", "a child that writes on")])
def test_whatever_it_says_nothing_wrong_gets_a_name_and_nothing_is_left(place: Place, how: str) -> None:
    lies = (
        "one bit",
        "zeros of the right length",
        "short",
        "long",
        "empty",
        "another file",
        "a hard link",
        "a symlink",
        "a directory",
    )
    with pytest.raises(K2Error) as caught:
        place.fetch(place.dfget(how))
    error = caught.value
    assert isinstance(error, IntegrityError if how in lies else UnavailableError), error
    assert error.code == ("K2-INT-002" if how.startswith("a ") else "K2-INT-001" if how in lies else "K2-UNA-001")
    assert place.left() == []
    assert TOKEN not in error.as_text()
    assert "Signature=abc" not in error.as_text()
    assert len(error.got) < 500
    place.fetch(place.dfget("right"))
    assert (place.models / PATH).read_bytes() == FILES[PATH]
    assert place.left() == [PATH]


def test_what_it_leaves_running_cannot_change_the_file(place: Place) -> None:
    place.fetch(place.dfget("a child that writes on"))
    time.sleep(0.5)
    assert (place.models / PATH).read_bytes() == FILES[PATH]


def test_one_that_hangs_is_ended_with_all_its_children(place: Place) -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="stalled"):
        place.fetch(place.dfget("hangs with a child", stall_s=0.5))
    assert time.monotonic() - began < 10
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(place.here).encode() in read(p)]
    assert mine == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_signal_ends_it_and_leaves_nothing(place: Place) -> None:
    stop = Stop()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(UnavailableError, match="Stopped by a signal"):
        place.fetch(place.dfget("hangs", stall_s=60), stop)
    assert place.left() == []


@pytest.mark.parametrize("there", ["missing", "not a program"])
def test_without_the_program_the_site_file_is_what_is_wrong(place: Place, there: str) -> None:
    if there == "not a program":
        (place.here / "dfget").write_text("")
    with pytest.raises(InputError) as caught:
        place.fetch(Dfget(str(place.here / "dfget"), hub_origin_from_environment(LOCK)))
    assert "p2p_command" in caught.value.hint
    assert place.left() == []


def test_a_token_may_stand_in_a_file(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_of-a-file\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    place.fetch(place.dfget("right"))
    assert place.calls()[0][1]["DFGET_HF_TOKEN"] == "hf_of-a-file"
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(InputError, match="token"):
        place.dfget("right")


def test_the_store_is_an_origin_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT": "http://s3", "BUCKET": "k2", "ACCESS_KEY": "ak", "SECRET_KEY": "sk"}.items():
        monkeypatch.setenv(f"K2_STORE_{name}", value)
    dfget = place.dfget("right")
    place.fetch(Dfget(dfget._command, store_origin_from_environment()))
    argv, environment = place.calls()[0]
    assert argv[0] == f"s3://k2/blobs/{FILE.sha256}"
    assert not {"ak", "sk"} & set(argv)
    assert environment["DFGET_STORAGE_ACCESS_KEY_SECRET"] == "sk"


def test_a_node_is_staged_by_it_and_twice_runs_nothing(place: Place) -> None:
    def stage() -> dict[str, object]:
        stager = ExchangeStager(
            place.dfget("right"),
            MemoryStore(),
            place.models,
            LOCK,
            Node("node-1", "uid-1"),
            0,
            Stop(),
            Party(("node-1",), (), "r"),
            Manner("", 0),
        )
        return stager.exchange(10.0)

    assert stage()["bytes_written"] == LOCK.total_bytes
    for path, data in FILES.items():
        assert (place.models / LOCK.model_dir / path).read_bytes() == data
    calls = len(place.calls())
    assert stage()["bytes_written"] == 0
    assert len(place.calls()) == calls
