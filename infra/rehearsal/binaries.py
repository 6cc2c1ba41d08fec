"""The programs of the rehearsal's cluster that are compiled: found, or built once from pinned Go modules and cached.

Order: ``KUBEBUILDER_ASSETS``, the cache, a build. Each set of programs has its own directory in the cache, whose name
covers every byte that is pinned for it: adding a program to one set leaves the others' builds valid.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.cache import Report, cache_directory, directory_key
from infra.rehearsal.errors import SiteError
from infra.rehearsal.gomodules import GoProgram, build_missing, module_version

MODULE = Path(__file__).parent / "controlplane"
KUBELET_MODULE = Path(__file__).parent / "kubelet"
LWS_MODULE = Path(__file__).parent / "lws"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
LWS_MANAGER = "lws-manager"
KUBELET = "kubelet"
"""Only the opt-in tier with a real kubelet builds it (``make test-kubelet``)."""
KUBERNETES, ETCD, LEADER_WORKER_SET = "k8s.io/kubernetes", "go.etcd.io/etcd/server/v3", "sigs.k8s.io/lws"
# Seconds on two cores with an empty Go cache, each with the shared packages of the one before it.
_EXPECTED_S = {"etcd": 35, "kube-apiserver": 150, "kube-controller-manager": 50, "kube-scheduler": 5, KUBELET: 35}
_LWS_MANAGER_EXPECTED_S = 120
_VERSION = re.compile(r"(?<![\w.])v?(\d+\.\d+(?:\.\d+)?(?:[-+][\w.]+)?)")


@dataclass(frozen=True)
class ControlPlaneBinaries:
    """The four programs, their Kubernetes version and where they came from."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    version: str
    source: str

    def by_name(self) -> dict[str, Path]:
        """Return program name -> path."""
        paths = (self.etcd, self.kube_apiserver, self.kube_controller_manager, self.kube_scheduler)
        return dict(zip(PROGRAMS, paths, strict=True))


@dataclass(frozen=True)
class ExecutableFacts:
    """What a program file is: its path, its digest and the version that it says it has."""

    path: Path
    sha256: str
    version: str


@dataclass(frozen=True)
class ProgramSet:
    """Programs of one pinned module that are built into one directory of the cache."""

    kind: str
    label: str
    """Versions that a person shall see in the directory's name."""
    module: Path
    programs: tuple[GoProgram, ...]

    @property
    def directory(self) -> Path:
        """Return the cache directory of exactly these sources on this kind of machine, existing or not."""
        own = [self.module / program.package / "main.go" for program in self.programs if _is_own(program)]
        key = directory_key([self.module / "go.mod", self.module / "go.sum", *own])
        return cache_directory() / self.kind / f"{self.label}-{platform.machine()}-{key}"

    def only(self, names: Sequence[str]) -> tuple[GoProgram, ...]:
        """Return the programs of these names."""
        return tuple(program for program in self.programs if program.name in names)


def _is_own(program: GoProgram) -> bool:
    """Tell whether the program's main package stands in this repository."""
    return program.package.startswith("./")


def kubernetes_version() -> str:
    """Return the pinned version of Kubernetes."""
    return module_version(KUBERNETES, MODULE / "go.mod")


def _kubernetes_set(kind: str, module: Path, names: Sequence[str], label: str) -> ProgramSet:
    flags = _kubernetes_link_flags()
    programs = (GoProgram(name, module, f"./cmd/{name}", flags, _EXPECTED_S[name]) for name in names)
    return ProgramSet(kind, label, module, tuple(programs))


def control_plane_set() -> ProgramSet:
    """Return the four programs of the control plane."""
    etcd = module_version(ETCD, MODULE / "go.mod")
    return _kubernetes_set("controlplane", MODULE, PROGRAMS, f"k8s-{kubernetes_version()}-etcd-{etcd}")


def kubelet_set() -> ProgramSet:
    """Return the kubelet, of the same version; it needs more modules, so its sums are no part of the others' key."""
    return _kubernetes_set("kubelet", KUBELET_MODULE, (KUBELET,), f"k8s-{kubernetes_version()}")


