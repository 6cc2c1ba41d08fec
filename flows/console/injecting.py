"""The injections of `k2ctl rehearse`: what is made to go wrong, and the moment for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flows.console.outages import API_KILLED, Outages
from flows.console.submission import say
from tasks.core.errors import InputError, K2Error
from tasks.core.render import ROLE_LABEL, SERVING_LABEL
from tasks.steps.context import Ports
from tasks.steps.traffic import read_live_route

# By name, what each works on: parts that only the embedded site has.
INJECTIONS = {
    "shard-bitflip": "the embedded site's Hub server",
    "gate-miss": "the embedded site's engine simulators",
    "node-lost": "the embedded site's node agent",
    "slo-breach": "the embedded site's engine simulators",
    API_KILLED: "the processes of the embedded site's control plane",
}
_RELEASE = "k2-release.io/release"
_LEAVE_S = 30.0
"""How long an injection may take to leave when the rehearsal is broken off; what it started is stopped after that."""


def check_injections(names: Sequence[str]) -> None:
    """Raise InputError for a name that is no injection."""
    unknown = [name for name in names if name not in INJECTIONS]
    if unknown:
        raise InputError(
            "K2-INP-001",
            "There is no such injection.",
            where="--inject",
            got=unknown[0],
            expected=", ".join(INJECTIONS),
        )


class Injector:
    """Makes things go wrong by name for one release, at the moment that each name stands for."""

    def __init__(self, site: Any, names: list[str], ports: Any, release: str) -> None:
        self._site = site
        self._names = names
        self._ports = ports
        self._release = release
        self._stop = threading.Event()
        self._outages = Outages(site, release, self._stop)
        self._failed: dict[str, Exception] = {}
        self.missed = [name for name in names if name != "shard-bitflip"]
        """The injections whose moment has not come yet; what is left of them at the end has shown nothing."""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Injector:
        if "shard-bitflip" in self._names:
            self._site.inject("shard-bitflip", {"path": "model-7-of-61.safetensors", "offset": 400_000})
            say("inject: the Hub flips one bit of model-7-of-61.safetensors")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Stop watching, and put back what is away.

        Raises:
            K2Error: an injection failed (K2-UNX-001). What breaks the rehearsal off, Ctrl-C above all, goes first.
        """
        self._stop.set()
        self._thread.join(_LEAVE_S if kind else self._outages.restart_s)
        if kind is None and self._thread.is_alive():
            raise self._failure(", ".join(self.missed), f"still at work {self._outages.restart_s:.0f} s after its end")
        for name, error in self._failed.items():
            if kind is None:
                raise self._failure(name, f"{type(error).__name__}: {error}") from error

    def _failure(self, name: str, how: str) -> K2Error:
        where = f"k2ctl rehearse --inject {name}"
        return K2Error("K2-UNX-001", f"The injection itself failed, so the rehearsal shows nothing: {how}", where=where)

    def _watch(self) -> None:
        with self._noting(*self.missed):
            ports = self._ports()
            while self.missed and not self._stop.wait(0.3):
                for name in tuple(self.missed):
                    self._look(name, ports)

    def _look(self, name: str, ports: Ports) -> None:
        """Try an injection; one that the site cannot answer just now is tried again, one that fails is given up."""
        with self._noting(name), contextlib.suppress(K2Error):
            if self._try(name, ports):
                self.missed.remove(name)

    @contextlib.contextmanager
    def _noting(self, *names: str) -> Iterator[None]:
        """Keep an exception for the end of the rehearsal: a thread has nobody to raise it to."""
        try:
            yield
        except Exception as error:
            for name in names:
                self._failed[name] = error
            self.missed = [name for name in self.missed if name not in names]
            say(f"inject: {', '.join(names)} failed: {type(error).__name__}: {error}")

    def _try(self, name: str, ports: Ports) -> bool:
        """Switch an injection on if its moment has come; return whether it is on."""
        if name == API_KILLED:
            return self._outages.look(ports)
        groups = ports.cluster.list_objects("LeaderWorkerSet")
        candidate = next((g for g in groups if g["metadata"]["annotations"].get(_RELEASE) == self._release), None)
        if candidate is None:
            return False
        serving = candidate["metadata"]["labels"]["k2-release.io/serving"]
        if name == "gate-miss":
            self._site.inject("engine-slow", {"pod_prefix": f"k2-{serving[:8]}-", "factor": 15})
            say("inject: the candidate's engines are 15 times slower")
            return True
        if name == "slo-breach":
            route, _ = read_live_route(ports)
            if route.candidate_percent < 10:
                return False
            self._site.inject("engine-slow", {"pod_prefix": f"k2-{serving[:8]}-", "factor": 40})
            say("inject: at 10% the candidate's engines become 40 times slower")
            return True
        node = node_of_candidate_alone(ports.cluster.list_objects("Pod"), serving)
        if node is None:
            return False
        self._site.inject("node-lost", {"node": node})
        say(f"inject: node {node} stops answering")
        return True


def node_of_candidate_alone(pods: Sequence[Mapping[str, Any]], serving: str) -> str | None:
    """Return a node whose loss the candidate feels and users do not; None while it has none.

    It runs nothing of any other set: of decode before prefill, and without a parking pod if there is such a one.
    Parking pods land anywhere, and serve nobody while a release is live.
    """
    on: dict[str, set[tuple[str, str]]] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        place = on.setdefault(str(pod["spec"].get("nodeName") or ""), set())
        place.add((str(labels.get(SERVING_LABEL, "")), str(labels.get(ROLE_LABEL, ""))))
    nodes = {node: what for node, what in on.items() if node and {of for of, _ in what} <= {serving, ""}}
    for role, parked in (("decode", False), ("prefill", False), ("decode", True)):
        fit = [node for node, what in nodes.items() if (serving, role) in what and (("", "parking") in what) == parked]
        if fit:
            return min(fit)
    return None
