"""Step `pull`: from a revision on the Hub to verified bytes in the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasks.core.errors import UnavailableError
from tasks.core.lock import Lock
from tasks.core.render import ROLE_LABEL
from tasks.core.units import format_bytes
from tasks.core.ways import pulls_into_store
from tasks.core.worker_jobs import render_pull_jobs
from tasks.ports import Store
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import Watch, run_jobs, unwatched
from tasks.steps.together import HaltedError

PULL_DEADLINE_S = 4 * 3600.0


def blobs_present(store: Store, lock: Lock) -> dict[str, bool]:
    """Return for each sha256 of the lock whether the store holds it verified: marker and blob with the right size."""
    sizes = {item.key: item.size_bytes for item in store.list_objects("blobs/")}
    return {
        file.sha256: f"blobs/{file.sha256}.ok" in sizes and sizes.get(f"blobs/{file.sha256}") == file.size_bytes
        for file in lock.files
    }


def pull_step(
    ports: Ports,
    subject: Subject,
    begun: Callable[[], None] = unwatched,
    watch: Watch = unwatched,
    *,
    planned: str = "",
) -> dict[str, Any]:
    """Bring every file of the lock into the store, verified in the same pass; what is there already moves no byte.

    Where the nodes pull from the Hub themselves (see `topology_of`), nothing is to be done here.

    Args:
        ports: of the site.
        subject: the release.
        begun: called once if something is missing, before the pullers start.
        watch: called while they work; what it raises ends the step, and the pullers go on.
        planned: the topology that the plan has picked.
    """
    lock = subject.lock
    if not pulls_into_store(ports.site, planned):
        return {"outcome": "unchanged", "bytes_fetched": 0, "note": "the nodes pull from the Hub themselves"}
    present = blobs_present(ports.store, lock)
    missing = [file for file in lock.files if not present[file.sha256]]
    if not missing:
        return {"outcome": "unchanged", "bytes_fetched": 0, "note": "every file is in the store already"}
    total = sum({file.sha256: file.size_bytes for file in missing}.values())
    jobs = render_pull_jobs(lock, ports.site, ports.templates, subject.release.images.tool)
    begun()
    try:
        results = run_jobs(ports, "pull", jobs, total, PULL_DEADLINE_S, watch)
    except HaltedError:
        ports.progress.say(
            "pull: its Jobs go on and the next run attaches to them; "
            f"kubectl -n {ports.site.namespace} delete jobs -l {ROLE_LABEL}=pull ends them"
        )
        raise
    absent = [sha for sha, there in blobs_present(ports.store, lock).items() if not there]
    if absent:
        raise UnavailableError(
            "K2-UNA-003",
            "The pullers ended but the store does not hold every file.",
            where=f"blobs/{absent[0]}",
            got=f"{len(absent)} missing",
            expected="none missing",
        )
    fetched = sum(int(result.message.get("bytes_fetched", 0)) for result in results)
    return {
        "bytes_fetched": fetched,
        "pullers": len(results),
        "note": f"{format_bytes(fetched)} from the Hub, verified",
    }
