"""Signatures over locks: made and checked without a network, and asked for by the lock step where a site says so."""

import json
import socket

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tasks.adapters.ec_keys import EcPublicKey, EcSigningKey
from tasks.core.attestation import Coverage, bundle, parse_bundle, signed_bytes, statement
from tasks.core.errors import InputError, IntegrityError
from tasks.core.identity import sha256_hex
from tasks.core.lock import LockedFile, make_lock
from tasks.steps.acceptance import find_lock, lock_step
from tasks.steps.signatures import check_signature, put_signature, require_signature, sign_lock, signature_key
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of
from tests.fakes.lock_keys import key_pair
from tests.fakes.small_world import World

LOCK = lock_of(contents())
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


@pytest.fixture
def pair(tmp_path):
    return key_pair(tmp_path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(act):
    with pytest.raises(IntegrityError) as caught:
        act()
    assert caught.value.code == "K2-INT-006"
    return caught.value


@pytest.mark.parametrize("curve", CURVES)
def test_a_signature_of_each_curve_holds(tmp_path, curve):
    pair = key_pair(tmp_path, curve=CURVES[curve])
    assert check_signature(pair.key, LOCK, sign_lock(pair.signing, LOCK), "x.sig") == Coverage(True, ())
    assert pair.key.key_id == pair.signing.key_id == sha256_hex(pair.public.read_bytes())


def test_an_encrypted_key_needs_its_password(tmp_path):
    pair = key_pair(tmp_path, password=b"tell nobody")
    (tmp_path / "password").write_text("tell nobody\n")
    key = EcSigningKey(pair.private, tmp_path / "password")
    check_signature(pair.key, LOCK, sign_lock(key, LOCK), "x.sig")
    (tmp_path / "password").write_text("tell everybody")
    for wrong in (EcSigningKey(pair.private), EcSigningKey(pair.private, tmp_path / "password")):
        with pytest.raises(InputError) as caught:
            sign_lock(wrong, LOCK)
        assert str(pair.private) in caught.value.where
        assert "tell everybody" not in str(caught.value)


def test_a_signature_of_another_key_is_refused(tmp_path, pair):
    other = key_pair(tmp_path, "other")
    error = refused(lambda: check_signature(other.key, LOCK, sign_lock(pair.signing, LOCK), "x.sig"))
    assert pair.key.key_id[:12] in error.got and other.key.key_id[:12] in error.expected


def test_a_signature_that_only_calls_itself_by_the_key_is_refused(tmp_path, pair):
    other, payload = key_pair(tmp_path, "other"), statement(LOCK)
    forged = bundle(payload, other.signing.sign(signed_bytes(payload)), pair.key.key_id)
    refused(lambda: check_signature(pair.key, LOCK, forged, "x.sig"))


@pytest.mark.parametrize("change", ["size", "sha256", "one file less", "one file more", "revision", "repo"])
def test_a_lock_that_was_changed_after_it_was_signed_is_refused(pair, change):
    data, files = sign_lock(pair.signing, LOCK), list(LOCK.files)
    repo, revision = LOCK.repo, LOCK.revision
    if change == "size":
        files[0] = LockedFile(files[0].path, files[0].size_bytes + 1, files[0].kind, files[0].sha256)
    elif change == "sha256":
        files[0] = LockedFile(files[0].path, files[0].size_bytes, files[0].kind, "0" * 64)
    elif change == "one file less":
        files.pop(0)
    elif change == "one file more":
        files.append(LockedFile("evil.py", 1, "code", "0" * 64))
    elif change == "revision":
        revision = "a" * 40
    else:
        repo = "moonshotai/Kimi-K2-Base"
    refused(lambda: check_signature(pair.key, make_lock(repo, revision, files), data, "x.sig"))


def test_no_changed_byte_of_a_signature_file_changes_what_is_signed(pair):
    data = sign_lock(pair.signing, LOCK)
    refusals = 0
    for place in range(0, len(data), 53):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        try:
            check_signature(pair.key, LOCK, damaged, "x.sig")
        except IntegrityError:
            refusals += 1
        else:  # a byte without a meaning: a name that a bundle gives to its key, a bit behind the last one of base64
            assert parse_bundle(damaged, "x.sig").payload == statement(LOCK)
    assert refusals > len(data) / 53 * 0.9


@pytest.mark.parametrize("content", ["", "no key", "private", "rsa", "p192"])
def test_what_is_no_public_key_of_a_known_curve_is_wrong_input(tmp_path, pair, content):
    path = tmp_path / "k.pub"
    if content == "private":
        path = pair.private
    elif content in ("rsa", "p192"):
        private = rsa.generate_private_key(65537, 2048) if content == "rsa" else ec.generate_private_key(ec.SECP224R1())
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        path.write_bytes(private.public_key().public_bytes(serialization.Encoding.PEM, form))
    else:
        path.write_text(content)
    with pytest.raises(InputError) as caught:
        check_signature(EcPublicKey(path), LOCK, sign_lock(pair.signing, LOCK), "x.sig")
    assert caught.value.where == str(path)


def test_a_key_file_that_is_not_there_is_wrong_input_when_it_is_needed(tmp_path):
    key = EcPublicKey(tmp_path / "none.pub")
    with pytest.raises(InputError):
        _ = key.key_id


def test_a_lock_with_a_file_that_nobody_hashed_is_not_signed(pair):
    bare = make_lock(REPO, REVISION, [*LOCK.files, LockedFile("x", 1, "other", git_sha1="a" * 40)])
    with pytest.raises(InputError):
        sign_lock(pair.signing, bare)


class Signed:
    """A site that asks for signatures of one key."""

    def __init__(self, pair):
        self.pair = pair
        self.world = World()
        self.world.lock_key = pair.key

    def lock(self):
        return find_lock(self.world.ports(), REPO, REVISION).lock

    def step(self):
        return lock_step(self.world.ports(), REPO, REVISION)


@pytest.fixture
def site(pair):
    return Signed(pair)


def test_where_a_site_names_a_key_an_unsigned_lock_is_refused_and_not_accepted(site):
    error = refused(site.step)
    assert "--sign-key" in error.hint and REPO in error.hint
    assert not [key for key in site.world.store.objects if key.startswith(("locks/", "accepted/"))]


def test_a_signed_lock_goes_on_and_the_record_says_by_whom(site):
    put_signature(site.world.store, site.lock(), site.pair.key, sign_lock(site.pair.signing, site.lock()))
    lock, data = site.step()
    assert data["signed_by"] == site.pair.key.key_id
    assert site.pair.key.key_id[:12] in data["note"]
    assert site.step()[0] == lock


def test_a_lock_that_was_accepted_unsigned_is_refused_once_the_site_names_a_key(site):
    site.world.lock_key = None
    site.step()
    site.world.lock_key = site.pair.key
    refused(site.step)


@pytest.mark.parametrize("what", ["another key's", "another lock's", "of the files alone", "damaged", "empty"])
def test_a_wrong_signature_in_the_store_is_refused(site, tmp_path, what):
    lock, store = site.lock(), site.world.store
    place, payload = signature_key(lock, site.pair.key), json.loads(statement(lock))
    if what == "another key's":
        store.objects[place] = sign_lock(key_pair(tmp_path, "other").signing, lock)
    elif what == "another lock's":
        store.objects[place] = sign_lock(site.pair.signing, LOCK)
    elif what == "of the files alone":
        del payload["predicate"]["k2_release_lock"]
        data = json.dumps(payload).encode()
        store.objects[place] = bundle(data, site.pair.signing.sign(signed_bytes(data)), site.pair.key.key_id)
    else:
        store.objects[place] = sign_lock(site.pair.signing, lock)[:-40] if what == "damaged" else b""
    refused(site.step)


def test_only_a_signature_that_holds_is_put_into_the_store(site, tmp_path):
    lock = site.lock()
    refused(
        lambda: put_signature(site.world.store, lock, site.pair.key, sign_lock(key_pair(tmp_path, "o").signing, lock))
    )
    assert signature_key(lock, site.pair.key) not in site.world.store.objects


def test_a_site_without_a_key_asks_for_no_signature():
    assert require_signature(World().store, LOCK, None) == ""
