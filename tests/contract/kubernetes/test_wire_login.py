"""Logins that are unknown, expired, rotated or without a right."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from infra.rehearsal.apiserver import ControlPlane
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.kinds import KINDS
from tasks.adapters.mirror import WatchTimes
from tasks.core.errors import Never, UnavailableError
from tasks.ports import Object
from tests.contract.kubernetes.faulty_proxy import HttpProxy, kubeconfig
from tests.contract.kubernetes.sides import NAMESPACE, client, config_map, eventually, service_account_token, shows

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


def signed(plane: ControlPlane, account: Object, expires_in_s: float) -> str:
    """Return a ServiceAccount's token, signed with the cluster's own key: what TokenRequest gives, of any age."""
    name, now = account["metadata"]["name"], time.time()
    claims = {
        "iss": plane.url,
        "aud": [plane.url],
        "sub": f"system:serviceaccount:{NAMESPACE}:{name}",
        "iat": int(now - 7200),
        "nbf": int(now - 7200),
        "exp": int(now + expires_in_s),
        "kubernetes.io": {"namespace": NAMESPACE, "serviceaccount": {"name": name, "uid": account["metadata"]["uid"]}},
    }
    key = serialization.load_pem_private_key((plane.pki / "sa.key").read_bytes(), password=None)
    assert isinstance(key, rsa.RSAPrivateKey)
    text = b".".join(_part(json.dumps(part).encode()) for part in ({"alg": "RS256"}, claims))
    return b".".join((text, _part(key.sign(text, padding.PKCS1v15(), hashes.SHA256())))).decode()


def _part(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@pytest.fixture
def account(server: KubeCluster, name: str) -> Object:
    """A ServiceAccount that may do everything."""
    made, _ = server.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    server.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
        }
    )
    return made


def logged_in(url: str, plane: ControlPlane, tmp_path: Path, user: dict[str, str], **options: Any) -> KubeCluster:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(url, plane, user))
    return client(plane, path, **options)


def refusal(cluster: KubeCluster, kind: str = "ConfigMap") -> UnavailableError:
    """Return the error of an identity that is refused, at once and for good."""
    began = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        cluster.list_objects(kind)
    assert time.monotonic() - began < 15
    assert isinstance(caught.value.retry, Never)
    return caught.value


def test_an_expired_token_is_said_to_be_and_not_tried_for_long(
    plane: ControlPlane, proxy: HttpProxy, account: Object, tmp_path: Path
) -> None:
    valid, expired = (signed(plane, account, seconds) for seconds in (600, -3600))
    # The expiry is all that is wrong with it.
    assert isinstance(logged_in(proxy.url, plane, tmp_path, {"token": valid}).list_objects("ConfigMap"), list)
    late = logged_in(proxy.url, plane, tmp_path, {"token": expired})
    proxy.script()
    error = refusal(late)
    assert "expired" in error.summary
    assert "login" in error.summary
    assert "Log in again" in error.hint
    assert proxy.statuses == [401, 401]  # once more, in case the login has been renewed
    assert expired not in error.as_text() + repr(late)


def test_an_unknown_token_and_one_of_an_account_that_is_gone(
    server: KubeCluster, plane: ControlPlane, account: Object, tmp_path: Path, name: str
) -> None:
    assert "login" in refusal(logged_in(plane.url, plane, tmp_path, {"token": "wrong"})).summary
    server.delete("ServiceAccount", name)
    token = signed(plane, account, 600)
    eventually(lambda: refusal(logged_in(plane.url, plane, tmp_path, {"token": token})))


def test_a_token_file_that_is_rotated_is_read_again(
    server: KubeCluster, plane: ControlPlane, proxy: HttpProxy, account: Object, tmp_path: Path, name: str
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(signed(plane, account, -3600))
    cluster = logged_in(proxy.url, plane, tmp_path, {"tokenFile": str(token_file)})
    refusal(cluster)
    proxy.script()
    token_file.write_text(signed(plane, account, 600))
    made, created = cluster.create(
        config_map(name, a="1")
    )  # a refused write was not looked at: it is safe to send again
    assert created
    assert proxy.statuses == [401, 201]
    assert cluster.replace(made | {"data": {"a": "2"}})["data"] == {"a": "2"}
    assert proxy.statuses == [401, 201, 200]
    token_file.write_text(signed(plane, account, 900))
    assert server.get("ConfigMap", name) == cluster.get("ConfigMap", name)


def test_a_mirror_goes_on_when_its_login_is_renewed(
    server: KubeCluster, plane: ControlPlane, account: Object, tmp_path: Path, name: str
) -> None:
    made = server.apply(config_map(name, {"test": name}))
    token_file = tmp_path / "token"
    token_file.write_text(signed(plane, account, -3600))
    cluster = logged_in(
        plane.url, plane, tmp_path, {"tokenFile": str(token_file)}, watch_times=WatchTimes(1.0, 0.5, 3.0)
    )
    with cluster.mirror("ConfigMap", {"test": name}) as mirror:
        with pytest.raises(UnavailableError, match="login has expired"):
            mirror.objects()
        token_file.write_text(signed(plane, account, 600))
        eventually(lambda: shows(mirror, name))
        assert mirror.objects() == [made]


def test_an_identity_without_the_right_is_told_which(plane: ControlPlane, tmp_path: Path, name: str) -> None:
    token = service_account_token(plane, name)
    weak = logged_in(plane.url, plane, tmp_path, {"token": token})
    error = refusal(weak, "Secret")
    assert "lacks the right to list secrets" in error.summary
    assert token not in error.as_text() + repr(weak)
    for call in (
        lambda: weak.get("Pod", name),
        lambda: weak.apply(config_map(name)),
        lambda: weak.create(config_map(name)),
        lambda: weak.merge_patch("ConfigMap", name, {}),
        lambda: weak.delete("ConfigMap", name),
        lambda: weak.pod_log(name, "main", 1),
    ):
        with pytest.raises(UnavailableError, match="lacks the right to") as caught:
            call()
        assert isinstance(caught.value.retry, Never)
    assert KINDS["Secret"].plural in error.summary
