"""Whether our identity has the rights that the flows use: all of them are asked for, and all that are missing named."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import UnavailableError
from tasks.core.permissions import Right, rights_error
from tasks.steps.context import Ports


def check_rights(ports: Ports) -> str:
    """Ask the API server for every right of the pipeline and return a note.

    Raises:
        RightsError: some are missing (K2-RGT-001); or the API server refuses to say.
    """
    missing = ports.cluster.missing_rights(ports.rights)
    if missing:
        raise _error(ports, missing)
    return f"all {len(ports.rights)} rights there"


def _error(ports: Ports, missing: Sequence[Right]) -> Exception:
    site = ports.site
    try:
        identity = ports.cluster.identity()
    except UnavailableError:
        identity = f"the user of context {site.context}"  # a server from before 1.28 does not say
    return rights_error(identity, missing, f"namespace {site.namespace}, context {site.context}", ports.rights)
