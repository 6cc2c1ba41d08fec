"""A network of our own with links of stated rates: one namespace a host, two bridges, `tc tbf` on every link.

Nothing of it can be left behind. The bench runs in network, PID and mount namespaces of its own that have no name: when
their first process ends, by whatever signal, the kernel ends all others in it and takes links, rates and files away.
What programs leave in /tmp goes into a layer that ends with them too.

    outside bridge: the Hub (its link: the uplink), and a port of each node (what one host gets from the Hub)
    inside bridge:  the store, and a port of each node (what a node gives and takes inside)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INSIDE_VARIABLE = "K2_BENCH_DIRECTORY"
_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_BASE, _PREFIX = Path("/run"), "k2-bench-"
_LATENCY = "200ms"
_BURST_BYTES = 128 * 1024
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def why_not_possible() -> str:
    """Return what this machine lacks for namespaces and limits, or nothing."""
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"no {', '.join(missing)} here (Debian: iproute2, util-linux)"
    return "" if os.geteuid() == 0 else "network namespaces and tc take root"


def run_inside(argv: Sequence[str]) -> int:
    """Run a Python program in namespaces of its own and return its exit code; it ends when we do.

    There `private_directory` gives it a place for files.
    """
    for old in _BASE.glob(f"{_PREFIX}*"):
        # The empty place of a run that was killed: its files went with it.
        if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
            old.rmdir()
    directory = _BASE / f"{_PREFIX}{os.getpid()}"
    directory.mkdir(mode=0o700)
    separate = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
    environment = os.environ | {INSIDE_VARIABLE: str(directory)}
    inside = subprocess.Popen([*separate, sys.executable, *argv], env=environment, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return inside.wait()
    finally:
        inside.kill()  # unshare passes no other signal on
        inside.wait(30)
        directory.rmdir()


def private_directory() -> Path | None:
    """Return a directory that ends with our namespaces, made ready, or None outside of `run_inside`."""
    if INSIDE_VARIABLE not in os.environ:
        return None
    directory = Path(os.environ[INSIDE_VARIABLE])
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "tmpfs", str(directory))
    upper, work = (directory / "tmp" / name for name in ("upper", "work"))
    upper.mkdir(parents=True)
    work.mkdir()
    _run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/tmp,upperdir={upper},workdir={work}", "/tmp")
    _run("ip", "link", "set", "lo", "up")
    return directory


@dataclass(frozen=True)
class Limits:
    """What the links carry in bytes per second: `hub` and `inside` of one node, `uplink` and `store` of all."""

    hub: int
    uplink: int
    store: int
    inside: int


class Host:
    """A namespace with an address on one bridge or two; programs run in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.addresses: dict[str, str] = {}
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        own = os.readlink("/proc/self/ns/net")
        while self._namespace(own) == own:  # until unshare has unshared
            if self._holder.poll() is not None:
                raise RuntimeError(f"the namespace of {name} did not come to be")
            os.sched_yield()
        self.run("ip", "link", "set", "lo", "up")

    def _namespace(self, unknown: str) -> str:
        try:
            return os.readlink(f"/proc/{self._holder.pid}/ns/net")
        except FileNotFoundError:
            return unknown

    @property
    def pid(self) -> int:
        """The process that keeps the namespace."""
        return self._holder.pid

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs a program in the namespace."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--", *argv]

    def run(self, *argv: str) -> None:
        """Run a short program in the namespace; RuntimeError if it fails."""
        _run(*self.command(*argv))

    def start(self, argv: Sequence[str], **popen: object) -> subprocess.Popen[str]:
        """Start a program in the namespace that ends when we do."""
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            self.command(*argv), text=True, start_new_session=True, preexec_fn=die_with_parent, **popen
        )

    def end(self) -> None:
        """Give the namespace up; the kernel removes it with its links."""
        self._holder.kill()
        self._holder.wait(30)


class Network:
    """The two bridges, and the hosts on them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        for number, bridge in enumerate(("outside", "inside")):
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "address", "add", f"10.{77 + number}.0.1/16", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
        self.hub = Host("hub")
        self._connect(self.hub, "outside", 2, given=limits.uplink, taken=0)
        self.store = Host("store")
        self._connect(self.store, "inside", 2, given=limits.store, taken=limits.store)
        self.nodes: list[Host] = []

    def add_nodes(self, count: int) -> list[Host]:
        """Return so many nodes, those that are there already first."""
        while len(self.nodes) < count:
            node, number = Host(f"node-{len(self.nodes) + 1}"), 10 + len(self.nodes)
            self._connect(node, "outside", number, given=0, taken=self._limits.hub)
            self._connect(node, "inside", number, given=self._limits.inside, taken=self._limits.inside)
            self.nodes.append(node)
        return self.nodes[:count]

    def _connect(self, host: Host, bridge: str, number: int, *, given: int, taken: int) -> None:
        """Put a host on a bridge; a rate of 0 is no limit."""
        port, address = f"{bridge[:3]}-{host.name}", f"10.{77 + (bridge == 'inside')}.0.{number}"
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", bridge, "netns", str(host.pid))
        _run("ip", "link", "set", port, "master", bridge, "up")
        host.run("ip", "address", "add", f"{address}/16", "dev", bridge)
        host.run("ip", "link", "set", bridge, "up")
        host.addresses[bridge] = address
        # tbf shapes what a device sends: the host's own end what it gives, the bridge's end what it takes.
        if given:
            host.run(*_shape(bridge, given))
        if taken:
            _run(*_shape(port, taken))


def _shape(device: str, bytes_per_s: int) -> list[str]:
    rate = ["rate", f"{bytes_per_s * 8}bit", "burst", str(_BURST_BYTES), "latency", _LATENCY]
    return ["tc", "qdisc", "add", "dev", device, "root", "tbf", *rate]


def die_with_parent() -> None:
    """Be killed when the process that has forked this one ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
