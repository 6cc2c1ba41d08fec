"""The parts of the node agent: commands, processes, probes, names, logs and statuses. Processes here are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from infra.rehearsal.nodes.__main__ import _parser, machines
from infra.rehearsal.nodes.agent import AddressPool, lost_nodes
from infra.rehearsal.nodes.commands import PathMap, expand, resolve_argv, resolve_environment, substitute_program
from infra.rehearsal.nodes.containers import ContainerProcess, Exit, Launch, StartError, run_to_end
from infra.rehearsal.nodes.hosts import PodHost, host_table
from infra.rehearsal.nodes.ledger import OWNER_VARIABLE, ProcessLedger, ProcessRecord, kill_leftovers, start_ticks
from infra.rehearsal.nodes.lifecycle import RestartRule
from infra.rehearsal.nodes.logs import LogSource, read_log, tail_offset
from infra.rehearsal.nodes.machines import Machine, MachineSpec, node_object
from infra.rehearsal.nodes.probes import ProbeTarget, ProbeTiming, Tally, run_probes
from infra.rehearsal.nodes.status import ContainerState, PodState, backoff_s, image_id, pod_status, terminated
from infra.rehearsal.nodes.volumes import VolumeError, VolumeMaker, field_value, has_service_account_token
from infra.rehearsal.procfs import ProcessStat

NOW = "2026-11-30T00:00:00Z"


def machine(directory: Path, index: int = 3) -> Machine:
    return Machine(f"node-{index}", index, "127.11", directory / f"node-{index}", MachineSpec())


def pod_object(**spec: Any) -> dict[str, Any]:
    metadata = {
        "name": "p",
        "namespace": "k2",
        "uid": "u",
        "generation": 1,
        "labels": {"app.kubernetes.io/name": "engine"},
    }
    return {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "x"}], **spec}}


# -- commands


def test_references_are_expanded_as_kubernetes_does():
    variables = {"A": "1", "B_C": "two"}
    assert expand("$(A)-$(B_C)-$(NO)-$$(A)-$A-$", variables) == "1-two-$(NO)-$(A)-$A-$"


def test_environment_values_see_only_what_stands_before_them():
    entries = [("B", "$(A)"), ("A", "1"), ("C", "$(A)"), ("GONE", None), ("A", "2"), ("D", "$(A)")]
    assert resolve_environment(entries) == {"B": "$(A)", "A": "2", "C": "1", "D": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/models", "/n/m"),
        ("/models/a/b", "/n/m/a/b"),
        ("--model-path=/models/x", "--model-path=/n/m/x"),
        ('{"path": "/models/x"}', '{"path": "/n/m/x"}'),
        ("/models:/conf/a", "/n/m:/n/c/a"),
        ("/models/cache/x", "/n/cache/x"),
        ("cat /models/x > /conf/y", "cat /n/m/x > /n/c/y"),
        ("/models-old", "/models-old"),
        ("/modelsx", "/modelsx"),
        ("http://host/models/x", "http://host/models/x"),
        ("/srv/models/x", "/srv/models/x"),
    ],
)
def test_paths_of_mounts_are_rewritten_and_nothing_else(text, expected):
    paths = PathMap({"/models": "/n/m", "/models/cache/": "/n/cache", "/conf": "/n/c"})
    assert paths.rewrite(text) == expected


def test_a_rewritten_path_is_not_rewritten_again():
    assert PathMap({"/tmp": "/tmp/site/tmp", "/data": "/tmp/site/data"}).rewrite("/data /tmp") == (
        "/tmp/site/data /tmp/site/tmp"
    )


def test_only_the_engine_is_substituted():
    def run(*argv: str) -> list[str]:
        return substitute_program(argv, python="/py")

    assert run("python3", "-u", "-m", "sglang.launch_server", "--tp", "16") == [
        "/py",
        "-u",
        "-m",
        "infra.rehearsal.engine",
        "--tp",
        "16",
    ]
    assert run("/usr/bin/python", "-m", "tasks.node.stage") == ["/py", "-m", "tasks.node.stage"]
    assert run("bash", "-c", "exec python -m sglang.launch_server --x")[2] == (
        "exec python -m infra.rehearsal.engine --x"
    )
    assert run("sh", "-c", "python -m sglang.launch_server.other") == [
        "sh",
        "-c",
        "python -m sglang.launch_server.other",
    ]
    assert run("echo", "-m", "sglang.launch_server") == ["echo", "-m", "sglang.launch_server"]


def test_arguments_are_expanded_before_their_paths_are_mapped():
    argv = resolve_argv(
        ["cat"], ["$(DIR)/x", "$(IP)"], {"DIR": "/models", "IP": "127.1.2.3"}, PathMap({"/models": "/n"}), python="/py"
    )
    assert argv == ["cat", "/n/x", "127.1.2.3"]


# -- processes


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def launch(directory: Path, *argv: str, **environment: str) -> Launch:
    return Launch(argv, {"PATH": os.environ["PATH"], **environment}, directory / "work", directory / "log")


def test_a_process_writes_its_log_and_reports_its_exit_code(tmp_path):
    async def scenario() -> Exit:
        return await ContainerProcess(launch(tmp_path, "sh", "-c", "pwd; echo oops >&2; exit 7")).wait()

    assert asyncio.run(scenario()) == Exit(7)
    assert (tmp_path / "log").read_text() == f"{tmp_path}/work\noops\n"


def test_a_process_that_does_not_exist_is_a_start_error(tmp_path):
    async def scenario() -> None:
        ContainerProcess(launch(tmp_path, "no-such-program"))

    with pytest.raises(StartError, match='exec: "no-such-program": No such file'):
        asyncio.run(scenario())


def test_stopping_is_polite_first_and_takes_the_whole_group(tmp_path):
    async def scenario() -> tuple[Exit, Exit, list[int]]:
        polite = ContainerProcess(launch(tmp_path, "sh", "-c", "trap 'exit 3' TERM; sleep 60 & echo up; wait"))
        deaf = ContainerProcess(launch(tmp_path, "sh", "-c", "trap '' TERM; echo up; sleep 61"))
        await until(lambda: (tmp_path / "log").read_text().count("up") == 2)
        exits = await polite.stop(30), await deaf.stop(0.2)
        return *exits, [polite.pid, deaf.pid]

    polite, deaf, groups = asyncio.run(scenario())
    assert polite == Exit(3)
    assert deaf == Exit(137, signal.SIGKILL)
    # What is left of a group may still wait to be reaped, but nothing of it runs.
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    stats = [stat for stat in map(ProcessStat.read, pids) if stat is not None]
    assert not [stat for stat in stats if stat.session in groups and stat.state not in "ZX"]


def test_a_short_program_that_takes_too_long_is_killed(tmp_path):
    assert asyncio.run(run_to_end(launch(tmp_path, "true"), 30)) == Exit(0)
    assert asyncio.run(run_to_end(launch(tmp_path, "sleep", "60"), 0.1)) is None


def record(pid: int, ticks: int) -> ProcessRecord:
    return ProcessRecord("node-1", "k2", "p", "u", "c", pid, ticks, "/bin/sleep", ("sleep", "60"), "/log", NOW)


def test_the_next_agent_kills_what_is_recorded_or_marked_and_spares_a_reused_pid(tmp_path):
    async def scenario() -> list[Exit]:
        recorded = ContainerProcess(launch(tmp_path, "sleep", "60"))
        marked = ContainerProcess(launch(tmp_path, "sleep", "60", **{OWNER_VARIABLE: str(tmp_path)}))
        other = ContainerProcess(launch(tmp_path, "sleep", "60", **{OWNER_VARIABLE: str(tmp_path) + "x"}))
        ledger = ProcessLedger(tmp_path)
        ledger.add(record(recorded.pid, start_ticks(recorded.pid)))
        ledger.add(record(other.pid, start_ticks(other.pid) - 1))
        ledger.flush()
        assert set(kill_leftovers(tmp_path)) == {recorded.pid, marked.pid}
        await asyncio.sleep(0.05)
        assert other.running
        other.signal(signal.SIGTERM)
        return [await process.wait() for process in (recorded, marked, other)]

    assert [ended.signal for ended in asyncio.run(scenario())] == [9, 9, 15]


def test_the_ledger_lists_what_runs(tmp_path):
    async def scenario() -> None:
        ledger = ProcessLedger(tmp_path)
        ledger.add(record(101, 5))
        ledger.add(record(102, 6))
        ledger.remove(101)
        await until((tmp_path / "processes.json").exists)

    asyncio.run(scenario())
    listed = json.loads((tmp_path / "processes.json").read_text())["processes"]
    assert [(process["pid"], process["argv"]) for process in listed] == [(102, ["sleep", "60"])]


# -- restarts and statuses


def test_restart_rules():
    def restarts(policy: str, *, init: bool = False, sidecar: bool = False) -> tuple[bool, bool]:
        rule = RestartRule.of(policy, init=init, sidecar=sidecar)
        return rule.restart(0), rule.restart(1)

    assert restarts("Always") == (True, True)
    assert restarts("OnFailure") == (False, True)
    assert restarts("Never") == (False, False)
    assert restarts("Always", init=True) == (False, True)
    assert restarts("Never", init=True) == (False, False)
    assert restarts("Never", init=True, sidecar=True) == (True, True)


def test_back_off_doubles_up_to_ten_seconds():
    assert [backoff_s(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def ended(code: int) -> dict[str, Any]:
    return terminated(exit_code=code, signal=0, started_at=NOW, finished_at=NOW, message="", container_id="x")


def state_of(*states: dict[str, Any], policy: str = "Always", **changes: Any) -> PodState:
    containers = [ContainerState(f"c{index}", "x", state=state) for index, state in enumerate(states)]
    return PodState("127.1.0.1", main=containers, restart_policy=policy, **{"initialized": True, **changes})


RUNNING = {"running": {"startedAt": NOW}}
WAITING = {"waiting": {"reason": "ContainerCreating"}}


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (state_of(WAITING), "Pending"),
        (state_of(RUNNING, WAITING), "Pending"),
        (state_of(RUNNING), "Running"),
        (state_of(ended(1)), "Running"),
        (state_of(ended(0), RUNNING, policy="Never"), "Running"),
        (state_of(ended(0), ended(0), policy="Never"), "Succeeded"),
        (state_of(ended(0), ended(2), policy="Never"), "Failed"),
        (state_of(ended(2), policy="OnFailure"), "Running"),
        (state_of(WAITING, initialized=False), "Pending"),
        (state_of(WAITING, initialized=False, init=[ContainerState("i", "x", state=ended(3))]), "Pending"),
        (
            state_of(WAITING, initialized=False, policy="Never", init=[ContainerState("i", "x", state=ended(3))]),
            "Failed",
        ),
    ],
)
def test_phases(state, phase):
    assert state.phase == phase


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {entry["type"]: (entry["status"], entry["reason"]) for entry in status["conditions"]}


def test_conditions_follow_the_containers_and_keep_their_times():
    state = state_of(RUNNING, RUNNING)
    state.main[0].ready = True
    status = pod_status(pod_object(), state, NOW)
    assert conditions(status)["Ready"] == ("False", "ContainersNotReady")
    assert "[c1]" in status["conditions"][2]["message"]
    state.main[1].ready = True
    later = pod_status(pod_object() | {"status": status}, state, "2026-11-30T00:00:09Z")
    assert conditions(later)["Ready"] == ("True", "")
    times = {entry["type"]: entry["lastTransitionTime"] for entry in later["conditions"]}
    assert (times["Initialized"], times["Ready"]) == (NOW, "2026-11-30T00:00:09Z")


def test_readiness_gates_hold_a_pod_back():
    state = state_of(RUNNING)
    state.main[0].ready = True
    pod = pod_object(readinessGates=[{"conditionType": "k2/warm"}])
    assert conditions(pod_status(pod, state, NOW))["Ready"] == ("False", "ReadinessGatesNotReady")
    pod["status"] = {"conditions": [{"type": "k2/warm", "status": "True"}]}
    assert conditions(pod_status(pod, state, NOW))["Ready"] == ("True", "")


def test_a_waiting_container_remembers_how_it_ended():
    container = ContainerState("c", "x", state=ended(4))
    container.wait("CrashLoopBackOff", "back-off 2s")
    assert container.last_state["terminated"]["exitCode"] == 4
    assert container.as_status()["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 2s"}}


def test_image_ids_keep_a_digest_and_are_stable_without_one():
    digest = "host:5000/a/b@sha256:" + "0" * 64
    assert image_id(digest) == digest
    assert image_id("host:5000/a/b:v1").startswith("host:5000/a/b@sha256:")
    assert image_id("host:5000/a/b").startswith("host:5000/a/b@sha256:")


# -- probes


def test_a_tally_needs_results_in_a_row():
    tally = Tally(ProbeTiming.of({"failureThreshold": 2, "successThreshold": 2}))
    assert [tally.add(result) for result in (True, False, True, True, False, False)] == [
        None,
        None,
        None,
        True,
        None,
        False,
    ]


def test_probe_timing_has_the_defaults_of_the_api_and_a_floor_of_one_second():
    assert ProbeTiming.of({}) == ProbeTiming(0, 10, 1, 3, 1)
    assert ProbeTiming.of({"periodSeconds": 0.2}).period_s == 1.0


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []

    def probe_started(self) -> None:
        self.told.append("started")

    def probe_ready(self, ready: bool) -> None:
        self.told.append(f"ready {ready}")

    def probe_failed(self, kind: str, message: str) -> None:
        self.told.append(f"{kind} failed: {message}")

    def probe_unhealthy(self, kind: str) -> None:
        self.told.append(f"unhealthy {kind}")


def probe_told(tmp_path: Path, container: dict[str, Any], answers: dict[str, int], count: int) -> list[str]:
    """Run the probes until they end or have told so many things; each has only one try before its period is over."""
    for probe in container.values():
        probe |= {"timeoutSeconds": 30, "periodSeconds": 60}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=answers[request.path])

    async def scenario() -> list[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        listener = Listener()
        async with aiohttp.ClientSession() as session:
            target = ProbeTarget(
                pod_ip="127.0.0.1",
                ports={"http": port},
                session=session,
                command=lambda words: words,
                environment={"PATH": os.environ["PATH"]},
                directory=tmp_path,
            )
            task = asyncio.create_task(run_probes(container, target, listener))
            await until(lambda: task.done() or len(listener.told) >= count)
            task.cancel()
        await runner.cleanup()
        return listener.told

    return asyncio.run(scenario())


def test_readiness_and_startup_over_http(tmp_path):
    container = {
        "startupProbe": {"httpGet": {"path": "/up", "port": "http"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "failureThreshold": 1},
    }
    assert probe_told(tmp_path, container, {"/up": 200, "/ready": 503}, 3) == [
        "started",
        "Readiness failed: HTTP probe failed with statuscode: 503",
        "ready False",
    ]


def test_a_failed_startup_probe_ends_the_matter(tmp_path):
    container = {
        "startupProbe": {"exec": {"command": ["false"]}, "failureThreshold": 1},
        "readinessProbe": {"exec": {}},
    }
    told = probe_told(tmp_path, container, {}, 3)
    assert told == ["Startup failed: command 'false' exited with 1", "unhealthy Startup"]


def test_liveness_over_tcp_and_readiness_without_a_probe(tmp_path):
    container = {"livenessProbe": {"tcpSocket": {"port": 1}, "failureThreshold": 1}}
    told = probe_told(tmp_path, container, {}, 4)
    assert told[:2] == ["started", "ready True"] and told[-1] == "unhealthy Liveness"


def test_a_probe_of_an_unknown_port_fails_and_says_so(tmp_path):
    container = {"readinessProbe": {"httpGet": {"port": "nope"}}}
    assert "the probe cannot be carried out" in probe_told(tmp_path, container, {}, 2)[1]


# -- volumes, names, nodes


def test_host_paths_lie_under_their_node(tmp_path):
    volume = {"name": "nvme", "hostPath": {"path": "/mnt/nvme/k2", "type": "DirectoryOrCreate"}}
    pod = pod_object(volumes=[volume, {"name": "shm", "emptyDir": {"medium": "Memory"}}])
    volumes = asyncio.run(VolumeMaker(None, pod, machine(tmp_path), tmp_path / "own").prepare())  # type: ignore[arg-type]
    mounts = volumes.mounts(
        {
            "volumeMounts": [
                {"name": "nvme", "mountPath": "/models"},
                {"name": "nvme", "mountPath": "/sub", "subPath": "a/b"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ]
        }
    )
    root = tmp_path / "node-3/mnt/nvme/k2"
    assert mounts == {"/models": str(root), "/sub": str(root / "a/b"), "/dev/shm": str(tmp_path / "own/volumes/shm")}
    assert (root / "a/b").is_dir()


@pytest.mark.parametrize(
    "volume",
    [
        {"name": "v", "hostPath": {"path": "/absent", "type": "Directory"}},
        {"name": "v", "persistentVolumeClaim": {"claimName": "c"}},
    ],
)
def test_what_cannot_be_mounted_is_an_error(tmp_path, volume):
    maker = VolumeMaker(None, pod_object(volumes=[volume]), machine(tmp_path), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(VolumeError):
        asyncio.run(maker.prepare())


def test_downward_fields():
    pod = pod_object(nodeName="node-3")
    status = {"podIP": "127.11.13.2", "hostIP": "127.11.0.3"}
    values = [
        field_value(pod, path, status)
        for path in ("metadata.name", "metadata.labels['app.kubernetes.io/name']", "spec.nodeName", "status.podIP")
    ]
    assert values == ["p", "engine", "node-3", "127.11.13.2"]
    assert field_value(pod, "spec.unknown", status) is None


def test_a_pod_without_a_token_volume_gets_no_credentials():
    assert not has_service_account_token(pod_object())
    source = {"serviceAccountToken": {"path": "token"}}
    assert has_service_account_token(pod_object(volumes=[{"name": "t", "projected": {"sources": [source]}}]))


def host(name: str, ip: str, *, ready: bool, **spec: Any) -> PodHost:
    pod = pod_object(**({"hostname": name, "subdomain": "k2-decode"} | spec))
    pod["metadata"] |= {"name": name, "labels": {"app": "x"}}
    return PodHost.of(pod, ip, ready=ready)


def service(name: str, selector: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "k2"}, "spec": {"selector": selector, **spec}}


def test_a_service_resolves_to_a_ready_pod():
    pods = [host("a", "127.1.1.1", ready=False), host("b", "127.1.1.2", ready=True)]
    table = host_table(pods, [service("router", {"app": "x"}), service("idle", {"app": "y"})])
    assert set(table) == {"router.k2", "router.k2.svc", "router.k2.svc.cluster.local"}
    assert set(table.values()) == {"127.1.1.2"}


def test_a_pod_resolves_in_its_subdomain_when_a_headless_service_selects_it():
    pods = [host("a", "127.1.1.1", ready=False), host("b", "127.1.1.2", ready=True)]
    assert host_table(pods, []) == {}, "no Service, no name"
    assert host_table(pods, [service("k2-decode", {"app": "y"}, clusterIP="None")]) == {}, "another's Service"
    assert "b.k2-decode.k2" not in host_table(pods, [service("k2-decode", {"app": "x"})]), "not headless"
    headless = service("k2-decode", {"app": "x"}, clusterIP="None")
    ready = host_table(pods, [headless])
    assert ready["b.k2-decode.k2"] == ready["b.k2-decode.k2.svc.cluster.local"] == "127.1.1.2"
    assert "a.k2-decode.k2" not in ready
    early = host_table(pods, [service("k2-decode", {"app": "x"}, clusterIP="None", publishNotReadyAddresses=True)])
    assert early["a.k2-decode.k2"] == "127.1.1.1", "the Services of groups publish addresses that are not ready"
    nameless = [host("a", "127.1.1.1", ready=True, hostname=None)]
    assert all(name.startswith("k2-decode.k2") for name in host_table(nameless, [headless]))


def test_pod_addresses_are_not_reused_at_once(tmp_path):
    pool = AddressPool(machine(tmp_path))
    first = pool.take()
    pool.release(first)
    assert (first, pool.take()) == ("127.11.13.2", "127.11.13.3")
    assert pool.take("127.11.13.77") == "127.11.13.77"
    assert pool.take("127.11.99.77") == "127.11.13.4"


def test_a_node_says_what_it_has(tmp_path):
    subject = machine(tmp_path)
    subject.directory.mkdir()
    assert subject.add_image("a/b:v1", image_id("a/b:v1")) and not subject.add_image("a/b:v1", image_id("a/b:v1"))
    again = machine(tmp_path)
    again.load_images()
    node = node_object(again)
    assert node["metadata"]["labels"]["k2-release.io/pool"] == "h200"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert node["status"]["addresses"][0] == {"type": "InternalIP", "address": "127.11.0.3"}
    assert node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] == 10250
    assert node["status"]["images"][0]["names"][0] == "a/b:v1"


def test_lost_nodes_are_read_from_the_injections(tmp_path):
    assert lost_nodes(tmp_path / "absent") == set()
    (tmp_path / "node-lost.json").write_text('{"node": "node-3"}')
    (tmp_path / "node-lost-2.json").write_text('{"nodes": ["node-4"]}')
    (tmp_path / "node-lost-3.json").write_text('{"nodes"')
    (tmp_path / "engine-slow.json").write_text('{"node": "node-5"}')
    assert lost_nodes(tmp_path) == {"node-3", "node-4"}


def test_the_command_line_makes_the_machines(tmp_path):
    argv = ["--kubeconfig", "k", "--site", str(tmp_path), "--subnet", "127.20", "--nodes", "2", "--prefix", "h-"]
    made = machines(_parser().parse_args(argv))
    assert [(m.name, m.address, m.pod_prefix) for m in made] == [
        ("h-1", "127.20.0.1", "127.20.11"),
        ("h-2", "127.20.0.2", "127.20.12"),
    ]
    with pytest.raises(SystemExit):
        _parser().parse_args(["--kubeconfig", "k", "--site", "s", "--subnet", "10.0"])


# -- logs


@pytest.mark.parametrize(("lines", "expected"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (9, "a\nb\nc\n")])
def test_the_tail_of_a_log(tmp_path, lines, expected):
    path = tmp_path / "log"
    path.write_text("a\nb\nc\n")
    assert path.read_text()[tail_offset(path, lines) :] == expected


def test_the_tail_of_a_long_log_is_found_from_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {index}\n" for index in range(40_000)))
    assert path.read_text()[tail_offset(path, 20_000) :].startswith("line 20000\n")
    path.write_text("one\ntwo")
    assert path.read_text()[tail_offset(path, 1) :] == "two"


def test_a_followed_log_ends_with_its_container(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\n")
    running = asyncio.Event()
    running.set()

    async def scenario() -> bytes:
        read = b""
        async for chunk in read_log(LogSource(path, running.is_set), follow=True):
            read += chunk
            if read == b"one\n":
                with path.open("a") as file:
                    file.write("two\n")
                running.clear()
        return read

    assert asyncio.run(scenario()) == b"one\ntwo\n"


def test_python_means_this_interpreter(tmp_path):
    argv = resolve_argv(["python", "-c", "print(6 * 7)"], [], {}, PathMap({}), python=sys.executable)
    assert asyncio.run(run_to_end(launch(tmp_path, *argv), 60)) == Exit(0)
    assert (tmp_path / "log").read_text() == "42\n"
