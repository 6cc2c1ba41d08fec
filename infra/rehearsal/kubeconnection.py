"""Where an API server is and what to show it, as a kubeconfig says it."""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Connection:
    """Where an API server is and what to show it."""

    server: str
    ca_pem: str | None = None
    token: str | None = field(default=None, repr=False)
    client_cert_pem: str | None = None
    client_key_pem: str | None = field(default=None, repr=False)
    verify: bool = True

    @classmethod
    def from_kubeconfig(cls, path: Path, context: str | None = None) -> Connection:
        """Return the connection of the current (or the named) context of a kubeconfig file."""
        document = yaml.safe_load(path.read_text())
        wanted = context or document["current-context"]
        chosen = _named(document["contexts"], wanted)["context"]
        cluster = _named(document["clusters"], chosen["cluster"])["cluster"]
        user = _named(document["users"], chosen["user"])["user"]
        token = user.get("token")
        if token is None and "tokenFile" in user:
            token = (path.parent / user["tokenFile"]).read_text().strip()
        return cls(
            server=cluster["server"].rstrip("/"),
            ca_pem=_pem(cluster, "certificate-authority", path.parent),
            token=token,
            client_cert_pem=_pem(user, "client-certificate", path.parent),
            client_key_pem=_pem(user, "client-key", path.parent),
            verify=not cluster.get("insecure-skip-tls-verify", False),
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None for a plain http server."""
        if not self.server.startswith("https"):
            return None
        context = ssl.create_default_context(cadata=self.ca_pem)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_cert_pem and self.client_key_pem:
            # The ssl module reads client certificates from files only.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pem:
                pem.write(self.client_cert_pem + "\n" + self.client_key_pem)
                pem.flush()
                context.load_cert_chain(pem.name)
        return context


def _named(entries: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(f"kubeconfig has no entry named {name!r}")


def _pem(section: Mapping[str, str], key: str, base: Path) -> str | None:
    if f"{key}-data" in section:
        return base64.b64decode(section[f"{key}-data"]).decode()
    return (base / section[key]).read_text() if key in section else None
