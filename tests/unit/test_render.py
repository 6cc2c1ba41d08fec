"""Rendered objects: what is in them because an invariant, the router, the scheduler or the API server needs it."""

import copy
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from tasks.core import render, worker_jobs
from tasks.core.lock import LockedFile, make_lock
from tasks.specs import load_base, load_release, load_site, load_templates

MANIFESTS = Path(str(resources.files("manifests")))
TEMPLATES = load_templates("sglang")
TOOL = "registry.example.com/tool@sha256:" + "a" * 64


@pytest.fixture(scope="module")
def release():
    return load_release(MANIFESTS / "releases" / "k2-20261130-1.yaml")


@pytest.fixture(scope="module")
def site():
    return load_site(MANIFESTS / "sites" / "example-h200.yaml")


@pytest.fixture(scope="module")
def lock(release):
    files = [LockedFile(f"model-{i}-of-61.safetensors", i, "shard", f"{i:064x}") for i in range(1, 62)]
    return make_lock(release.repo, release.revision, files)


@pytest.fixture
def serving(release, lock, site):
    return {
        (obj["kind"], obj["metadata"]["name"].rsplit("-", 1)[-1] if obj["kind"] == "LeaderWorkerSet" else ""): obj
        for obj in render.render_serving(release, lock, site, TEMPLATES)
    }


def pods(serving):
    for role in ("prefill", "decode"):
        template = serving["LeaderWorkerSet", role]["spec"]["leaderWorkerTemplate"]
        yield role, "leader", template["leaderTemplate"]
        yield role, "worker", template["workerTemplate"]


def options(args):
    return {word: args[i + 1] for i, word in enumerate(args[:-1]) if word.startswith("--")}


def test_apply_order_and_names(release, lock, site):
    short = release.serving_digest(lock.digest)[:8]
    objects = render.render_serving(release, lock, site, TEMPLATES)
    assert [(obj["kind"], obj["metadata"]["name"]) for obj in objects] == [
        ("LeaderWorkerSet", f"k2-{short}-prefill"),
        ("LeaderWorkerSet", f"k2-{short}-decode"),
        ("Service", f"k2-{short}-router"),
        ("Deployment", f"k2-{short}-router"),
        ("HTTPRoute", f"k2-probe-{short}"),
    ]
    for obj in objects:
        assert obj["metadata"]["labels"][render.SERVING_LABEL] == release.serving_digest(lock.digest)[:12]
        assert obj["metadata"]["annotations"][render.RELEASE_ANNOTATION] == release.id
        assert obj["metadata"]["namespace"] == "k2"


def test_same_input_gives_the_same_objects(release, lock, site):
    shuffled = replace(
        release,
        profile=replace(
            release.profile,
            groups=tuple(
                replace(g, args=dict(reversed(g.args.items())), env=dict(reversed(g.env.items())))
                for g in release.profile.groups
            ),
            router_args=dict(reversed(release.profile.router_args.items())),
        ),
    )
    once = render.render_serving(release, lock, site, TEMPLATES)
    assert release.serving_digest(lock.digest) == shuffled.serving_digest(lock.digest)
    assert once == render.render_serving(shuffled, lock, site, TEMPLATES)
    assert render.manifests_digest(once) == render.manifests_digest(copy.deepcopy(once))


def test_templates_are_left_as_they_are(release, lock, site):
    before = copy.deepcopy(TEMPLATES)
    render.render_serving(release, lock, site, TEMPLATES)
    worker_jobs.render_stage_job(lock, site, TEMPLATES, TOOL, "node-1", "uid")
    assert before == TEMPLATES


def test_policy_changes_reach_no_pod(release, lock, site):
    other = replace(release, id="k2-other", retention=replace(release.retention, hold_s=1.0))
    for one, two in zip(
        render.render_serving(release, lock, site, TEMPLATES),
        render.render_serving(other, lock, site, TEMPLATES),
        strict=True,
    ):
        assert one["spec"] == two["spec"]


def test_every_engine_pod_waits_for_staged_and_checked_weights(serving, lock):
    for role, _, pod in pods(serving):
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert len(required["nodeSelectorTerms"]) == 1, "terms are alternatives: a second one would be a way around"
        wanted = {(e["key"], e["operator"], *e["values"]) for e in required["nodeSelectorTerms"][0]["matchExpressions"]}
        assert (f"staged.k2-release.io/{lock.digest[:12]}", "In", "true") in wanted, role
        assert ("k2-release.io/pool", "In", "h200") in wanted
        check = pod["spec"]["initContainers"][0]
        assert check["command"] == ["python", "-m", "tasks.node.marker_check"]
        assert check["args"] == ["--dir", f"/models/{lock.model_dir}", "--lock-digest", lock.digest]
        assert all(mount["readOnly"] for mount in check["volumeMounts"])


