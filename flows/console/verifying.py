"""`k2ctl verify`: is every file of a lock, byte for byte, in a directory, in the store, on the nodes? Reads only.

Nothing is imported before it is needed: a small checkout is verified in less time than those libraries take to load.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.console.live_progress import LiveProgress, ShownTally
from flows.console.lock_files import read_lock_file
from tasks.core.errors import ExitCode, InputError, IntegrityError, K2Error, UnavailableError
from tasks.core.file_verdicts import MISSING, POINTER, UNREADABLE, FileVerdict, Findings
from tasks.core.lock import Lock
from tasks.core.marker import MARKER_FILE
from tasks.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from tasks.node.program import Stop
    from tasks.steps.context import Ports

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMED_EXTRA = 20
_NAMED_IN_HINT = 5


@dataclass(frozen=True)
class Outcome:
    """What was found in one place, and the error to end with; `more` are fields of the document of that place alone."""

    lock: Lock
    findings: Findings
    seconds: float
    more: Mapping[str, Any]
    error: K2Error | None
    notes: tuple[str, ...] = ()


def verify(args: Namespace) -> int:
    """Compare a directory, a store or all nodes with a lock, say what was found, and exit 5 if anything differs."""
    if args.nodes:
        from flows.console.verifying_nodes import verify_all_nodes

        return verify_all_nodes(args, *lock_of_site(args))
    outcome = _verify_store(args) if args.dir is None else _verify_directory(args)
    _show(args, outcome)
    if outcome.error is None:
        return ExitCode.DONE
    print(outcome.error.as_text(), file=sys.stderr)
    return outcome.error.exit_code


def _verify_directory(args: Namespace) -> Outcome:
    from tasks.node.checkout import find_checkout, list_others, read_checkout

    lock = read_lock_file(Path(args.lock)) if Path(args.lock).is_file() else lock_of_site(args)[1]
    directory = find_checkout(Path(args.dir).absolute(), lock)
    progress, began = LiveProgress(), time.monotonic()
    tally = ShownTally(progress, "verify", lock.total_bytes, len(lock.files))
    with _stoppable(progress) as stop:
        found = read_checkout(directory, lock, links=True, threads=args.threads, stop=stop, tally=tally)
    extra, ignored = list_others(directory, lock)
    found = replace(found, extra=extra, ignored=ignored)
    more = {"directory": str(directory), "links": found.links}
    error = _error_of(found, lock, str(directory), args.fail_on_extra, _fetch_again(lock, directory, found))
    return Outcome(lock, found, time.monotonic() - began, more, error)


def _verify_store(args: Namespace) -> Outcome:
    from tasks.node.stored_files import parse_store_uri, read_stored

    ports, lock, _ = lock_of_site(args)
    bucket, prefix = parse_store_uri(args.store, ports.site.store.bucket)
    store = ports.store if bucket == ports.site.store.bucket else _other_bucket(ports, bucket)
    progress, began = LiveProgress(), time.monotonic()
    tally = ShownTally(progress, "verify", lock.total_bytes, len(lock.files))
    with _stoppable(progress) as stop:
        stored = read_stored(store, prefix, lock, threads=args.threads, stop=stop, tally=tally)
    uri = f"s3://{bucket}/{prefix}"
    more = {"store": uri, "layout": stored.layout, "without_statement": list(stored.without_statement)}
    hint = "delete each named blob and its .ok, then run the release again: its pull step brings them anew"
    error = _error_of(stored.findings, lock, uri, args.fail_on_extra, hint)
    silent = tuple(f"no statement: {key}.ok (stagers do not take this blob)" for key in stored.without_statement)
    return Outcome(lock, stored.findings, time.monotonic() - began, more, error, silent)


def _other_bucket(ports: Ports, bucket: str) -> Any:
    """Return another bucket at the site's endpoint, with the site's credentials."""
    from tasks import wiring

    return wiring.open_store(replace(ports.site, store=replace(ports.site.store, bucket=bucket)))


@contextmanager
def _stoppable(progress: LiveProgress) -> Iterator[Stop]:
    """Yield a flag that Ctrl-C and SIGTERM set: threads end at their next block, not at the end of a file."""
    from tasks.node.program import Stop, StoppedError

    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    except StoppedError as error:
        raise KeyboardInterrupt("stopped; nothing was written, and nothing is known of the place") from error
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        progress.clear()


def lock_of_site(args: Namespace) -> tuple[Ports, Lock, str]:
    """Return the site's ports, the lock that was named, and the tool image of its release (empty: not a release).

    LOCK is a file, a digest under which the site's store keeps one, or a release: by its receipt, else from the Hub.
    """
    named = args.lock
    if not Path(named).is_file() and (named.endswith(".json") or "/" in named):
        raise _no_such_lock(named)
    from flows.console.reports import connect
    from tasks.specs import find_release
    from tasks.steps.acceptance import find_lock
    from tasks.steps.documents import find_receipt, get_lock

    ports = replace(connect(args), progress=LiveProgress())
    if Path(named).is_file():
        return ports, read_lock_file(Path(named)), ""
    if _DIGEST.fullmatch(named):
        if ports.store.head(f"locks/{named}.json") is None:
            raise _no_such_lock(named)
        return ports, get_lock(ports.store, named), ""
    if receipt := find_receipt(ports.store, named):
        return ports, get_lock(ports.store, receipt["lock"]["digest"]), receipt["release"]["images"]["tool"]
    release = find_release(named, ports.site.releases_dir)
    return ports, find_lock(ports, release.repo, release.revision).lock, release.images.tool


def _no_such_lock(named: str) -> InputError:
    return InputError(
        "K2-INP-001",
        "There is no such lock.",
        where="LOCK",
        got=named,
        expected="a lock file, the digest of a lock in the site's store, or a release",
        hint="k2ctl lock REPO --revision R writes one",
    )


def _error_of(found: Findings, lock: Lock, place: str, fail_on_extra: bool, hint: str) -> K2Error | None:
    """Return what the findings mean for whoever runs this: wrong bytes before files that could not be read."""
    problems = found.problems
    if found.differs:
        first = next(problem for problem in problems if problem.verdict != UNREADABLE)
        return IntegrityError(
            "K2-INT-002",
            f"{len(problems)} of {len(lock.files)} files are missing or differ from the lock.",
            where=f"{place}: {printable(first.place or first.path)}",
            got=printable(first.got),
            expected=first.expected,
            hint=hint,
        )
    if problems:
        return UnavailableError(
            "K2-UNA-001",
            f"{len(problems)} of {len(lock.files)} files cannot be read; the others are right.",
            where=f"{place}: {printable(problems[0].place or problems[0].path)}",
            got=printable(problems[0].got),
            hint="see to the rights and the disk there, then verify again",
        )
    if found.extra and fail_on_extra:
        return IntegrityError(
            "K2-INT-002",
            f"{len(found.extra)} files stand there that are not in the lock.",
            where=f"{place}: {printable(found.extra[0])}",
            got="a file",
            expected="nothing beside the files of the lock",
            hint="remove them, or verify without --fail-on-extra",
        )
    return None


def _fetch_again(lock: Lock, directory: Path, found: Findings) -> str:
    """Return what puts wrong files right: `hf download` alone keeps a file whose notes call it right."""
    paths = [problem.path for problem in found.problems]
    if MARKER_FILE in found.extra:
        return "a stager's directory: delete the wrong files; the next release of these weights stages them anew"
    if (directory / ".git").exists() and any(problem.verdict == POINTER for problem in found.problems):
        return shlex.join(["git", "-C", str(directory), "lfs", "pull"])
    wrong = any(problem.verdict not in (MISSING, UNREADABLE) for problem in found.problems)
    cache = directory.parent.name == "snapshots"
    words = [
        "hf",
        "download",
        lock.repo,
        *(paths if len(paths) <= _NAMED_IN_HINT else ()),
        "--revision",
        lock.revision,
        *(("--cache-dir", str(directory.parents[2])) if cache else ("--local-dir", str(directory))),
        *(("--force-download",) if wrong else ()),
    ]
    return shlex.join(words)


def document_of(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as the document of `--json`; its schema is manifests/schemas/verification.json."""
    found, error = outcome.findings, outcome.error
    seconds = outcome.seconds
    ended = {"outcome": "failed", "error": error.as_data()} if error else {"outcome": "done"}
    return {
        "version": 1,
        "ok": error is None,
        **ended,
        **lock_fields(outcome.lock),
        "files_ok": sum(verdict.ok for verdict in found.verdicts),
        "bytes": found.read_bytes,
        "seconds": round(seconds, 3),
        "gb_per_s": round(found.read_bytes / seconds / 1e9, 3) if seconds > 0 else 0.0,
        **outcome.more,
        "problems": [problem_row(problem) for problem in found.problems],
        "extra": list(found.extra),
        "ignored": list(found.ignored),
    }


