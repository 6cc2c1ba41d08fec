"""What really runs in a site: for each real program its pid, executable, digest, version and address.

Everything is read from the running processes (/proc, their own version endpoints), not from what was meant to start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import urllib.request
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any


@functools.cache
def _sha256(path: Path, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def executable_of(pid: int) -> Path:
    """Return the file that a process runs; FileNotFoundError if it has ended."""
    return Path(f"/proc/{pid}/exe").resolve(strict=True)


def describe(name: str, pid: int, version: str, address: str) -> dict[str, Any]:
    """Return one row of the inventory; for a Python program its compiled modules tell more than the interpreter."""
    executable = executable_of(pid)
    return {
        "name": name,
        "pid": pid,
        "executable": str(executable),
        "sha256": _sha256(executable, executable.stat().st_mtime_ns),
        "version": version,
        "address": address,
    }


def mapped_extension(pid: int, name: str) -> Path:
    """Return the compiled module of that name which a process has mapped; FileNotFoundError if it has none."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(name) and path.suffix == ".so":
            return path
    raise FileNotFoundError(f"process {pid} has no module {name} mapped")


def installed_version(pid: int, extension: str, name: str) -> str:
    """Return the version of a distribution in the packages that a Python process runs from.

    Pure Python leaves nothing in a process's map; a compiled module that it has mapped says which packages it uses.

    Raises:
        FileNotFoundError: the process has not mapped the module, or the distribution is not installed beside it.
    """
    module = mapped_extension(pid, extension)
    for packages in module.parents:
        for found in distributions(name=name, path=[str(packages)]):
            return found.version
    raise FileNotFoundError(f"no {name} is installed beside {module}")


def envoy_row(site: Path, admin_url: str) -> dict[str, Any]:
    """Return the gateway's Envoy: pid from the controller's record, version from its own admin page."""
    record = json.loads((site / "gateway" / "process.json").read_text())
    with urllib.request.urlopen(f"{admin_url}/server_info", timeout=5) as answer:  # noqa: S310 (loopback)
        version = str(json.load(answer)["version"]).split("/")[1]
    return describe("envoy", int(record["pid"]), version, str(record["listen"]))


def router_rows(site: Path) -> list[dict[str, Any]]:
    """Return each running sglang-router: the module that it has mapped names the wheel that it came from."""
    rows = []
    for process in json.loads((site / "nodes" / "processes.json").read_text())["processes"]:
        if "sglang_router.launch_router" not in process["argv"]:
            continue
        pid = int(process["pid"])
        try:
            extension = mapped_extension(pid, "sglang_router_rs")
        except OSError:
            continue  # it has just ended, or has not loaded yet
        version = _distribution_version(extension, "sglang-router")
        argv = list(process["argv"])
        address = f"http://{argv[argv.index('--host') + 1]}:{argv[argv.index('--port') + 1]}"
        row = describe(f"sglang-router ({process['pod']})", pid, version, address)
        rows.append(row | {"module": str(extension), "module_sha256": _sha256(extension, extension.stat().st_mtime_ns)})
    return rows


def _distribution_version(module: Path, name: str) -> str:
    """Return the version of a distribution if the module is one of its files; raise FileNotFoundError otherwise."""
    found = distribution(name)
    if not any(Path(str(found.locate_file(file))).resolve() == module.resolve() for file in found.files or ()):
        raise FileNotFoundError(f"{module} is not a file of {name}")
    return found.version
