"""`k2ctl rehearse --site`: a rehearsal on a cluster of the user's own, where its site file says that it may be."""

from __future__ import annotations

import signal
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from flows.console.injecting import INJECTIONS
from flows.console.rehearsal import Programme, Rehearsal, Stage
from flows.console.rehearsal_result import forget_results
from flows.console.reports import access_of
from flows.console.sites import check_parts
from flows.console.submission import say
from flows.console.temporary_server import use_server_for
from tasks import wiring
from tasks.core.errors import InputError
from tasks.core.route import LIVE_ROUTE
from tasks.core.spec import Release, Site
from tasks.specs import find_release, load_base
from tasks.steps.site_setup import set_up_site

_OF_THE_EMBEDDED = ("full", "first", "keep", "stop", "site_only", "dir", "topology", "seed")
_OF_A_SITE = ("kubeconfig", "context", "releases")


def refuse_without_site(args: Namespace) -> None:
    """Raise InputError for an option that says something of a cluster, where none is named."""
    for name in _OF_A_SITE:
        if getattr(args, name):
            raise InputError(
                "K2-INP-001",
                "Without --site the rehearsal starts a cluster of its own.",
                where=_option(name),
                got="no --site",
                expected="the site file of a cluster that may be rehearsed on",
                hint="k2ctl rehearse --site FILE; infra/runbooks/own-cluster.md says what must be there",
            )


def rehearse_there(args: Namespace) -> int:
    """Rehearse on the cluster of a site file; nothing of it is stopped or taken away at the end."""
    from infra.rehearsal.own_site import OwnSite

    _refuse_options(args)
    site_path, access = wiring.site_path(args.site), access_of(args)
    site = wiring.read_site(site_path, access)
    _refuse_other_sites(site, site_path)
    old, new = _releases(args, site)
    forget_results()
    _banner(site)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    programme = Programme(old.id, new.id, new.profile.served_model_name, access)
    with (
        tempfile.TemporaryDirectory(prefix="k2-rehearsal-") as directory,
        OwnSite(site, Path(site_path), Path(directory), programme.model) as stage,
    ):
        result = OwnRehearsal(stage, args, programme, site, old).carry_out()
    say("nothing was stopped or removed: what is live stays live")
    return int(result.exit_code)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_options(args: Namespace) -> None:
    """Raise InputError for what only the embedded site can do."""
    for name in _OF_THE_EMBEDDED:
        value = getattr(args, name)
        if value or (name == "seed" and value is not None):
            raise InputError(
                "K2-INP-001",
                "This option is about the embedded site, which a rehearsal with --site does not start.",
                where=_option(name),
                got="given beside --site",
                expected=f"--site without any of {', '.join(map(_option, _OF_THE_EMBEDDED))}",
                hint="leave one of the two out",
            )
    for name in args.inject:
        raise InputError(
            "K2-INP-001",
            f"The injection {name} works on {INJECTIONS[name]}, and --site names a cluster that has none.",
            where=f"--inject {name}",
            got="given beside --site",
            expected="no injection: break things there with that cluster's own means",
            hint=f"k2ctl rehearse --inject {name} shows it on the embedded site",
        )


def _refuse_other_sites(site: Site, site_path: str) -> None:
    if not site.rehearsal:
        raise InputError(
            "K2-INP-001",
            "A rehearsal restarts and breaks things; this site does not say that it is for rehearsals.",
            where=f"{site_path}: rehearsal",
            got="false",
            expected="true, in the site file of a cluster that nobody depends on",
            hint="k2ctl rehearse without --site has a cluster of its own; a release on this site: k2ctl release",
        )


def _releases(args: Namespace, site: Site) -> tuple[Release, Release]:
    """Return the release to make live first, and the candidate: as named, else the only two that the site has."""
    named = list(args.releases or sorted(path.stem for path in Path(site.releases_dir).glob("*.yaml")))
    if len(named) != 2:
        raise InputError(
            "K2-INP-001",
            "Which two releases are to be rehearsed?",
            where=f"--releases, or the files in {site.releases_dir}",
            got=", ".join(named) or "no release",
            expected="an older one that is made live, and the candidate",
            hint="k2ctl rehearse --site FILE --releases OLD NEW",
        )
    old, new = (find_release(name, site.releases_dir) for name in named)
    if old.id == new.id:
        raise InputError(
            "K2-INP-001",
            "Both releases are the same one.",
            where="--releases",
            got=f"{old.id} twice",
            expected="two releases",
            hint="k2ctl rehearse --site FILE --releases OLD NEW",
        )
    return old, new


def _banner(site: Site) -> None:
    say(f"k2ctl rehearse: the release flows of production on site {site.name}, context {site.context}.")
    say("simulated there, by the site file's own word:")
    for line in site.simulated or ("nothing",):
        say(f"  - {line}")


class OwnRehearsal(Rehearsal):
    """A rehearsal on a site that is there already and stays."""

    def __init__(self, stage: Stage, args: Namespace, programme: Programme, site: Site, old: Release) -> None:
        super().__init__(stage, args, programme)
        self._site = site
        self._old = old

    def prepare(self) -> None:
        """Apply the base objects where there is no live route yet, and contact everything that the site file names.

        Raises:
            K2Error: that of the first part that does not answer.
        """
        ports = self.ports()
        if ports.cluster.get("HTTPRoute", LIVE_ROUTE) is None:
            say("base objects: not there yet; applying them (this needs the rights of `k2ctl site init`)")
            set_up_site(ports, load_base(), self._old.images.tool)
        else:
            say("base objects: there already")
        rows, errors = check_parts(ports, self.programme.old)
        for row in rows:
            say(f"  {'ok' if row['ok'] else 'NO':<4}{row['part']:<22}{row['says']}")
        if errors:
            raise errors[0]
        use_server_for(self._site)

    def submits(self) -> bool:
        """Return whether flows run as deployments: where there is a Prefect server and the site file's word holds."""
        return bool(self._site.prefect_api_url) and not self.programme.access.chosen

    def say_what_stays(self) -> None:
        """Tell how to look at it."""
        say(f"note:     the site stays as it is: k2ctl status {self.programme.new}")
