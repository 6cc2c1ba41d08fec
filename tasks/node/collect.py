"""Lists the checkpoints on this node, and moves to the trash, or deletes from it, what an order names.

Without an order nothing is changed. An order was decided on a list; what it names is looked at again at the very
moment: a directory that was used since it was listed, in which somebody works, or of which any process of this machine
has a file open, in whatever container, stays where it is. The trash is on the same file system, so a move is a rename;
what is in it is deleted by a later order only, when its time is over by the pipeline's clock and by this node's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.collection import CHECKPOINT, Checkpoint, Inventory, Trashed
from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.identity import canonical_bytes, digest_of, sha256_hex
from tasks.core.marker import MARKER_FILE, Marker
from tasks.core.spec import plain
from tasks.core.units import format_bytes
from tasks.node import directory_lock
from tasks.node.environment import ENVIRONMENT_HELP, store_from_environment
from tasks.node.open_files import ignore_lease_breaks, in_use, leased, regular_files
from tasks.node.program import Stop, run, say
from tasks.node.staged_directory import read_marker
from tasks.node.trash import Trash
from tasks.node.verified_file import disk_error
from tasks.node.workers import attempt

if TYPE_CHECKING:
    from tasks.ports import Store

_TRIES = 4


@dataclass(frozen=True)
class Order:
    """What is to be done on one node, as it was decided.

    `move` are paths with the token of the list, `delete` names in the trash, `protect` paths that nothing happens to.
    """

    node: str
    now: float
    trash_age_s: float
    protect: tuple[str, ...]
    move: Mapping[str, str]
    delete: tuple[str, ...]


@dataclass
class Done:
    """What became of an order."""

    moved: dict[str, str] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    kept: dict[str, str] = field(default_factory=dict)


class Collector:
    """Looks after the checkpoints below one node's directory for weights."""

    def __init__(self, root: Path, node: str, stop: Stop) -> None:
        self._root = root
        self._node = node
        self._stop = stop
        self._trash = Trash(root)

    def list(self) -> Inventory:
        """Return what stands there; changes nothing."""
        if not self._root.is_dir():
            raise InputError(
                "K2-INP-001", "The directory for weights is not there.", where=f"{self._node}: {self._root}"
            )
        checkpoints, others = [], []
        for path in sorted(self._root.iterdir()):
            name = path.name
            if name.startswith(".k2-") or name == "lost+found":
                continue
            if "--" not in name or path.is_symlink() or not path.is_dir():
                others.append(name)
                continue
            for revision in sorted(path.iterdir()):
                self._stop.check()
                found = self._checkpoint(f"{name}/{revision.name}")
                if found is None:
                    others.append(f"{name}/{revision.name}")
                else:
                    checkpoints.append(found)
        entries, foreign = self._trash.entries()
        disk = os.statvfs(self._root)
        return Inventory(
            self._node,
            tuple(checkpoints),
            tuple(self._trashed(entry.name, entry.path, entry.moved_at) for entry in entries),
            (*others, *foreign),
            disk.f_bavail * disk.f_frsize,
            disk.f_blocks * disk.f_frsize,
        )

    def _checkpoint(self, path: str) -> Checkpoint | None:
        directory = self._root / path
        if not _is_checkpoint(directory, path):
            return None
        files = regular_files(directory)
        marker = _marker(directory)
        revision = path.rpartition("/")[2]
        return Checkpoint(
            path=path,
            size_bytes=_size(files),
            files=len(files),
            lock_digest=marker.lock_digest if marker else "",
            token=self._token(path),
            held=directory_lock.is_held(self._root, revision),
            in_use=_used(directory, files),
        )

    def _trashed(self, name: str, path: str, moved_at: float) -> Trashed:
        files = regular_files(self._trash.directory(name))
        used = _used(self._trash.directory(name), files)
        return Trashed(name, path, _size(files), moved_at, self._trash.age_s(name), used)

    def _token(self, path: str) -> str:
        """Return what changes with whatever is done in a checkpoint's directory, also if nothing is changed by it."""
        directory = self._root / path
        marker = directory / MARKER_FILE
        stats = [file.lstat() for file in regular_files(directory)]
        folders = [Path(base).lstat() for base, _, _ in os.walk(directory)]
        return digest_of(
            {
                "inode": directory.lstat().st_ino,
                "marker": sha256_hex(marker.read_bytes()) if marker.is_file() and not marker.is_symlink() else "",
                "taken_at": directory_lock.taken_at_ns(self._root, path.rpartition("/")[2]),
                "files": len(stats),
                "bytes": sum(stat.st_size for stat in stats),
                "newest": max(stat.st_mtime_ns for stat in (*stats, *folders)),
            }
        )

    def carry_out(self, order: Order) -> Done:
        """Do what an order says, as far as it still is right, and return what became of each of its parts."""
        done = Done()
        if order.node != self._node:
            raise InputError(
                "K2-INP-001", "The order is of another node.", where=self._node, got=order.node, expected=self._node
            )
        names = {entry.name for entry in self._trash.entries()[0]}  # not what this run moves there
        for path, token in sorted(order.move.items()):
            self._stop.check()
            why = self._move(order, path, token, done)
            if why:
                done.kept[path] = why
                say(f"{self._node}: {path} stays: {why}")
        for name in order.delete:
            self._stop.check()
            why = self._delete(order, name, done) if name in names else "not in the trash"
            if why:
                done.kept[name] = why
                say(f"{self._node}: {name} stays in the trash: {why}")
        return done

    def _move(self, order: Order, path: str, token: str, done: Done) -> str:
        """Move a directory to the trash, or return why it stays."""
        directory = self._root / path
        if path in order.protect:
            return "something needs it"
        if not _is_checkpoint(directory, path):
            return "no checkpoint's directory"
        try:
            with directory_lock.undisturbed(self._root, path.rpartition("/")[2]) as free:
                if not free:
                    return "a stager or a scrub works there"
                if self._token(path) != token:
                    return "it was used or changed after it had been listed"
                files = regular_files(directory)
                size_bytes = _size(files)
                with leased(files) as problem:
                    if problem is not None:
                        return f"{problem.path.relative_to(directory)}: {problem.why}"
                    done.moved[path] = self._trash.take(path, order.now)
        except OSError as error:
            return f"it cannot be moved: {error.strerror or error}"
        say(f"{self._node}: {path} ({format_bytes(size_bytes)}) is in the trash: {done.moved[path]}")
        return ""

    def _delete(self, order: Order, name: str, done: Done) -> str:
        """Delete an entry of the trash for good, or return why it stays."""
        entry = next(found for found in self._trash.entries()[0] if found.name == name)
        directory = self._trash.directory(name)
        if entry.path in order.protect:
            return "something needs it again"
        age_s = min(order.now - entry.moved_at, self._trash.age_s(name))
        if age_s < order.trash_age_s:
            return f"its time is not over: {age_s:.0f} s of {order.trash_age_s:.0f} s"
        files = regular_files(directory)
        size_bytes, used = _size(files), _used(directory, files)
        if used:
            return used
        try:
            self._trash.delete(name)
        except OSError as error:
            return f"it cannot be deleted: {error.strerror or error}"
        done.deleted.append(name)
        done.freed_bytes += size_bytes
        say(f"{self._node}: {name} is deleted ({format_bytes(size_bytes)})")
        return ""


