"""The API server's audit log: who used which right. It is of the site's accounts alone, so it costs little."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.permissions import Right

NAMESPACE = "k2"
ACCOUNTS = f"system:serviceaccount:{NAMESPACE}:"
NODE_AGENT = "k2-node-agent"
GATEWAY = "k2-gateway-controller"

POLICY: Mapping[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        # The bodies are nobody's business: a token request answers with a token.
        {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{NAMESPACE}"]},
        {"level": "Metadata", "users": [NODE_AGENT, GATEWAY]},
        {"level": "None"},
    ],
}
_MAX_FILE_MB = 100
_MAX_OLD_FILES = 2


@dataclass(frozen=True)
class Use:
    """One request of an account: the right that it took, of whatever object, and whether the API server let it pass."""

    user: str
    right: Right
    allowed: bool


def apiserver_flags(site_dir: Path) -> tuple[str, ...]:
    """Write the audit policy of a site and return the API server's flags for it; its log is `logs/audit.log`."""
    policy = site_dir / "pki" / "audit-policy.json"
    policy.write_text(json.dumps(POLICY, indent=1))
    (site_dir / "logs").mkdir(exist_ok=True)
    return (
        f"--audit-policy-file={policy}",
        f"--audit-log-path={site_dir / 'logs' / 'audit.log'}",
        f"--audit-log-maxsize={_MAX_FILE_MB}",
        f"--audit-log-maxbackup={_MAX_OLD_FILES}",
    )


def read_uses(site_dir: Path) -> set[Use]:
    """Return what the accounts of a site have done so far, each use once; requests of no resource are left out."""
    uses: set[Use] = set()
    for path in sorted((site_dir / "logs").glob("audit*.log")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be half written
                    uses |= set(uses_of(json.loads(line)))
    return uses


def uses_of(event: Mapping[str, Any]) -> Iterator[Use]:
    """Yield what one audit event says was used: nothing, one right, or two for an apply that made its object."""
    reference = event.get("objectRef") or {}
    if not reference.get("resource"):
        return
    user = str(event["user"]["username"])
    subresource = reference.get("subresource")
    resource = reference["resource"] + (f"/{subresource}" if subresource else "")
    # The server says that a Namespace is in itself; the right to it is cluster-wide all the same.
    namespace = "" if reference["resource"] == "namespaces" else reference.get("namespace", "")
    allowed = event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow"
    verbs = [event["verb"]]
    if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
        verbs.append("create")  # the server asks for both, and writes one event
    for verb in verbs:
        yield Use(user, Right(reference.get("apiGroup", ""), resource, verb, namespace), allowed)
