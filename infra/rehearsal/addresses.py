"""Loopback addresses and ports of a site, chosen so that two sites on one machine do not meet."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import random
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.rehearsal.errors import SiteError

# Ports that this program has handed out: parts that start at the same time must not be given the same one.
_GIVEN: set[int] = set()
_GIVEN_LOCK = threading.Lock()


def free_ports(count: int, host: str = "127.0.0.1", *also: str) -> list[int]:
    """Choose TCP ports that are free on every named address, below the range that outgoing connections draw from."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(12_000, low if low > 14_000 else 32_000))
    random.shuffle(candidates)
    ports: list[int] = []
    with _GIVEN_LOCK:
        for port in candidates:
            if len(ports) == count:
                return ports
            if port not in _GIVEN and all(_bindable(address, port) for address in (host, *also)):
                ports.append(port)
                _GIVEN.add(port)
    raise SiteError(f"found {len(ports)} of {count} free TCP ports on {host}")


def _bindable(host: str, port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False


def _listening_subnets() -> set[int]:
    """Return n for every 127.n.x.x on which a TCP socket listens now."""
    taken = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address = bytes.fromhex(local.split(":")[0])[::-1]  # the kernel prints it in host order
        if state == "0A" and address[0] == 127:
            taken.add(address[1])
    return taken


class SubnetLease:
    """Holds 127.<n>.0.0/16 for one site, by a lock on a file, until released or its last holder ends.

    Pass `fileno` to the `Supervisor` as one of its ``hold_fds``: then a kept site keeps its addresses too.
    """

    FIRST, LAST = 16, 250

    def __init__(self, number: int, fd: int) -> None:
        self.network = ipaddress.IPv4Network(f"127.{number}.0.0/16")
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path | None = None) -> SubnetLease:
        """Take the first subnet that no other site holds and nothing listens on."""
        directory = directory or Path(tempfile.gettempdir()) / "k2-rehearsal-subnets"
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            directory.chmod(0o1777)  # every user's sites share the loopback addresses
        listening = _listening_subnets()
        for number in range(cls.FIRST, cls.LAST + 1):
            if number in listening:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(directory / f"127.{number}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    continue
                return cls(number, fd)
        raise SiteError(f"no free loopback subnet 127.{cls.FIRST}-{cls.LAST}.0.0/16: locks are in {directory}")

    def fileno(self) -> int:
        """Return the descriptor that holds the lock."""
        return self._fd

    def address(self, third: int, fourth: int) -> str:
        """Return 127.<n>.<third>.<fourth>."""
        return str(self.network.network_address + third * 256 + fourth)

    def release(self) -> None:
        """Give the subnet back (children that hold the descriptor keep it until they end)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
