"""Engines behind a gateway in memory: scripted sets that answer right, wrong, slowly or not at all.

The port cases in tests/contract/router run on its router and on a real one; where they differ this is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from tasks.core.gates import SMOKE_PROMPTS
from tasks.core.render import ENGINE_PORT
from tasks.core.route import LIVE_ROUTE, RELEASE_HEADER
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import Workload
from tasks.ports import BackendCounts, Object
from tests.fakes.memory_cluster import MemoryCluster
from tests.fakes.steady_clock import SteadyClock

_RIGHT = {prompt.prompt: prompt.contains for prompt in SMOKE_PROMPTS}


@dataclass
class Behaviour:
    """How one set behaves. `status` 200 with `garbage` is the failure that only a graded answer shows.

    `hangs`: no answer until the caller gives up. `served_by`: the set that answers instead, its probe route being gone.
    """

    status: int = 200
    garbage: bool = False
    latency_s: float = 0.05
    running: float = 0.0
    load_tok_per_s: float = 1000.0
    counts: bool = True
    hangs: bool = False
    served_by: str = ""


@dataclass
class MemoryEngine:
    """Implements ports.Engine. `sets` are behaviours by serving label; a set that is not there answers nothing."""

    cluster: MemoryCluster
    clock: SteadyClock
    sets: dict[str, Behaviour] = field(default_factory=dict)
    stale: dict[str, list[Object]] = field(default_factory=dict)
    """Workers by serving label that the router has not noticed the end of; a new router does not know them."""
    dead: set[str] = field(default_factory=set)
    """Addresses (url) of workers that the router knows and that do not answer it."""
    asked: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    on_ask: Callable[[str], None] = lambda serving: None

    def __post_init__(self) -> None:
        self._turn = itertools.count()

    def ask(self, prompt: str, *, serving: str, max_tokens: int, stream: bool, timeout_s: float) -> Answer:
        to = serving or self._by_weight()
        self.asked.append(serving or "user")
        self.on_ask(to)
        how = self.sets.get(to, Behaviour(status=503))
        if how.hangs:
            self.clock.sleep(timeout_s)
            return Answer(0, "", "", 0, 0, False, 0.0, timeout_s, "", "ReadTimeout")
        self.clock.sleep(how.latency_s)
        if how.status != 200:
            return Answer(how.status, "", "", 0, 0, True, 0.0, how.latency_s, to, f"HTTP {how.status}")
        self.served[to] = self.served.get(to, 0.0) + 1
        by = how.served_by or to
        text = "blah blah" if how.garbage else f"It is {_RIGHT.get(prompt, 'fine')}."
        return Answer(200, text, "stop", len(prompt.split()), 3, True, how.latency_s / 2, how.latency_s, by)

    def _by_weight(self) -> str:
        """Return the set that the live route sends the next user to."""
        route = self.cluster.objects["HTTPRoute", LIVE_ROUTE]
        refs = [ref for ref in route["spec"]["rules"][0]["backendRefs"] for _ in range(ref["weight"])]
        ref = refs[next(self._turn) * 37 % len(refs)]
        headers = ref["filters"][0]["responseHeaderModifier"]["set"]
        return str(next(header["value"] for header in headers if header["name"] == RELEASE_HEADER))

    def router_ready(self, serving: str) -> bool:
        """Ready with at least one healthy prefill and one healthy decode, as the router in PD mode says it."""
        return {"prefill", "decode"} <= {w["worker_type"] for w in self.workers(serving) if w["is_healthy"]}

    def workers(self, serving: str) -> list[Object]:
        pods = self.cluster.list_objects("Pod", {"k2-release.io/serving": serving})
        known = [
            {
                "id": pod["metadata"]["uid"],
                "url": f"http://{pod['status']['podIP']}:{ENGINE_PORT}",
                "worker_type": role,
                "is_healthy": True,
            }
            for pod in pods
            if (role := pod["metadata"]["labels"]["k2-release.io/role"]) in ("prefill", "decode")
            and pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
        ]
        known += [dict(worker) for worker in self.stale.get(serving, [])]
        return [{**worker, "is_healthy": worker["is_healthy"] and worker["url"] not in self.dead} for worker in known]

    def counters(self, serving: str) -> dict[str, float]:
        how = self.sets.get(serving)
        if how is None or not how.counts:
            return {}
        served = self.served.get(serving, 0.0)
        return {f"{role}:sglang_num_requests_total": served for role in ("prefill", "decode")} | {
            "decode:sglang_num_running_reqs": how.running
        }

    def run_load(self, serving: str, workload: Workload, progress: Callable[[int], None]) -> list[LoadSample]:
        how = self.sets[serving]
        each_s = workload.output_tokens / how.load_tok_per_s
        progress(workload.requests)
        return [
            LoadSample(number * each_s, each_s / 2, each_s, workload.input_tokens, workload.output_tokens, True)
            for number in range(workload.requests)
        ]


@dataclass
class MemoryStats:
    """Implements ports.GatewayStats; `down` raises what a gateway without statistics raises."""

    by_backend: dict[str, BackendCounts] = field(default_factory=dict)
    down: Exception | None = None

    def counts(self, backend: str) -> BackendCounts:
        if self.down is not None:
            raise self.down
        return self.by_backend.get(backend, BackendCounts(0.0, 0.0))
