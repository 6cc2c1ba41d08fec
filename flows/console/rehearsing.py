"""`k2ctl rehearse`: the embedded site, an older release live on it, and a new one through the whole chain."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.console.cpu_clock import CpuClock
from flows.console.injecting import INJECTIONS, Injector
from flows.console.kept_site import note_kept, refuse_a_second, refuse_running, stop_kept
from flows.console.reports import print_json
from flows.console.submission import say, show_steps_here, submit, use_api
from tasks import wiring
from tasks.core.errors import ExitCode, InputError, K2Error
from tasks.progress import TerminalProgress
from tasks.specs import load_base
from tasks.steps.context import Ports
from tasks.steps.documents import get_live, get_receipt
from tasks.steps.journal import states
from tasks.steps.site_setup import set_up_site
from tasks.steps.traffic import read_live_route

_CLIENT_RATE_PER_S = 20.0
_MIN_REQUESTS = 1000
_RETIRE_WAIT_S = 60


@dataclass
class Outcome:
    """What a rehearsal came to; becomes the JSON document."""

    release: str
    outcome: str = "failed"
    exit_code: int = ExitCode.UNEXPECTED
    receipt: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    built_s: float = 0.0
    users: str = ""


def rehearse(args: Namespace) -> int:
    """Run the rehearsal that the arguments ask for; its exit code is that of the release, or 1 if users noticed it."""
    from infra.rehearsal import site as embedded

    if args.stop:
        return stop_kept(args)
    unknown = [name for name in args.inject if name not in INJECTIONS]
    if unknown:
        raise InputError(
            "K2-INP-001",
            "There is no such injection.",
            where="--inject",
            got=unknown[0],
            expected=", ".join(INJECTIONS),
        )
    keep = args.keep or args.site_only
    if keep:
        refuse_a_second()
    if args.dir:
        refuse_running(Path(args.dir))
    directory = Path(args.dir or tempfile.mkdtemp(prefix="k2-rehearsal-"))
    directory.mkdir(parents=True, exist_ok=True)
    _forget_results()
    _banner(embedded.SIMULATED, directory)
    began = time.monotonic()
    programs = embedded.prepare(say)
    built_s = time.monotonic() - began
    options = embedded.SiteOptions(directory, 32 if args.full else 6, args.seed, keep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with embedded.RehearsalSite(options, say) as site:
        run = Rehearsal(site, args, built_s)
        try:
            result = run.carry_out(programs)
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


def _forget_results() -> None:
    """Remove the results of earlier rehearsals, so that no receipt stands beside the result of another."""
    results = _results_directory()
    for path in (results / "result.json", *results.glob("*.receipt.json")):
        path.unlink(missing_ok=True)


def _banner(simulated: tuple[str, ...], directory: Path) -> None:
    say("k2ctl rehearse: the release flows of production on this machine, without GPUs.")
    say(f"site directory: {directory}")
    say("simulated here (everything else is the real program):")
    for line in simulated:
        say(f"  - {line}")


class Rehearsal:
    """One rehearsal on a site: an older release first, then the candidate, with users all the while."""

    def __init__(self, site: Any, args: Namespace, built_s: float) -> None:
        from infra.rehearsal.releases import NEW, OLD

        self._site = site
        self._args = args
        self._built_s = built_s
        self._profile = "rehearsal-4p12d" if args.full else "rehearsal-1p2d"
        self._old, self._new = OLD, NEW
        self._cpu = CpuClock(site)

    def carry_out(self, programs: Any) -> Outcome:
        """Start the site, run the releases, print the result, and return it."""
        began = time.monotonic()
        result = Outcome(release=self._new, built_s=round(self._built_s, 1))
        self._site.start(programs)
        use_api(self._ports().site)
        self._set_up()
        with self._cpu:
            self._start_life()
            if self._args.site_only:
                result.outcome, result.exit_code, result.release = "live", ExitCode.DONE, self._old
            else:
                self._release(result)
            result.cpu_s = round(self._cpu.now(), 1)
        result.wall_s = round(time.monotonic() - began, 1)
        self._report(result)
        return result

    def _ports(self) -> Ports:
        return wiring.connect(str(self._site.site_path), "k2ctl-rehearse", TerminalProgress())

    def _set_up(self) -> None:
        """Make the base objects and the releases; from here on the pipeline has only its own rights."""
        from infra.rehearsal.releases import images, release_data, traffic, write_release

        set_up_site(self._ports(), load_base(), images()["tool"])
        self._site.use_pipeline_account()
        releases = self._site.directory / "releases"
        old = release_data(self._old, self._site.revisions["old"], self._profile, traffic=traffic(bake_s=0.5))
        new = release_data(self._new, self._site.revisions["new"], self._profile)
        for data in (old, new):
            write_release(releases, data)

    def _start_life(self) -> None:
        """Make the older release live (unless --first) while the worker comes up, then let users in."""
        worker = threading.Thread(target=self._site.start_worker)
        worker.start()
        if not self._args.first:
            say(f"making {self._old} live, so that there is something to protect")
            self._run_here("release", {"release": self._old})
            self._run_here("promote", {"release": self._old, "approver": "rehearsal"})
            say("users: the client sends streaming and plain requests from now on")
            self._site.start_client(_CLIENT_RATE_PER_S)
        worker.join()

    def _run_here(self, name: str, parameters: dict[str, Any]) -> None:
        show_steps_here()
        from flows.promote import promote
        from flows.release import release

        flow: Any = {"release": release, "promote": promote}[name]
        flow(**parameters, site=str(self._site.site_path))

    def _release(self, result: Outcome) -> None:
        """Take the candidate through release and promote as deployments, with the injections."""
        site = self._ports().site
        with Injector(self._site, self._args.inject, self._ports, self._new):
            try:
                parameters = {"release": self._new, "site": str(self._site.site_path)}
                submit(site, "release/release", self._new, parameters)
                ended = submit(site, "promote/promote", self._new, {**parameters, "approver": "rehearsal"})
                result.outcome, result.exit_code = "promoted", ExitCode.DONE
                result.receipt = str(ended.data["receipt"])
                self._await_retire()
            except K2Error as error:
                result.error, result.exit_code = error.as_data(), error.exit_code
                result.outcome = "reverted" if error.exit_code == ExitCode.REVERTED else "failed"
                say(error.as_text())
                if not self._args.keep:
                    say("note:     this site ends now; with --keep it stays up to be looked at")
        self._enough_requests()

    def _await_retire(self) -> None:
        """Wait for the run that promote has scheduled for the end of the hold: it takes the old set down."""
        if self._args.first:
            return
        say(f"retire: {self._old} is taken down after its hold, by a scheduled run of its own")
        deadline = time.monotonic() + _RETIRE_WAIT_S
        while time.monotonic() < deadline:
            state = states(self._ports().store, self._old).get("retire")
            if state is not None and state.outcome not in ("interrupted", "failed"):
                say(f"  retire: {state.outcome} - {state.data.get('note', '')}")
                return
            time.sleep(1)
        say(f"retire: not within {_RETIRE_WAIT_S} s; k2ctl retire {self._old} -y")

    def _enough_requests(self) -> None:
        """Let the client reach the number of requests that the result promises, for a minute at most."""
        if self._args.first or self._args.inject:
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._client_report().get("requests", 0) < _MIN_REQUESTS:
            time.sleep(0.5)

    def _client_report(self) -> dict[str, Any]:
        path = self._site.directory / "client.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _by_release(self, report: dict[str, Any]) -> dict[str, int]:
        """Return how many requests each release has answered; answers name the serving digest, the plan its release."""
        store, names = self._ports().store, {}
        for release in (self._old, self._new):
            plan = states(store, release).get("plan")
            if plan is not None and "plan" in plan.data:
                names[plan.data["plan"]["serving_digest"][:12]] = release
        counts = report.get("by_release") or {}
        return {names.get(serving, serving): int(row["requests"]) for serving, row in counts.items()}

    def _report(self, result: Outcome) -> None:
        ports = self._ports()
        if not self._args.first:
            report = self._client_report() if self._args.keep or self._args.site_only else self._site.stop_client()
            keys = ("requests", "failed", "cut_streams", "first_failures", "latency_ms", "ttft_ms")
            result.client = {key: report.get(key) for key in keys} | {"by_release": self._by_release(report)}
            whole = not (self._args.inject or self._args.site_only) and result.exit_code == ExitCode.DONE
            blame(result, _MIN_REQUESTS if whole else 0)
        result.steps = self._cpu.steps(states(ports.store, result.release))
        route, _ = read_live_route(ports)
        live, _ = get_live(ports.store)
        if result.receipt:
            path = _results_directory() / f"{result.release}.receipt.json"
            path.write_text(json.dumps(get_receipt(ports.store, result.release), indent=1))
            result.receipt = str(path)
        document = {
            "version": 1,
            "outcome": result.outcome,
            "release": result.release,
            "receipt": result.receipt,
            "exit_code": int(result.exit_code),
            "error": result.error,
            "steps": result.steps,
            "client": result.client,
            "users": result.users,
            "live": live["release"] if live else None,
            "route": {backend.release: weight for backend, weight in route.weights()},
            "parked": self._site.parked_answer(),
            "wall_s": result.wall_s,
            "cpu_s": result.cpu_s,
            "one_time_build_s": result.built_s,
            "hub": self._site.hub_stats().get("bytes_served"),
            "site": str(self._site.site_path),
            "simulated": list(ports.site.simulated),
            "real": self._site.real_parts(),
        }
        (_results_directory() / "result.json").write_text(json.dumps(document, indent=1))
        if self._args.json:
            print_json(document)
        else:
            _print_result(document)


def blame(result: Outcome, least: int) -> None:
    """Make a rehearsal that users noticed, or that had fewer than `least` requests of users, a failed one.

    That comes before the outcome of the release: no way for it to end may be felt by users.
    """
    failed, cut = (int(result.client.get(key) or 0) for key in ("failed", "cut_streams"))
    requests = int(result.client.get("requests") or 0)
    if failed or cut:
        result.users = f"Of {requests} user requests {failed} failed, and {cut} streams were cut."
    elif requests < least:
        result.users = f"Only {requests} user requests were sent; {least} are needed to say that none fails."
    else:
        return
    result.outcome, result.exit_code = "users-failed", ExitCode.UNEXPECTED
    say(result.users)


def _results_directory() -> Path:
    """Return where results and receipts outlive the site's own directory."""
    directory = wiring.last_rehearsal_site().parent
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _print_result(document: dict[str, Any]) -> None:
    print(f"\n{document['release']}: {document['outcome']} (exit {document['exit_code']})")
    print(f"{'step':<14}{'outcome':<14}{'wall s':>8}{'CPU s':>8}")
    for step in document["steps"]:
        print(f"{step['name']:<14}{step['outcome']:<14}{step['seconds']:>8.1f}{step['cpu_seconds']:>8.1f}")
    print(
        f"{'everything':<28}{document['wall_s']:>8.1f}{document['cpu_s']:>8.1f}   (one-time build apart: "
        f"{document['one_time_build_s']:.1f} s)"
    )
    client = document["client"]
    if client:
        print(
            f"users: {client['requests']} requests, {client['failed']} failed, {client['cut_streams']} cut streams, "
            "answered by " + ", ".join(f"{name}: {count}" for name, count in client["by_release"].items())
        )
    print("traffic now: " + ", ".join(f"{name} {weight}%" for name, weight in document["route"].items()))
    if document["users"]:
        print(document["users"])
    if document["receipt"]:
        print(f"receipt: {document['receipt']}")
