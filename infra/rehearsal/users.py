"""Users of a rehearsal: the client that sends their traffic, and what they get while nobody serves."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from infra.rehearsal.processes import ProcessSpec, Supervisor

_NAME = "client"
_CONCURRENCY = 8
_GRACE_S = 60.0


def start_client(supervisor: Supervisor, gateway_url: str, out: Path, rate_per_s: float, model: str = "") -> Path:
    """Start the client that sends user traffic the whole time; return the path of its report."""
    options = {"--url": gateway_url, "--out": out, "--concurrency": _CONCURRENCY, "--rate-per-s": rate_per_s}
    words = [str(word) for pair in options.items() for word in pair] + (["--model", model] if model else [])
    argv = (sys.executable, "-m", "infra.rehearsal.client", *words)
    supervisor.start(ProcessSpec(_NAME, argv, address=gateway_url, ready=out.exists, grace_s=30.0))
    return out


def stop_client(supervisor: Supervisor, out: Path) -> dict[str, Any]:
    """Let the client finish what is in flight, stop it, and return its counts."""
    supervisor.stop(_NAME, grace_s=_GRACE_S)
    return dict(json.loads(out.read_text()))


def parked_answer(gateway_url: str) -> dict[str, Any] | None:
    """Return what a user gets who is answered by nobody but the parking backend; None if somebody serves."""
    request = urllib.request.Request(f"{gateway_url}/v1/models")  # noqa: S310 (the gateway's own http URL)
    try:
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        return {"status": error.code, "retry_after": error.headers.get("Retry-After", "")}
    return None
