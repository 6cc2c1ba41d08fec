"""`k2ctl site`: set a cluster up once, and check that a site file leads where it says."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from flows.console.reports import connect, print_json
from flows.console.submission import say
from flows.console.temporary_server import answers
from tasks.core.errors import ExitCode, InputError, K2Error, UnavailableError
from tasks.specs import find_release, load_base
from tasks.steps.capacity import read_nodes
from tasks.steps.context import Ports
from tasks.steps.documents import find_receipt, get_live
from tasks.steps.rights import check_rights
from tasks.steps.site_setup import set_up_site
from tasks.steps.traffic import read_live_route


def site(args: Namespace) -> int:
    """Carry out `site init` or `site check`."""
    return _init(args) if args.action == "init" else _check(args)


def _init(args: Namespace) -> int:
    """Apply the base objects and create the live route, all traffic parked; twice is the same as once."""
    ports = connect(args)
    if not args.release:
        raise InputError(
            "K2-INP-001",
            "Which image of this tool should the site run?",
            where="--release",
            got="nothing",
            expected="a release whose tool image is used",
            hint="k2ctl site init --release R",
        )
    set_up_site(ports, load_base(), find_release(args.release, ports.site.releases_dir).images.tool)
    say(f"site {ports.site.name}: base objects applied, live route there")
    if args.json:
        print_json({"version": 1, "site": ports.site.name, "outcome": "done"})
    return ExitCode.DONE


def _check(args: Namespace) -> int:
    """Contact everything that the site file names and say what answered; reads only. Exits as the first that did not.

    A part that does not answer keeps no other from being asked.
    """
    ports = connect(args)
    rows, errors = check_parts(ports, args.release)
    if args.json:
        ended = {"outcome": "failed", "error": errors[0].as_data()} if errors else {"outcome": "done"}
        print_json({"version": 1, "site": ports.site.name, **ended, "parts": rows})
    else:
        for row in rows:
            print(f"{'ok' if row['ok'] else 'NO':<4}{row['part']:<22}{row['says']}")
    for failed in errors:
        say(failed.as_text())
    return errors[0].exit_code if errors else ExitCode.DONE


def check_parts(ports: Ports, release: str) -> tuple[list[dict[str, Any]], list[K2Error]]:
    """Ask every part of a site and return what each said, a row a part, with the errors of those that did not answer.

    The Hub is asked for the revision of `release`; empty for that of the live one.
    """
    rows: list[dict[str, Any]] = []
    errors: list[K2Error] = []
    for part, look in _PARTS:
        try:
            rows.append({"part": part, "ok": True, "says": look(ports, release)})
        except K2Error as error:
            rows.append({"part": part, "ok": False, "says": str(error), "error": error.as_data()})
            errors.append(error)
    return rows, errors


def _nodes(ports: Ports, _: str) -> str:
    nodes = read_nodes(ports, "")
    who = "the cluster has the uid of the site file" if ports.site.cluster_uid else "no cluster_uid in the site file"
    return f"{sum(n.usable for n in nodes)} of {len(nodes)} nodes of the pool are usable; {who}"


def _rights(ports: Ports, _: str) -> str:
    return check_rights(ports)


def _route(ports: Ports, _: str) -> str:
    route, _obj = read_live_route(ports)
    return f"{route.phase}, stable {route.stable.release}"


def _store(ports: Ports, _: str) -> str:
    return f"{len(ports.store.list_objects('receipts/'))} receipts in {ports.site.store.bucket}"


def _hub(ports: Ports, release: str) -> str:
    """Ask the Hub for the revision of the named release, else of the live one."""
    repo, revision = _revision(ports, release)
    if not repo:
        return "not asked: nothing is live that names a revision; name one with --release"
    return f"knows {repo} at {ports.hub.resolve(repo, revision)[:12]}"


def _lock_key(ports: Ports, _: str) -> str:
    key = ports.lock_key
    return f"locks have to be signed by {key.key_id[:12]}" if key else "none is named: locks need no signature"


def _revision(ports: Ports, named: str) -> tuple[str, str]:
    if named:
        release = find_release(named, ports.site.releases_dir)
        return release.repo, release.revision
    live, _ = get_live(ports.store)
    receipt = find_receipt(ports.store, live["release"]) if live else None
    return (receipt["lock"]["repo"], receipt["lock"]["revision"]) if receipt else ("", "")


def _prefect(ports: Ports, _: str) -> str:
    url = ports.site.prefect_api_url
    if not url:
        return "none is named: flows run in the process of k2ctl"
    if not answers(url):
        raise UnavailableError(
            "K2-UNA-001",
            "Prefect does not answer.",
            where=url,
            got="no healthy answer",
            expected="HTTP 200 from /health",
        )
    return f"healthy at {url}"


def _statistics(ports: Ports, _: str) -> str:
    service = read_live_route(ports)[0].stable.service
    counted = ports.stats.counts(service).requests
    return f"no counters of {service}" if math.isnan(counted) else f"{counted:.0f} requests counted"


_PARTS: tuple[tuple[str, Callable[[Ports, str], str]], ...] = (
    ("kubernetes", _nodes),
    ("rights", _rights),
    ("live route", _route),
    ("store", _store),
    ("hub", _hub),
    ("lock key", _lock_key),
    ("prefect", _prefect),
    ("gateway statistics", _statistics),
)
