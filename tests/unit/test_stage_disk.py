"""What a stager does to a node's disk: quarantine, modes, full and failing disks, two locks at once, odd clocks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import CapacityError, IntegrityError, K2Error, NotReadyError, UnavailableError
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE, Marker, StagedFile
from tasks.core.staging import Room
from tasks.node import stager as module
from tasks.node.directory_lock import LOCKS_DIR
from tasks.node.program import Stop
from tasks.node.quarantine import KEPT, QUARANTINE_DIR, Quarantine
from tasks.node.rate_limit import RateLimit
from tasks.node.stage import Node
from tasks.node.staging_result import Staged, staging_result
from tasks.node.verified_file import PARTIAL_DIR, Writing
from tests.fakes.checkpoints import fill, lock_of
from tests.fakes.staged_node import (
    FILES,
    NODE,
    SHARD,
    FaultyStore,
    assert_nothing_unverified,
    assert_staged,
    blob_key,
    flipped,
    quarantined,
    stage,
    tree,
)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Memory where there is some: most of these tests are about calls, and need not wait for a busy disk to sync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def lock(store: FaultyStore) -> Lock:
    return fill(store, FILES)


def put(root: Path, lock: Lock, path: str, data: bytes) -> Path:
    """Write a file into a checkpoint's directory, as somebody may."""
    target = root / lock.model_dir / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o755)
    if target.exists():
        target.chmod(0o644)
    target.write_bytes(data)
    return target


# Quarantine


