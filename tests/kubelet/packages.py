"""containerd, runc and the CNI plugins: Debian's packages, unpacked into the cache and never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.binaries import cache_directory
from infra.rehearsal.errors import SiteError

PACKAGES = ("containerd", "runc", "containernetworking-plugins")
NO_INSTALL = "K2_KUBELET_NO_INSTALL"
_TIMEOUT_S = 300


@dataclass(frozen=True)
class ContainerPrograms:
    """The programs that run containers."""

    containerd: Path
    ctr: Path
    runc: Path
    cni: Path
    """A directory of plugins."""
    versions: str


def ensure_programs(report: Callable[[str], None]) -> ContainerPrograms:
    """Return the programs, fetched by apt-get (which checks signatures) if the cache lacks these versions.

    Raises:
        SiteError: they are not there and K2_KUBELET_NO_INSTALL=1 says not to fetch, or apt-get could not.
    """
    root = cache_directory() / "containerd"
    found = sorted(root.glob("*/complete")) if root.is_dir() else []
    if not found:
        if os.environ.get(NO_INSTALL) == "1":
            raise SiteError(
                f"{root} holds no containerd, and {NO_INSTALL}=1 says not to fetch it\n"
                f"  would fetch with apt-get download, and unpack there: {', '.join(PACKAGES)}"
            )
        found = [_fetch(root, report)]
    directory = found[-1].parent
    programs = directory / "usr/bin"
    return ContainerPrograms(
        programs / "containerd",
        programs / "ctr",
        directory / "usr/sbin/runc",
        directory / "usr/lib/cni",
        found[-1].read_text().strip(),
    )


def _fetch(root: Path, report: Callable[[str], None]) -> Path:
    """Download and unpack the packages; return the file that says that all of them are there."""
    root.mkdir(parents=True, exist_ok=True)
    report(f"fetching {', '.join(PACKAGES)} with apt-get download, once, into {root} (nothing is installed)")
    with tempfile.TemporaryDirectory(dir=root, prefix=".partial-") as temporary:
        try:
            _apt(temporary, "download", *PACKAGES)
        except subprocess.CalledProcessError:
            _apt(temporary, "update")  # the lists are older than what the mirror has
            try:
                _apt(temporary, "download", *PACKAGES)
            except subprocess.CalledProcessError as error:
                raise SiteError(f"apt-get download failed:\n{error.stderr.strip()[-1000:]}") from error
        files = sorted(Path(temporary).glob("*.deb"))
        names = [file.name.rpartition("_")[0].replace("%3a", ":") for file in files]
        unpacked = Path(temporary) / "unpacked"
        for file in files:
            subprocess.run(["dpkg-deb", "-x", file, unpacked], check=True, timeout=_TIMEOUT_S)
        (unpacked / "complete").write_text(" ".join(name.replace("_", " ") for name in names) + "\n")
        target = root / names[0]
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return target / "complete"


def _apt(directory: str, *arguments: str) -> None:
    # As root, because the user that apt-get changes to could not write here.
    argv = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", *arguments]
    subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
