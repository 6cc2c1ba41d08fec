"""What a signature over a lock says, and what of it is believed."""

import base64
import json

import pytest

from tasks.core.attestation import Coverage, bundle, check_statement, parse_bundle, signed_bytes, statement
from tasks.core.errors import IntegrityError
from tasks.core.lock import LockedFile, make_lock
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of

LOCK = lock_of(contents() | {".gitattributes": b"*.safetensors lfs", ".github/x.yml": b"on: push"})


def changed(change):
    said = json.loads(statement(LOCK))
    change(said)
    return json.dumps(said).encode()


def refused(payload, lock=LOCK):
    with pytest.raises(IntegrityError) as caught:
        check_statement(lock, payload, "x.sig")
    assert caught.value.code == "K2-INT-006"
    return caught.value


def test_a_statement_names_the_lock_and_every_file_that_the_formats_tool_looks_at():
    said = json.loads(statement(LOCK))
    assert statement(LOCK) == statement(
        lock_of(contents() | {".gitattributes": b"*.safetensors lfs", ".github/x.yml": b"on: push"})
    )
    assert said["predicate"]["k2_release_lock"] == {"digest": LOCK.digest, "repo": REPO, "revision": REVISION}
    named = {entry["name"]: entry["digest"] for entry in said["predicate"]["resources"]}
    assert named == {f.path: f.sha256 for f in LOCK.files if not f.path.startswith(".git")}
    assert check_statement(LOCK, statement(LOCK), "x.sig") == Coverage(True, ())


def test_files_in_a_directory_that_others_pass_over_are_signed_where_the_checkpoint_has_some():
    lock = lock_of(contents() | {".cache/a.json": b"{}"})
    said = json.loads(statement(lock))
    assert ".cache/a.json" in {entry["name"] for entry in said["predicate"]["resources"]}
    assert ".cache" not in said["predicate"]["serialization"]["ignore_paths"]


FIRST = json.loads(statement(LOCK))["predicate"]["resources"][0]["name"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["predicate"]["resources"][0].update(digest="0" * 64), FIRST),
        (lambda d: d["predicate"]["resources"][0].update(algorithm="blake2b"), FIRST),
        (lambda d: d["predicate"]["resources"].pop(0), FIRST),
        (lambda d: d["predicate"]["resources"].append({"name": "x", "algorithm": "sha256", "digest": "0"}), "x"),
        (lambda d: d["predicate"]["resources"].append(d["predicate"]["resources"][0]), "another kind"),
        (lambda d: d["predicate"]["k2_release_lock"].update(digest="0" * 64), "another lock"),
        (lambda d: d["predicate"].update(resources=3), "cannot be read"),
        (lambda d: d["predicate"].update(k2_release_lock=3), "cannot be read"),
        (lambda d: d.pop("predicate"), "cannot be read"),
        (lambda d: d.update(predicateType="https://slsa.dev/provenance/v1"), "another kind"),
        (lambda d: d.update(_type="https://in-toto.io/Statement/v0.1"), "another kind"),
    ],
)
def test_a_statement_about_anything_else_is_refused(change, words):
    assert words in str(refused(changed(change)))


@pytest.mark.parametrize("payload", [b"", b"[]", b"3", b"\xff", b"{" * 100_000])
def test_what_is_no_statement_is_refused(payload):
    refused(payload)


def test_the_statement_of_another_revision_with_the_same_files_is_refused():
    newer = make_lock(REPO, "a" * 40, LOCK.files)
    assert "another lock" in str(refused(statement(LOCK), newer))


def test_a_statement_by_the_formats_own_tool_is_over_the_files_and_says_what_it_leaves_out():
    own = changed(lambda d: d["predicate"].pop("k2_release_lock"))
    assert check_statement(LOCK, own, "x.sig") == Coverage(False, (".gitattributes", ".github/x.yml"))
    with_signature_in_it = make_lock(REPO, REVISION, [*LOCK.files, LockedFile("model.sig", 1, "other", "a" * 64)])
    assert "model.sig" in refused(own, with_signature_in_it).where


def test_a_bundle_comes_back_and_its_signature_is_over_dsse_bytes():
    payload = statement(LOCK)
    found = parse_bundle(bundle(payload, b"sig", "ab" * 32), "x.sig")
    assert (found.payload, found.signature, found.key_id) == (payload, b"sig", "ab" * 32)
    kind = b"application/vnd.in-toto+json"
    assert found.signed_bytes == signed_bytes(payload) == b"DSSEv1 28 " + kind + b" %d " % len(payload) + payload


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("dsseEnvelope"),
        lambda d: d.pop("verificationMaterial"),
        lambda d: d.update(mediaType="application/vnd.dev.sigstore.bundle.v0.1+json"),
        lambda d: d["dsseEnvelope"].update(payloadType="text/plain"),
        lambda d: d["dsseEnvelope"].update(signatures=[]),
        lambda d: d["dsseEnvelope"]["signatures"].append(d["dsseEnvelope"]["signatures"][0]),
        lambda d: d["dsseEnvelope"].update(payload="not base64!"),
        lambda d: d["dsseEnvelope"].update(payload=base64.b64encode(b"x").decode() + "\n!"),
        lambda d: d["dsseEnvelope"]["signatures"][0].update(sig=3),
        lambda d: d["verificationMaterial"].update(publicKey=None),
    ],
)
def test_what_is_no_bundle_of_one_key_is_refused(change):
    data = json.loads(bundle(statement(LOCK), b"sig", "ab" * 32))
    change(data)
    with pytest.raises(IntegrityError) as caught:
        parse_bundle(json.dumps(data).encode(), "x.sig")
    assert (caught.value.code, caught.value.where) == ("K2-INT-006", "x.sig")


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b"\xff\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(IntegrityError):
        parse_bundle(data, "x.sig")
