"""The node agent and the group controller against the real API server, scheduler and controller manager."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infra.rehearsal import apiserver, crds
from infra.rehearsal.addresses import SubnetLease
from infra.rehearsal.apiserver import ApiError, ControlPlane
from infra.rehearsal.binaries import ensure_control_plane
from infra.rehearsal.processes import ProcessSpec, Supervisor
from infra.rehearsal.procfs import identified

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

NAMESPACE = "k2"
NODES = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    directory: Path
    plane: ControlPlane
    supervisor: Supervisor

    def get(self, path: str) -> dict[str, Any]:
        return self.plane.admin.request("GET", path)

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.plane.admin.request("POST", path, body)

    def delete(self, path: str, grace_s: int | None = None) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self.plane.admin.request("DELETE", path, options | ({} if grace_s is None else {"gracePeriodSeconds": grace_s}))

    def pod(self, name: str) -> dict[str, Any] | None:
        try:
            return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def pods(self, selector: str) -> list[dict[str, Any]]:
        return self.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")["items"]

    def log(self, pod: str, query: str = "") -> str:
        # This is what `kubectl logs` asks for; the API server fetches it from the node over HTTPS.
        answer = self.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/log?{query}")
        return str(answer["text"]) if set(answer) == {"text"} else json.dumps(answer)

    def processes(self, pod: str) -> list[dict[str, Any]]:
        content = json.loads((self.directory / "nodes" / "processes.json").read_text())
        return [process for process in content["processes"] if process["pod"] == pod]

    def run_pod(self, name: str, *containers: dict[str, Any], **spec: Any) -> None:
        body = {
            "metadata": {"name": name, "labels": {"test": name}},
            "spec": {"terminationGracePeriodSeconds": 2, **spec, "containers": list(containers)},
        }
        self.create(f"/api/v1/namespaces/{NAMESPACE}/pods", {"apiVersion": "v1", "kind": "Pod", **body})

    def start_agent(self) -> None:
        subnet = ".".join(self.agent_argv_subnet.split(".")[:2])
        argv = [sys.executable, "-m", "infra.rehearsal.nodes", "--kubeconfig", str(self.plane.kubeconfig)]
        argv += ["--site", str(self.directory), "--subnet", subnet, "--nodes", str(NODES), "--groups"]
        self.supervisor.start(ProcessSpec("node-agent", tuple(argv)), wait=False)

    @property
    def agent_argv_subnet(self) -> str:
        return (self.directory / "subnet").read_text()


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float = 120.0) -> T:
    deadline = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


def container(command: list[str], name: str = "main", **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "registry.example/test:1", "command": command, **more}


def python(source: str, name: str = "main", **more: Any) -> dict[str, Any]:
    return container(["python", "-c", source], name, **more)


def condition(item: dict[str, Any], kind: str) -> str:
    conditions = item.get("status", {}).get("conditions") or []
    return next((entry["status"] for entry in conditions if entry["type"] == kind), "")


def first_status(pod: dict[str, Any] | None) -> dict[str, Any]:
    return ((pod or {}).get("status", {}).get("containerStatuses") or [{}])[0]


def phase(pod: dict[str, Any] | None) -> str:
    return str((pod or {}).get("status", {}).get("phase", ""))


def ready_nodes(site: Site) -> list[str]:
    nodes = site.get("/api/v1/nodes")["items"]
    return [node["metadata"]["name"] for node in nodes if condition(node, "Ready") == "True"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with SubnetLease.acquire() as lease, Supervisor(directory, hold_fds=[lease.fileno()]) as supervisor:
        (directory / "subnet").write_text(str(lease.network.network_address))
        plane = apiserver.start(supervisor, ensure_control_plane(print))
        files = [path for path in crds.ensure_files(print) if "leaderworkersets" in path.name]
        crds.install(plane.admin, files)
        plane.admin.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        started = Site(directory, plane, supervisor)
        started.start_agent()
        wait_for("nodes ready", lambda: len(ready_nodes(started)) == NODES)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        wait_for("ServiceAccount", lambda: plane.admin.answers(account))
        yield started


def test_nodes_have_gpus_their_own_addresses_and_leases(site: Site) -> None:
    nodes = site.get("/api/v1/nodes?labelSelector=k2-release.io/pool=h200")["items"]
    assert [node["metadata"]["name"] for node in nodes] == [f"node-{index}" for index in range(1, NODES + 1)]
    addresses = {node["status"]["addresses"][0]["address"] for node in nodes}
    assert len(addresses) == NODES and all(address.startswith("127.") for address in addresses)
    assert {node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes} == {"8"}
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-1"
    wait_for("lease", lambda: site.plane.admin.answers(path))
    lease = site.get(path)
    assert lease["spec"]["leaseDurationSeconds"] == 10


def test_a_deployment_becomes_available_through_its_readiness_probe(site: Site) -> None:
    server = container(
        ["python", "-m", "http.server", "8080", "--bind", "$(POD_IP)"],
        env=[{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        ports=[{"name": "http", "containerPort": 8080}],
        readinessProbe={"httpGet": {"port": "http", "path": "/"}, "periodSeconds": 1},
    )
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [server]}}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    base = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    site.create(base, {"metadata": {"name": "web"}, "spec": spec})
    wait_for("available", lambda: condition(site.get(f"{base}/web"), "Available") == "True")
    pods = site.pods("app=web")
    assert len({pod["status"]["podIP"] for pod in pods}) == 2
    assert "GET / HTTP/1.1" in site.log(pods[0]["metadata"]["name"], "tailLines=1")
    site.delete(f"{base}/web")
    wait_for("gone", lambda: not site.pods("app=web"))


def test_a_job_reports_its_last_words_and_a_failed_one_its_exit_code(site: Site) -> None:
    base = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    words = "open('/dev/termination-log', 'w').write('42 shards verified')"
    for name, source in (("good", words), ("bad", f"{words}; raise SystemExit(5)")):
        template = {"spec": {"restartPolicy": "Never", "containers": [python(source)]}}
        site.create(base, {"metadata": {"name": name}, "spec": {"backoffLimit": 0, "template": template}})
    wait_for("complete", lambda: condition(site.get(f"{base}/good"), "Complete") == "True")
    wait_for("failed", lambda: condition(site.get(f"{base}/bad"), "Failed") == "True")
    good, bad = (site.pods(f"job-name={name}")[0] for name in ("good", "bad"))
    assert (phase(good), phase(bad)) == ("Succeeded", "Failed")
    ended = first_status(bad)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (5, "Error", "42 shards verified")
    assert first_status(good)["state"]["terminated"]["message"] == "42 shards verified"


def test_volumes_and_environment_reach_the_program(site: Site) -> None:
    core = f"/api/v1/namespaces/{NAMESPACE}"
    site.create(f"{core}/configmaps", {"metadata": {"name": "settings"}, "data": {"a.txt": "content"}})
    site.create(f"{core}/secrets", {"metadata": {"name": "store"}, "stringData": {"key": "p$(HOME)w"}})
    script = (
        "import os, pathlib, sys;"
        "print(pathlib.Path(sys.argv[1]).read_text(), pathlib.Path('/models/m').read_text(), os.environ['KEY'],"
        " os.environ['WHERE'], os.environ['POD_NAME'], oct(os.stat(os.environ['KUBECONFIG']).st_mode & 0o777))"
    )
    main = python(
        script,
        args=["/conf/a.txt"],
        env=[
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "store", "key": "key"}}},
            {"name": "NO", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "key", "optional": True}}},
            {"name": "WHERE", "value": "$(KEY)@$(NODE)"},
        ],
        volumeMounts=[{"name": "conf", "mountPath": "/conf"}, {"name": "nvme", "mountPath": "/models"}],
    )
    first = container(
        ["sh", "-c", "echo -n marker > /models/m"], "first", volumeMounts=[{"name": "nvme", "mountPath": "/models"}]
    )
    volumes = [
        {"name": "conf", "configMap": {"name": "settings"}},
        {"name": "nvme", "hostPath": {"path": "/mnt/nvme/k2", "type": "DirectoryOrCreate"}},
    ]
    site.run_pod("volumes", main, initContainers=[first], volumes=volumes, restartPolicy="Never")
    pod = wait_for("ended", lambda: (p := site.pod("volumes")) and phase(p) == "Succeeded" and p)
    assert site.log("volumes").strip() == "content marker p$(HOME)w p$(HOME)w@$(NODE) volumes 0o600"
    node = site.directory / "nodes" / pod["spec"]["nodeName"]
    assert (node / "mnt/nvme/k2/m").read_text() == "marker"


def test_a_container_acts_as_its_own_service_account(site: Site) -> None:
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    site.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "reader"}})
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    site.create(f"{rbac}/roles", {"metadata": {"name": "reader"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    site.create(f"{rbac}/rolebindings", {"metadata": {"name": "r"}, "subjects": [subject], "roleRef": reference})
    source = (
        "import asyncio, os, pathlib\n"
        "from infra.rehearsal.kubeclient import Connection, KubeClient, KubeError\n"
        "from infra.rehearsal.kuberesources import PODS, SECRETS\n"
        "async def main():\n"
        "    async with KubeClient(Connection.from_kubeconfig(pathlib.Path(os.environ['KUBECONFIG']))) as client:\n"
        "        print('pods', bool((await client.list(PODS, 'k2')).items))\n"
        "        try:\n"
        "            await client.list(SECRETS, 'k2')\n"
        "        except KubeError as error:\n"
        "            print(error.status, error.message.split(' cannot ')[0])\n"
        "asyncio.run(main())\n"
    )
    site.run_pod("reader", python(source), serviceAccountName="reader", restartPolicy="Never")
    wait_for("ended", lambda: phase(site.pod("reader")) == "Succeeded")
    lines = site.log("reader").splitlines()
    assert lines == ["pods True", '403 secrets is forbidden: User "system:serviceaccount:k2:reader"']


def test_a_killed_container_is_restarted_and_its_log_kept(site: Site) -> None:
    site.run_pod("killed", python("print('run', flush=True); import time; time.sleep(600)"))
    process = wait_for("running", lambda: site.processes("killed"))[0]
    wait_for("log", lambda: site.log("killed") == "run\n")
    os.kill(process["pid"], signal.SIGKILL)
    pod = wait_for("restarted", lambda: (p := site.pod("killed")) and first_status(p).get("restartCount") == 1 and p)
    ended = first_status(pod)["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "Error")
    assert site.log("killed", "previous=true") == "run\n"
    site.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/killed")
    wait_for("gone", lambda: site.pod("killed") is None)


def test_a_condition_that_somebody_else_changed_is_taken_back(site: Site) -> None:
    site.run_pod("marked", python("import time; time.sleep(600)"))
    wait_for("ready", lambda: condition(site.pod("marked") or {}, "Ready") == "True")
    # As the controller manager does to the pods of a node whose lease it could not read for a while.
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/marked/status"
    patch = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    answer = site.plane.admin.request("PATCH", path, patch, content_type="application/strategic-merge-patch+json")
    assert condition(answer, "Ready") == "False"
    wait_for("ready again", lambda: condition(site.pod("marked") or {}, "Ready") == "True", 30)
    site.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/marked")


def test_a_failing_init_container_backs_off_and_keeps_the_engine_from_starting(site: Site) -> None:
    init = container(["sh", "-c", "echo marker is wrong >&2; exit 3"], "marker")
    site.run_pod("init", python("print('started')"), initContainers=[init])

    def backing_off() -> dict[str, Any] | None:
        pod = site.pod("init")
        statuses = (pod or {}).get("status", {}).get("initContainerStatuses") or [{}]
        waiting = statuses[0].get("state", {}).get("waiting", {})
        return pod if waiting.get("reason") == "CrashLoopBackOff" and statuses[0]["restartCount"] else None

    pod = wait_for("CrashLoopBackOff", backing_off)
    assert pod["status"]["initContainerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 3
    assert first_status(pod)["state"]["waiting"]["reason"] == "PodInitializing"
    assert condition(pod, "Initialized") == "False" and phase(pod) == "Pending"
    assert site.log("init", "container=marker").strip() == "marker is wrong"
    site.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/init")
    wait_for("gone", lambda: site.pod("init") is None)


def test_deletion_gives_the_grace_period_and_no_more(site: Site) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    site.run_pod("deaf", python(deaf + "time.sleep(600)"))
    wait_for("running", lambda: site.log("deaf") if phase(site.pod("deaf")) == "Running" else None)
    process = site.processes("deaf")[0]
    began = time.monotonic()
    site.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/deaf")
    wait_for("gone", lambda: site.pod("deaf") is None)
    assert 2.0 <= time.monotonic() - began < 30.0  # the API's default, had the pod's own 2 s not been heeded
    assert not identified(process["pid"], process["start_ticks"])


def group_set(name: str, replicas: int = 1) -> dict[str, Any]:
    source = (
        "import json, os, time\n"
        "keys = ('LWS_LEADER_ADDRESS', 'LWS_GROUP_SIZE', 'LWS_WORKER_INDEX')\n"
        "print(' '.join(os.environ[key] for key in keys), flush=True)\n"
        "while os.environ[keys[0]] not in json.load(open(os.environ['K2_REHEARSAL_HOSTS'])): time.sleep(0.1)\n"
        "print('leader found', flush=True)\n"
        "time.sleep(600)\n"
    )
    main = python(source, resources={"limits": {"nvidia.com/gpu": "8"}})
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [main]}}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
    }


def test_a_lost_node_is_seen_and_its_group_moves(site: Site) -> None:
    base = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{NAMESPACE}/leaderworkersets"
    site.create(base, group_set("prefill"))
    wait_for("available", lambda: condition(site.get(f"{base}/prefill"), "Available") == "True")
    worker = site.pod("prefill-0-1")
    assert worker
    node, process = worker["spec"]["nodeName"], site.processes("prefill-0-1")[0]
    injection = site.directory / "inject" / "node-lost.json"
    injection.parent.mkdir(exist_ok=True)
    injection.write_text(json.dumps({"node": node}))
    wait_for("killed", lambda: not identified(process["pid"], process["start_ticks"]))
    # "Unknown" is the controller manager's word for heartbeats that stopped; the agent would have said "False".
    wait_for("not ready", lambda: condition(site.get(f"/api/v1/nodes/{node}"), "Ready") == "Unknown")

    def moved() -> bool:
        pods = [site.pod("prefill-0"), site.pod("prefill-0-1")]
        return all(pod and condition(pod, "Ready") == "True" and pod["spec"]["nodeName"] != node for pod in pods)

    wait_for("the group on other nodes", moved)
    injection.unlink()
    wait_for("ready again", lambda: node in ready_nodes(site))
    site.delete(f"{base}/prefill")
    wait_for("gone", lambda: not site.pods("leaderworkerset.sigs.k8s.io/name=prefill"))


def test_a_killed_agent_leaves_nothing_and_the_next_one_takes_over(site: Site) -> None:
    # The grandchild has a session of its own: neither the parent's death nor its process group reaches it.
    seconds = f"612.{os.getpid()}"  # this run's alone on the machine
    popen = f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)"
    site.run_pod("survivor", python(f"import subprocess, time; {popen}; time.sleep(600)"))
    process = wait_for("running", lambda: site.processes("survivor"))[0]
    grandchild = wait_for("grandchild", lambda: sleeping(seconds))
    os.kill(site.supervisor.child("node-agent").pid, signal.SIGKILL)
    wait_for("dead with its agent", lambda: not identified(process["pid"], process["start_ticks"]))
    site.supervisor.stop("node-agent")
    site.start_agent()
    pod = wait_for(
        "restarted",
        lambda: (
            (p := site.pod("survivor")) and first_status(p).get("restartCount") == 1 and first_status(p)["ready"] and p
        ),
    )
    assert first_status(pod)["lastState"]["terminated"]["exitCode"] == 137
    assert grandchild != sleeping(seconds)
    assert len(site.processes("survivor")) == 1
    site.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/survivor", grace_s=0)
    wait_for("gone", lambda: site.pod("survivor") is None)


# After the others: the real garbage collector looks for kinds that are new to it only every 30 seconds.
def test_a_group_lives_and_dies_together(site: Site) -> None:
    base = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{NAMESPACE}/leaderworkersets"
    site.create(base, group_set("decode"))
    wait_for("available", lambda: condition(site.get(f"{base}/decode"), "Available") == "True")
    status = site.get(f"{base}/decode")["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)
    wait_for("leader found", lambda: "leader found" in site.log("decode-0-1"))
    assert site.log("decode-0-1").splitlines()[0] == "decode-0.decode.k2 2 1"
    leader, worker = site.pod("decode-0"), site.pod("decode-0-1")
    assert leader and worker and leader["spec"]["nodeName"] != worker["spec"]["nodeName"]
    processes = site.processes("decode-0") + site.processes("decode-0-1")
    os.kill(site.processes("decode-0-1")[0]["pid"], signal.SIGKILL)

    def renewed() -> bool:
        pods = [site.pod("decode-0"), site.pod("decode-0-1")]
        old = {leader["metadata"]["uid"], worker["metadata"]["uid"]}
        return all(pod and pod["metadata"]["uid"] not in old and condition(pod, "Ready") == "True" for pod in pods)

    wait_for("the whole group anew", renewed)
    assert not any(identified(process["pid"], process["start_ticks"]) for process in processes)
    processes = site.processes("decode-0") + site.processes("decode-0-1")
    site.delete(f"{base}/decode")
    wait_for("gone", lambda: not site.pods("leaderworkerset.sigs.k8s.io/name=decode"))
    assert not any(identified(process["pid"], process["start_ticks"]) for process in processes)


def sleeping(seconds: str) -> int | None:
    """Return the pid of the one `sleep` with this argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", seconds.encode()]:
            return int(path.parent.name)
    return None