def test_leader_and_workers_run_one_argument_list(serving, release, lock):
    for role in ("prefill", "decode"):
        template = serving["LeaderWorkerSet", role]["spec"]["leaderWorkerTemplate"]
        assert template["size"] == release.profile.group(role).nodes
        leader, worker = template["leaderTemplate"], template["workerTemplate"]
        assert leader["spec"] == worker["spec"]
        args = leader["spec"]["containers"][0]["args"]
        assert args == render.engine_arguments(release, lock, role)
        given = options(args)
        assert given["--dist-init-addr"] == "$(LWS_LEADER_ADDRESS):5757"
        assert given["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert given["--nnodes"] == str(release.profile.group(role).nodes)
        assert (given["--host"], given["--port"]) == ("$(POD_IP)", "30000")
        assert given["--disaggregation-mode"] == role
        assert given["--served-model-name"] == "kimi-k2"
        assert "--enable-eplb" in args and "True" not in args
        assert all(isinstance(word, str) for word in args)


def test_only_the_prefill_leader_offers_a_bootstrap_port(serving):
    for role, place, pod in pods(serving):
        offered = pod["metadata"]["annotations"].get("sglang.ai/bootstrap-port")
        assert offered == ("8998" if (role, place) == ("prefill", "leader") else None)


def test_engine_pods_have_no_rights_whole_nodes_and_no_liveness_probe(serving):
    for _, _, pod in pods(serving):
        assert pod["spec"]["serviceAccountName"] == "k2-engine"
        assert pod["spec"]["automountServiceAccountToken"] is False
        engine = pod["spec"]["containers"][0]
        assert engine["resources"]["requests"] == engine["resources"]["limits"]
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert "livenessProbe" not in engine
        shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


@pytest.mark.parametrize("deadline_s", [20.0, 180.0, 3600.0])
def test_the_flow_gives_up_before_the_kubelet_does(release, lock, site, deadline_s):
    release = replace(release, profile=replace(release.profile, ready_deadline_s=deadline_s))
    lws = render.render_serving(release, lock, site, TEMPLATES)[0]
    probe = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1.5 * deadline_s


def test_router_finds_only_its_own_leaders(serving, release, lock):
    args = serving["Deployment", ""]["spec"]["template"]["spec"]["containers"][0]["args"]
    serving12 = release.serving_digest(lock.digest)[:12]
    for role in ("prefill", "decode"):
        start = args.index(f"--{role}-selector") + 1
        assert args[start : start + 3] == [
            f"k2-release.io/serving={serving12}",
            f"k2-release.io/role={role}",
            "leaderworkerset.sigs.k8s.io/worker-index=0",
        ]
        for role_of_pod, _, pod in pods(serving):
            labels = pod["metadata"]["labels"]
            assert labels["k2-release.io/serving"] == serving12
            assert labels["k2-release.io/role"] == role_of_pod
    assert "--policy" not in args
    assert options(args)["--prometheus-host"] == "$(POD_IP)"


def test_service_and_deployment_select_the_router_alone(serving):
    deployment, service = serving["Deployment", ""], serving["Service", ""]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert len(service["spec"]["selector"]) == 2
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": 30080}]


def test_probe_route_always_needs_the_header_and_no_mutating_path(serving, release, lock):
    serving12 = release.serving_digest(lock.digest)[:12]
    paths = set()
    for rule in serving["HTTPRoute", ""]["spec"]["rules"]:
        for match in rule["matches"]:
            assert match["headers"] == [{"type": "Exact", "name": "x-k2-release", "value": serving12}]
            paths.add((match.get("method"), match["path"]["type"], match["path"]["value"]))
    assert paths == {
        (None, "PathPrefix", "/v1"),
        (None, "PathPrefix", "/generate"),
        ("GET", "Exact", "/health"),
        ("GET", "Exact", "/readiness"),
        ("GET", "Exact", "/workers"),
        ("GET", "Exact", "/engine_metrics"),
    }


def test_live_route_carries_weights_headers_and_annotations():
    backends = [("k2-new-router", 10, "aaaaaaaaaaaa"), ("k2-old-router", 90, "bbbbbbbbbbbb"), ("k2-parking", 0, "")]
    route = render.render_live_route(TEMPLATES["live-route"], backends, {"k2-release.io/generation": "3"}, "k2")
    assert route["metadata"]["annotations"] == {"k2-release.io/generation": "3"}
    assert [rule["matches"] for rule in route["spec"]["rules"]] == [
        [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        [{"path": {"type": "PathPrefix", "value": "/generate"}}],
    ]
    for rule in route["spec"]["rules"]:
        assert [(ref["name"], ref["weight"], ref["port"]) for ref in rule["backendRefs"]] == [
            ("k2-new-router", 10, 80),
            ("k2-old-router", 90, 80),
            ("k2-parking", 0, 80),
        ]
        header = rule["backendRefs"][0]["filters"][0]["responseHeaderModifier"]["set"]
        assert header == [{"name": "x-k2-release", "value": "aaaaaaaaaaaa"}]
        assert "filters" not in rule["backendRefs"][2]


def test_pull_jobs_share_the_files_and_hold_no_secret(lock, site):
    jobs = worker_jobs.render_pull_jobs(lock, site, TEMPLATES, TOOL)
    assert [job["metadata"]["name"] for job in jobs] == [f"k2-pull-{lock.digest[:8]}-{i}" for i in range(8)]
    for i, job in enumerate(jobs):
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["args"] == ["--lock-digest", lock.digest, "--puller", str(i), "--of", "8"]
        environment = {item["name"]: item for item in container["env"]}
        assert environment["HF_ENDPOINT"]["value"] == "https://huggingface.co"
        for name, key in (("K2_STORE_ACCESS_KEY", "access_key"), ("K2_STORE_SECRET_KEY", "secret_key")):
            assert environment[name]["valueFrom"]["secretKeyRef"] == {"name": "k2-store", "key": key}
        assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "k2-hub", "key": "token"}


def test_no_more_pullers_than_files(release, site):
    lock = make_lock(release.repo, release.revision, [LockedFile("a.safetensors", 1, "shard", "0" * 64)])
    assert len(worker_jobs.render_pull_jobs(lock, site, TEMPLATES, TOOL)) == 1


def test_node_jobs_run_once_on_their_node(lock, site):
    stage = worker_jobs.render_stage_job(lock, site, TEMPLATES, TOOL, "node-3", "uid-3")
    verify = worker_jobs.render_verify_job(lock, site, TEMPLATES, TOOL, "node-3")
    assert stage["metadata"]["name"] == f"k2-stage-{lock.digest[:8]}-node-3"
    assert verify["metadata"]["name"] == f"k2-verify-{lock.digest[:8]}-node-3"
    for job in (stage, verify):
        spec = job["spec"]["template"]["spec"]
        assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
        assert job["spec"]["activeDeadlineSeconds"] > 0 and "ttlSecondsAfterFinished" not in job["spec"]
        assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("k2-stager", False)
        terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-3"]}]}]
        assert spec["volumes"][0]["hostPath"]["path"] == site.nvme_path
    mounts = [job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0] for job in (stage, verify)]
    assert "readOnly" not in mounts[0] and mounts[1]["readOnly"] is True
    assert "uid-3" in stage["spec"]["template"]["spec"]["containers"][0]["args"]


