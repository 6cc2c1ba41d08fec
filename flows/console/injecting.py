"""The injections of `k2ctl rehearse`: what is made to go wrong, and the moment for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from flows.console.outages import API_KILLED, Outages
from flows.console.submission import say
from tasks.core.errors import InputError, K2Error
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
        self._outages = Outages(site, release)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Injector:
        if "shard-bitflip" in self._names:
            self._site.inject("shard-bitflip", {"path": "model-7-of-61.safetensors", "offset": 12345})
            say("inject: the Hub flips one bit of model-7-of-61.safetensors")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10 if API_KILLED not in self._names else self._outages.longest_s)

    def _watch(self) -> None:
        pending = [name for name in self._names if name != "shard-bitflip"]
        ports = self._ports()
        while pending and not self._stop.wait(0.3):
            with contextlib.suppress(K2Error):
                pending = [name for name in pending if not self._try(name, ports)]

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
        node = _node_of_candidate_alone(ports, serving)
        if node is None:
            return False
        self._site.inject("node-lost", {"node": node})
        say(f"inject: node {node} stops answering")
        return True


def _node_of_candidate_alone(ports: Ports, serving: str) -> str | None:
    """Return a node that runs a decode pod of the candidate and nothing of any other set: users must not feel it."""
    pods = ports.cluster.list_objects("Pod")
    labels = [(pod["spec"].get("nodeName"), pod["metadata"].get("labels", {})) for pod in pods]
    taken = {n for n, tags in labels if tags.get("k2-release.io/serving") not in (None, serving)}
    taken |= {n for n, tags in labels if tags.get("k2-release.io/role") == "parking"}
    own = {
        n
        for n, tags in labels
        if tags.get("k2-release.io/serving") == serving and tags.get("k2-release.io/role") == "decode"
    }
    return min((n for n in own - taken if n), default=None)
