"""Keys of elliptic curves in PEM files, for signatures over locks; offline, and cryptography is imported when needed.

The curves, hashes and the key's name are those of OpenSSF model signing's `key` method.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.core.errors import InputError

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_KEY_MAX_BYTES = 100_000


class EcPublicKey:
    """Implements `ports.LockKey`. The PEM file is read when it is first needed; InputError if it holds no such key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _key(self) -> Any:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            return _checked(load_pem_public_key(_read(self._path)), self._path)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _no_key(self._path, "a public key") from error

    @property
    def key_id(self) -> str:
        """What signatures call it: the sha256 of its PEM form."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        pem = self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(pem).hexdigest()

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Return whether a signature of some bytes was made with the private half of the key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data, _algorithm(self._key))
        except InvalidSignature:
            return False
        return True


class EcSigningKey(EcPublicKey):
    """Implements `ports.SigningKey`.

    Args:
        path: PEM file of the private key.
        password_file: file with the password of an encrypted one.
    """

    def __init__(self, path: Path, password_file: Path | None = None) -> None:
        super().__init__(path)
        self._password_file = password_file

    @cached_property
    def _private(self) -> Any:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        password = _read(self._password_file).strip() if self._password_file else None
        try:
            return _checked(load_pem_private_key(_read(self._path), password), self._path)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            # Not the library's words: they may be about the password.
            raise _no_key(self._path, "a private key that this password, or none, opens") from error

    @cached_property
    def _key(self) -> Any:
        return self._private.public_key()

    def sign(self, data: bytes) -> bytes:
        """Return a signature of some bytes."""
        return bytes(self._private.sign(data, _algorithm(self._private)))


def _algorithm(key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return ec.ECDSA(by_size[key.curve.key_size])


def _checked(key: Any, path: Path) -> Any:
    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if curve not in _CURVES:
        raise InputError(
            "K2-INP-001",
            "The key is of a kind that locks are not signed with.",
            where=str(path),
            got=curve,
            expected=", ".join(_CURVES),
            hint="openssl ecparam -name prime256v1 -genkey -noout -out lock.key && "
            "openssl ec -in lock.key -pubout -out lock.pub",
        )
    return key


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_KEY_MAX_BYTES)
    except OSError as error:
        raise InputError(
            "K2-INP-001", "The key file cannot be read.", where=str(path), got=error.strerror or type(error).__name__
        ) from error


def _no_key(path: Path, expected: str) -> InputError:
    return InputError("K2-INP-001", "The file holds no usable key.", where=str(path), got="no key", expected=expected)
