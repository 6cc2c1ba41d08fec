"""Commands that look after the weights of a site: scrub and gc."""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from flows.console.releasing import ended_by_signal
from flows.console.reports import access_of, connect, print_json
from flows.console.submission import Ended, say, show_steps_here, submit
from flows.console.temporary_server import use_server_for
from tasks import wiring
from tasks.core.errors import ExitCode, InputError
from tasks.core.ledger import CARE
from tasks.core.spec import plain
from tasks.core.units import format_bytes, format_duration
from tasks.steps.collecting import list_step

_SHORT = 12
_FLOWS = {"scrub": "scrub", "gc": "collect"}


def scrub(args: Namespace) -> int:
    """Read every staged byte again, and put right what has rotted; exit 5 if some of it stays wrong."""
    ended = _run(args, {"nodes": args.node})
    if args.json:
        print_json({"version": 1, "run": ended.run, "url": ended.url, **ended.data})
        return ExitCode.DONE
    for row in ended.data["nodes"]:
        said = row.get("why") or f"{format_bytes(row.get('bytes_read', 0))} read ({row.get('how') or 'read before'})"
        print(f"{row['node']:<14}{row['outcome']:<10}lock {row['lock_digest'][:_SHORT]}  {said}")
        for problem in row.get("problems", []):
            print("\n".join(_problem_lines(problem)))
    print(ended.data["note"])
    return ExitCode.DONE


def _problem_lines(problem: Mapping[str, Any]) -> list[str]:
    """Return what was wrong with a file, and what a person has to know of it."""
    lines = [f"  {problem['path']}: {problem['problem']}, got {problem['got'] or 'nothing'}"]
    if "differs_from" in problem:
        lines.append(f"    bytes {problem['differs_from']} to {problem['differs_to']} hold the differences")
    if problem["repaired"]:
        lines.append(f"    right again, from {problem.get('source', 'elsewhere')}")
    if problem.get("still_open"):
        lines.append(f"    the old file is {problem['still_open']}: that engine goes on with it until it is restarted")
    return lines


def gc(args: Namespace) -> int:
    """List what is on the nodes and in the store and what may go; with -y let it go."""
    if args.yes:
        ended = _run(args, {"nodes": args.node, "trash_age_s": args.trash_age_s})
        data: dict[str, Any] = {"run": ended.run, "url": ended.url, **ended.data}
    else:
        data = list_step(connect(args), args.node, args.trash_age_s)
    if args.json:
        print_json({"version": 1, **data})
    else:
        _print(data)
        if not args.yes:
            say("nothing was changed; to carry it out: the same command with -y")
    return ExitCode.DONE


def _print(data: Mapping[str, Any]) -> None:
    for node in data["nodes"]:
        free, total = format_bytes(node["free_bytes"]), format_bytes(node["total_bytes"])
        print(f"{node['node']:<14}{free} of {total} free")
        for row in data["checkpoints"]:
            if row["node"] == node["node"]:
                trash = " in the trash" if row.get("trash") and row["action"] != "move to the trash" else ""
                print(f"  {format_bytes(row['size_bytes']):>9}  {row['path']}{trash}: {row['action']} - {row['why']}")
        for name in node["others"]:
            print(f"             {name}: not ours, left alone")
    store = data["store"]
    print(f"store         {store['needed']} files needed, {format_bytes(store['needed_bytes'])}")
    for row in store["files"]:
        print(f"  {format_bytes(row['size_bytes']):>9}  {row['what'][: _SHORT + 16]}: {row['action']}")
    for node, why in data["unread"].items():
        print(f"{node:<14}not looked at: {why}")
    print(f"{data['note']}; what is in the trash can be taken back for {format_duration(data['trash_age_s'])}")


def _run(args: Namespace, parameters: dict[str, Any]) -> Ended:
    """Run a flow: as its deployment where the site has a Prefect server (the default), else in this process."""
    site_path, access = wiring.site_path(args.site), access_of(args)
    site, name = wiring.read_site(site_path, access), _FLOWS[args.command]
    if site.prefect_api_url and not args.local:
        if access.chosen:
            raise InputError(
                "K2-INP-001",
                "A submitted run reaches the cluster as its worker's site file says, by that file's kubeconfig.",
                where="--kubeconfig" if args.kubeconfig else "--context",
                got=args.kubeconfig or args.context,
                expected="--local beside it: the flow in this process",
                hint=f"k2ctl {args.command} --local with the same options, or submit it without this one",
            )
        return submit(site, f"{name}/{name}", CARE, {**parameters, "site": site_path if args.site else ""})
    use_server_for(site)
    show_steps_here()
    signal.signal(signal.SIGTERM, ended_by_signal)
    from flows.collect import collect as collect_flow
    from flows.scrub import scrub as scrub_flow

    chosen = {key: value for key, value in plain(access).items() if value}
    flow: Any = {"scrub": scrub_flow, "collect": collect_flow}[name]
    return Ended("local", dict(flow(**parameters, site=site_path, **chosen)), "")
