"""The node agent against the real API server, scheduler and controller manager."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.rehearsal.procfs import identified
from tests.contract.agent_site import (
    NAMESPACE,
    NODES,
    Site,
    agent_site,
    condition,
    container,
    first_status,
    phase,
    python,
    sleeping,
    wait_for,
)

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with agent_site(tmp_path_factory.mktemp("site"), groups=False) as started:
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
