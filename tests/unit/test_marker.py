"""The marker: this lock, this node, every file; and on disk the very files that were verified."""

import json
from dataclasses import replace

import pytest

from tasks.core.errors import IntegrityError
from tasks.core.marker import (
    FileStat,
    Marker,
    StagedFile,
    check_marker_against_disk,
    check_marker_against_lock,
    marker_from_data,
)
from tests.fakes.checkpoints import contents, lock_of

LOCK = lock_of(contents())
MARKER = Marker(
    LOCK.digest, LOCK.repo, LOCK.revision, "node-1", "uid-1",
    tuple(StagedFile(f.path, f.size_bytes, f.sha256, 100 + i, i) for i, f in enumerate(LOCK.files)),
    "2026-11-30T00:00:00Z", "k2-release 0",
)  # fmt: skip
STATS = [FileStat(f.path, f.size_bytes, f.mtime_ns, f.inode) for f in MARKER.files]


def test_what_a_marker_proves_stays_the_same_when_a_file_is_repaired():
    repaired = replace(with_first(mtime_ns=7, inode=7), verified_at="2027-01-01T00:00:00Z", tool="k2-release 1")
    assert repaired.digest != MARKER.digest
    assert repaired.content_digest == MARKER.content_digest
    assert replace(MARKER, files=MARKER.files[::-1]).content_digest == MARKER.content_digest


@pytest.mark.parametrize(
    "change",
    [
        lambda: replace(MARKER, node="node-2"),
        lambda: replace(MARKER, node_uid="another machine"),
        lambda: replace(MARKER, lock_digest="f" * 64),
        lambda: replace(MARKER, files=MARKER.files[1:]),
        lambda: with_first(sha256="f" * 64),
        lambda: with_first(size_bytes=1),
    ],
)
def test_another_machine_or_other_bytes_prove_something_else(change):
    assert change().content_digest != MARKER.content_digest


def with_first(**changes):
    return replace(MARKER, files=(replace(MARKER.files[0], **changes), *MARKER.files[1:]))


def test_a_marker_comes_back_from_its_bytes():
    again = marker_from_data(json.loads(MARKER.to_bytes()))
    assert again == MARKER
    assert again.digest == MARKER.digest


@pytest.mark.parametrize("data", [None, [], 3, {}, {"version": 2}, {**MARKER.to_data(), "files": [{}]}, {"version": 1}])
def test_what_is_no_marker_is_an_integrity_error(data):
    with pytest.raises(IntegrityError):
        marker_from_data(data)


def test_the_right_marker_passes():
    check_marker_against_lock(MARKER, LOCK, "node-1")
    check_marker_against_disk(MARKER, LOCK.digest, STATS)


@pytest.mark.parametrize(
    ("marker", "node"),
    [
        (replace(MARKER, lock_digest="0" * 64), "node-1"),
        (MARKER, "node-2"),
        (replace(MARKER, files=MARKER.files[1:]), "node-1"),
        (replace(MARKER, files=()), "node-1"),
        (with_first(sha256="0" * 64), "node-1"),
        (with_first(sha256=""), "node-1"),
        (with_first(size_bytes=1), "node-1"),
    ],
)
def test_a_marker_of_something_else_does_not(marker, node):
    with pytest.raises(IntegrityError):
        check_marker_against_lock(marker, LOCK, node)


@pytest.mark.parametrize("field", ["size_bytes", "mtime_ns", "inode"])
def test_a_file_that_was_replaced_is_not_the_one_that_was_verified(field):
    stats = [replace(STATS[0], **{field: 999}), *STATS[1:]]
    with pytest.raises(IntegrityError) as caught:
        check_marker_against_disk(MARKER, LOCK.digest, stats)
    assert STATS[0].path in caught.value.where


def test_a_file_that_is_gone_and_another_lock_are_refused():
    with pytest.raises(IntegrityError):
        check_marker_against_disk(MARKER, LOCK.digest, STATS[1:])
    with pytest.raises(IntegrityError):
        check_marker_against_disk(MARKER, "0" * 64, STATS)
