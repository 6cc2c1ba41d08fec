"""The site's CA, checked by a real TLS handshake and by what strict clients refuse."""

import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.rehearsal.certificates import Authority, KeyPair, service_account_key, write_private


def handshake(server: KeyPair, trusted: KeyPair, name: str) -> None:
    """Shake hands in memory; raises ssl.SSLError if the client refuses."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server.certificate, server.key)
    client_context = ssl.create_default_context(cafile=str(trusted.certificate))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    serving = server_context.wrap_bio(to_server, to_client, server_side=True)
    pending = [client, serving]
    for _ in range(10):
        for side in list(pending):
            try:
                side.do_handshake()
                pending.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not pending:
            return
    raise AssertionError("the handshake did not end")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority.create(tmp_path_factory.mktemp("pki"))


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_leaf_is_accepted_by_address_and_by_name(authority):
    leaf = authority.issue("server", "kube-apiserver", names=["localhost"], addresses=["127.0.0.1", "127.16.0.1"])
    for name in ("localhost", "127.0.0.1", "127.16.0.1"):
        handshake(leaf, authority.pair, name)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.17\.0\.1"):
        handshake(leaf, authority.pair, "127.17.0.1")


def test_a_leaf_of_another_authority_is_refused(authority, tmp_path):
    leaf = Authority.create(tmp_path).issue("server", "x", addresses=["127.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(leaf, authority.pair, "127.0.0.1")


def test_a_leaf_is_no_ca_and_carries_the_clients_group(authority):
    leaf = authority.issue("client", "kube-apiserver", organization="system:masters")
    certificate = x509.load_pem_x509_certificate(leaf.certificate.read_bytes())
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert certificate.subject.rfc4514_string() == "CN=kube-apiserver,O=system:masters"


def test_keys_are_for_their_owner_alone(authority, tmp_path):
    leaf = authority.issue("modes", "modes")
    account_key = service_account_key(tmp_path / "sa.key")
    assert [mode(path) for path in (authority.pair.key, leaf.key, account_key)] == [0o600] * 3
    loaded = serialization.load_pem_private_key(account_key.read_bytes(), password=None)
    assert isinstance(loaded, rsa.RSAPrivateKey) and loaded.key_size == 2048


def test_write_private_narrows_a_file_that_was_open_to_all(tmp_path):
    path = tmp_path / "tokens.csv"
    path.write_text("old")
    path.chmod(0o644)
    assert write_private(path, b"new") == path
    assert path.read_bytes() == b"new" and mode(path) == 0o600


def test_a_loaded_authority_signs_like_the_created_one(authority):
    leaf = Authority.load(authority.directory).issue("loaded", "x", addresses=["127.0.0.1"])
    handshake(leaf, authority.pair, "127.0.0.1")
