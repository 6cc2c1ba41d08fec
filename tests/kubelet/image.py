"""The tool image, made without a registry and without a container builder: an OCI archive written by hand.

Three layers, the one that changes most last: CPython with its shared libraries, the packages that the node programs
import, and the project's own `tasks`. The image's user is not root: what a manifest needs of a user, it has to say.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

TOOL, PAUSE = "k2.invalid/k2-release/tool", "k2.invalid/k2-release/pause"
USER = 65532
IMPORTED = ("boto3", "huggingface_hub")
"""What `tasks.node` imports beside the standard library, by the dependency rule: two adapters' libraries."""
ROOT = Path(__file__).parents[2]
_PREFIX = Path("usr/local")
_STDLIB = _PREFIX / f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES, _PROJECT = Path("opt/packages"), Path("opt/k2-release")
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "dist-packages",
}
# Of the descriptions of 400 services only those that a client of S3 reads.
_BOTOCORE_KEPT = {"s3", "sts", "sso", "sso-oidc"}
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Layer:
    """One layer's tar file."""

    what: str
    path: Path
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class BuiltImage:
    """An image archive, and the names under which containerd finds its two images after an import."""

    archive: Path
    tool: str
    pause: str
    layers: tuple[Layer, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all layers."""
        return sum(layer.size_bytes for layer in self.layers)


def build(directory: Path) -> BuiltImage:
    """Write the archive with the tool image and the sandbox image, which is the tool image's first layer alone."""
    base = _write_layer(directory, "CPython", _python_files())
    packages = _write_layer(directory, "packages", _package_files())
    project = _write_layer(directory, "project", _project_files())
    layers = (base, packages, project)
    environment = [
        "PATH=/usr/local/bin",
        "LD_LIBRARY_PATH=/usr/local/lib",
        f"PYTHONPATH=/{_PROJECT}:/{_PACKAGES}",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
    ]
    waits = ["python", "-c", "import signal; signal.pause()"]
    blobs: dict[str, bytes] = {}
    tool = _add_image(blobs, TOOL, layers, {"Env": environment, "User": f"{USER}:{USER}", "WorkingDir": "/"})
    pause = _add_image(blobs, PAUSE, (base,), {"Env": environment[:2], "User": f"{USER}:{USER}", "Entrypoint": waits})
    archive = directory / "tool.oci.tar"
    index = json.dumps({"schemaVersion": 2, "manifests": [tool, pause]}).encode()
    with tarfile.open(archive, "w") as tar:
        _add_bytes(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add_bytes(tar, "index.json", index)
        for digest, data in blobs.items():
            _add_bytes(tar, f"blobs/sha256/{digest}", data)
        for layer in layers:
            tar.add(layer.path, f"blobs/sha256/{layer.digest}")
            layer.path.unlink()
    return BuiltImage(archive, _name(tool), _name(pause), layers)


def _name(descriptor: dict[str, Any]) -> str:
    return str(descriptor["annotations"]["io.containerd.image.name"])


def _add_image(blobs: dict[str, bytes], name: str, layers: Iterable[Layer], config: dict[str, Any]) -> dict[str, Any]:
    """Put config and manifest of an image among the blobs; return the descriptor that the index lists."""
    layers = tuple(layers)
    made = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[_machine()],
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        "history": [{"created_by": layer.what} for layer in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _add_blob(blobs, _CONFIG, made),
        "layers": [
            {"mediaType": _LAYER, "digest": f"sha256:{layer.digest}", "size": layer.size_bytes} for layer in layers
        ],
    }
    descriptor = _add_blob(blobs, _MANIFEST, manifest)
    return {**descriptor, "annotations": {"io.containerd.image.name": f"{name}@{descriptor['digest']}"}}


def _add_blob(blobs: dict[str, bytes], media_type: str, document: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _machine() -> str:
    return sysconfig.get_platform().rpartition("-")[2]


Entry = tuple[Path, "Path | bytes | None"]
"""Where in the image, and what: a file of this machine, bytes, or nothing for a directory."""


def _write_layer(directory: Path, what: str, entries: Iterable[Entry]) -> Layer:
    path = directory / f"{what}.tar"
    made: set[Path] = set()
    with tarfile.open(path, "w") as tar:
        for place, source in entries:
            for parent in reversed(place.parents[:-1]):
                _add_directory(tar, parent, made)
            if source is None:
                _add_directory(tar, place, made)
            elif place not in made:
                made.add(place)
                _add_file(tar, place, source)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Layer(what, path, digest, path.stat().st_size)


def _add_directory(tar: tarfile.TarFile, place: Path, made: set[Path]) -> None:
    if place not in made:
        made.add(place)
        info = tarfile.TarInfo(str(place))
        info.type, info.mode = tarfile.DIRTYPE, 0o1777 if str(place) == "tmp" else 0o755
        tar.addfile(info)


def _add_file(tar: tarfile.TarFile, place: Path, source: Path | bytes) -> None:
    if isinstance(source, bytes):
        _add_bytes(tar, str(place), source)
        return
    info = tarfile.TarInfo(str(place))
    stat = source.stat()
    # The time stays, because compiled modules name that of their source.
    info.size, info.mtime, info.mode = stat.st_size, int(stat.st_mtime), 0o755 if stat.st_mode & 0o100 else 0o644
    with source.open("rb") as file:
        tar.addfile(info, file)


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _python_files() -> Iterator[Entry]:
    yield Path("tmp"), None
    for name in ("dev", "proc", "sys", "etc", "models"):
        yield Path(name), None
    yield Path("etc/passwd"), f"root:x:0:0::/:\nk2:x:{USER}:{USER}::/:\n".encode()
    executable = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    yield _PREFIX / "bin/python", executable
    stdlib = Path(sysconfig.get_path("stdlib"))
    programs = [executable]
    for place, source in _tree(stdlib, _STDLIB):
        yield place, source
        if source.suffix == ".so":
            programs.append(source)
    yield from _libraries(programs)


def _package_files() -> Iterator[Entry]:
    programs = []
    for name in sorted(_needed(IMPORTED)):
        for file in importlib.metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if file.parts[0] != ".." and source.is_file() and _kept(file.parts):
                yield _PACKAGES / file, source
                if source.suffix == ".so":
                    programs.append(source)
    yield from _libraries(programs)


def _kept(parts: tuple[str, ...]) -> bool:
    if parts[:2] == ("botocore", "data") and len(parts) > 3:
        return parts[2] in _BOTOCORE_KEPT
    return True


def _project_files() -> Iterator[Entry]:
    yield from ((place, source) for place, source in _tree(ROOT / "tasks", _PROJECT / "tasks"))
    distribution = importlib.metadata.distribution("k2-release")
    metadata = f"Metadata-Version: 2.1\nName: k2-release\nVersion: {distribution.version}\n".encode()
    yield _PROJECT / f"k2_release-{distribution.version}.dist-info/METADATA", metadata


def _tree(root: Path, place: Path) -> Iterator[tuple[Path, Path]]:
    for source in sorted(root.rglob("*")):
        parts = source.relative_to(root).parts
        if source.is_file() and not _LEFT_OUT & set(parts) and not _is_for_builders(parts):
            yield place.joinpath(*parts), source


def _is_for_builders(parts: tuple[str, ...]) -> bool:
    """Say whether a file of the standard library is a static library, or compiled for `python -O`."""
    return parts[0].startswith("config-") or ".opt-" in parts[-1]


def _libraries(programs: Iterable[Path]) -> Iterator[Entry]:
    """Yield the shared libraries that programs need, the loader among them; those of our Python in its own place."""
    found: set[Path] = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=30, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(?:=>\s+|^\s+)(/\S+)\s+\(0x", listed, re.MULTILINE)}
    for path in sorted(found):
        own = path.is_relative_to(sys.base_prefix) and sys.base_prefix != "/usr"
        yield (_PREFIX / "lib" / path.name if own else path.relative_to("/")), path


def _needed(names: Iterable[str]) -> set[str]:
    """Return the distributions and what they require, by name."""
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in needed:
            needed.add(name)
            required = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return needed
