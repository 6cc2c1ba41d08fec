"""The rehearsal site that `--keep` left up: noted where `k2ctl` looks for it, refused a second time, stopped."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from flows.console.reports import print_json
from flows.console.submission import say
from tasks import wiring
from tasks.core.errors import ConflictError, ExitCode


def refuse_a_second() -> None:
    """Raise ConflictError while a kept site is up: `k2ctl` finds only one by itself, the other would be forgotten."""
    note = wiring.last_rehearsal_site()
    if note.is_symlink():
        refuse_running(note.readlink().parent)


def refuse_running(directory: Path) -> None:
    """Raise ConflictError if a site runs in the directory: starting there would lose the record of its processes."""
    from infra.rehearsal.errors import SiteError
    from infra.rehearsal.processes import recorded

    try:
        alive = [process for process in recorded(directory) if process.alive()]
    except SiteError:
        return  # no site, or none that this version could have started
    if alive:
        raise ConflictError(
            "K2-CON-007",
            "A rehearsal site is up already.",
            where=str(directory),
            got=f"{len(alive)} processes of it run",
            expected="none",
            hint=f"use it (`k2ctl status`), or end it: k2ctl rehearse --stop --dir {directory}",
        )


def note_kept(site: Any, args: Namespace) -> None:
    """Note the kept site where `k2ctl` looks for it, and say how to use and end it."""
    note = wiring.last_rehearsal_site()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    note.symlink_to(site.site_path)
    say("\nThe site stays up:")
    say(f"  site file   {site.site_path}   (k2ctl finds it by itself)")
    say(f"  gateway     {site.gateway_url}/v1/chat/completions")
    say(f"  Prefect     {site.prefect.api_url.removesuffix('/api')}")
    say(f"  kubectl     KUBECONFIG={site.control_plane.kubeconfig} kubectl get pods")
    say("  try         k2ctl status; k2ctl ask 'What is 17 + 25?'; k2ctl plan k2-rehearsal-2")
    say("  end it      k2ctl rehearse --stop")


def stop_kept(args: Namespace) -> int:
    """Stop the site that was kept; only processes that it recorded and that are still those."""
    from infra.rehearsal.processes import stop_recorded

    note = wiring.last_rehearsal_site()
    kept = note.readlink().parent if note.is_symlink() else None
    directory = Path(args.dir).resolve() if args.dir else kept
    if directory is None:
        say("no rehearsal site was kept")
        _document(args, "none-kept", 0, None)
        return ExitCode.DONE
    stopped = stop_recorded(directory) if args.dir or directory.is_dir() else ()
    if directory == kept:
        note.unlink()
    # Staged weights are closed for writing, for their owner too.
    say(f"stopped {len(stopped)} processes; its files may be deleted: chmod -R u+w {directory}; rm -rf {directory}")
    _document(args, "stopped", len(stopped), str(directory))
    return ExitCode.DONE


def _document(args: Namespace, outcome: str, processes: int, directory: str | None) -> None:
    if args.json:
        print_json({"version": 1, "outcome": outcome, "processes": processes, "directory": directory})