def lock_fields(lock: Lock) -> dict[str, Any]:
    """Return what a document says of the lock it is about."""
    return {
        "digest": lock.digest,
        "repo": lock.repo,
        "revision": lock.revision,
        "files": len(lock.files),
        "total_bytes": lock.total_bytes,
    }


def problem_row(problem: FileVerdict) -> dict[str, str]:
    """Return a problem as a row of a document."""
    row = {"path": problem.path, "verdict": problem.verdict, "got": problem.got, "expected": problem.expected}
    return row | ({"key": problem.place} if problem.place else {})


def print_document(document: Mapping[str, Any]) -> None:
    """Write the one JSON document of the command."""
    print(json.dumps(document, indent=2))


def _show(args: Namespace, outcome: Outcome) -> None:
    if args.json:
        print_document(document_of(outcome))
        return
    found, seconds = outcome.findings, outcome.seconds
    for problem in found.problems:
        print_problem(problem.verdict, problem.place or problem.path, problem.got, problem.expected)
    for path in found.extra[:_NAMED_EXTRA]:
        print(f"{'extra':<13}{printable(path)}")
    if len(found.extra) > _NAMED_EXTRA:
        print(f"{'extra':<13}... and {len(found.extra) - _NAMED_EXTRA} more (--json has all)")
    for line in outcome.notes:
        print(line)
    linked = f", {found.links} through links" if found.links else ""
    rate = f", {format_bytes(found.read_bytes / seconds)}/s" if seconds > 0 and found.read_bytes else ""
    print(
        f"{len(outcome.lock.files)} files of the lock {outcome.lock.digest[:12]}: {found.counted()}{linked}; "
        f"{format_bytes(found.read_bytes)} read in {format_duration(seconds)}{rate}"
    )


def print_problem(verdict: str, path: str, got: str, expected: str) -> None:
    """Write a problem in two lines."""
    print(f"{verdict:<13}{printable(path)}\n{'':<13}got: {printable(got)}, expected: {expected}")


def printable(text: str) -> str:
    """Return text that any terminal can show: a file's name may hold any byte, an escape sequence too."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