def lws_set() -> ProgramSet:
    """Return the LeaderWorkerSet manager: upstream's own main package, with nothing of ours around it."""
    version = module_version(LEADER_WORKER_SET, LWS_MODULE / "go.mod")
    flags = f"-s -w -X {LEADER_WORKER_SET}/pkg/version.GitVersion={version}"
    manager = GoProgram(LWS_MANAGER, LWS_MODULE, f"{LEADER_WORKER_SET}/cmd", flags, _LWS_MANAGER_EXPECTED_S)
    return ProgramSet("lws", f"lws-{version}", LWS_MODULE, (manager,))


def _kubernetes_link_flags() -> str:
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    stamp = "k8s.io/component-base/version.git"
    values = {"Version": version, "Major": major, "Minor": minor, "TreeState": "clean"}
    return " ".join(["-s", "-w", *(f"-X {stamp}{name}={value}" for name, value in values.items())])


def ensure_control_plane(report: Report) -> ControlPlaneBinaries:
    """Return the four programs, building what neither KUBEBUILDER_ASSETS nor the cache holds."""
    found, sources = _assets(report), []
    if found:
        sources.append(f"KUBEBUILDER_ASSETS={os.environ['KUBEBUILDER_ASSETS']}")
    missing = [name for name in PROGRAMS if name not in found]
    if missing:
        programs = control_plane_set()
        directory = programs.directory
        built = build_missing(directory, programs.only(missing), report)
        found |= {name: directory / name for name in missing}
        sources.append(f"{'built into' if built else 'cache'} {directory}")
    version = executable_facts(found["kube-apiserver"]).version
    etcd, apiserver, controller_manager, scheduler = (found[name] for name in PROGRAMS)
    return ControlPlaneBinaries(etcd, apiserver, controller_manager, scheduler, version, " and ".join(sources))


def ensure_program(name: str, report: Report) -> Path:
    """Return one program beside the control plane (`LWS_MANAGER`, `KUBELET`), built if it is found nowhere."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and os.access(Path(assets) / name, os.X_OK):
        return Path(assets) / name
    programs = {LWS_MANAGER: lws_set, KUBELET: kubelet_set}[name]()
    build_missing(programs.directory, programs.programs, report)
    return programs.directory / name


def _assets(report: Report) -> dict[str, Path]:
    """Return the programs in KUBEBUILDER_ASSETS; it must hold the two that envtest needs."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        return {}
    found = {name: Path(assets) / name for name in PROGRAMS if os.access(Path(assets) / name, os.X_OK)}
    for name in ("etcd", "kube-apiserver"):
        if name not in found:
            raise SiteError(
                f"KUBEBUILDER_ASSETS={assets} holds no executable {name}\n"
                "  next: unset KUBEBUILDER_ASSETS (the programs are then built once), or point it at a full set"
            )
    if absent := [name for name in PROGRAMS if name not in found]:
        report(
            f"KUBEBUILDER_ASSETS={assets} has etcd and kube-apiserver but not {' or '.join(absent)}: "
            f"taking {'it' if len(absent) == 1 else 'them'} ({kubernetes_version()}) from our own build"
        )
    return found


def executable_facts(path: Path, version_argument: str = "--version") -> ExecutableFacts:
    """Return a program's real path, sha256 and the version that it prints."""
    real = path.resolve()
    stat = real.stat()
    return _facts(real, version_argument, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _facts(path: Path, version_argument: str, mtime_ns: int, size_bytes: int) -> ExecutableFacts:
    """Work out the facts once for each state of the file: hashing 100 MB for every list of parts would be waste."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    result = subprocess.run([path, version_argument], capture_output=True, text=True, timeout=60, check=False)
    match = _VERSION.search(result.stdout) or _VERSION.search(result.stderr)
    return ExecutableFacts(path, sha256, match.group(1) if match else "unknown")


def main() -> int:
    """Make sure that the programs of a rehearsal exist and print what they are (``make controlplane``)."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        binaries = ensure_control_plane(report)
        manager = ensure_program(LWS_MANAGER, report)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Kubernetes {binaries.version}: {binaries.source}; {LWS_MANAGER}: {manager.parent}", file=sys.stderr)
    for name, path in {**binaries.by_name(), LWS_MANAGER: manager}.items():
        facts = executable_facts(path)
        print(f"{name:<24} {facts.version:<8} sha256:{facts.sha256} {facts.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
