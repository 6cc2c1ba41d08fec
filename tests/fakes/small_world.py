"""A whole site in memory: cluster with its controllers, store, Hub, engines, gateway and clock, and releases on it.

What kubelet, the LeaderWorkerSet controller, the gateway and the node programs would do happens at once when an object
is written. `faults` wraps the ports of one run, so that its process can be killed at any port call.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.core.errors import K2Error
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock, lock_from_data
from tasks.core.marker import Marker, StagedFile
from tasks.core.spec import (
    GatePolicy,
    GatewayRef,
    HubRef,
    Images,
    Limit,
    Release,
    Retention,
    Site,
    StoreRef,
    TrafficPlan,
    Workload,
)
from tasks.ports import LockKey, Object
from tasks.specs import load_base, load_profile, load_templates
from tasks.steps.context import Ports, Subject
from tasks.steps.locking import make_accepted_lock
from tasks.steps.site_setup import set_up_site
from tasks.wiring import pipeline_rights
from tests.fakes.checkpoints import REPO, REVISION
from tests.fakes.memory_cluster import MemoryCluster
from tests.fakes.memory_engine import Behaviour, MemoryEngine, MemoryStats
from tests.fakes.memory_hub import MemoryHub
from tests.fakes.memory_store import MemoryStore
from tests.fakes.safetensors_files import shard
from tests.fakes.steady_clock import SteadyClock

TEMPLATES = load_templates("sglang")
BASE = load_base()
PROFILE = load_profile("rehearsal-1p2d")
IMAGES = Images(
    *(f"registry.example.com/{n}@sha256:{d * 64}" for n, d in (("engine", "1"), ("router", "2"), ("t", "3")))
)
MODEL_CONFIG = {
    "n_routed_experts": 384,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def checkpoint(seed: str = "a") -> dict[str, bytes]:
    """Return the files of a checkpoint of two shards."""
    names = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    shards = {path: shard({f"layer.{n}": ("U8", [400])}, f"{seed} {path}") for n, path in enumerate(names)}
    index = {"metadata": {"total_size": 800}, "weight_map": {f"layer.{n}": path for n, path in enumerate(shards)}}
    small = {
        "config.json": json.dumps(MODEL_CONFIG),
        "model.safetensors.index.json": json.dumps(index),
        "code.py": "pass",
    }
    return shards | {path: text.encode() for path, text in small.items()}


def site(**changes: Any) -> Site:
    """Return a site with a gateway of its own name."""
    base = Site(
        name="memory",
        kubeconfig="/none",
        context="none",
        namespace="k2",
        store=StoreRef("http://127.0.0.1:1", "k2", "/none", "k2-store"),
        hub=HubRef("http://127.0.0.1:1"),
        gateway=GatewayRef("http://127.0.0.1:1", "front-door", "http://127.0.0.1:1"),
        prefect_api_url="",
        node_selector={"k2-release.io/pool": "h200"},
        nvme_path="/mnt/nvme/k2",
        usd_per_gpu_hour=2.3,
        pullers=2,
        lease_duration_s=15.0,
        releases_dir="/none",
        simulated=("everything",),
    )
    return replace(base, **changes)


def release(release_id: str = "k2-new-1", **changes: Any) -> Release:
    """Return a small release; `changes` replace its fields, `args` adds decode arguments."""
    args = changes.pop("args", {})
    groups = tuple(replace(g, args={**g.args, **(args if g.role == "decode" else {})}) for g in PROFILE.groups)
    base = Release(
        id=release_id,
        repo=REPO,
        revision=REVISION,
        images=IMAGES,
        profile=replace(PROFILE, groups=groups),
        gates=GatePolicy(1.0, Workload(64, 16, 20, 4), (Limit("e2e_output_tok_per_s", ">=", 25.0, "tok/s"),), 0.5),
        traffic=TrafficPlan((10, 50, 100), 4.0, 1.0, 4, 0.1, 5.0),
        retention=Retention(60.0),
    )
    return replace(base, **changes)


@dataclass
class RecordingProgress:
    """Implements ports.Progress by keeping everything."""

    lines: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)

    def say(self, message: str) -> None:
        self.lines.append(message)

    def show(self, step: str, done: float, total: float, unit: str, note: str = "") -> None:
        assert 0 <= done <= total
        self.lines.append(f"{step}: {done:g} of {total:g} {unit} {note}")

    def table(self, key: str, rows: list[dict[str, Any]], title: str) -> None:
        self.tables[key] = [dict(row) for row in rows]

    def document(self, key: str, markdown: str) -> None:
        self.documents[key] = markdown


class Death(BaseException):
    """The process is gone: nothing that it would still do reaches the world."""


class Faults:
    """Kills the process at its n-th call of a port, before the call reaches the world.

    That is also what a death after the call before looks like: between two calls a process has no effect.
    """

    def __init__(self, at: int) -> None:
        self.calls = 0
        self._at = at

    def kill(self) -> None:
        """Kill the process now: its next call does not reach the world."""
        self._at = self.calls

    def wrap(self, port: Any) -> Any:
        return _Faulty(port, self)

    def call(self, act: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.calls >= self._at:
            raise Death
        return act()


class _Faulty:
    def __init__(self, port: Any, faults: Faults) -> None:
        self._port = port
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        if name == "impatient":
            return self
        method = getattr(self._port, name)
        if not callable(method):
            return method
        return lambda *args, **kwargs: self._faults.call(lambda: method(*args, **kwargs))


class World:
    """One site in memory with six nodes."""

    def __init__(self, nodes: int = 6, **site_changes: Any) -> None:
        self.site = site(**site_changes)
        self.clock = SteadyClock()
        self.cluster = MemoryCluster()
        self.store = MemoryStore()
        self.hub = MemoryHub(REPO, REVISION, checkpoint())
        self.engine = MemoryEngine(self.cluster, self.clock)
        self.stats = MemoryStats()
        self.progress = RecordingProgress()
        self.jobs_run: list[str] = []
        self.broken_jobs: dict[str, Object] = {}
        self.lock_key: LockKey | None = None
        self.cluster.controllers.append(self._control)
        for number in range(1, nodes + 1):
            self.add_node(f"node-{number}")
        set_up_site(self.ports("setup"), BASE, IMAGES.tool)

    def ports(self, run: str = "run-1", faults: Faults | None = None) -> Ports:
        """Return the ports of one run, killed as `faults` says."""

        def through(port: Any) -> Any:
            return port if faults is None else faults.wrap(port)

        return Ports(
            site=self.site,
            hub=through(self.hub),
            store=through(self.store),
            cluster=through(self.cluster),
            engine=through(self.engine),
            stats=through(self.stats),
            clock=self.clock,
            progress=self.progress,
            templates=TEMPLATES,
            rights=pipeline_rights(self.site),
            run=run,
            tool="k2-release 0",
            lock_key=self.lock_key,
        )

    def subject(self, what: Release) -> Subject:
        """Return a release with the accepted lock of the Hub's files."""
        return Subject(what, make_accepted_lock(self.hub, what.repo, what.revision)[0])

    def add_node(self, name: str) -> None:
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": dict(self.site.node_selector)},
                "spec": {},
            }
        )
        self.cluster.set_status("Node", name, {**READY, "allocatable": {"nvidia.com/gpu": "8"}})

    def live_weights(self) -> dict[str, int]:
        """Return the weights of the live route as the gateway reads them."""
        rules = self.cluster.objects["HTTPRoute", "k2-live"]["spec"]["rules"]
        weights = [{ref["name"]: ref["weight"] for ref in rule["backendRefs"]} for rule in rules]
        assert all(each == weights[0] for each in weights)
        return weights[0]

    def _control(self, verb: str, obj: Object) -> None:
        kind, name = obj["kind"], obj["metadata"]["name"]
        if kind == "HTTPRoute" and verb != "delete":
            condition = {
                "type": "Accepted",
                "status": "True",
                "observedGeneration": self.cluster.objects[kind, name]["metadata"]["generation"],
            }
            self.cluster.set_status(kind, name, {"parents": [{"conditions": [condition]}]})
        elif kind == "Job" and verb == "create":
            self._run_job(obj)
        elif kind == "LeaderWorkerSet":
            self._group(verb, obj)
        elif kind == "Deployment":
            self._deployment(verb, obj)

    def _deployment(self, verb: str, obj: Object) -> None:
        name, pod = obj["metadata"]["name"], f"{obj['metadata']['name']}-0"
        template = obj.get("spec", {}).get("template")
        known = self.cluster.objects.get(("Pod", pod))
        asked = _annotations(template)  # those of `kubectl rollout restart`
        if known and (verb == "delete" or (asked and known["metadata"].get("annotations") != asked)):
            self.cluster.delete("Pod", pod)
        if verb != "delete" and ("Pod", pod) not in self.cluster.objects:
            self._make_pod(pod, template, {}, "")
            self.cluster.set_status("Deployment", name, {"readyReplicas": 1})
            self.engine.stale.pop(template["metadata"]["labels"].get("k2-release.io/serving"), None)

    def _group(self, verb: str, obj: Object) -> None:
        name, template = obj["metadata"]["name"], obj["spec"]["leaderWorkerTemplate"]
        for rank in range(template["size"]):
            pod = f"{name}-0" + (f"-{rank}" if rank else "")
            if verb == "delete":
                self.cluster.delete("Pod", pod)
            elif ("Pod", pod) not in self.cluster.objects:
                labels = {
                    "leaderworkerset.sigs.k8s.io/name": name,
                    "leaderworkerset.sigs.k8s.io/worker-index": str(rank),
                }
                chosen = template["leaderTemplate" if rank == 0 else "workerTemplate"]
                self._make_pod(pod, chosen, labels, self._place(chosen["spec"]))
        serving = obj["metadata"]["labels"]["k2-release.io/serving"]
        if verb == "delete":
            self.engine.sets.pop(serving, None)
        else:
            self.engine.sets.setdefault(serving, Behaviour())

    def _place(self, spec: Object) -> str:
        """Return a node as the scheduler chooses it: required affinity, and no engine on it yet."""
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        wanted = {e["key"]: e["values"][0] for e in required["nodeSelectorTerms"][0]["matchExpressions"]}
        taken = {pod["spec"].get("nodeName") for pod in self.cluster.list_objects("Pod") if _asks_for_gpus(pod["spec"])}
        free = [n["metadata"]["name"] for n in self.cluster.list_objects("Node", wanted)]
        return str(next(name for name in free if name not in taken))

    def _make_pod(self, name: str, template: Object, labels: Mapping[str, str], node: str) -> None:
        number = len(self.cluster.writes)
        meta: Object = {"name": name, "labels": {**template["metadata"]["labels"], **labels}}
        meta |= {"annotations": annotations} if (annotations := _annotations(template)) else {}
        spec = {**template["spec"], **({"nodeName": node} if node else {"nodeName": "node-1"})}
        self.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        address = f"127.9.{number // 250}.{number % 250}"
        self.cluster.set_status("Pod", name, {**READY, "phase": "Running", "podIP": address})

    def _run_job(self, job: Object) -> None:
        """Do what the program of a Job does, and end it."""
        name = job["metadata"]["name"]
        self.jobs_run.append(name)
        container = job["spec"]["template"]["spec"]["containers"][0]
        options = dict(zip(*[iter(shlex.split(shlex.join(container["args"])))] * 2, strict=True))
        error = next((e for start, e in self.broken_jobs.items() if name.startswith(start)), None)
        try:
            message = error or self._program(container["command"][-1], options)
        except K2Error as failure:
            message = error = failure.as_data()
        labels = {"batch.kubernetes.io/controller-uid": job["metadata"]["uid"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-x", "labels": labels}}
        self.cluster.delete("Pod", f"{name}-x")
        self.cluster.create({**pod, "spec": {"containers": [{"name": container["name"]}]}})
        ended = {"terminated": {"exitCode": 5 if error else 0, "message": json.dumps(message)}}
        phase = "Failed" if error else "Succeeded"
        self.cluster.set_status("Pod", f"{name}-x", {"phase": phase, "containerStatuses": [{"state": ended}]})
        condition = {"type": "Failed" if error else "Complete", "status": "True"}
        self.cluster.set_status("Job", name, {"conditions": [condition]})

    def _program(self, module: str, options: Mapping[str, str]) -> Object:
        if module == "tasks.node.probe":
            return {"node": options["--node"], "free_bytes": 10**12, "needed_bytes": 1, "free_inodes": 10**6}
        lock = lock_from_data(json.loads(self.store.objects[f"locks/{options['--lock-digest']}.json"]))
        if module == "tasks.node.pull":
            return {"bytes_fetched": sum(self._pull(lock, int(options["--puller"]), int(options["--of"])))}
        if module in ("tasks.node.stage", "tasks.node.exchange"):
            return self._stage(lock, options["--node"], options["--node-uid"])
        return {"node": options["--node"], "checked": len(lock.files)}

    def _pull(self, lock: Lock, puller: int, of: int) -> Iterator[int]:
        for file in lock.files[puller::of]:
            key = f"blobs/{file.sha256}"
            if f"{key}.ok" not in self.store.objects:
                self.store.objects[key] = self.hub.files[file.path]
                self.store.objects[f"{key}.ok"] = b"{}"
                yield file.size_bytes

    def _stage(self, lock: Lock, node: str, node_uid: str) -> Object:
        key = f"markers/{node}/{lock.digest}.json"
        files = tuple(StagedFile(f.path, f.size_bytes, f.sha256, 1, 1) for f in lock.files)
        marker = Marker(lock.digest, lock.repo, lock.revision, node, node_uid, files, "2026-11-30T00:00:00Z", "k2")
        kept = self.store.objects.get(key) == marker.to_bytes()
        self.store.objects[key] = marker.to_bytes()
        return {
            "node": node,
            "lock_digest": lock.digest,
            "marker_sha256": sha256_hex(marker.to_bytes()),
            "files": len(files),
            "bytes_written": 0 if kept else lock.total_bytes,
            "files_kept": len(files) if kept else 0,
        }


def _asks_for_gpus(spec: Object) -> bool:
    return any(c.get("resources", {}).get("limits", {}).get("nvidia.com/gpu") for c in spec["containers"])


def _annotations(template: Object | None) -> Object:
    return ((template or {}).get("metadata") or {}).get("annotations") or {}