def test_a_wrong_file_is_moved_with_what_was_wrong_and_told(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    stage(store, tmp_path, lock)
    wrong = b"x" * len(FILES[SHARD])
    put(tmp_path, lock, SHARD, wrong)
    outcome = stage(store, tmp_path, lock)
    ((note, data),) = quarantined(tmp_path, lock)
    assert data == wrong
    at = note.pop("at")
    assert time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")
    sha256 = hashlib.sha256(wrong).hexdigest()
    assert note == {
        "path": SHARD,
        "size_bytes": len(wrong),
        "sha256": sha256,
        "expected_sha256": hashlib.sha256(FILES[SHARD]).hexdigest(),
        "reason": "wrong bytes",
    }
    assert (outcome["quarantined"], outcome["moved"]) == (1, [{"path": SHARD, "got": f"sha256 {sha256}"}])
    assert_staged(tmp_path, lock)


def test_no_wrong_file_stands_under_its_name_while_its_replacement_is_fetched(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    put(tmp_path, lock, SHARD, b"x" * len(FILES[SHARD]))
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() else blocks
    with pytest.raises(IntegrityError):
        stage(store, tmp_path, lock)
    assert_nothing_unverified(tmp_path, lock)
    assert SHARD not in tree(tmp_path, lock)
    assert len(quarantined(tmp_path, lock)) == 1


def test_files_that_are_not_of_the_lock_are_moved_and_a_marker_stays(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    stage(store, tmp_path, lock)
    marker = (tmp_path / lock.model_dir / MARKER_FILE).read_bytes()
    for path in ("tokenizer.json", "code/more.py", "model-5-of-4.safetensors"):
        put(tmp_path, lock, path, b"of somebody")
    put(tmp_path, lock, ".cache/huggingface/download/x.metadata", b"notes of a downloader")
    outcome = stage(store, tmp_path, lock)
    assert outcome["bytes_written"] == 0
    assert outcome["quarantined"] == 3
    assert {note["path"] for note, _ in quarantined(tmp_path, lock)} == {
        "tokenizer.json", "code/more.py", "model-5-of-4.safetensors"
    }  # fmt: skip
    assert (tmp_path / lock.model_dir / MARKER_FILE).read_bytes() == marker
    assert (tmp_path / lock.model_dir / ".cache/huggingface/download/x.metadata").exists()


def test_only_the_newest_are_kept(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        put(tmp_path, lock, f"extra-{number}.bin", b"x" * (number + 1))
        stage(store, tmp_path, lock)
    kept = [note["path"] for note, _ in quarantined(tmp_path, lock)]
    assert kept == [f"extra-{number}.bin" for number in range(3, KEPT + 3)]


def test_a_death_between_note_and_move_leaves_the_file_and_the_next_sweep_takes_the_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.bin").write_bytes(b"wrong")

    class Killed(BaseException):
        pass

    real = Path.rename

    def rename(path: Path, target: Any) -> Any:
        if path.name == "wrong.bin":
            raise Killed
        return real(path, target)

    quarantine = Quarantine(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(Killed):
            quarantine.take("wrong.bin", "wrong bytes")
    assert (tmp_path / "wrong.bin").read_bytes() == b"wrong"
    assert quarantine.sweep() == 0
    assert list((tmp_path / QUARANTINE_DIR).iterdir()) == []
    quarantine.take("wrong.bin", "wrong bytes")
    assert quarantine.size_bytes == 5


def room(free_bytes: int) -> Callable[[Path, int], Room]:
    return lambda directory, reclaimable_bytes=0: Room(free_bytes, None, reclaimable_bytes)


def test_the_quarantine_gives_way_where_there_is_no_room_else(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, lock, SHARD, b"x" * (len(FILES[SHARD]) - 1))
    monkeypatch.setattr(module, "read_room", room(lock.total_bytes))
    stage(store, tmp_path, lock)
    assert len(quarantined(tmp_path, lock)) == 1  # there is room beside it
    (tmp_path / lock.model_dir / SHARD).unlink()
    monkeypatch.setattr(module, "read_room", room(10))
    stage(store, tmp_path, lock)
    assert quarantined(tmp_path, lock) == []
    assert_staged(tmp_path, lock)


def test_a_quarantine_that_would_not_be_enough_is_kept(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, lock, SHARD, b"x" * 100)
    monkeypatch.setattr(module, "read_room", room(10))
    with pytest.raises(CapacityError) as caught:
        stage(store, tmp_path, lock)
    assert caught.value.details == {
        "free_bytes": 10, "reclaimable_bytes": 100, "needed_bytes": lock.total_bytes
    }  # fmt: skip
    assert len(quarantined(tmp_path, lock)) == 1


def test_the_quarantine_gives_way_to_a_disk_that_fills_up_in_the_middle(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, lock, SHARD, b"x" * len(FILES[SHARD]))
    real, place = os.write, tmp_path / lock.model_dir / QUARANTINE_DIR

    def write(fd: int, data: Any) -> int:
        if len(data) > 1000 and any(place.glob("*.bytes")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    stage(store, tmp_path, lock)
    assert quarantined(tmp_path, lock) == []
    assert_staged(tmp_path, lock)


# Errors of a file


def test_both_wrong_digests_and_the_source_are_told(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    def other(blocks: Iterator[bytes], nth: int) -> Iterator[bytes]:
        for block in blocks:
            yield bytes([block[0] ^ nth]) + block[1:]

    store.change = lambda key, nth, blocks: other(blocks, nth) if key == blob_key() else blocks
    with pytest.raises(IntegrityError) as caught:
        stage(store, tmp_path, lock)
    tries = caught.value.details["tries"]
    assert len(set(tries)) == 2
    assert caught.value.got == tries[1]
    assert caught.value.details["source"].startswith("store ")
    assert blob_key() in caught.value.hint


def test_a_file_that_was_fetched_twice_is_the_worst_of_the_result(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    store.change = lambda key, nth, blocks: flipped(blocks) if key == blob_key() and nth == 1 else blocks
    outcome = stage(store, tmp_path, lock)
    assert (outcome["worst"][0]["path"], outcome["worst"][0]["attempts"]) == (SHARD, 2)
    assert outcome["attempts"] == len(FILES) + 1


def test_a_result_fits_into_a_termination_message_whatever_the_names(lock: Lock) -> None:
    files = [StagedFile("d/" * 500 + f"{n}.bin", 10**10, "0" * 64, 1, 1) for n in range(90)]
    done = [Staged(file, True, 1.5, 2, "store " + "s" * 300) for file in files]
    marker = Marker(lock.digest, lock.repo, lock.revision, "n" * 253, "uid", tuple(files), "2026", "tool")
    moved = [{"path": file.path, "got": "sha256 " + "0" * 64} for file in files]
    result = staging_result(Node("n" * 253, "uid"), lock, marker, done, moved, 9.0)
    assert len(json.dumps(result, separators=(",", ":"))) < 4096
    assert (result["bytes_written"], result["attempts"], result["quarantined"]) == (90 * 10**10, 180, 90)
    assert result["worst"] or result["moved"]


# Modes


def modes(root: Path, lock: Lock) -> set[str]:
    directory = root / lock.model_dir
    places = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    return {oct(place.stat().st_mode & 0o777) for place in places}


def test_a_staged_directory_is_closed_and_opened_again_for_whoever_stages(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    put(tmp_path, lock, SHARD, b"x" * len(FILES[SHARD]))
    stage(store, tmp_path, lock)
    assert modes(tmp_path, lock) == {"0o555"}
    during: set[str] = set()

    def looking(blocks: Iterator[bytes]) -> Iterator[bytes]:
        during.update(modes(tmp_path, lock))
        return blocks

    store.change = lambda key, nth, blocks: looking(blocks)
    (tmp_path / lock.model_dir / SHARD).unlink()
    stage(store, tmp_path, lock)
    assert during == {"0o755"}
    assert modes(tmp_path, lock) == {"0o555"}


def test_a_stager_without_rights_on_other_peoples_files_can_stage_again(
    store: FaultyStore, lock: Lock, tmp_path: Path
) -> None:
    """As the Job does: the owner, without the capability that lets root write into a closed directory."""
    root = tmp_path / "models"
    root.mkdir()
    if os.geteuid() == 0:
        for parent in (tmp_path, *tmp_path.parents):
            if not parent.stat().st_mode & 0o001:
                parent.chmod(0o755)
        os.chown(root, 65532, 65532)
    if (child := os.fork()) == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(65532)
                os.setuid(65532)
            stage(store, root, lock)
            directory = root / lock.model_dir
            try:
                (directory / "more").touch()
            except PermissionError:
                pass
            else:
                os._exit(2)
            directory.chmod(0o755)
            (directory / SHARD).unlink()
            directory.chmod(0o555)
            code = 0 if stage(store, root, lock)["bytes_written"] == len(FILES[SHARD]) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_staged(root, lock)


# Disks that fail


def _names(path: Any, part: str) -> bool:
    return part in str(path)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, phase: str, number: int, lock: Lock) -> Iterator[None]:
    """Let one kind of call of a stager fail, each time."""
    what, part = PHASES[phase]
    part = part.replace("REVISION", lock.revision)

    def wrapped(real: Any) -> Any:
        def call(first: Any, *rest: Any, **more: Any) -> Any:
            target = f"{first} {rest[0] if rest and isinstance(rest[0], (str, Path)) else ''}"
            if not part or _names(target, part):
                raise OSError(number, os.strerror(number), str(first))
            return real(first, *rest, **more)

        return call

    owner = os if what in ("open", "write", "fsync", "fchmod") else Path
    name = {"path_open": "open"}.get(what, what)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, wrapped(getattr(owner, name)))
        yield


PHASES = {
    "the directory of the locks": ("mkdir", LOCKS_DIR),
    "a lock": ("open", f"{LOCKS_DIR}/node.lock"),
    "the checkpoint's directory": ("mkdir", "REVISION"),
    "the directory of temps": ("mkdir", PARTIAL_DIR),
    "a directory in it": ("mkdir", "/code"),
    "a temp": ("open", f"{PARTIAL_DIR}/"),
    "its bytes": ("write", ""),
    "its mode": ("fchmod", ""),
    "its fsync": ("fsync", ""),
    "its name": ("rename", f"{PARTIAL_DIR}/"),
    "the marker's bytes": ("path_open", MARKER_FILE),
    "the marker's name": ("rename", MARKER_FILE),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["ENOSPC", "EROFS", "EIO"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_disk_that_fails_at_any_phase_leaves_nothing_unverified_and_is_resumed(
    store: FaultyStore,
    lock: Lock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    number: int,
) -> None:
    # Each of these is tried again after some seconds; here that does not help.
    monkeypatch.setattr(module, "_TRIES", 1)
    root = tmp_path / "models"
    root.mkdir()
    with failing(monkeypatch, phase, number, lock), pytest.raises(K2Error) as caught:
        stage(store, root, lock)
    assert caught.value.exit_code == (8 if number == errno.ENOSPC else 11)
    assert_nothing_unverified(root, lock)
    assert not list((root / lock.model_dir).glob(f"{PARTIAL_DIR}/*"))
    assert not list((root / lock.model_dir).glob("*.tmp"))
    stage(store, root, lock)
    assert_staged(root, lock)


def test_a_part_of_the_checkpoint_on_another_disk_is_refused_before_the_first_byte(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, lock, "code/modeling.py", FILES["code/modeling.py"])
    real, elsewhere = Path.stat, tmp_path / lock.model_dir / "code"

    class Elsewhere:
        def __init__(self, found: os.stat_result) -> None:
            self._found = found
            self.st_dev = found.st_dev + 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._found, name)

    monkeypatch.setattr(
        Path, "stat", lambda path, **more: Elsewhere(real(path)) if path == elsewhere else real(path, **more)
    )
    with pytest.raises(NotReadyError) as caught:
        stage(store, tmp_path, lock)
    assert (caught.value.code, caught.value.where) == ("K2-RDY-002", f"node-1: {elsewhere}")
    assert store.opened == {}


# Two locks, clocks, rates


def test_stagers_of_two_locks_take_turns_so_that_each_sees_what_the_other_has_left(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would pass the check of the room if they looked at the same moment; there is room for one."""
    files = {path: data[::-1] for path, data in FILES.items() if path.startswith("model-")}
    second = lock_of(files)
    second = Lock(second.repo, "f" * 40, second.files)
    for path, data in files.items():
        store.objects[f"blobs/{hashlib.sha256(data).hexdigest()}"] = data
        assert path
    total = max(lock.total_bytes, second.total_bytes)

    def read_room(directory: Path, reclaimable_bytes: int = 0) -> Room:
        used = sum(path.stat().st_size for path in tmp_path.rglob("model-*") if path.is_file())
        return Room(total - used, None, reclaimable_bytes)

    monkeypatch.setattr(module, "read_room", read_room)
    outcomes: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def run(which: Lock) -> None:
        barrier.wait(20)
        try:
            outcomes[which.digest] = stage(store, tmp_path, which)
        except K2Error as error:
            outcomes[which.digest] = error

    threads = [threading.Thread(target=run, args=[which]) for which in (lock, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, K2Error)]
    assert [error.code for error in failed] == ["K2-CAP-002"]
    assert failed[0].summary == "Not enough free space on the node's disk."  # found before, not in the middle
    winner = next(which for which in (lock, second) if not isinstance(outcomes[which.digest], K2Error))
    assert (tmp_path / winner.model_dir / MARKER_FILE).exists()


def test_a_stager_that_waits_for_another_locks_says_whose_it_is(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tasks.node import directory_lock

    monkeypatch.setenv("POD_NAME", "k2-stage-aaaa-node-1-x")
    with directory_lock.hold_node(tmp_path, "a" * 64, 1.0, Stop()):
        with pytest.raises(UnavailableError) as caught, directory_lock.hold_node(tmp_path, "b" * 64, 0.3, Stop()):
            pass
        assert caught.value.got == f"k2-stage-aaaa-node-1-x, {'a' * 64}"
    assert f"another stager (k2-stage-aaaa-node-1-x, {'a' * 64}) holds" in capsys.readouterr().err
    stage(store, tmp_path, lock)  # free again


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_clock_that_jumps_changes_nothing_but_what_is_written_of_the_time(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    stage(store, tmp_path, lock)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    (tmp_path / lock.model_dir / SHARD).unlink()
    store.opened.clear()
    outcome = stage(store, tmp_path, lock)
    assert (outcome["bytes_written"], store.opened) == (len(FILES[SHARD]), {blob_key(): 1})
    assert 0 < outcome["seconds"] < 60
    assert_staged(tmp_path, lock)


def test_the_progress_goes_on_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tasks.node.program import ProgressLines

    ticks = iter(range(0, 100, 10))
    progress = ProgressLines(100, 1, now=lambda: float(next(ticks)))
    progress.advance(1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    progress.advance(1)
    assert capsys.readouterr().out.count("progress") == 2


def test_a_limit_holds_for_what_is_fetched_and_what_is_hashed(store: FaultyStore, lock: Lock, tmp_path: Path) -> None:
    for path, data in FILES.items():
        if path != SHARD:
            put(tmp_path, lock, path, data)
    waited: list[float] = []
    limit = RateLimit(lock.total_bytes, waited.append, lambda: 0.0)
    stage(store, tmp_path, lock, threads=1, writing=Writing("drop", limit))
    assert max(waited) == pytest.approx(1.0)  # every byte was taken from it once
    assert_staged(tmp_path, lock)


@pytest.mark.parametrize(("mode", "dropped"), [("drop", len(FILES)), ("keep", 0)])
def test_what_is_read_and_written_beside_an_engine_leaves_the_page_cache(
    store: FaultyStore, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, dropped: int
) -> None:
    put(tmp_path, lock, "config.json", FILES["config.json"])
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: advised.append(advice))
    stage(store, tmp_path, lock, NODE, writing=Writing(mode))
    assert len([advice for advice in advised if advice == os.POSIX_FADV_DONTNEED]) == dropped
