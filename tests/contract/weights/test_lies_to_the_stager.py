"""Every way in which a store can lie to a stager, or a disk stand in its way: a table, and what has to hold after each.

However a case ends: what has a final name has the lock's bytes (all of it is hashed again here), nothing half done
lies about, a failure leaves no marker, and the same command with an honest store and disk ends with everything there.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.core.errors import ExitCode, InputError, K2Error
from tasks.core.lock import Lock, lock_from_data
from tasks.core.marker import MARKER_FILE, marker_from_data
from tasks.node import workers
from tasks.node.marker_check import check_directory
from tasks.node.program import Stop
from tasks.node.sources import StoreSource
from tasks.node.stager import Node, Stager
from tasks.node.stored_lock import read_lock
from tasks.node.verified_file import PARTIAL_DIR
from tests.contract.weights.conftest import FILES, FIRST, SECOND, Weights, sha256_of
from tests.contract.weights.lying_relay import (
    Lie,
    Request,
    body,
    compressed,
    cut,
    drip,
    flip,
    header,
    longer_than_announced,
    redirect,
    status,
)

NODE = Node("node-1", "uid-1")
OK, INTEGRITY, UNAVAILABLE, CAPACITY = ExitCode.DONE, ExitCode.INTEGRITY, ExitCode.UNAVAILABLE, ExitCode.CAPACITY
ALWAYS, ONCE = 1_000_000, 1


def stage(weights: Weights, root: Path, *, lying: bool = True, node: Node = NODE) -> ExitCode:
    """Stage with the real program's parts and return the exit code that it would have."""
    store = weights.client(lying=lying)
    try:
        Stager(StoreSource(store), store, root, weights.lock, node, 0, Stop()).stage(threads=3, lock_wait_s=20.0)
    except K2Error as error:
        assert error.where, error.as_text()
        return error.exit_code
    return ExitCode.DONE


def final_files(root: Path, lock: Lock) -> dict[str, Path]:
    """Return what stands under the names that an engine would open."""
    directory = root / lock.model_dir
    return {file.path: path for file in lock.files if (path := directory / file.path).is_file()}


def assert_nothing_wrong(root: Path, lock: Lock, *, marked: bool) -> None:
    """Assert that each file under a final name is right, and that nothing half done lies about."""
    directory = root / lock.model_dir
    for path, place in final_files(root, lock).items():
        assert not place.is_symlink()
        assert sha256_of(place) == lock.file(path).sha256, path
    partial = directory / PARTIAL_DIR
    assert not partial.is_dir() or list(partial.iterdir()) == []
    assert (directory / MARKER_FILE).exists() == marked


def assert_whole(root: Path, lock: Lock) -> None:
    """Assert that everything is there, verified, and that an engine may start."""
    assert_nothing_wrong(root, lock, marked=True)
    assert final_files(root, lock).keys() == {file.path for file in lock.files}
    check_directory(root / lock.model_dir, lock.digest)


