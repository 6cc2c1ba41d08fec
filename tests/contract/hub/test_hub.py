"""What `ports.Hub` promises: the same cases on the fake, on the rehearsal's server and on olah.

olah knows no ranges, no pages and no X-Linked headers, and answers 500 to much that it does not have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tasks.core.errors import InputError, Never, UnavailableError
from tasks.core.identity import git_blob_sha1_hex
from tasks.core.lock import LockedFile
from tests.contract.hub.conftest import FILES, REPO, SHARD, Served
from tests.fakes.memory_hub import LFS_SUFFIXES

NO_COMMIT = "f" * 40


def read(served: Served, path: str, offset: int = 0) -> bytes:
    return b"".join(served.hub.open_file(REPO, served.commit, path, offset))


def test_a_branch_and_a_commit_become_a_commit(served: Served) -> None:
    assert served.hub.resolve(REPO, "main") == served.commit
    assert served.hub.resolve(REPO, served.commit) == served.commit


def test_the_list_has_all_files_in_order(served: Served) -> None:
    listed = served.hub.list_revision(REPO, served.commit)
    assert (listed.repo, listed.revision) == (REPO, served.commit)
    assert [(file.path, file.size_bytes) for file in listed.files] == sorted(
        (path, len(data)) for path, data in FILES.items()
    )


@pytest.mark.parametrize("path", FILES)
def test_a_large_file_has_a_sha256_and_a_small_one_its_git_id(served: Served, path: str) -> None:
    files = {file.path: file for file in served.hub.list_revision(REPO, served.commit).files}
    data, kind = FILES[path], files[path].kind
    if path.endswith(LFS_SUFFIXES):
        assert files[path] == LockedFile(path, len(data), kind, sha256=hashlib.sha256(data).hexdigest())
    else:
        assert files[path] == LockedFile(path, len(data), kind, git_sha1=git_blob_sha1_hex(data))


@pytest.mark.parametrize("path", [SHARD, "model-2-of-2.safetensors", "config.json", "code/empty.py", "extra/07.txt"])
def test_a_file_arrives_whole(served: Served, path: str) -> None:
    assert read(served, path) == FILES[path]


@pytest.mark.parametrize("offset", [1, 1_234_567, 2_999_999])
def test_bytes_come_from_an_offset_on(served: Served, offset: int) -> None:
    assert read(served, SHARD, offset) == FILES[SHARD][offset:]


def test_from_its_end_on_a_file_is_empty_and_beyond_there_is_none(served: Served) -> None:
    assert read(served, SHARD, 3_000_000) == b""
    with pytest.raises(UnavailableError):
        read(served, SHARD, 3_000_001)
    with pytest.raises(UnavailableError):
        read(served, "code/empty.py", 1)


def test_a_large_file_comes_in_blocks(served: Served) -> None:
    blocks = list(served.hub.open_file(REPO, served.commit, SHARD, 0))
    assert len(blocks) > 1
    assert all(blocks)


def test_a_stream_may_be_left_and_the_next_one_is_whole(served: Served) -> None:
    stream = served.hub.open_file(REPO, served.commit, SHARD, 0)
    assert FILES[SHARD].startswith(next(iter(stream)))
    stream.close()  # type: ignore[attr-defined]
    assert read(served, SHARD) == FILES[SHARD]


def test_files_are_read_by_many_at_once(served: Served) -> None:
    paths = [SHARD, "config.json", "model-2-of-2.safetensors", "code/modeling_k2.py"] * 3
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda path: read(served, path), paths)) == [FILES[path] for path in paths]


def test_a_small_file_is_read_up_to_a_limit(served: Served) -> None:
    size = len(FILES["config.json"])
    assert served.hub.read_file(REPO, served.commit, "config.json", size) == FILES["config.json"]
    for path, limit in ((SHARD, 1000), ("config.json", size - 1)):
        with pytest.raises(InputError) as caught:
            served.hub.read_file(REPO, served.commit, path, limit)
        assert caught.value.code == "K2-INP-004"
        assert caught.value.where.endswith(path)
        assert isinstance(caught.value.retry, Never)


@pytest.mark.parametrize(
    ("path", "offset", "size"),
    [(SHARD, 0, 8), (SHARD, 0, 1_000_000), (SHARD, 1_234_567, 500), (SHARD, 2_999_999, 1), ("config.json", 0, 5)],
)
def test_a_part_of_a_file_is_just_that_part(served: Served, path: str, offset: int, size: int) -> None:
    data = served.hub.read_range(REPO, served.commit, path, offset, size)
    assert data == FILES[path][offset : offset + size]
    assert read(served, "config.json") == FILES["config.json"]  # and the next request is like any other


def test_a_part_ends_where_the_file_does(served: Served) -> None:
    assert served.hub.read_range(REPO, served.commit, SHARD, 2_999_990, 500) == FILES[SHARD][-10:]
    assert served.hub.read_range(REPO, served.commit, SHARD, 3_000_000, 8) == b""
    assert served.hub.read_range(REPO, served.commit, "code/empty.py", 0, 8) == b""
    with pytest.raises(UnavailableError):
        served.hub.read_range(REPO, served.commit, SHARD, 3_000_001, 8)


# A file of no repository is no file either: olah says the latter.
ABSENT: dict[str, tuple[str, Callable[[Served], Any]]] = {
    "repo": ("K2-INP-002", lambda s: s.hub.resolve("moonshotai/Nothing", "main")),
    "repo-list": ("K2-INP-002", lambda s: s.hub.list_revision("moonshotai/Nothing", s.commit)),
    "repo-file": (
        "K2-INP-002 K2-INP-004",
        lambda s: s.hub.read_file("moonshotai/Nothing", s.commit, "config.json", 100),
    ),
    "branch": ("K2-INP-002", lambda s: s.hub.resolve(REPO, "no-such-branch")),
    "commit": ("K2-INP-002", lambda s: s.hub.resolve(REPO, NO_COMMIT)),
    "commit-list": ("K2-INP-002", lambda s: s.hub.list_revision(REPO, NO_COMMIT)),
    "commit-file": ("K2-INP-002", lambda s: s.hub.read_file(REPO, NO_COMMIT, "config.json", 100)),
    "file": ("K2-INP-004", lambda s: read(s, "nothing.bin")),
    "file-from": ("K2-INP-004", lambda s: read(s, "nothing.bin", 7)),
    "file-below": ("K2-INP-004", lambda s: read(s, "code/nothing.py")),
    "file-read": ("K2-INP-004", lambda s: s.hub.read_file(REPO, s.commit, "nothing.json", 100)),
    "file-part": ("K2-INP-004", lambda s: s.hub.read_range(REPO, s.commit, "nothing.bin", 0, 8)),
    "branch-list": ("K2-INP-002", lambda s: s.hub.list_revision(REPO, "main")),
    "no-name": ("K2-INP-001", lambda s: s.hub.resolve("../etc", "main")),
}


@pytest.mark.parametrize("what", ABSENT)
def test_what_does_not_exist_is_wrong_input(served: Served, what: str) -> None:
    codes, call = ABSENT[what]
    with pytest.raises(InputError) as caught:
        call(served)
    assert caught.value.code in codes.split()
    assert isinstance(caught.value.retry, Never)
    assert read(served, "config.json") == FILES["config.json"]  # and the next request is like any other
