"""Key pairs in PEM files, for tests of signatures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tasks.adapters.ec_keys import EcPublicKey, EcSigningKey


@dataclass(frozen=True)
class KeyPair:
    """A key pair: the files and what they hold."""

    private: Path
    public: Path

    @property
    def signing(self) -> EcSigningKey:
        return EcSigningKey(self.private)

    @property
    def key(self) -> EcPublicKey:
        return EcPublicKey(self.public)


def key_pair(
    directory: Path, name: str = "lock", curve: ec.EllipticCurve | None = None, password: bytes = b""
) -> KeyPair:
    """Write a new key pair and return it."""
    private = ec.generate_private_key(curve or ec.SECP256R1())
    closed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pair = KeyPair(directory / f"{name}.key", directory / f"{name}.pub")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    pair.private.write_bytes(private.private_bytes(pem, form, closed))
    pair.public.write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return pair
