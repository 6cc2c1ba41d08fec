"""Comparison with the lock: only a digest proves anything."""

import pytest

from tasks.core.verify import Mismatch, ObservedFile, compare
from tests.fakes.checkpoints import contents, lock_of

LOCK = lock_of(contents())
RIGHT = {f.path: ObservedFile(f.path, f.size_bytes, f.sha256) for f in LOCK.files}
FIRST = LOCK.files[0]


def seen(**changes):
    return [*(RIGHT | changes).values()]


def test_everything_right_is_ok_and_extra_files_do_not_count():
    result = compare(LOCK, [*RIGHT.values(), ObservedFile("extra", 1, "x")])
    assert result.ok
    assert (result.checked, result.extra) == (len(LOCK.files), ("extra",))


@pytest.mark.parametrize(
    ("observed", "got"),
    [
        (ObservedFile(FIRST.path, FIRST.size_bytes, "0" * 64), "0" * 64),
        (ObservedFile(FIRST.path, FIRST.size_bytes, ""), "not hashed"),
        (ObservedFile(FIRST.path, FIRST.size_bytes + 1, FIRST.sha256), f"{FIRST.size_bytes + 1} bytes"),
    ],
)
def test_a_wrong_file_is_named_with_both_sides(observed, got):
    result = compare(LOCK, seen(**{FIRST.path: observed}))
    assert not result.ok
    assert result.first_problem().path == FIRST.path
    assert result.first_problem().got == got


def test_a_missing_file_is_not_ok():
    result = compare(LOCK, [f for f in RIGHT.values() if f.path != FIRST.path])
    assert result.first_problem() == Mismatch(FIRST.path, "no such file", "a file of the lock")


def test_nothing_observed_is_not_ok():
    assert len(compare(LOCK, []).missing) == len(LOCK.files)


def test_a_file_without_sha256_in_the_lock_is_never_right():
    from dataclasses import replace

    lock = replace(LOCK, files=(replace(FIRST, sha256="", git_sha1="a" * 40), *LOCK.files[1:]))
    assert not compare(lock, seen(**{FIRST.path: ObservedFile(FIRST.path, FIRST.size_bytes, "")})).ok
