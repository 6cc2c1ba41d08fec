"""Names and digests."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import InputError
from tasks.core.identity import (
    canonical_bytes,
    check_release_id,
    check_repo,
    check_revision,
    digest_of,
    git_blob_sha1_hex,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_canonical_bytes_say_the_same_and_are_a_fixed_point(value):
    data = canonical_bytes(value)
    assert json.loads(data) == value
    assert canonical_bytes(json.loads(data)) == data


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_the_order_of_keys_does_not_change_the_digest(value):
    assert digest_of(dict(reversed(value.items()))) == digest_of(value)


def test_numbers_that_are_none_have_no_canonical_form():
    with pytest.raises(ValueError):
        canonical_bytes({"value": float("nan")})


def test_git_blob_id_is_the_one_that_git_computes():
    # printf 'hello\n' | git hash-object --stdin
    assert git_blob_sha1_hex(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert git_blob_sha1_hex(b"") == hashlib.sha1(b"blob 0\0").hexdigest()


@pytest.mark.parametrize("bad", ["main", "v1", "a" * 39, "a" * 41, "A" * 40, "g" * 40, "", "a" * 40 + "\n"])
def test_a_revision_is_a_full_commit(bad):
    with pytest.raises(InputError) as caught:
        check_revision(bad)
    assert caught.value.code == "K2-INP-002"
    assert check_revision("a1" * 20) == "a1" * 20


@pytest.mark.parametrize("bad", ["kimi", "a/b/c", "../x", "a/..", "a/b..c", "a b/c", "/a", "a/", "", "a/-b", "a/b\n"])
def test_a_repository_is_owner_and_name(bad):
    with pytest.raises(InputError):
        check_repo(bad)
    assert check_repo("moonshotai/Kimi-K2-Instruct") == "moonshotai/Kimi-K2-Instruct"


@pytest.mark.parametrize("bad", ["", "K2", "-a", "a-", "a_b", "a.b", "a/b", "a" * 49, "a\n", "../a"])
def test_a_release_id_can_name_objects_and_keys(bad):
    with pytest.raises(InputError):
        check_release_id(bad)
    assert check_release_id("k2-20261130-1") == "k2-20261130-1"
    assert check_release_id("a" * 48) == "a" * 48