STORE_LIES: list[tuple[str, Lie, int, ExitCode]] = [
    ("a-bit-of-the-first-byte", flip(0.0), ALWAYS, INTEGRITY),
    ("a-bit-in-the-middle", flip(0.5), ALWAYS, INTEGRITY),
    ("a-bit-of-the-last-byte", flip(1.0), ALWAYS, INTEGRITY),
    ("a-bit-once", flip(0.5), ONCE, OK),
    ("short-and-says-so", body(lambda data: data[:-1]), ALWAYS, INTEGRITY),
    ("long-and-says-so", body(lambda data: data + b"x"), ALWAYS, INTEGRITY),
    ("longer-than-announced", longer_than_announced, ALWAYS, OK),
    ("empty", body(lambda data: b""), ALWAYS, INTEGRITY),
    ("zeros-in-full-length", body(lambda data: bytes(len(data))), ALWAYS, INTEGRITY),
    ("second-half-zeros", body(lambda data: data[: len(data) // 2].ljust(len(data), b"\0")), ALWAYS, INTEGRITY),
    ("another-shard-of-the-same-size", body(lambda data: FILES[SECOND]), ALWAYS, INTEGRITY),
    ("html-with-200", status(200), ALWAYS, UNAVAILABLE),
    ("compressed-unasked", compressed, ALWAYS, INTEGRITY),
    ("etag-of-something-else", header("ETag", '"00000000000000000000000000000000"'), ALWAYS, OK),
    ("says-that-it-is-a-web-page", header("Content-Type", "text/html"), ALWAYS, UNAVAILABLE),
    *((f"cut-once-at-{tenth}0-percent", cut(tenth / 10), ONCE, OK) for tenth in range(10)),
    ("cut-always-in-the-middle", cut(0.5), ALWAYS, UNAVAILABLE),
    ("a-byte-now-and-then", drip(0.2), ALWAYS, UNAVAILABLE),
    *((f"status-{code}-once", status(code), ONCE, OK) for code in (429, 500, 502, 503, 504)),
    *((f"status-{code}", status(code), ALWAYS, UNAVAILABLE) for code in (401, 403, 404, 416, 429, 500, 503)),
    ("redirect-elsewhere", redirect("http://127.0.0.1:9/stolen"), ALWAYS, UNAVAILABLE),
]


@pytest.mark.parametrize(("lie", "times", "code"), [row[1:] for row in STORE_LIES], ids=[row[0] for row in STORE_LIES])
def test_a_lying_store(filled: Weights, tmp_path: Path, lie: Lie, times: int, code: ExitCode) -> None:
    filled.store.tell(lie, filled.lock.file(FIRST).sha256 + "(\\?|$)", times=times)
    assert stage(filled, tmp_path) == code
    assert filled.store.told >= 1
    assert_nothing_wrong(tmp_path, filled.lock, marked=code == OK)
    filled.store.be_honest()
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)


def test_credentials_do_not_follow_a_redirect(filled: Weights, tmp_path: Path) -> None:
    from tests.contract.odd_server import odd_server, send

    came: list[dict[str, str]] = []
    with odd_server(lambda h: (came.append(dict(h.headers)), send(h, 200, FILES[FIRST]))[1]) as elsewhere:
        filled.store.tell(redirect(f"{elsewhere}/blob"), filled.lock.file(FIRST).sha256)
        assert stage(filled, tmp_path) == UNAVAILABLE
    secrets = (filled.keys.access_key, filled.keys.secret_key, "Signature")
    assert not [value for headers in came for value in headers.values() if any(s in value for s in secrets)]
    assert_nothing_wrong(tmp_path, filled.lock, marked=False)


def test_a_lock_that_was_changed_in_the_store(filled: Weights) -> None:
    changed = filled.lock.to_bytes().replace(filled.lock.file(FIRST).sha256.encode(), b"0" * 64)
    filled.store.tell(body(lambda data: changed), "locks/")
    with pytest.raises(K2Error) as caught:
        read_lock(filled.client(), filled.lock.digest)
    assert (caught.value.code, caught.value.exit_code) == ("K2-INT-003", INTEGRITY)


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../b", "a\\..\\b", "a//b", "./a", "", ".", "a/\x00b", ".k2-staged.json"]
)
def test_a_lock_that_leads_out_of_its_directory(filled: Weights, path: str) -> None:
    data = filled.lock.to_data()
    data["files"][0] = {**data["files"][0], "path": path}
    with pytest.raises(InputError):
        lock_from_data(data)


# What stands on the node's disk before.


def _place(root: Path, lock: Lock, path: str) -> Path:
    place = root / lock.model_dir / path
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _right_size_wrong_bytes(root: Path, lock: Lock) -> None:
    _place(root, lock, FIRST).write_bytes(FILES[SECOND])


def _sparse(root: Path, lock: Lock) -> None:
    with _place(root, lock, FIRST).open("wb") as file:
        file.truncate(len(FILES[FIRST]))


def _short(root: Path, lock: Lock) -> None:
    _place(root, lock, FIRST).write_bytes(FILES[FIRST][:1000])


def _right_but_nobody_vouches(root: Path, lock: Lock) -> None:
    _place(root, lock, FIRST).write_bytes(FILES[FIRST])


def _litter_of_a_dead_stager(root: Path, lock: Lock) -> None:
    _place(root, lock, f"{PARTIAL_DIR}/{'0' * 64}.12345678.1").write_bytes(b"half a shard")


def _marker_of_garbage(root: Path, lock: Lock) -> None:
    _place(root, lock, MARKER_FILE).write_bytes(b"{not json")


def _read_only_file(root: Path, lock: Lock) -> None:
    place = _place(root, lock, FIRST)
    place.write_bytes(FILES[SECOND])
    place.chmod(0o444)


def _another_revision_beside(root: Path, lock: Lock) -> None:
    other = root / lock.model_dir.replace(lock.revision, "f" * 40) / FIRST
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another release")


def _file_of_the_wrong_case(root: Path, lock: Lock) -> None:
    _place(root, lock, FIRST.upper()).write_bytes(FILES[FIRST])


HALF_DONE: list[Callable[[Path, Lock], None]] = [
    _right_size_wrong_bytes,
    _sparse,
    _short,
    _right_but_nobody_vouches,
    _litter_of_a_dead_stager,
    _marker_of_garbage,
    _read_only_file,
    _another_revision_beside,
    _file_of_the_wrong_case,
]


@pytest.mark.parametrize("before", HALF_DONE, ids=lambda f: f.__name__.strip("_").replace("_", "-"))
def test_a_half_done_state(filled: Weights, tmp_path: Path, before: Callable[[Path, Lock], None]) -> None:
    before(tmp_path, filled.lock)
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)


