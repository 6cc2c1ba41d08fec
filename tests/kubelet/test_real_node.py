"""Worker Jobs as real pods: a kubelet, containerd, the image, the node's directory, and what each enforces.

The tests stand in the order in which a release goes, on one node that keeps what was done to it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import IntegrityError, K2Error, UnavailableError
from tasks.core.marker import MARKER_FILE, marker_from_data
from tasks.core.pod_status import dead_container, termination_data
from tasks.core.render import placed_label, render_serving, staged_label
from tasks.core.worker_jobs import render_probe_job, render_verify_job, stage_job_name
from tasks.node.verified_file import PARTIAL_DIR
from tasks.steps.capacity import preflight_step
from tasks.steps.context import Ports, Subject
from tasks.steps.jobs import JobResult, run_jobs
from tasks.steps.staging import stage_step
from tasks.steps.weights import blobs_present, pull_step
from tests.contract.slow_relay import relayed
from tests.kubelet.conftest import Running, wait_for
from tests.kubelet.machine import NAMESPACE, Machine
from tests.kubelet.node import NAME
from tests.kubelet.putting_back import SYSCTLS

TOOL_USER, NOBODY_IN_PARTICULAR = 65532, 1000


class Staging(threading.Thread):
    """The stage step, while a test looks at the pod that it made."""

    def __init__(self, ports: Ports, subject: Subject) -> None:
        super().__init__(daemon=True)
        self._act: Callable[[], Any] = lambda: stage_step(ports, subject, [NAME], [])
        self.result: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:
            self.error = error

    def end(self) -> dict[str, Any]:
        self.join(120)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def slowly(ports: Ports, endpoint: str) -> Ports:
    """The same ports for a site whose pods reach the store through a slow relay."""
    return replace(ports, site=replace(ports.site, store=replace(ports.site.store, endpoint=endpoint)))


def pods(machine: Machine, role: str) -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=k2-release.io/role%3D{role}"
    return list(machine.plane.admin.request("GET", path)["items"])


def pod(machine: Machine, name: str) -> dict[str, Any]:
    return machine.plane.admin.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")


def process(machine: Machine, role: str, name: str = "") -> int:
    """The process of the first running pod of a role whose name begins so, waited for."""

    def pid() -> int:
        running = [
            status["containerID"]
            for found in pods(machine, role)
            for status in found["status"].get("containerStatuses", [])
            if found["metadata"]["name"].startswith(name) and "running" in status["state"]
        ]
        return machine.containerd.pid(running[0]) if running else 0

    return int(wait_for(f"a running container of {role}", pid))


def kernel_says(pid: int) -> dict[str, str]:
    """What the kernel holds a process to."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {line.split(":")[0]: line.split(":")[1].split() for line in lines}
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    options = {fields[4]: fields[5].split(",")[0] for fields in mounts}
    return {
        "uid": status["Uid"][1],
        "capabilities": status["CapEff"][0].strip("0") + status["CapBnd"][0].strip("0"),
        "no new privileges": status["NoNewPrivs"][0],
        "seccomp": status["Seccomp"][0],
        "/": options["/"],
        "/models": options.get("/models", "none"),
    }


def confined(uid: int, models: str) -> dict[str, str]:
    return {
        "uid": str(uid),
        "capabilities": "",
        "no new privileges": "1",
        "seccomp": "2",
        "/": "ro",
        "/models": models,
    }


