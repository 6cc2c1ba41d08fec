"""A Prefect server for one command, so that `--local` works while the site's own server is down."""

from __future__ import annotations

import os
import urllib.request

from flows.console.submission import say, use_api
from tasks.core.spec import Site


def answers(api_url: str) -> bool:
    """Return whether a Prefect API is there."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=5) as answer:  # noqa: S310 (the site's own URL)
            return int(answer.status) == 200
    except (OSError, ValueError):
        return False


def use_server_for(site: Site) -> None:
    """Let flows in this process report to the site's Prefect server, or to a temporary one where none answers."""
    if site.prefect_api_url and answers(site.prefect_api_url):
        use_api(site)
    else:
        say("no Prefect server of the site answers: a temporary one keeps this run; the ledger has it all the same")
        use_temporary_server()


def use_temporary_server() -> None:
    """Let flows in this process run with a Prefect server of their own, for the time of the process."""
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "true"
    # 20 s by default, which a busy machine does not keep.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
