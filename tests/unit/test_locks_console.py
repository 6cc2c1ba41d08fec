"""`k2ctl lock`, `lock-sign`, `lock-verify` and `lock-accept`: files, the store, exit codes."""

import json
import socket

import pytest

from flows import cli
from tasks import wiring
from tasks.core.lock import make_lock
from tasks.core.sglang_checksums import sglang_checksums
from tasks.steps.acceptance import find_lock, lock_step
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.lock_keys import key_pair
from tests.fakes.memory_hub import DownHub
from tests.fakes.safetensors_files import INDEX
from tests.fakes.site_files import write_site
from tests.fakes.small_world import World, checkpoint

NAME = f"{REPO.replace('/', '--')}@{REVISION[:8]}.lock"
ACCEPTED = f"accepted/{REPO}/{REVISION}.json"


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return int(code), out.out, out.err


def document(capsys, *argv):
    code, out, _ = run(capsys, *argv, "--json")
    return code, json.loads(out)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site, and commands that reach it."""
    world = World()
    monkeypatch.setattr(wiring, "connect", lambda path, run, progress, model="", access=None: world.ports(run))
    monkeypatch.setenv("K2_SITE", str(write_site(tmp_path)))
    return world


@pytest.fixture
def lock_file(site, tmp_path):
    """A lock file as somebody else made it; the site knows nothing of it."""
    path = tmp_path / "elsewhere" / f"{NAME}.json"
    path.parent.mkdir()
    path.write_bytes(find_lock(site.ports(), REPO, REVISION).lock.to_bytes())
    return path


@pytest.fixture
def pair(tmp_path):
    return key_pair(tmp_path)


def lock(capsys, tmp_path, *more):
    return document(capsys, "lock", REPO, "--output", tmp_path / "locks", *more)


def test_a_lock_is_written_and_accepted_and_names_the_commit_of_a_branch(capsys, site, tmp_path):
    code, said = lock(capsys, tmp_path, "--revision", "main")
    path = tmp_path / "locks" / f"{NAME}.json"
    assert (code, said["path"], said["revision"], said["shards"]) == (0, str(path), REVISION, 2)
    assert json.loads(site.store.objects[ACCEPTED])["lock_digest"] == said["digest"]
    assert path.read_bytes() == site.store.objects[f"locks/{said['digest']}.json"]
    code, out, _ = run(capsys, "lock", REPO, "--output", tmp_path / "locks")
    assert (code, "accepted before" in out, str(path) in out) == (0, True, True)


def test_a_commit_that_was_accepted_needs_no_hub_and_a_branch_does(capsys, site, tmp_path):
    lock(capsys, tmp_path)
    site.hub = DownHub()
    assert lock(capsys, tmp_path, "--revision", REVISION)[0] == 0
    assert site.hub.asked == []
    assert lock(capsys, tmp_path, "--revision", "main")[0] == 11
    assert site.hub.asked == ["resolve"]


def test_again_asks_the_hub_and_a_commit_that_has_changed_is_exit_5(capsys, site, tmp_path):
    first = lock(capsys, tmp_path)[1]
    assert lock(capsys, tmp_path, "--again")[1]["source"].startswith("made from")
    site.hub.files = {**checkpoint(), "code.py": b"import os"}
    assert lock(capsys, tmp_path)[1]["digest"] == first["digest"]
    code, said = lock(capsys, tmp_path, "--again")
    assert (code, said["error"]["code"]) == (5, "K2-INT-005")
    assert lock(capsys, tmp_path)[1]["digest"] == first["digest"]


def test_a_wrong_total_is_refused_until_it_is_ignored_once(capsys, site, tmp_path):
    site.hub.files = {**checkpoint(), INDEX: checkpoint()[INDEX].replace(b"800", b"801")}
    code, said = lock(capsys, tmp_path)
    assert (code, said["error"]["code"]) == (2, "K2-INP-004")
    assert "--ignore-total-size" in said["error"]["next"]
    code, said = lock(capsys, tmp_path, "--ignore-total-size")
    assert code == 0
    assert lock_step(site.ports(), REPO, REVISION)[1]["lock_digest"] == said["digest"]


def test_the_list_for_sglang_is_written_beside(capsys, site, tmp_path):
    code, said = lock(capsys, tmp_path, "--sglang-checksums", tmp_path / "x" / "sglang.json")
    made = find_lock(site.ports(), REPO, REVISION).lock
    assert (code, said["sglang_checksums"]) == (0, str(tmp_path / "x" / "sglang.json"))
    assert (tmp_path / "x" / "sglang.json").read_bytes() == sglang_checksums(made)


def test_a_site_with_a_key_takes_a_lock_that_was_signed_and_no_other(capsys, site, tmp_path, pair):
    site.lock_key = pair.key
    code, _, err = run(capsys, "lock", REPO, "--output", tmp_path / "locks")
    assert (code, "releases refuse this lock" in err, "K2-INT-006" in err) == (0, True, True)
    code, out, err = run(capsys, "lock", REPO, "--output", tmp_path / "locks", "--sign-key", pair.private)
    assert (code, "refuse" in err, f"{NAME}.sig" in out) == (0, False, True)
    assert lock_step(site.ports(), REPO, REVISION)[1]["signed_by"] == pair.key.key_id
    assert document(capsys, "lock-verify", tmp_path / "locks" / f"{NAME}.json", "--key", pair.public)[0] == 0


def test_a_signature_of_another_key_is_kept_and_does_not_help(capsys, site, tmp_path, pair):
    site.lock_key = pair.key
    other = key_pair(tmp_path, "other")
    code, _, err = run(capsys, "lock", REPO, "--output", tmp_path / "locks", "--sign-key", other.private)
    assert (code, "releases refuse this lock" in err) == (0, True)
    site.lock_key = other.key
    assert lock_step(site.ports(), REPO, REVISION)[1]["signed_by"] == other.key.key_id


def test_signing_and_checking_need_no_network_and_no_site(capsys, lock_file, pair, tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(wiring, "connect", refuse)
    code, said = document(capsys, "lock-sign", lock_file, "--key", pair.private)
    assert (code, said["signature"]) == (0, str(lock_file.with_suffix(".sig")))
    code, said = document(capsys, "lock-verify", lock_file, "--key", pair.public)
    assert (code, said["ok"], said["names_lock"], said["left_out"]) == (0, True, True, [])
    assert "its revision and every file" in run(capsys, "lock-verify", lock_file, "--key", pair.public)[2]
    elsewhere = tmp_path / "s.sig"
    assert run(capsys, "lock-sign", lock_file, "--key", pair.private, "-o", elsewhere)[0] == 0
    assert run(capsys, "lock-verify", lock_file, "--key", pair.public, "--signature", elsewhere)[0] == 0


def test_a_password_is_read_from_its_file(capsys, lock_file, tmp_path):
    pair = key_pair(tmp_path, password=b"secret words")
    (tmp_path / "password").write_text("secret words\n")
    code, _, err = run(capsys, "lock-sign", lock_file, "--key", pair.private)
    assert (code, str(pair.private) in err) == (2, True)
    argv = ["lock-sign", lock_file, "--key", pair.private, "--password-file", tmp_path / "password"]
    assert run(capsys, *argv)[0] == 0


@pytest.mark.parametrize("what", ["another key", "changed lock", "changed signature", "missing signature", "no key"])
def test_what_does_not_verify_is_not_exit_0(capsys, lock_file, pair, tmp_path, what):
    assert run(capsys, "lock-sign", lock_file, "--key", pair.private)[0] == 0
    signature, key, code, said = lock_file.with_suffix(".sig"), pair.public, 5, "K2-INT-006"
    if what == "another key":
        key = key_pair(tmp_path, "other").public
    elif what == "changed lock":
        data = json.loads(lock_file.read_bytes())
        data["files"][0]["sha256"] = "0" * 64
        lock_file.write_text(json.dumps(data))
    elif what == "changed signature":
        signature.write_bytes(signature.read_bytes().replace(b"payload", b"payloaf"))
    elif what == "missing signature":
        signature.unlink()
        code, said = 2, "K2-INP-001"
    else:
        key, code, said = tmp_path / "none.pub", 2, "K2-INP-001"
    got, data = document(capsys, "lock-verify", lock_file, "--key", key)
    assert (got, data["error"]["code"]) == (code, said)


def test_a_lock_that_was_made_elsewhere_is_accepted_without_a_hub(capsys, site, lock_file):
    site.hub = DownHub()
    code, said = document(capsys, "lock-accept", lock_file)
    assert (code, said["source"]) == (0, f"read from {NAME}.json")
    lock, data = lock_step(site.ports(), REPO, REVISION)
    assert (lock.digest, data["lock_source"]) == (said["digest"], f"accepted before, read from {NAME}.json")
    assert site.hub.asked == []
    assert document(capsys, "lock-accept", lock_file)[0] == 0


def test_a_second_lock_for_a_commit_is_exit_5(capsys, site, lock_file):
    lock_step(site.ports(), REPO, REVISION)
    made = find_lock(site.ports(), REPO, REVISION).lock
    lock_file.write_bytes(make_lock(REPO, REVISION, made.files[1:]).to_bytes())
    code, said = document(capsys, "lock-accept", lock_file)
    assert (code, said["error"]["code"]) == (5, "K2-INT-005")
    assert made.digest in said["error"]["expected"]


def test_the_signature_beside_a_lock_goes_into_the_store_with_it(capsys, site, lock_file, pair):
    site.lock_key = pair.key
    code, _, err = run(capsys, "lock-accept", lock_file)
    assert (code, "releases refuse this lock" in err) == (0, True)
    run(capsys, "lock-sign", lock_file, "--key", pair.private)
    code, said = document(capsys, "lock-accept", lock_file)
    assert (code, said["signature"] in site.store.objects) == (0, True)
    assert lock_step(site.ports(), REPO, REVISION)[1]["signed_by"] == pair.key.key_id


def test_a_wrong_signature_beside_a_lock_stops_its_acceptance(capsys, site, lock_file, pair, tmp_path):
    run(capsys, "lock-sign", lock_file, "--key", key_pair(tmp_path, "other").private)
    site.lock_key = pair.key
    code, said = document(capsys, "lock-accept", lock_file)
    assert (code, said["error"]["code"]) == (5, "K2-INT-006")
    assert ACCEPTED not in site.store.objects


def test_a_signature_that_nobody_can_check_is_not_taken(capsys, site, lock_file, pair):
    run(capsys, "lock-sign", lock_file, "--key", pair.private)
    code, said = document(capsys, "lock-accept", lock_file, "--signature", lock_file.with_suffix(".sig"))
    assert (code, "lock_key" in said["error"]["got"]) == (2, True)
    assert document(capsys, "lock-accept", lock_file)[0] == 0
    assert not [key for key in site.store.objects if key.startswith("signatures/")]


def test_places_that_cannot_be_written_are_wrong_input(capsys, site, tmp_path, lock_file, pair):
    (tmp_path / "a-file").write_text("")
    for argv in (
        ["lock", REPO, "--output", tmp_path / "a-file"],
        ["lock", REPO, "--output", tmp_path / "locks", "--sglang-checksums", tmp_path / "a-file" / "x"],
        ["lock-sign", lock_file, "--key", pair.private, "-o", tmp_path / "a-file" / "x"],
    ):
        code, said = document(capsys, *argv)
        assert (code, said["error"]["code"]) == (2, "K2-INP-001")
