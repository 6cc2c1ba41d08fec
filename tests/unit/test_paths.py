"""Paths of a checkpoint: what a Hub may call a file, alone and beside the others."""

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import InputError
from tasks.core.paths import (
    PART_MAX_BYTES,
    PATH_MAX_BYTES,
    check_paths_together,
    check_relative_path,
    linked_path,
)


@pytest.mark.parametrize(
    "bad",
    [
        "", "/etc/passwd", "..", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "a\\b", "a\0b", "a\nb",
        "a\x1b", "a\x7f", "a\x85b", "a\u200bb", "a\u202etxt.yp", "\ufeffa", "a\u2028b", "a\ud800b",
        ".k2-staged.json", ".k2-partial/x", "sub/.k2-partial/x", ".K2-staged.json", ".git/hooks/post-checkout", ".GIT",
        "a" * (PART_MAX_BYTES + 1), "ä" * (PART_MAX_BYTES // 2 + 1), "a/" * (PATH_MAX_BYTES // 2) + "b",
    ],
)  # fmt: skip
def test_unsafe_paths_are_refused(bad):
    with pytest.raises(InputError) as caught:
        check_relative_path(bad)
    assert caught.value.code == "K2-INP-003"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "good",
    [
        "a", "a/b.py", "..a", "a..b", ".gitattributes", ".github/x", "model-1-of-61.safetensors", "ä/日", "k2-a", "a b",
        "a" * PART_MAX_BYTES, "a/" * (PATH_MAX_BYTES // 2 - 1) + "b",
    ],
)  # fmt: skip
def test_usual_paths_are_kept(good):
    assert check_relative_path(good) == good


@given(st.lists(st.sampled_from(["a", "..", ".", "", "/", "b.py", "\\", "\0", "c"]), max_size=6), st.text(max_size=8))
def test_whatever_is_accepted_stays_inside(parts, name):
    path = "/".join([*parts, name])
    try:
        check_relative_path(path)
    except InputError:
        return
    assert posixpath.normpath(posixpath.join("/root/model", path)) == f"/root/model/{path}"


@pytest.mark.parametrize(
    "paths",
    [
        ["a", "a"],
        ["README.md", "readme.md"],
        ["docs/A.py", "docs/a.py"],
        ["Docs/a.py", "docs/a.py"],
        ["caf\u00e9", "cafe\u0301"],
        ["stra\u00dfe", "STRASSE"],
        ["\u03a3", "\u03c2"],
        ["a", "a/b"],
        ["a/b", "a"],
        ["A", "a/b/c"],
        ["x/a/b/c", "x/a"],
    ],
)
def test_paths_that_cannot_stand_side_by_side_are_refused(paths):
    for path in paths:
        assert check_relative_path(path) == path
    with pytest.raises(InputError) as caught:
        check_paths_together(["other", *paths])
    assert caught.value.code == "K2-INP-003"
    assert all(repr(path) in caught.value.got for path in set(paths))


def test_paths_that_only_look_alike_stand_side_by_side():
    check_paths_together(["a.py", "a/b.py", "ab", "a-b", "Docs/a", "docs/b", "a.safetensors", "aa/a.safetensors"])


PATHS = ["config.json", "sub/a.py", "sub/deep/b.py", "a"]


@pytest.mark.parametrize(
    ("path", "data", "target"),
    [
        ("x", b"config.json", "config.json"),
        ("sub/x.py", b"a.py", "sub/a.py"),
        ("sub/deep/x", b"../a.py", "sub/a.py"),
        ("sub/deep/x", b"../../config.json", "config.json"),
        ("sub/deep/x", b"./../deep/b.py", "sub/deep/b.py"),
        ("x", b"config.json\n", ""),
        ("x", b"pass", ""),
        ("x", b"", ""),
        ("x", b"sub", ""),
        ("latest", b"sub/deep", ""),
        ("x", b"../config.json", ""),
        ("x", b"\xff\xfe", ""),
        ("x", b"config.json" + b" " * 2000, ""),
    ],
)
def test_a_small_file_that_is_only_the_path_of_another_is_a_link(path, data, target):
    assert linked_path(path, data, PATHS) == target
