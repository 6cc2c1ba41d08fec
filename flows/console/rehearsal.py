"""What every rehearsal does, wherever: an older release live, then a new one through the whole chain, with users."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flows.console.cpu_clock import CpuClock
from flows.console.rehearsal_result import Outcome, blame, blame_missed, print_result, results_directory
from flows.console.submission import say, show_steps_here, submit
from tasks import wiring
from tasks.core.access import AS_WRITTEN, Access
from tasks.core.errors import ExitCode, K2Error
from tasks.core.spec import plain
from tasks.progress import TerminalProgress
from tasks.steps.context import Ports
from tasks.steps.documents import get_live, get_receipt
from tasks.steps.journal import states
from tasks.steps.traffic import read_live_route

MIN_REQUESTS = 1000
_CLIENT_RATE_PER_S = 20.0
_RETIRE_WAIT_S = 60


class Stage(Protocol):
    """What a rehearsal needs of a place beyond its site file."""

    @property
    def site_path(self) -> Path:
        """The site file."""

    @property
    def directory(self) -> Path:
        """Where the users' client keeps its report, `client.json`."""

    def start_client(self, rate_per_s: float) -> Path:
        """Let users in."""

    def stop_client(self) -> dict[str, Any]:
        """Let users finish, and return their counts."""

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of everything of the rehearsal on this machine."""

    def hub_stats(self) -> dict[str, Any]:
        """Return what the Hub has served, where that is known."""

    def parked_answer(self) -> dict[str, Any] | None:
        """Return what users get while nobody serves; None if somebody does."""

    def real_parts(self) -> list[dict[str, Any]]:
        """Return what is real."""


@dataclass(frozen=True)
class Programme:
    """What is played: the two releases by id, the model that users ask for, and how the cluster is reached."""

    old: str
    new: str
    model: str = wiring.DEFAULT_MODEL
    access: Access = AS_WRITTEN
    built_s: float = 0.0


class Rehearsal:
    """One rehearsal on a stage; `prepare`, `start_worker` and `injecting` are what differs from place to place."""

    def __init__(self, stage: Stage, args: Namespace, programme: Programme) -> None:
        self.stage = stage
        self.args = args
        self.programme = programme
        self._cpu = CpuClock(stage)

    def prepare(self) -> None:
        """Bring the site to where a release can begin."""

    def start_worker(self) -> None:
        """Make sure that submitted runs are taken up; runs beside the first release."""

    def injecting(self) -> AbstractContextManager[Any]:
        """Return the context in which the candidate is released: one in which nothing is made to go wrong."""
        return nullcontext()

    def submits(self) -> bool:
        """Return whether the candidate's flows run as deployments."""
        return True

    def carry_out(self) -> Outcome:
        """Prepare the site, run the releases, print the result, and return it."""
        began = time.monotonic()
        result = Outcome(release=self.programme.new, built_s=round(self.programme.built_s, 1))
        self.prepare()
        with self._cpu:
            self._start_life()
            if self.args.site_only:
                result.outcome, result.exit_code, result.release = "live", ExitCode.DONE, self.programme.old
            else:
                self._release(result)
            result.cpu_s = round(self._cpu.now(), 1)
        result.wall_s = round(time.monotonic() - began, 1)
        self._report(result)
        return result

    def ports(self) -> Ports:
        """Return the ports of the site."""
        p = self.programme
        return wiring.connect(str(self.stage.site_path), "k2ctl-rehearse", TerminalProgress(), p.model, p.access)

    def _start_life(self) -> None:
        """Make the older release live (unless --first) while the worker comes up, then let users in."""
        pool = ThreadPoolExecutor(1)
        worker = pool.submit(self.start_worker)
        pool.shutdown(wait=False)  # takes nothing more; leaving by an exception does not wait for the worker
        if not self.args.first:
            old = self.programme.old
            say(f"making {old} live, so that there is something to protect")
            if self._run_here("release", old)["outcome"] == "gated":
                self._run_here("promote", old, approver="rehearsal")
            say("users: the client sends streaming and plain requests from now on")
            self.stage.start_client(_CLIENT_RATE_PER_S)
        worker.result()

    def _run_here(self, name: str, release_id: str, **more: str) -> dict[str, Any]:
        """Run a flow in this process."""
        show_steps_here()
        from flows.promote import promote
        from flows.release import release

        flow: Any = {"release": release, "promote": promote}[name]
        chosen = {key: value for key, value in plain(self.programme.access).items() if value}
        return dict(flow(release=release_id, site=str(self.stage.site_path), **chosen, **more))

    def _run(self, name: str, release_id: str, **more: str) -> dict[str, Any]:
        """Run a flow as its deployment where the place has one, else in this process."""
        if not self.submits():
            return self._run_here(name, release_id, **more)
        parameters = {"release": release_id, "site": str(self.stage.site_path), **more}
        return submit(self.ports().site, f"{name}/{name}", release_id, parameters).data

    def _release(self, result: Outcome) -> None:
        """Take the candidate through release and promote, with the injections."""
        new, began = self.programme.new, time.time()
        with self.injecting() as injector:
            try:
                ended = self._run("release", new)
                result.outcome, result.exit_code = str(ended["outcome"]), ExitCode.DONE
                if result.outcome == "gated":
                    ended = self._run("promote", new, approver="rehearsal")
                    result.outcome, result.receipt = "promoted", str(ended["receipt"])
                    self._await_retire(ended, began)
            except K2Error as error:
                result.error, result.exit_code = error.as_data(), error.exit_code
                result.outcome = "reverted" if error.exit_code == ExitCode.REVERTED else "failed"
                say(error.as_text())
                self.say_what_stays()
        if injector is not None:
            blame_missed(result, injector.missed)
        self._enough_requests()

    def say_what_stays(self) -> None:
        """Tell, after a failure, what of the site can still be looked at."""

    def _await_retire(self, promoted: dict[str, Any], began: float) -> None:
        """Wait for the run that promote has scheduled for the end of the hold: it takes the old set down."""
        old, retire_at = promoted["previous"], promoted["retire_at"] or 0.0
        if not old:
            return
        if not self.submits() or retire_at > time.time() + _RETIRE_WAIT_S:
            say(f"retire: {old} stays warm for its hold; then k2ctl retire {old} -y, if no scheduled run does it")
            return
        say(f"retire: {old} is taken down after its hold, by a scheduled run of its own")
        deadline = time.monotonic() + _RETIRE_WAIT_S
        while time.monotonic() < deadline:
            state = states(self.ports().store, old).get("retire")
            ended = state is not None and state.ended_at is not None and state.ended_at >= began
            if state is not None and ended and state.outcome not in ("interrupted", "failed"):
                say(f"  retire: {state.outcome} - {state.data.get('note', '')}")
                return
            time.sleep(1)
        say(f"retire: not within {_RETIRE_WAIT_S} s; k2ctl retire {old} -y")

    def _enough_requests(self) -> None:
        """Let the client reach the number of requests that the result promises, for a minute at most."""
        if self.args.first or self.args.inject:
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._client_report().get("requests", 0) < MIN_REQUESTS:
            time.sleep(0.5)

    def _client_report(self) -> dict[str, Any]:
        path = self.stage.directory / "client.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _by_release(self, report: dict[str, Any]) -> dict[str, int]:
        """Return how many requests each release has answered; answers name the serving digest, the plan its release."""
        store, names = self.ports().store, {}
        for release in (self.programme.old, self.programme.new):
            plan = states(store, release).get("plan")
            if plan is not None and "plan" in plan.data:
                names[plan.data["plan"]["serving_digest"][:12]] = release
        counts = report.get("by_release") or {}
        return {names.get(serving, serving): int(row["requests"]) for serving, row in counts.items()}

    def _report(self, result: Outcome) -> None:
        ports = self.ports()
        if not self.args.first:
            report = self._client_report() if self.args.keep or self.args.site_only else self.stage.stop_client()
            keys = ("requests", "failed", "cut_streams", "first_failures", "latency_ms", "ttft_ms")
            result.client = {key: report.get(key) for key in keys} | {"by_release": self._by_release(report)}
            whole = not (self.args.inject or self.args.site_only) and result.exit_code == ExitCode.DONE
            blame(result, MIN_REQUESTS if whole else 0)
        result.steps = self._cpu.steps(states(ports.store, result.release))
        if result.receipt:
            path = results_directory() / f"{result.release}.receipt.json"
            path.write_text(json.dumps(get_receipt(ports.store, result.release), indent=1))
            result.receipt = str(path)
        document = self._document(ports, result)
        (results_directory() / "result.json").write_text(json.dumps(document, indent=1))
        print_result(document, as_json=self.args.json)

    def _document(self, ports: Ports, result: Outcome) -> dict[str, Any]:
        route, _ = read_live_route(ports)
        live, _ = get_live(ports.store)
        return {
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
            "parked": self.stage.parked_answer(),
            "wall_s": result.wall_s,
            "cpu_s": result.cpu_s,
            "one_time_build_s": result.built_s,
            "hub": self.stage.hub_stats().get("bytes_served"),
            "site": str(self.stage.site_path),
            "simulated": list(ports.site.simulated),
            "real": self.stage.real_parts(),
        }