def _link_to_a_file(root: Path, lock: Lock) -> Path:
    (root / "elsewhere").write_bytes(FILES[FIRST])
    place = _place(root, lock, FIRST)
    place.symlink_to(root / "elsewhere")
    return place


def _link_to_nothing(root: Path, lock: Lock) -> Path:
    place = _place(root, lock, FIRST)
    place.symlink_to(root / "nowhere")
    return place


def _link_on_the_way(root: Path, lock: Lock) -> Path:
    (root / "elsewhere").mkdir()
    place = root / lock.model_dir
    place.parent.mkdir(parents=True)
    place.symlink_to(root / "elsewhere")
    return place


def _pipe(root: Path, lock: Lock) -> Path:
    place = _place(root, lock, FIRST)
    os.mkfifo(place)
    return place


def _marker_is_a_link(root: Path, lock: Lock) -> Path:
    place = _place(root, lock, MARKER_FILE)
    place.symlink_to(root / "nowhere")
    return place


@pytest.mark.parametrize(
    "before",
    [_link_to_a_file, _link_to_nothing, _link_on_the_way, _pipe, _marker_is_a_link],
    ids=lambda f: f.__name__.strip("_").replace("_", "-"),
)
def test_what_no_stager_may_write_through(
    filled: Weights, tmp_path: Path, before: Callable[[Path, Lock], Path]
) -> None:
    place = before(tmp_path, filled.lock)
    assert stage(filled, tmp_path) == INTEGRITY
    assert place.is_symlink() or stat.S_ISFIFO(place.lstat().st_mode)
    assert not (tmp_path / "nowhere").exists()
    place.unlink()
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)


def _changed_in_place(place: Path) -> None:
    place.chmod(0o644)
    place.write_bytes(FILES[SECOND])


def _cut_after_staging(place: Path) -> None:
    place.chmod(0o644)
    os.truncate(place, 1000)


def _replaced_by_another(place: Path) -> None:
    times, other = place.stat(), place.with_name("other")
    other.write_bytes(FILES[SECOND])
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and time: the inode tells
    other.replace(place)


def _removed(place: Path) -> None:
    place.unlink()


@pytest.mark.parametrize(
    "after",
    [_changed_in_place, _cut_after_staging, _replaced_by_another, _removed],
    ids=lambda f: f.__name__.strip("_").replace("_", "-"),
)
def test_what_is_changed_after_staging(filled: Weights, tmp_path: Path, after: Callable[[Path], None]) -> None:
    assert stage(filled, tmp_path) == OK
    directory = tmp_path / filled.lock.model_dir
    # As root: on a node it is the owner who would have to do it.
    directory.chmod(0o755)
    after(directory / FIRST)
    with pytest.raises(K2Error) as caught:
        check_directory(directory, filled.lock.digest)
    assert caught.value.exit_code == INTEGRITY
    assert FIRST in caught.value.where
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)


def test_a_marker_of_a_machine_that_was_rebuilt(filled: Weights, tmp_path: Path) -> None:
    assert stage(filled, tmp_path) == OK
    assert stage(filled, tmp_path, node=Node("node-1", "uid-2")) == OK
    directory = tmp_path / filled.lock.model_dir
    assert marker_from_data(json.loads((directory / MARKER_FILE).read_bytes())).node_uid == "uid-2"
    assert_whole(tmp_path, filled.lock)


@contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs for the while."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


def _remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True, timeout=30)


def test_a_disk_that_is_too_small_is_seen_before_the_first_byte(filled: Weights, tmp_path: Path) -> None:
    asked = len(filled.store.asked("blobs/"))
    with small_disk(tmp_path / "disk", "size=400k") as root:
        assert stage(filled, root) == CAPACITY
        assert len(filled.store.asked("blobs/")) == asked
        assert_nothing_wrong(root, filled.lock, marked=False)
        _remount(root, "size=64m")
        assert stage(filled, root) == OK
        assert_whole(root, filled.lock)


