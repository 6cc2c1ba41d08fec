"""What a real kubelet, containerd and CNI may change on this machine, read so that before and after can be compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

HostState = dict[str, dict[str, str]]
"""Section -> what -> its value; plain data, so that it can be kept in a file."""

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_ROOTS = frozenset({"kubepods", "k8s.io"})
"""Made by the kubelet at the top of the hierarchies, and by containerd for tasks that name no parent."""
# Directories outside our own that these programs make or fill whatever they are told.
FOREIGN = (
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/run/runc",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)
# Counters and gauges that change by themselves, and the settings of single interfaces, which come and go with them.
_VOLATILE = re.compile(
    r"fs/(aio-nr|dentry-state|file-nr|inode-nr|inode-state|quota/.*|mqueue/.*)$"
    r"|kernel/(ns_last_pid|pty/nr|random/.*|perf_.*|sched_.*|shm_next_id|sem_next_id|msg_next_id|tainted)$"
    r"|net/netfilter/nf_conntrack_count$|net/ipv4/tcp_fastopen_key$|net/ipv[46]/route/.*"
    r"|net/ipv[46]/(conf|neigh)/(veth|cni|k2).*"
)


def read() -> HostState:
    """Return the state of the machine now."""
    return {
        "sysctl": _sysctls(),
        "interface": _interfaces(),
        "route": dict.fromkeys(_lines("ip", "route", "show", "table", "all"), "there"),
        "mount": _mounts(),
        "cgroup": dict.fromkeys(map(str, filter(_may_be_ours, cgroup_directories())), "there"),
        "file": dict.fromkeys(_foreign_files(), "there"),
        "packet filter": _packet_filter(),
    }


def differences(before: HostState, after: HostState) -> list[str]:
    """Return one line for each thing that is not as it was."""
    return [
        f"{section} {what}: {before[section].get(what, 'none')} -> {after[section].get(what, 'none')}"
        for section in before
        for what in sorted({*before[section], *after[section]})
        if before[section].get(what) != after[section].get(what)
    ]


def counts(state: HostState) -> str:
    """Return how much was read, for people."""
    return ", ".join(f"{len(found)} {section}s" for section, found in state.items())


def cgroup_directories() -> Iterator[Path]:
    """Yield every cgroup of every hierarchy, each after the ones below it."""
    for base, directories, _ in os.walk(CGROUPS, topdown=False):
        yield from (Path(base, name) for name in directories if not Path(base, name).is_symlink())


def _may_be_ours(cgroup: Path) -> bool:
    """Say whether pods could have made it: at the top of a hierarchy, or a pod's. Sessions come and go below."""
    parts = cgroup.relative_to(CGROUPS).parts
    return len(parts) <= 2 or bool(CGROUP_ROOTS & set(parts))


def mount_points() -> list[str]:
    """Return the places of all mounts, in the order in which they were made."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]


def _sysctls(root: str = "/proc/sys") -> dict[str, str]:
    found = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = Path(base, name)
            key = str(path.relative_to(root))
            if not _VOLATILE.match(key) and (value := _readable(path)) is not None:
                found[key.replace("/", ".")] = value
    return found


def _readable(path: Path) -> str | None:
    try:
        if not path.stat().st_mode & 0o400:
            return None  # made to be written only
        return " ".join(path.read_text().split())
    except (OSError, UnicodeDecodeError):
        return None


def _interfaces() -> dict[str, str]:
    rows = json.loads(_output("ip", "-j", "addr"))
    return {
        row["ifname"]: " ".join(f"{a.get('local')}/{a.get('prefixlen')}" for a in row["addr_info"]) or "no address"
        for row in rows
    }


def _mounts() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1 :]
        found[fields[4]] = f"{found.get(fields[4], '')} {kind[0]} {kind[1]}".strip()
    return found


def _foreign_files() -> Iterator[str]:
    for root in FOREIGN:
        if Path(root).exists():
            yield root
        for base, directories, names in os.walk(root):
            yield from (str(Path(base, name)) for name in (*directories, *names))


def _packet_filter() -> dict[str, str]:
    """Return the rules as far as this machine has a program that shows them, and the kernel's own list of tables."""
    programs: Mapping[str, tuple[str, ...]] = {
        "nft": ("nft", "list", "ruleset"),
        "iptables": ("iptables-save",),
        "ip6tables": ("ip6tables-save",),
    }
    found = {name: _rules(*argv) for name, argv in programs.items() if shutil.which(argv[0])}
    for name in ("ip_tables_names", "ip6_tables_names"):
        path = Path("/proc/net") / name
        found[name] = (path.read_text() if path.exists() else "").replace("\n", " ")
    return found


def _rules(*argv: str) -> str:
    lines = _output(*argv).splitlines()
    # Packet counters and the time of the listing are no rules.
    return re.sub(r"\[\d+:\d+\]|counter packets \d+ bytes \d+", "", "; ".join(x for x in lines if x[:1] != "#"))


def _lines(*argv: str) -> list[str]:
    return [" ".join(line.split()) for line in _output(*argv).splitlines()]


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
