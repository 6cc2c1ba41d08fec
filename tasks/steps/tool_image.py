"""Which image runs the programs that look after a site, and not after one release."""

from __future__ import annotations

from tasks.core.errors import NotReadyError
from tasks.core.route import PARKING_SERVICE
from tasks.steps.context import Ports
from tasks.steps.documents import find_receipt, get_live


def tool_image(ports: Ports) -> str:
    """Return the tool's image of what is live, else that of the parking backend, which every site has.

    Raises:
        NotReadyError: the site was never set up.
    """
    live, _ = get_live(ports.store)
    receipt = find_receipt(ports.store, str(live["release"])) if live else None
    if receipt is not None:
        return str(receipt["release"]["images"]["tool"])
    for deployment in ports.cluster.list_objects("Deployment"):
        if deployment["metadata"]["name"] == PARKING_SERVICE:
            return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
    raise NotReadyError(
        "K2-RDY-002",
        "The site has no parking backend: it was never set up.",
        where=f"Deployment {PARKING_SERVICE}",
        hint="k2ctl site init --release R --site S",
    )