def test_too_few_inodes_are_seen_before_the_first_byte(filled: Weights, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=20") as root:
        assert stage(filled, root) == CAPACITY
        assert_nothing_wrong(root, filled.lock, marked=False)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_a_disk_that_somebody_else_fills(filled: Weights, tmp_path: Path, share: float) -> None:
    """ENOSPC in the middle: room was there when it was checked."""
    with small_disk(tmp_path / "disk", "size=8m") as root:

        def fill(request: Request) -> None:
            if filled.lock.file(FIRST).sha256 in request.path:
                disk = os.statvfs(root)
                with open(root / "somebody-else", "ab") as file:
                    file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - int(len(FILES[FIRST]) * share))))

        filled.store.hook = fill
        assert stage(filled, root) == CAPACITY
        filled.store.be_honest()
        assert_nothing_wrong(root, filled.lock, marked=False)
        (root / "somebody-else").unlink()
        assert stage(filled, root) == OK
        assert_whole(root, filled.lock)


def test_a_disk_that_turns_read_only(filled: Weights, tmp_path: Path) -> None:
    """EROFS, as ext4 does on an error; a bind mount turns so while files are open."""
    with small_disk(tmp_path / "disk", "size=64m") as root:
        _remount(root, "ro")
        assert stage(filled, root) == UNAVAILABLE
        _remount(root, "rw")
        assert_nothing_wrong(root, filled.lock, marked=False)
        assert stage(filled, root) == OK
        assert_whole(root, filled.lock)


def test_no_root_to_stage_in(filled: Weights, tmp_path: Path) -> None:
    assert stage(filled, tmp_path / "not-mounted") == ExitCode.INVALID_INPUT
    assert not (tmp_path / "not-mounted").exists()


def test_a_clock_that_jumps(filled: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: 1.8e9 - 3600.0 * next(hours))
    filled.store.tell(status(503), filled.lock.file(FIRST).sha256, times=2)
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)
    assert stage(filled, tmp_path) == OK


def test_two_stagers_at_once(filled: Weights, tmp_path: Path) -> None:
    codes: list[ExitCode] = []
    before = len(filled.store.asked("blobs/"))
    threads = [threading.Thread(target=lambda: codes.append(stage(filled, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert codes == [OK, OK]
    assert len(filled.store.asked("blobs/")) - before == len(filled.lock.files)
    assert_whole(tmp_path, filled.lock)


# SIGKILL at each phase: the stager runs in a child that kills itself there.

PHASES = {
    "before-the-first-byte": ("verified_file", "HashingWriter.write", "before"),
    "after-some-bytes": ("verified_file", "HashingWriter.write", "after"),
    "before-the-content-is-checked": ("verified_file", "check_content", "before"),
    "before-the-rename": ("verified_file", "Path.rename", "before"),
    "after-the-rename": ("verified_file", "Path.rename", "after"),
    "before-the-directory-is-durable": ("verified_file", "fsync_directory", "before"),
    "before-the-marker": ("stager", "write_document", "before"),
    "after-the-marker": ("stager", "write_document", "after"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at(filled: Weights, tmp_path: Path, phase: str) -> None:
    assert _killed(filled, tmp_path, *PHASES[phase]) == -9
    for path, place in final_files(tmp_path, filled.lock).items():
        assert sha256_of(place) == filled.lock.file(path).sha256, path
    if phase != "after-the-marker":
        assert not (tmp_path / filled.lock.model_dir / MARKER_FILE).exists()
    assert stage(filled, tmp_path) == OK
    assert_whole(tmp_path, filled.lock)


_CHILD = """
import importlib, os, signal, sys
from pathlib import Path
module, name, when, url, bucket, access, secret, root, digest = sys.argv[1:]
home = importlib.import_module("tasks.node." + module)
owner, attribute = (getattr(home, name.split(".")[0]), name.split(".")[1]) if "." in name else (home, name)
real, killed = getattr(owner, attribute), [0]
def dying(*arguments, **more):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = real(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)
    return done
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.node.program import Stop
from tasks.node.sources import StoreSource
from tasks.node.stager import Node, Stager
from tasks.node.stored_lock import read_lock
store = S3Store(url, bucket, StoreCredentials(access, secret))
lock = read_lock(store, digest)
setattr(owner, attribute, dying)
Stager(StoreSource(store), store, Path(root), lock, Node("node-1", "uid-1"), 0, Stop()).stage(1, 5.0)
"""


def _killed(weights: Weights, root: Path, module: str, name: str, when: str) -> int:
    import sys

    keys = weights.keys
    arguments = [module, name, when, weights.store.target, weights.bucket, keys.access_key, keys.secret_key, str(root)]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments, weights.lock.digest], timeout=60, capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr.decode()
    return done.returncode


def test_the_table_is_long_enough() -> None:
    assert len(STORE_LIES) + len(HALF_DONE) + len(PHASES) >= 40
    assert workers._Linked.sleep is not None
