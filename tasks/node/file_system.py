"""What kind of file system a directory is on, and whether weights may lie there."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# Shared by nodes: each node's stager would find another node's marker there and take it back, and locks of the kernel
# do not reach from one machine to another on all of them.
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "orangefs", "ocfs2", "gfs2"}
)
_SHARED_FUSE = ("glusterfs", "juicefs", "ceph", "s3fs", "goofys", "gcsfuse", "alluxio", "sshfs", "rclone", "mount-s3")
_LOCAL = frozenset({"ext4", "xfs", "btrfs", "zfs", "f2fs"})
_NOTES = {
    "tmpfs": "memory: weights there are memory that no engine gets, and are gone with the next start",
    "ramfs": "memory: weights there are memory that no engine gets, and are gone with the next start",
    "overlay": "the layers of a container or an image: is the disk for weights mounted?",
}


def file_system_of(directory: Path) -> str:
    """Return the type of the file system that a directory is on: `ext4`, `fuse.juicefs`; empty if it is not known."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted] and after:
            found = after.split()[0]
    return found


def is_shared(kind: str) -> bool:
    """Return whether other nodes see the same files there."""
    base, _, driver = kind.partition(".")
    return kind in _SHARED or (base == "fuse" and driver.startswith(_SHARED_FUSE))


def note_on(kind: str) -> str:
    """Return what is to be said of weights on such a file system; empty for what is meant for them."""
    if kind in _LOCAL:
        return ""
    return _NOTES.get(kind, "not one of " + ", ".join(sorted(_LOCAL)) + ": not known to keep what fsync promises")
