"""A signature over a lock, in the form of OpenSSF model signing: its own tool verifies a checkout against it.

A Sigstore bundle (v0.3) with a public key's hint, around a DSSE envelope, around an in-toto statement whose predicate
lists every file with its sha256: what a lock has without hashing a byte. The lock's own digest, repository and
revision stand in the predicate too, where the format wants other readers to pass over what they do not know.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from tasks.core.errors import IntegrityError
from tasks.core.identity import canonical_bytes
from tasks.core.lock import Lock

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_LOCK = "k2_release_lock"
# The format's tool leaves these out on both sides unless it is told not to.
_GIT = (".git", ".gitattributes", ".github", ".gitignore")
# What may stand in a checkout beside the model: huggingface_hub's records, and what a stager leaves.
_BESIDE = (".cache", ".k2-locks", ".k2-partial", ".k2-staged.json")


@dataclass(frozen=True)
class Signature:
    """A signature as read, not yet checked: the statement's bytes, what was signed of them, and whose key it names."""

    payload: bytes
    signature: bytes
    key_id: str

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that the signature is over."""
        return signed_bytes(self.payload)


@dataclass(frozen=True)
class Coverage:
    """What a good signature is over.

    `names_lock`: the lock itself, so repository and revision too; else only the content of files, without `left_out`.
    """

    names_lock: bool
    left_out: tuple[str, ...]


def statement(lock: Lock) -> bytes:
    """Return the statement about a lock's files that is signed: the same bytes for the same lock."""
    files = _signed_files(lock)
    beside = [name for name in _BESIDE if not any(path.split("/")[0] == name for path in files)]
    digests = b"".join(bytes.fromhex(digest) for digest in files.values())
    return canonical_bytes(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": lock.repo, "digest": {"sha256": sha256(digests).hexdigest()}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [*_GIT, *beside],
                },
                "resources": [
                    {"name": path, "algorithm": "sha256", "digest": digest} for path, digest in files.items()
                ],
                _LOCK: {"digest": lock.digest, "repo": lock.repo, "revision": lock.revision},
            },
        }
    )


def signed_bytes(payload: bytes) -> bytes:
    """Return the bytes that a signature of a statement is over: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def bundle(payload: bytes, signature: bytes, key_id: str) -> bytes:
    """Return the file that carries a signed statement."""
    return canonical_bytes(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key_id}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
    )


def parse_bundle(data: bytes, where: str) -> Signature:
    """Return the signature of a file; IntegrityError (K2-INT-006) if it is none that is understood."""
    try:
        found = json.loads(data)
        envelope = found["dsseEnvelope"]
        (signature,) = envelope["signatures"]
        types = (found["mediaType"], envelope["payloadType"])
        made = Signature(
            base64.b64decode(envelope["payload"], validate=True),
            base64.b64decode(signature["sig"], validate=True),
            str(found["verificationMaterial"]["publicKey"].get("hint") or ""),
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _refused("The signature cannot be read.", where, type(error).__name__, "a bundle of one key") from error
    if types != (BUNDLE_TYPE, PAYLOAD_TYPE):
        raise _refused("The signature is of another kind.", where, str(types), f"{BUNDLE_TYPE} of {PAYLOAD_TYPE}")
    return made


def check_statement(lock: Lock, payload: bytes, where: str) -> Coverage:
    """Check that a statement, whose signature holds, is about a lock's files, and return how far it goes.

    Raises:
        IntegrityError: it has another digest for a file, a file that is not in the lock, leaves one out without saying
            so, or names another lock (K2-INT-006).
    """
    try:
        said = json.loads(payload)
        predicate, types = said["predicate"], (said["_type"], said["predicateType"])
        files = {entry["name"]: f"{entry['algorithm']} {entry['digest']}" for entry in predicate["resources"]}
        twice = len(files) != len(predicate["resources"])
        ignored = tuple(map(str, predicate["serialization"].get("ignore_paths", ())))
        digest = str((predicate.get(_LOCK) or {}).get("digest", ""))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _refused("The signed statement cannot be read.", where, type(error).__name__, PREDICATE_TYPE) from error
    if types != (STATEMENT_TYPE, PREDICATE_TYPE) or twice:
        raise _refused("The signed statement is of another kind.", where, str(types), PREDICATE_TYPE)
    expected = {file.path: f"sha256 {file.sha256}" for file in lock.files}
    left_out = tuple(path for path in expected if path not in files and _is_below(path, ignored))
    for path in sorted({*files, *expected} - {*left_out}):
        got, want = files.get(path, "not signed"), expected.get(path, "no such file in the lock")
        if got != want:
            raise _refused("The signature is not over the lock's files.", f"{where}: {path}", got, want)
    if digest not in ("", lock.digest):
        raise _refused("The signature is over another lock of the same files.", where, digest, lock.digest)
    return Coverage(bool(digest), () if digest else left_out)


def _is_below(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in names)


def _signed_files(lock: Lock) -> dict[str, str]:
    """Return path to sha256 of what the format's tool looks at, in its order."""
    files = [file for file in lock.files if file.path.split("/")[0] not in _GIT]
    return {file.path: file.sha256 for file in sorted(files, key=lambda file: file.path.split("/"))}


def _refused(summary: str, where: str, got: str, expected: str) -> IntegrityError:
    return IntegrityError("K2-INT-006", summary, where=where, got=got, expected=expected)
