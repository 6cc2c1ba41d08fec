"""Keys and certificates of a rehearsal site: one CA, leaves that are not CAs, and the ServiceAccount signing key."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID_FOR = datetime.timedelta(days=30)
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def write_private(path: Path, content: bytes) -> Path:
    """Write a file that only its owner may read, replacing what was there; it is never readable in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return temporary.replace(path)


@dataclass(frozen=True)
class KeyPair:
    """A certificate file and its key file (mode 0600)."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """A certificate authority that signs leaves into its own directory."""

    directory: Path
    pair: KeyPair

    @classmethod
    def create(cls, directory: Path, common_name: str = "k2-rehearsal") -> Authority:
        """Make a new CA: ``ca.crt`` and ``ca.key`` in the directory."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, name = ec.generate_private_key(ec.SECP256R1()), _name(common_name)
        certificate = (
            _builder(name, name, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(directory, _write_pair(directory, "ca", certificate, key))

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Use the CA that `create` left in the directory."""
        return cls(directory, KeyPair(directory / "ca.crt", directory / "ca.key"))

    def issue(
        self,
        file_name: str,
        common_name: str,
        *,
        names: Sequence[str] = (),
        addresses: Sequence[str] = (),
        organization: str = "",
        directory: Path | None = None,
    ) -> KeyPair:
        """Sign a leaf (CA:FALSE) for server and client use; ``organization`` is the Kubernetes group of a client.

        It is written into the CA's own directory unless another one is given.

        A leaf is signed apart from the CA because clients built on rustls refuse a server certificate that is a CA.
        """
        authority = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        signer = serialization.load_pem_private_key(self.pair.key.read_bytes(), password=None)
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{self.pair.key} does not hold the elliptic-curve key of this CA")
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(_name(common_name, organization), authority.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _write_pair(directory or self.directory, file_name, builder.sign(signer, hashes.SHA256()), key)


def service_account_key(path: Path) -> Path:
    """Write the RSA key that signs ServiceAccount tokens (mode 0600)."""
    return write_private(path, _pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)))


def _name(common_name: str, organization: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _builder(subject: x509.Name, issuer: x509.Name, key: _PrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(directory: Path, file_name: str, certificate: x509.Certificate, key: _PrivateKey) -> KeyPair:
    certificate_path = directory / f"{file_name}.crt"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return KeyPair(certificate_path, write_private(directory / f"{file_name}.key", _pem(key)))


def _pem(key: _PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
