"""Files where they lie: what is read, what is not, and what a reader may not be talked into."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import InputError
from tasks.core.file_verdicts import FileVerdict, ignored_root, in_order, judge_digest, judge_pointer
from tasks.core.lock import Lock, LockedFile, make_lock
from tasks.node import checkout
from tasks.node.checkout import find_checkout, judge_file, list_others, read_checkout
from tasks.node.program import Stop, StoppedError
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of

FILES = contents(shards=2)
SHARD = "model-1-of-2.safetensors"
CODE = "code/modeling.py"
LOCK = lock_of(FILES)


class Counted:
    """A tally that keeps what it was told."""

    def __init__(self) -> None:
        self.bytes = self.files = 0

    def advance(self, count_bytes: int) -> None:
        self.bytes += count_bytes

    def file_done(self) -> None:
        self.files += 1


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    for path, data in FILES.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def verdict(tree: Path, path: str = SHARD, *, links: bool = True, lock: Lock = LOCK) -> FileVerdict:
    return judge_file(tree, lock.file(path), links=links, advance=lambda count: None)


def read(tree: Path, **changes: object) -> tuple[FileVerdict, ...]:
    return read_checkout(tree, LOCK, links=True, threads=2, stop=Stop(), **changes).verdicts  # type: ignore[arg-type]


def test_every_file_is_read_once_and_judged_in_the_order_of_the_lock(tree: Path) -> None:
    tally = Counted()
    found = read_checkout(tree, LOCK, links=True, threads=3, stop=Stop(), tally=tally)
    assert [(v.path, v.verdict, v.read_bytes) for v in found.verdicts] == [
        (file.path, "ok", file.size_bytes) for file in LOCK.files
    ]
    assert (tally.bytes, tally.files) == (LOCK.total_bytes, len(LOCK.files))
    assert (found.read_bytes, found.links, found.problems, found.differs) == (LOCK.total_bytes, 0, (), False)


def test_large_files_come_first(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def judged(directory: Path, file: LockedFile, **_: object) -> FileVerdict:
        seen.append(file.size_bytes)
        return judge_file(directory, file, links=True, advance=lambda count: None)

    monkeypatch.setattr(checkout, "judge_file", judged)
    read_checkout(tree, LOCK, links=True, threads=1, stop=Stop())
    assert seen == sorted(seen, reverse=True)


def test_a_file_of_another_size_is_not_read_and_settled_all_the_same(tree: Path) -> None:
    (tree / SHARD).write_bytes(FILES[SHARD] + b"x")
    (tree / CODE).unlink()
    tally = Counted()
    found = read_checkout(tree, LOCK, links=True, threads=2, stop=Stop(), tally=tally)
    assert {v.path: (v.got, v.expected, v.read_bytes) for v in found.problems} == {
        CODE: ("no such file", LOCK.file(CODE).sha256, 0),
        SHARD: (f"{len(FILES[SHARD]) + 1} bytes", f"{len(FILES[SHARD])} bytes", 0),
    }
    assert (tally.bytes, tally.files) == (LOCK.total_bytes, len(LOCK.files))
    assert found.counted() == f"{len(LOCK.files) - 2} ok, 1 differs, 1 missing"


def test_a_file_that_nobody_judged_is_a_problem() -> None:
    (verdict, *_) = in_order(LOCK, [])
    assert (verdict.verdict, verdict.got) == ("unreadable", "not looked at")


def test_a_lock_without_a_sha256_proves_nothing() -> None:
    file = LockedFile("config.json", 3, "other", git_sha1="a" * 40)
    assert judge_digest(file, 3, "").verdict == "differs"
    assert judge_digest(file, 3, hashlib.sha256(b"{}\n").hexdigest()).verdict == "differs"


@pytest.mark.parametrize("size_bytes", [0, 1, 999, checkout.BLOCK_BYTES - 1, checkout.BLOCK_BYTES + 1])
def test_sizes_around_a_block(tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "a.safetensors").write_bytes(data)
    file = LockedFile("a.safetensors", size_bytes, "shard", sha256=hashlib.sha256(data).hexdigest())
    lock = make_lock(REPO, REVISION, [file])
    found = verdict(tmp_path, "a.safetensors", lock=lock)
    assert (found.verdict, found.read_bytes) == ("ok", size_bytes)


@pytest.mark.parametrize("change", ["grows", "shrinks", "is written to", "is exchanged"])
def test_a_file_that_changes_while_it_is_read_is_not_right(
    tree: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(checkout, "BLOCK_BYTES", 100_000)
    path, seen = tree / SHARD, []

    def advance(count_bytes: int) -> None:
        seen.append(count_bytes)
        if len(seen) > 1:
            return
        if change == "is exchanged":
            path.rename(tree / "aside")
            path.write_bytes(bytes(len(FILES[SHARD])))
        with path.open("r+b") as file:
            if change == "grows":
                file.seek(0, os.SEEK_END)
                file.write(b"x")
            elif change == "shrinks":
                file.truncate(150_000)
            elif change == "is written to":
                file.write(FILES[SHARD][:10])  # the same bytes: that it is being written to is what is found
                os.utime(path, ns=(1, 1))

    found = judge_file(tree, LOCK.file(SHARD), links=True, advance=advance)
    if change == "is exchanged":  # what was opened is read to its end, and is right
        assert found.verdict == "ok"
    else:
        assert (found.verdict, found.got) == ("differs", "changed while it was read")


def test_links_are_followed_only_where_that_is_wanted(tree: Path) -> None:
    (tree / SHARD).rename(tree.parent / "aside")
    (tree / SHARD).symlink_to("../aside")
    assert (verdict(tree).verdict, verdict(tree).link) == ("ok", True)
    strict = verdict(tree, links=False)
    assert (strict.verdict, strict.got, strict.link) == ("not-regular", "a link", True)


def test_a_directory_that_is_a_link_is_followed_in_no_case(tree: Path) -> None:
    (tree / "code").rename(tree.parent / "code")
    (tree / "code").symlink_to("../code")
    for links in (True, False):
        found = verdict(tree, CODE, links=links)
        assert (found.verdict, found.got) == ("not-regular", "its directory code is a link")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: path.mkdir(), "a directory"),
        (os.mkfifo, "a pipe"),
        (_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/null"), "a special file"),
        (lambda path: path.symlink_to("code"), "a directory"),
    ],
)
def test_what_is_no_regular_file_is_named_and_never_opened(
    tree: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], got: str
) -> None:
    monkeypatch.chdir(tree)  # the path of a socket is short
    Path(SHARD).unlink()
    make(Path(SHARD))
    opened: list[object] = []
    monkeypatch.setattr(
        checkout.os, "open", lambda path, *more, _open=os.open, **how: opened.append(path) or _open(path, *more, **how)
    )
    found = verdict(Path("."))
    assert (found.verdict, found.got) == ("not-regular", got)
    assert SHARD not in opened


def test_a_link_that_leads_nowhere_says_where(tree: Path) -> None:
    (tree / SHARD).unlink()
    (tree / SHARD).symlink_to("blobs/0f")
    found = verdict(tree)
    assert (found.verdict, found.got, found.link) == ("missing", "a link that leads nowhere: blobs/0f", True)


def test_a_file_that_cannot_be_read_hides_no_other(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: list[bytearray], _readv: Callable[..., int] = os.readv) -> int:
        if os.fstat(fd).st_size == len(FILES[SHARD]):
            raise OSError(5, "Input/output error")
        return _readv(fd, buffers)

    monkeypatch.setattr(checkout.os, "readv", broken)
    found = [v for v in read(tree) if not v.ok]
    assert [(v.path, v.verdict, v.got) for v in found] == [(SHARD, "unreadable", "Input/output error")]


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (f"oid sha256:{LOCK.file(SHARD).sha256}\nsize 5\n", "a git-lfs pointer to this file"),
        (f"oid sha256:{'a' * 64}\nsize 5\n", f"a git-lfs pointer to sha256 {'a' * 64}"),
        (f"ext-0-foo sha256:{'b' * 64}\noid sha256:{'a' * 64}\nsize 5\n", f"a git-lfs pointer to sha256 {'a' * 64}"),
    ],
)
def test_a_pointer_is_called_one(tree: Path, content: str, got: str) -> None:
    (tree / SHARD).write_text(f"version https://git-lfs.github.com/spec/v1\n{content}")
    assert (verdict(tree).verdict, verdict(tree).got) == ("pointer", got)


def test_what_only_looks_like_a_pointer_is_none(tree: Path) -> None:
    assert judge_pointer(LOCK.file(SHARD), b"version https://git-lfs.github.com/spec/v1\noid md5:0\n") is None
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 5\n".encode()
    assert judge_pointer(LOCK.file(SHARD), b"x" + text) is None
    (tree / SHARD).write_bytes(text + bytes(2000))
    assert verdict(tree).verdict == "differs"


def test_a_pointer_that_is_the_file_of_the_lock_is_right(tmp_path: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 5\n".encode()
    (tmp_path / "a.safetensors").write_bytes(text)
    assert verdict(tmp_path, "a.safetensors", lock=lock_of({"a.safetensors": text})).ok


def test_a_stop_ends_it_in_the_middle_of_a_file(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "BLOCK_BYTES", 1000)
    stop, tally = Stop(), Counted()
    monkeypatch.setattr(tally, "advance", lambda count: stop.set())
    with pytest.raises(StoppedError):
        read_checkout(tree, LOCK, links=True, threads=1, stop=stop, tally=tally)


def test_what_is_beside_the_files_is_listed(tree: Path) -> None:
    for path in ("a.bin", "code/b.py", ".git/HEAD", "code/.cache/huggingface/x", ".cache/pip/y", ".k2-staged.json"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(b"")
    (tree / "empty").mkdir()
    (tree / "dangling").symlink_to("nowhere")
    (tree / "elsewhere").symlink_to("/etc")
    extra, ignored = list_others(tree, LOCK)
    assert extra == (".cache/pip/y", ".k2-staged.json", "a.bin", "code/b.py", "dangling", "elsewhere")
    assert ignored == (".git", "code/.cache/huggingface")


def test_a_directory_that_cannot_be_listed_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, _scandir: Callable[..., object] = os.scandir) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return _scandir(path)

    (tree / "closed").mkdir()
    monkeypatch.setattr(checkout.os, "scandir", refused)
    assert list_others(tree, LOCK)[0] == ("closed/",)


@pytest.mark.parametrize(
    ("path", "root"),
    [
        (".git", ".git"),
        (".git/hooks/a", ".git"),
        ("a/.git/b", "a/.git"),
        ("a/.gitignore", ""),
        (".gitattributes", ""),
        (".cache/huggingface/download/x", ".cache/huggingface"),
        (".cache/x", ""),
        ("a/huggingface", ""),
        (".cache/huggingface2/x", ""),
    ],
)
def test_what_is_ignored_is_what_huggingface_hub_ignores(path: str, root: str) -> None:
    from huggingface_hub.utils._paths import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    assert ignored_root(path) == root
    assert list(filter_repo_objects([path], ignore_patterns=DEFAULT_IGNORE_PATTERNS)) == ([] if root else [path])


def test_the_hubs_cache_is_found_by_the_commit_of_the_lock(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    for path in (repository / "blobs", snapshot):
        path.mkdir(parents=True)
    for given in (tmp_path / "hub", repository, snapshot):
        assert find_checkout(given, LOCK) == snapshot
    snapshot.rename(snapshot.with_name("f" * 40))
    for given in (tmp_path / "hub", repository):
        with pytest.raises(InputError) as caught:
            find_checkout(given, LOCK)
        assert (caught.value.got, caught.value.expected) == ("f" * 40, REVISION)


def test_a_directory_named_snapshots_makes_no_cache(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / REVISION).mkdir(parents=True)
    assert find_checkout(tmp_path, LOCK) == tmp_path
    with pytest.raises(InputError):
        find_checkout(tmp_path / "none", LOCK)
