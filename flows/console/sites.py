"""`k2ctl site`: set a cluster up once, and check that a site file leads where it says."""

from __future__ import annotations

import math
from argparse import Namespace

from flows.console.reports import connect, print_json
from flows.console.submission import say
from tasks.core.errors import ExitCode, InputError
from tasks.specs import find_release, load_base
from tasks.steps.capacity import read_nodes
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
    """Contact everything that the site file names and say what answered; reads only."""
    ports = connect(args)
    nodes = read_nodes(ports, "")
    route, _ = read_live_route(ports)
    objects = len(ports.store.list_objects("receipts/"))
    counted = ports.stats.counts(route.stable.service).requests
    rows = [
        {"part": "kubernetes", "says": f"{sum(n.usable for n in nodes)} of {len(nodes)} nodes of the pool are usable"},
        {"part": "live route", "says": f"{route.phase}, stable {route.stable.release}"},
        {"part": "store", "says": f"{objects} receipts in {ports.site.store.bucket}"},
        {
            "part": "gateway statistics",
            "says": f"no counters of {route.stable.service}"
            if math.isnan(counted)
            else f"{counted:.0f} requests counted",
        },
    ]
    if args.json:
        print_json({"version": 1, "site": ports.site.name, "parts": rows})
    else:
        for row in rows:
            print(f"ok  {row['part']:<22}{row['says']}")
    return ExitCode.DONE
