"""Our signatures and OpenSSF's tool, model_signing 1.1.1: each takes what the other signs, and both refuse alike."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from model_signing import hashing, signing, verifying

from tasks.core.attestation import Coverage
from tasks.core.errors import IntegrityError
from tasks.core.lock import Lock
from tasks.steps.signatures import check_signature, sign_lock
from tests.fakes.checkpoints import contents, lock_of
from tests.fakes.lock_keys import KeyPair, key_pair

FILES = {**contents(2, 20_000), ".gitattributes": b"*.safetensors lfs\n", "docs/é.md": b"#", "a-b/c": b"1", "a/b": b"2"}


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


class Signed:
    """A checkout, its lock, a key, and our signature over the lock."""

    def __init__(self, tmp_path: Path) -> None:
        self.model = write(tmp_path / "model", FILES)
        self.lock: Lock = lock_of(FILES)
        self.pair: KeyPair = key_pair(tmp_path)
        self.signature = tmp_path / "lock.sig"
        self.signature.write_bytes(sign_lock(self.pair.signing, self.lock))

    def verify(self, key: Path | None = None) -> None:
        """Do what `model_signing verify key MODEL --signature SIG --public_key PEM` does; ValueError if it refuses."""
        looking = hashing.Config().set_ignored_paths(paths=[self.signature], ignore_git_paths=True)
        config = verifying.Config().use_elliptic_key_verifier(public_key=key or self.pair.public)
        config.set_hashing_config(looking.set_allow_symlinks(False)).verify(self.model, self.signature)


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


def command(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "model_signing"
    return subprocess.run([program, *argv], capture_output=True, text=True, timeout=60)


def test_the_tools_own_command_verifies_a_plain_checkout(signed: Signed) -> None:
    argv = ("verify", "key", signed.model, "--signature", signed.signature, "--public_key", signed.pair.public)
    done = command(*argv)
    assert done.returncode == 0, done.stderr
    (signed.model / "code/modeling.py").write_bytes(b"import os\n")
    done = command(*argv)
    assert done.returncode == 1
    assert "code/modeling.py" in done.stderr


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_a_key_of_each_curve(tmp_path: Path, curve: str) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    signed = Signed(tmp_path)
    signed.pair = key_pair(tmp_path, "c", getattr(ec, curve)())
    signed.signature.write_bytes(sign_lock(signed.pair.signing, signed.lock))
    signed.verify()


@pytest.mark.parametrize(
    "beside",
    [
        {".cache/huggingface/download/config.json.metadata": b"x", ".cache/huggingface/trees/x.json": b"{}"},
        {".k2-staged.json": b"{}", ".k2-partial/x": b"", ".k2-locks/y": b""},
        {".git/HEAD": b"ref: refs/heads/main\n", ".gitignore": b"*"},
        {"lock.sig": b"whatever"},
    ],
    ids=["hf download", "staged by us", "git clone", "the signature beside"],
)
def test_what_downloaders_and_stagers_leave_beside_the_files_is_passed_over(
    signed: Signed, beside: Mapping[str, bytes]
) -> None:
    write(signed.model, beside)
    if "lock.sig" in beside:
        signed.signature = signed.signature.rename(signed.model / "lock.sig")
    signed.verify()


WRONG: dict[str, Callable[[Signed], object]] = {
    "a byte": lambda s: (s.model / "model-1-of-2.safetensors").write_bytes(b"\0" * 20_001),
    "a missing file": lambda s: (s.model / "config.json").unlink(),
    "a further file": lambda s: (s.model / "evil.py").write_bytes(b"import os"),
    "a changed signature": lambda s: s.signature.write_bytes(
        s.signature.read_bytes().replace(b'"sig":"M', b'"sig":"N')
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_tool_refuses_what_is_not_signed(signed: Signed, what: str) -> None:
    signed.verify()
    WRONG[what](signed)
    with pytest.raises(Exception):  # noqa: B017 - whatever it raises, it is a refusal
        signed.verify()


def test_the_tool_refuses_our_signature_by_another_key(signed: Signed, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Key mismatch"):
        signed.verify(key_pair(tmp_path, "other").public)


def test_a_signature_by_the_tool_is_over_the_files_of_the_lock(signed: Signed, tmp_path: Path) -> None:
    theirs = tmp_path / "model.sig"
    signing.Config().use_elliptic_key_signer(private_key=signed.pair.private).sign(signed.model, theirs)
    covered = check_signature(signed.pair.key, signed.lock, theirs.read_bytes(), "model.sig")
    assert covered == Coverage(False, (".gitattributes",))
    changed = lock_of({**FILES, "config.json": b"{ }"})
    with pytest.raises(IntegrityError) as caught:
        check_signature(signed.pair.key, changed, theirs.read_bytes(), "model.sig")
    assert "config.json" in caught.value.where
    with pytest.raises(IntegrityError):
        check_signature(key_pair(tmp_path, "other").key, signed.lock, theirs.read_bytes(), "model.sig")
