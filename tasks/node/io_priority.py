"""Lets a program's reads wait behind everybody else's, where the disk's scheduler knows priorities."""

from __future__ import annotations

import ctypes
import os
import platform

# Numbers of ioprio_set: linux/arch/*/entry/syscalls; Python has no wrapper of its own.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _CLASS_IDLE, _CLASS_SHIFT = 1, 3, 13


def be_idle() -> bool:
    """Put this process into the idle class of disk access and the lowest of the CPU; return whether the kernel took it.

    No privilege is needed. The scheduler `none`, which NVMe often has, knows no classes: the rate limit is what holds.
    """
    os.nice(19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE << _CLASS_SHIFT) == 0)
