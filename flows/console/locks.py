"""Commands about locks: lock, lock-sign, lock-verify, lock-accept."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from flows.console.lock_files import read_lock_file, read_signature_file, signature_path, write_file
from flows.console.reports import connect, print_json
from flows.console.submission import say
from tasks.core.errors import ExitCode, InputError, IntegrityError
from tasks.core.lock import Lock
from tasks.core.sglang_checksums import sglang_checksums
from tasks.core.units import format_bytes
from tasks.ports import SigningKey
from tasks.steps.acceptance import FoundLock, find_lock, keep_lock
from tasks.steps.context import Ports
from tasks.steps.signatures import check_signature, put_signature, require_signature, sign_lock
from tasks.wiring import public_key, signing_key

_COMMIT = re.compile(r"[0-9a-f]{40}")


def lock(args: Namespace) -> int:
    """Write the lock of a revision, and have the site take it for that commit from now on."""
    ports = connect(args)
    commit = args.revision if _COMMIT.fullmatch(args.revision) else ports.hub.resolve(args.repo, args.revision)
    found = find_lock(ports, args.repo, commit, again=args.again, total_size=not args.ignore_total_size)
    keep_lock(ports, found)
    path = Path(args.output) / found.lock.file_name
    write_file(str(path), found.lock.to_bytes())
    written = {"path": str(path)}
    if args.sign_key:
        place = signature_path(path)
        put_signature(ports.store, found.lock, *_sign(args.sign_key, args.password_file, found.lock, place))
        written["signature"] = str(place)
    _warn(ports, found.lock)
    if args.sglang_checksums:
        write_file(args.sglang_checksums, sglang_checksums(found.lock), "--sglang-checksums")
        written["sglang_checksums"] = args.sglang_checksums
    _show(args, found, written)
    return ExitCode.DONE


def lock_sign(args: Namespace) -> int:
    """Sign a lock file, offline: the key, the lock and a signature beside it."""
    path = Path(args.lock)
    made = read_lock_file(path)
    place = Path(args.output or signature_path(path))
    _sign(args.key, args.password_file, made, place)
    _show(args, FoundLock(made, f"read from {path}"), {"signature": str(place)})
    return ExitCode.DONE


def lock_verify(args: Namespace) -> int:
    """Check a lock file's signature, offline."""
    path = Path(args.lock)
    made, key = read_lock_file(path), public_key(args.key)
    place = Path(args.signature or signature_path(path))
    covered = check_signature(key, made, read_signature_file(place), str(place))
    what = (
        "this lock: its repository, its revision and every file" if covered.names_lock else "the content of the files"
    )
    but = f", without {', '.join(covered.left_out)}" if covered.left_out else ""
    if args.json:
        print_json(
            {
                "version": 1,
                "ok": True,
                "digest": made.digest,
                "key": key.key_id,
                "names_lock": covered.names_lock,
                "left_out": covered.left_out,
            }
        )
    say(f"ok: {place} is a signature by key {key.key_id[:12]} over {what}{but}")
    return ExitCode.DONE


def lock_accept(args: Namespace) -> int:
    """Have a site take a lock file, made elsewhere, for its commit; with the signature beside it, if there is one."""
    ports, path = connect(args), Path(args.lock)
    found = FoundLock(read_lock_file(path), f"read from {path.name}")
    place, written = Path(args.signature or signature_path(path)), {}
    if args.signature and ports.lock_key is None:
        raise InputError(
            "K2-INP-001",
            "The site names no key to check the signature with.",
            where="--signature",
            got="no lock_key in the site file",
            expected="the signer's public key there",
            hint="name it as lock_key in the site file, or accept the lock without --signature",
        )
    if ports.lock_key and (args.signature or place.is_file()):
        data = read_signature_file(place)
        written["signature"] = put_signature(ports.store, found.lock, ports.lock_key, data)
    keep_lock(ports, found)
    _warn(ports, found.lock)
    _show(args, found, written)
    return ExitCode.DONE


def _sign(key_path: str, password_file: str, made: Lock, place: Path) -> tuple[SigningKey, bytes]:
    """Write a lock's signature and return it with its key."""
    key = signing_key(key_path, password_file)
    data = sign_lock(key, made)
    write_file(str(place), data)
    return key, data


def _warn(ports: Ports, made: Lock) -> None:
    """Say so where a release will refuse the lock."""
    try:
        require_signature(ports.store, made, ports.lock_key)
    except IntegrityError as error:
        say(f"releases refuse this lock as it is: {error}")


def _show(args: Namespace, found: FoundLock, written: dict[str, str]) -> None:
    made = found.lock
    facts: dict[str, Any] = {
        "revision": made.revision,
        "digest": made.digest,
        "source": found.source,
        "files": len(made.files),
        "shards": len(made.shards),
        "total_bytes": made.total_bytes,
    }
    if args.json:
        print_json({"version": 1, **written, **facts})
        return
    for place in written.values():
        print(place)
    print(
        f"revision {made.revision}\ndigest   {made.digest}\nsource   {found.source}\n"
        f"{len(made.files)} files, {len(made.shards)} shards, {format_bytes(made.total_bytes)}"
    )
