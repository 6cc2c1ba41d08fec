"""Commands that read: plan, render, receipt, explain, ask."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flows.console.lock_files import write_file
from flows.console.submission import say
from tasks import wiring
from tasks.core.access import Access
from tasks.core.errors import CATALOGUE, ExitCode, InputError, UnavailableError
from tasks.core.plan import Plan, plan_rows
from tasks.core.receipt_view import receipt_lines
from tasks.core.render import render_serving
from tasks.core.samples import Answer
from tasks.core.spec import plain
from tasks.progress import TerminalProgress
from tasks.specs import find_release
from tasks.steps.acceptance import find_lock
from tasks.steps.audit import verify_receipt
from tasks.steps.capacity import make_release_plan
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import get_receipt
from tasks.steps.signatures import require_signature

_OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_PASSING = (408, 429)


def connect(args: Namespace) -> Ports:
    """Return the ports of the site that a command names, with progress on standard error."""
    model = getattr(args, "model", wiring.DEFAULT_MODEL)
    return wiring.connect(wiring.site_path(args.site), "k2ctl", TerminalProgress(), model, access_of(args))


def access_of(args: Namespace) -> Access:
    """Return how the site's cluster is reached, by the options of a command."""
    kubeconfig = str(Path(args.kubeconfig).expanduser().resolve()) if args.kubeconfig else ""
    return Access(kubeconfig, args.context or "")


def print_json(data: Any) -> None:
    """Write one JSON document to standard output."""
    print(json.dumps(plain(data), indent=2))


def plan(args: Namespace) -> int:
    """Say what a release would change; reads only. Exit 3 with --detailed-exitcode when there are changes."""
    ports = connect(args)
    subject, source = planned(ports, args.release)
    made = make_release_plan(ports, subject)
    show_plan(args, made, source)
    return ExitCode.PLAN_HAS_CHANGES if args.detailed_exitcode and made.has_changes else ExitCode.DONE


def show_plan(args: Namespace, made: Plan, lock_source: str) -> None:
    """Write a plan to standard output: rows for a person, or with --json one document."""
    if args.json:
        print_json({"version": 1, **plain(made), "lock_source": lock_source})
    else:
        lock_row = {"what": "lock", "value": f"{made.lock_digest[:12]}, {lock_source}"}
        for row in (*plan_rows(made, made.usd_per_hour), lock_row):
            print(f"{row['what']:<22}{row['value']}")


def render(args: Namespace) -> int:
    """Write the objects of a release as YAML, or with --json as a JSON list."""
    ports = connect(args)
    subject, _ = planned(ports, args.release)
    objects = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    text = json.dumps(objects, indent=2) + "\n" if args.json else yaml.safe_dump_all(objects, sort_keys=True)
    if args.output:
        write_file(args.output, text.encode())
        if args.json:
            print_json({"version": 1, "path": args.output, "objects": len(objects)})
    else:
        sys.stdout.write(text)
    return ExitCode.DONE


def planned(ports: Ports, release: str) -> tuple[Subject, str]:
    """Return a release with the lock that a run of it would take, and where that came from; reads only."""
    found = find_release(release, ports.site.releases_dir)
    locked = find_lock(ports, found.repo, found.revision)
    require_signature(ports.store, locked.lock, ports.lock_key)
    return Subject(found, locked.lock), locked.source


def receipt(args: Namespace) -> int:
    """Show a release's receipt; with --verify recompute every digest in it, down to the bytes on each node."""
    ports = connect(args)
    release = args.release if "/" not in args.release else find_release(args.release, ports.site.releases_dir).id
    body = get_receipt(ports.store, release)
    if not args.verify:
        _show_receipt(args, body)
        return ExitCode.DONE
    checks = verify_receipt(ports, body)
    if args.json:
        print_json({"version": 1, "release": release, "ok": True, "checks": checks})
    else:
        for check in checks:
            print(f"ok  {check['what']:<28}{check['digest']}")
        print(f"every digest of the receipt of {release} holds: {len(checks)} checks")
    return ExitCode.DONE


def _show_receipt(args: Namespace, body: Mapping[str, Any]) -> None:
    """Write a receipt to standard output: lines for a person, or with --json the whole document."""
    if args.json:
        print_json(body)
    else:
        print("\n".join(receipt_lines(body)))
        say(f"every digest in full: k2ctl receipt {body['release']['id']} --json")


def explain(args: Namespace) -> int:
    """Say what an error code means and what to do; without a code list all of them."""
    if args.code and args.code not in CATALOGUE:
        raise InputError(
            "K2-INP-001", "There is no such code.", where="CODE", got=args.code, expected="one of `k2ctl explain`"
        )
    entries = [CATALOGUE[args.code]] if args.code else list(CATALOGUE.values())
    if args.json:
        print_json({"version": 1, "codes": [{**plain(e), "exit_code": int(e.exit_code)} for e in entries]})
        return ExitCode.DONE
    for entry in entries:
        print(f"{entry.code}  exit {int(entry.exit_code)}\n  {entry.meaning}\n  next: {entry.remedy}")
    return ExitCode.DONE


def ask(args: Namespace) -> int:
    """Send one prompt the way users go and show who answered what."""
    ports = connect(args)
    answer = ports.engine.ask(
        args.prompt, serving=args.serving, max_tokens=args.max_tokens, stream=True, timeout_s=120.0
    )
    _check_answer(answer, args.serving)
    if args.json:
        print_json({"version": 1, **plain(answer)})
    else:
        print(answer.text)
        say(
            f"status {answer.status}, {answer.finish_reason}, {answer.completion_tokens} tokens, first after "
            f"{answer.ttft_s:.3f} s, all after {answer.latency_s:.3f} s, served by {answer.served_by or 'nobody'}"
        )
    return ExitCode.DONE


def _check_answer(answer: Answer, serving: str) -> None:
    """Refuse what is no answer, and an answer by another set than was asked: with no probe route the live one does.

    Raises:
        InputError: the request was refused (HTTP 4xx).
        UnavailableError: anything else than an answer.
        InputError: another set than `serving` has answered.
    """
    wanted = f"an answer of set {serving}" if serving else "an answer"
    if answer.status != _OK:
        got = answer.error or (f"HTTP {answer.status}" if answer.status else "nothing")
        if _BAD_REQUEST <= answer.status < _SERVER_ERROR and answer.status not in _PASSING:
            raise InputError("K2-INP-001", "The request was refused.", where="PROMPT", got=got, expected=wanted)
        raise UnavailableError("K2-UNA-001", "The prompt was not answered.", where="gateway", got=got, expected=wanted)
    if serving and answer.served_by != serving:
        raise InputError(
            "K2-INP-001",
            "No set of this serving digest has a probe route; another one has answered.",
            where="--serving",
            got=answer.served_by or "nobody says so",
            expected=serving,
            hint="`k2ctl status RELEASE` and `kubectl get httproute` show the sets that are up",
        )


def summary(data: Mapping[str, Any]) -> str:
    """Return one line for the end of a release run."""
    plan_data = data.get("plan") or {}
    change = f", change {plan_data['change']}" if plan_data else ""
    return f"outcome: {data['outcome']}{change}"