def _is_checkpoint(directory: Path, path: str) -> bool:
    """Return whether a path below the root is a checkpoint's directory of ours, and no link leads to it."""
    real = directory.is_dir() and not directory.is_symlink() and not directory.parent.is_symlink()
    return bool(CHECKPOINT.fullmatch(path)) and real


def _marker(directory: Path) -> Marker | None:
    try:
        return read_marker(directory)
    except IntegrityError:
        return None


def _used(directory: Path, files: Sequence[Path]) -> str:
    found = in_use(files)
    return f"{found.path.relative_to(directory)}: {found.why}" if found else ""


def _size(files: Sequence[Path]) -> int:
    return sum(path.lstat().st_size for path in files)


def read_order(store: Store, digest: str) -> Order:
    """Return the order that the store keeps under a digest; IntegrityError if its bytes are other ones."""
    key = f"collections/{digest}.json"
    try:
        data, _ = store.get(key)
    except KeyError as error:
        raise UnavailableError("K2-UNA-001", "The store does not hold the order.", where=key) from error
    if sha256_hex(data) != digest:
        raise IntegrityError(
            "K2-INT-003", "The stored order is not the one that was given.", where=key, got=sha256_hex(data)
        )
    body = json.loads(data)
    return Order(
        node=str(body["node"]),
        now=float(body["now"]),
        trash_age_s=float(body["trash_age_s"]),
        protect=tuple(body["protect"]),
        move=dict(body["move"]),
        delete=tuple(body["delete"]),
    )


def publish(store: Store, inventory: Inventory, order: str, done: Done | None, stop: Stop) -> dict[str, Any]:
    """Keep the inventory in the store by its digest, and return the message that names it."""
    data = canonical_bytes({"version": 1, **plain(inventory), "done": plain(done) if done else None})
    digest = sha256_hex(data)
    attempt(partial(store.put, f"inventories/{digest}.json", data), stop, integrity_tries=1, tries=_TRIES)
    return {
        "node": inventory.node,
        "order": order,
        "inventory": digest,
        "checkpoints": len(inventory.checkpoints),
        "moved": len(done.moved) if done else 0,
        "deleted": len(done.deleted) if done else 0,
        "kept": len(done.kept) if done else 0,
        "freed_bytes": done.freed_bytes if done else 0,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.node.collect",
        description=__doc__,
        epilog=ENVIRONMENT_HELP
        + "\nexit codes: 0 listed, or the order carried out as far as it was right, 11 try again",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, required=True, help="the node's NVMe directory for weights (/models)")
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument("--order", default="", help="sha256 of an order; read from collections/<digest>.json")
    return parser


def _work(arguments: argparse.Namespace, stop: Stop) -> Mapping[str, Any]:
    ignore_lease_breaks()
    store = store_from_environment(stall_s=30.0)
    collector, done = Collector(arguments.root, arguments.node, stop), None
    try:
        if arguments.order:
            order = attempt(partial(read_order, store, arguments.order), stop, integrity_tries=1, tries=_TRIES)
            done = collector.carry_out(order)
        inventory = collector.list()
    except OSError as error:
        raise disk_error(error, arguments.root) from error
    return publish(store, inventory, arguments.order, done, stop)


def main(argv: list[str] | None = None) -> int:
    """List or collect on this node and return the exit code."""
    arguments = _parser().parse_args(argv)
    stop = Stop()
    stop.install()
    return run(partial(_work, arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
