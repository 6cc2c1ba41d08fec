"""Commands that act: release, promote, retire."""

from __future__ import annotations

import getpass
import signal
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.console.reports import access_of, connect, planned, print_json, show_plan, summary
from flows.console.submission import Ended, again, say, show_steps_here, submit
from flows.console.temporary_server import use_server_for
from tasks import wiring
from tasks.core.access import Access
from tasks.core.errors import ExitCode, InputError
from tasks.core.spec import Site, plain
from tasks.specs import find_release
from tasks.steps.capacity import make_release_plan

_SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class _Target:
    """The release and the site that a command is about."""

    args: Namespace
    site_path: str
    access: Access
    site: Site
    release_id: str

    @property
    def release(self) -> str:
        """The release as a flow is to find it: its id, or the absolute path of its file."""
        given = str(self.args.release)
        named_by_path = "/" in given or given.endswith((".yaml", ".yml"))
        return str(Path(given).expanduser().resolve()) if named_by_path else given

    @property
    def approver(self) -> str:
        """Who approves: as given, else the user at the keyboard."""
        return str(self.args.approver or getpass.getuser())


def _target(args: Namespace) -> _Target:
    site_path, access = wiring.site_path(args.site), access_of(args)
    site = wiring.read_site(site_path, access)
    target = _Target(args, site_path, access, site, find_release(args.release, site.releases_dir).id)
    _check_approval(target)
    _check_access(target)
    return target


def _check_approval(target: _Target) -> None:
    """Check who approves and why by the flow's own rules, before anything is started."""
    from flows.promote import ApproverParameter, CommentParameter

    args = target.args
    rules: list[tuple[str, Any, str]] = [("--comment", CommentParameter, args.comment)]
    if args.approver or (args.yes and args.command != "retire"):
        rules.append(("--approver", ApproverParameter, target.approver))
    for option, rule, value in rules:
        try:
            TypeAdapter(rule).validate_python(value)
        except ValidationError as error:
            raise InputError(
                "K2-INP-001",
                f"{error.errors()[0]['msg']}.",
                where=option,
                got=value if len(value) <= _SHOWN_CHARACTERS else f"{len(value)} characters",
                hint=f"give another {option}",
            ) from error


def _check_access(target: _Target) -> None:
    """Refuse to send a choice of cluster to a worker: it reads the site file as it sees it and has its own files."""
    args = target.args
    if target.access.chosen and _is_submitted(target) and not getattr(args, "dry_run", False):
        raise InputError(
            "K2-INP-001",
            "A submitted run reaches the cluster as its worker's site file says, by that file's kubeconfig.",
            where="--kubeconfig" if args.kubeconfig else "--context",
            got=args.kubeconfig or args.context,
            expected="--local beside it: the flow in this process",
            hint=f"k2ctl {args.command} {target.release} --local with the same options, or submit it without this one",
        )


def release(args: Namespace) -> int:
    """Bring a release to gated; with --yes let it have traffic too. Resumes at the first unfinished step."""
    target = _target(args)
    if args.dry_run:
        return _dry_run(args)
    ended = _run(target, "release")
    data: dict[str, Any] = dict(ended.data)
    if args.yes and data["outcome"] == "gated":
        ended = _run(target, "promote", approver=target.approver, comment=args.comment)
        data = {**data, **ended.data}
    elif data["outcome"] == "gated":
        say(f"gated: no user traffic was moved. Next: k2ctl promote {target.release} --approver NAME -y")
    return _report(target, data, ended)


def promote(args: Namespace) -> int:
    """Let a gated release have traffic: shift by its plan, then promote."""
    target = _target(args)
    _confirm(target, f"shift user traffic to {target.release_id}")
    ended = _run(target, "promote", approver=target.approver, comment=args.comment)
    return _report(target, dict(ended.data), ended)


def retire(args: Namespace) -> int:
    """Take down a replaced release after its hold."""
    target = _target(args)
    _confirm(target, f"delete the pods and objects of {target.release_id} (its weights stay)")
    ended = _run(target, "retire")
    return _report(target, dict(ended.data), ended)


def _confirm(target: _Target, what: str) -> None:
    """Refuse to go on without -y: what moves traffic or deletes is said out loud first."""
    if not target.args.yes:
        raise InputError(
            "K2-INP-001",
            f"This would {what}.",
            where="-y",
            got="not given",
            expected="-y to go on",
            hint=again(target.args.command, target.release),
        )


def _run(target: _Target, name: str, **more: str) -> Ended:
    """Run a flow: as its deployment where the site has a Prefect server (the default), else in this process.

    A worker may see the site file elsewhere than we do, so its own site is meant unless one was named.
    """
    args, site = target.args, target.site
    if not _is_submitted(target):
        chosen = {key: value for key, value in plain(target.access).items() if value}
        return _run_here(site, name, {"release": target.release, "site": target.site_path, **chosen, **more})
    parameters = {"release": target.release, "site": target.site_path if args.site else "", **more}
    return submit(site, f"{name}/{name}", target.release_id, parameters)


def _is_submitted(target: _Target) -> bool:
    """Return whether flows run as their deployments: where there is a Prefect server, unless it is to be here."""
    return bool(target.site.prefect_api_url) and not target.args.local


def _run_here(site: Site, name: str, parameters: dict[str, Any]) -> Ended:
    use_server_for(site)
    show_steps_here()
    # Prefect has its own while a flow runs, and sends the signal again when the flow has ended in order.
    signal.signal(signal.SIGTERM, ended_by_signal)
    from flows.promote import promote as promote_flow
    from flows.release import release as release_flow
    from flows.retire import retire as retire_flow

    flow: Any = {"release": release_flow, "promote": promote_flow, "retire": retire_flow}[name]
    return Ended("local", dict(flow(**parameters)), "")


def ended_by_signal(*_: object) -> None:
    """End a command in order when it is told to; a flow in it has ended before."""
    raise KeyboardInterrupt("ended by SIGTERM; run the same command again to resume")


def _dry_run(args: Namespace) -> int:
    """Show the plan and stop."""
    ports = connect(args)
    subject, source = planned(ports, args.release)
    show_plan(args, make_release_plan(ports, subject), source)
    return ExitCode.DONE


def _report(target: _Target, data: dict[str, Any], ended: Ended) -> int:
    release_id = target.release_id
    if target.args.json:
        print_json({"version": 1, "release": release_id, "run": ended.run, "url": ended.url, **data})
    else:
        print(f"{release_id}: {summary(data)}" + (" - nothing to do" if data["outcome"] == "unchanged" else ""))
        if data.get("receipt"):
            print(f"receipt: {data['receipt']} in the store; k2ctl receipt {release_id} --verify")
    return ExitCode.DONE