def test_job_names_stay_names_and_apart():
    digest = "0123456789abcdef" * 4
    long = "gpu-worker-with-a-rather-long-name-{}.compute.eu-west-1.internal.example.com"
    names = [
        worker_jobs.stage_job_name(digest, node) for node in (long.format(1), long.format(2), "a.b", "a-b", "node-1")
    ]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_a_field_that_a_template_lacks_is_an_error(release, lock, site):
    broken = copy.deepcopy(TEMPLATES)
    del broken["decode"]["spec"]["leaderWorkerTemplate"]["size"]
    with pytest.raises(KeyError, match="size"):
        render.render_serving(release, lock, site, broken)


def test_base_takes_namespace_gateway_and_image_from_the_site(site):
    other = replace(site, namespace="kimi", gateway=replace(site.gateway, name="edge"))
    objects = {(obj["kind"], obj["metadata"]["name"]): obj for obj in render.render_base(load_base(), other, TOOL)}
    assert ("Namespace", "kimi") in objects and ("Gateway", "edge") in objects
    for obj in objects.values():
        assert obj["metadata"].get("namespace", "kimi") == "kimi"
        assert all(subject["namespace"] == "kimi" for subject in obj.get("subjects", ()))
    parking = objects["Deployment", "k2-parking"]["spec"]["template"]["spec"]["containers"][0]
    assert parking["image"] == TOOL
    assert parking["command"] + parking["args"] == [
        *("python", "-m", "tasks.node.park", "--host", "$(POD_IP)", "--port", "8080"),
    ]


def test_rights_are_the_least_that_works():
    objects = {(obj["kind"], obj["metadata"]["name"]): obj for obj in load_base()}
    assert objects["Role", "k2-router"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    assert objects["ClusterRole", "k2-pipeline"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"]},
    ]
    bound = {subject["name"] for obj in load_base() for subject in obj.get("subjects", ())}
    assert bound == {"k2-router", "k2-pipeline"}
    granted = [r for rule in objects["Role", "k2-pipeline"]["rules"] for r in rule["resources"]]
    assert "secrets" not in granted and "*" not in granted


def test_nothing_listens_everywhere(release, lock, site):
    text = str(render.render_serving(release, lock, site, TEMPLATES)) + str(load_base())
    assert "0.0.0.0" not in text and "hostNetwork" not in text and "privileged" not in text
