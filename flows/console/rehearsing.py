"""`k2ctl rehearse`: on the embedded site, which it starts and stops, or with --site on a cluster of the user's own."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flows.console.injecting import Injector, check_injections
from flows.console.kept_site import note_kept, refuse_a_second, refuse_running, stop_kept
from flows.console.own_cluster import refuse_without_site, rehearse_there
from flows.console.rehearsal import Programme, Rehearsal
from flows.console.rehearsal_result import forget_results
from flows.console.submission import say, use_api
from tasks.specs import load_base
from tasks.steps.site_setup import set_up_site

_SEED = 1


def rehearse(args: Namespace) -> int:
    """Run the rehearsal that the arguments ask for; its exit code is that of the release, or 1 if users noticed it."""
    check_injections(args.inject)
    if args.site:
        return rehearse_there(args)
    refuse_without_site(args)
    if args.stop:
        return stop_kept(args)
    return _rehearse_embedded(args)


def _rehearse_embedded(args: Namespace) -> int:
    from infra.rehearsal import site as embedded
    from infra.rehearsal.releases import NEW, OLD

    keep = args.keep or args.site_only
    if keep:
        refuse_a_second()
    if args.dir:
        refuse_running(Path(args.dir))
    directory = Path(args.dir or tempfile.mkdtemp(prefix="k2-rehearsal-"))
    directory.mkdir(parents=True, exist_ok=True)
    forget_results()
    _banner(embedded.SIMULATED, directory)
    began = time.monotonic()
    programs = embedded.prepare(say)
    built_s = time.monotonic() - began
    seed = _SEED if args.seed is None else args.seed
    options = embedded.SiteOptions(directory, 32 if args.full else 6, seed, keep, args.topology or "auto")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with embedded.RehearsalSite(options, say) as site:
        run = EmbeddedRehearsal(site, args, Programme(OLD, NEW, built_s=built_s), programs)
        try:
            result = run.carry_out()
        except BaseException as stopped:
            # Nobody knows yet how to stop it: a site that did not come up is not kept.
            site.supervisor.stop_all()
            if not args.dir:
                embedded.remove(directory)
            if isinstance(stopped, KeyboardInterrupt):
                # What a submitted run would say, that it goes on, is not true of a site that has ended.
                raise KeyboardInterrupt("interrupted; everything that the rehearsal started has ended") from None
            raise
        if keep:
            note_kept(site, args)
    if not keep and not args.dir:
        embedded.remove(directory)
    return int(result.exit_code)


def _banner(simulated: tuple[str, ...], directory: Path) -> None:
    say("k2ctl rehearse: the release flows of production on this machine, without GPUs.")
    say(f"site directory: {directory}")
    say("simulated here (everything else is the real program):")
    for line in simulated:
        say(f"  - {line}")


class EmbeddedRehearsal(Rehearsal):
    """A rehearsal on the embedded site: it starts the servers and writes the two releases itself."""

    def __init__(self, site: Any, args: Namespace, programme: Programme, programs: Any) -> None:
        super().__init__(site, args, programme)
        self._site = site
        self._programs = programs
        self._profile = "rehearsal-4p12d" if args.full else "rehearsal-1p2d"

    def prepare(self) -> None:
        """Start the site, make the base objects and the releases; then the pipeline has only its own rights."""
        from infra.rehearsal.releases import images, release_data, traffic, write_release

        self._site.start(self._programs)
        use_api(self.ports().site)
        set_up_site(self.ports(), load_base(), images()["tool"])
        self._site.use_pipeline_account()
        releases, revisions = self._site.directory / "releases", self._site.revisions
        old = release_data(self.programme.old, revisions["old"], self._profile, traffic=traffic(bake_s=0.5))
        new = release_data(self.programme.new, revisions["new"], self._profile)
        for data in (old, new):
            write_release(releases, data)

    def start_worker(self) -> None:
        """Register the deployments and start their worker."""
        self._site.start_worker()

    def injecting(self) -> AbstractContextManager[Any]:
        """Return the context that makes things go wrong for the candidate."""
        return Injector(self._site, self.args.inject, self.ports, self.programme.new)

    def say_what_stays(self) -> None:
        """Tell that the site ends, unless it is kept."""
        if not self.args.keep:
            say("note:     this site ends now; with --keep it stays up to be looked at")