def memory_limit_bytes(pid: int) -> int:
    """The limit of the process's own cgroup, in either version of cgroups."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for place in (f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes", f"/sys/fs/cgroup{path}/memory.max"):
            if controllers in ("memory", "") and Path(place).exists():
                return int(Path(place).read_text())
    raise AssertionError(f"no memory limit of {pid}")


def directory_of(machine: Machine, subject: Subject) -> Path:
    return machine.nvme / subject.lock.model_dir


def labels(machine: Machine) -> Mapping[str, str]:
    return dict(machine.plane.admin.request("GET", f"/api/v1/nodes/{NAME}")["metadata"]["labels"])


def verify(ports: Ports, subject: Subject) -> JobResult:
    job = render_verify_job(subject.lock, ports.site, ports.templates, subject.release.images.tool, NAME)
    return run_jobs(ports, "verify", [job], subject.lock.total_bytes, 120)[0]


def test_the_parking_backend_answers_from_real_pods(machine: Machine) -> None:
    def ready() -> list[dict[str, Any]]:
        found = pods(machine, "parking")
        conditions = [c for p in found for c in p["status"].get("conditions", []) if c["type"] == "Ready"]
        return found if [c["status"] for c in conditions] == ["True", "True"] else []

    found = wait_for("both parking pods Ready by their probes", ready)
    assert kernel_says(process(machine, "parking")) == confined(TOOL_USER, "none")
    for one in found:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{one['status']['podIP']}:8080/v1/models", timeout=10)
        assert (caught.value.code, int(caught.value.headers["Retry-After"]) > 0) == (503, True)


def test_preflight_probes_the_disk_by_a_real_pod(machine: Machine, ports: Ports, subjects: tuple[Subject, ...]) -> None:
    assert not machine.nvme.exists()
    result = preflight_step(ports, subjects[0], [NAME])
    assert result["nodes"][0]["free_bytes"] > result["nodes"][0]["needed_bytes"] == subjects[0].lock.total_bytes
    # The kubelet has made the directory, as DirectoryOrCreate says: root's, and nobody else's to write in.
    stat = machine.nvme.stat()
    assert (stat.st_uid, stat.st_gid, oct(stat.st_mode & 0o7777)) == (0, 0, "0o755")
    (found,) = pods(machine, "probe")
    (status,) = found["status"]["containerStatuses"]
    assert (found["spec"]["nodeName"], found["status"]["hostIP"]) == (NAME, machine.network.host)
    assert status["imageID"] == subjects[0].release.images.tool
    assert status["state"]["terminated"]["exitCode"] == 0


def test_a_directory_that_the_pods_cannot_write_is_found_before_anything_moves(
    machine: Machine, ports: Ports, subjects: tuple[Subject, ...]
) -> None:
    other = machine.directory / "nvme" / "of-somebody-else"
    other.mkdir()
    os.chown(other, NOBODY_IN_PARTICULAR, NOBODY_IN_PARTICULAR)
    site = replace(ports.site, nvme_path=str(other))
    job = render_probe_job(subjects[0].lock, site, ports.templates, subjects[0].release.images.tool, NAME)
    with pytest.raises(K2Error) as caught:
        run_jobs(ports, "preflight", [job], 0, 120)
    assert (caught.value.code, caught.value.where) == ("K2-RDY-004", f"{NAME}: /models")
    assert "Permission denied" in caught.value.summary
    assert f"owner {NOBODY_IN_PARTICULAR}:{NOBODY_IN_PARTICULAR}, mode 755, user 0" in caught.value.got


def test_pull_jobs_bring_every_file(machine: Machine, ports: Ports, subjects: tuple[Subject, ...]) -> None:
    for subject in subjects:
        result = pull_step(ports, subject)
        assert result["bytes_fetched"] > 0
        assert all(blobs_present(ports.store, subject.lock).values())
    assert {p["status"]["phase"] for p in pods(machine, "pull")} == {"Succeeded"}


def test_a_stager_is_confined_shows_its_progress_and_leaves_verified_files(
    machine: Machine, ports: Ports, subjects: tuple[Subject, ...]
) -> None:
    lock, directory = subjects[0].lock, directory_of(machine, subjects[0])
    with relayed(
        machine.store.endpoint, machine.network.host, slow_after_bytes=lock.total_bytes - 6_000_000
    ) as endpoint:
        staging = Staging(slowly(ports, endpoint), subjects[0])
        pid = process(machine, "stage", stage_job_name(lock.digest, NAME))
        assert kernel_says(pid) == confined(0, "rw")
        assert memory_limit_bytes(pid) == 4 * 2**30
        shown = ports.progress.lines  # type: ignore[attr-defined]

        def partly() -> bool:
            counts = [float(line.split()[1]) for line in shown if line.startswith("stage: ") and " bytes " in line]
            return any(0 < count < lock.total_bytes for count in counts)

        wait_for("progress, read from the pod's log through the kubelet", partly)
        result = staging.end()
    assert result["bytes_written"] == lock.total_bytes
    (row,) = result["nodes"]
    marker = marker_from_data(json.loads((directory / MARKER_FILE).read_bytes()))
    assert row["marker_content_sha256"] == marker.content_digest
    assert marker.node_uid == machine.plane.admin.request("GET", f"/api/v1/nodes/{NAME}")["metadata"]["uid"]
    for file in lock.files:
        stat = (directory / file.path).stat()
        assert (stat.st_size, stat.st_uid, oct(stat.st_mode & 0o7777)) == (file.size_bytes, 0, "0o444")
    assert labels(machine)[staged_label(lock.digest)] == "true"
    assert verify(ports, subjects[0]).message == {"node": NAME, "checked": len(lock.files), "bytes": lock.total_bytes}


def test_a_stager_killed_in_the_middle_goes_on_where_it_was(
    machine: Machine, ports: Ports, subjects: tuple[Subject, ...]
) -> None:
    lock, directory = subjects[1].lock, directory_of(machine, subjects[1])
    with relayed(machine.store.endpoint, machine.network.host, slow_after_bytes=lock.total_bytes // 2) as endpoint:
        staging = Staging(slowly(ports, endpoint), subjects[1])
        pid = process(machine, "stage", stage_job_name(lock.digest, NAME))
        there = directory / PARTIAL_DIR
        wait_for(
            "a whole shard and a part of one", lambda: any(directory.glob("*.safetensors")) and any(there.glob("*"))
        )
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError) as caught:
            staging.end()
    assert caught.value.code == "K2-UNA-003"
    (killed,) = [p for p in pods(machine, "stage") if p["status"]["phase"] == "Failed"]
    assert killed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    assert not (directory / MARKER_FILE).exists()
    assert staged_label(lock.digest) not in labels(machine)
    result = stage_step(ports, subjects[1], [NAME], [])
    assert 0 < result["bytes_written"] < lock.total_bytes
    assert result["nodes"][0]["files_kept"] > 0
    assert list(there.iterdir()) == []
    assert verify(ports, subjects[1]).message["checked"] == len(lock.files)
    again = stage_step(ports, subjects[1], [NAME], [])
    assert (again["outcome"], again["bytes_written"]) == ("unchanged", 0)


def test_a_flipped_byte_is_found_by_the_verify_job(
    machine: Machine, ports: Ports, subjects: tuple[Subject, ...]
) -> None:
    shard = subjects[1].lock.shards[2]
    path = directory_of(machine, subjects[1]) / shard.path
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as bit rot does, which nobody writes
    with pytest.raises(IntegrityError) as caught:
        verify(ports, subjects[1])
    assert (caught.value.code, caught.value.where) == ("K2-INT-002", f"{NAME}: {shard.path}")
    assert caught.value.expected == shard.sha256
    path.unlink()
    assert stage_step(ports, subjects[1], [NAME], [])["bytes_written"] == shard.size_bytes
    assert verify(ports, subjects[1]).message["checked"] == len(subjects[1].lock.files)


def engine_pod(ports: Ports, subject: Subject, name: str) -> dict[str, Any]:
    """A pod as the rendered decode group has it, but for its engine, which only waits; there is no GPU to run one."""
    groups = render_serving(subject.release, subject.lock, ports.site, ports.templates)
    template = next(g for g in groups if g["metadata"]["name"].endswith("-decode"))["spec"]["leaderWorkerTemplate"]
    spec = template["workerTemplate"]["spec"]
    engine = spec["containers"][0]
    for probe in ("startupProbe", "readinessProbe"):
        del engine[probe]
    waits = {"image": subject.release.images.tool, "command": ["python", "-c", "import signal; signal.pause()"]}
    engine |= {**waits, "args": []}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": template["workerTemplate"]["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_the_marker_check_lets_an_engine_start_and_stops_one(
    machine: Machine, ports: Ports, subjects: tuple[Subject, ...]
) -> None:
    subject, admin = subjects[0], machine.plane.admin
    placed = {"metadata": {"labels": {placed_label(subject.serving): "true"}}}
    ports.cluster.merge_patch("Node", NAME, placed)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    admin.request("POST", path, engine_pod(ports, subject, "decode-0"))

    def started(name: str) -> bool:
        return bool(pod(machine, name)["status"]["phase"] == "Running")

    wait_for("the engine's container", lambda: started("decode-0"))
    (check,) = pod(machine, "decode-0")["status"]["initContainerStatuses"]
    assert json.loads(check["state"]["terminated"]["message"])["lock_digest"] == subject.lock.digest
    said = kernel_says(process(machine, "decode"))
    assert said["/models"] == "ro"
    # All GPUs of the node are taken: the scheduler holds the next engine back, until this one is gone.
    admin.request("POST", path, engine_pod(ports, subject, "decode-1"))
    wait_for(
        "the scheduler's refusal",
        lambda: "Insufficient nvidia.com/gpu" in json.dumps(pod(machine, "decode-1")["status"].get("conditions", [])),
    )
    touched = directory_of(machine, subject) / subject.lock.shards[0].path
    os.utime(touched)
    admin.request("DELETE", f"{path}/decode-0?gracePeriodSeconds=1")

    def refused() -> tuple[str, Any, int] | None:
        return dead_container(pod(machine, "decode-1")["status"])

    container, ended, _ = wait_for("the check's refusal", refused)
    assert (container, ended["exitCode"]) == ("marker-check", 5)
    data = termination_data(ended["message"])
    assert data is not None
    assert (data["code"], data["where"]) == ("K2-INT-002", f"{NAME}: {touched.name}")
    assert not started("decode-1")
    # Its bytes are right: hashed again, and marked anew, it is what was verified, and the waiting pod starts.
    assert stage_step(ports, subject, [NAME], [])["bytes_written"] == 0
    wait_for("the engine, by the kubelet's next try", lambda: started("decode-1"))
    admin.request("DELETE", f"{path}/decode-1?gracePeriodSeconds=1")


def test_the_machine_is_put_back(running: Running) -> None:
    before = {name: Path("/proc/sys", name.replace(".", "/")).read_text() for name in SYSCTLS}
    outcome = running.stop()
    after = {name: Path("/proc/sys", name.replace(".", "/")).read_text() for name in SYSCTLS}
    assert before != after  # the kubelet had changed some
    assert outcome.differences == []
