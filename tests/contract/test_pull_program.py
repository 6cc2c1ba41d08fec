"""The pull as a program whose Hub stands, whose store dies, and whose own processes are killed: all of them real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.rehearsal import objectstore
from infra.rehearsal.processes import Supervisor
from tasks.adapters.store import S3Store, StoreCredentials
from tests.contract.faulty_line import FaultyLine
from tests.contract.test_node_programs import (
    BIG,
    PART,
    Program,
    Site,
    assert_pulled,
    blob,
    pull,
    site,
    slowed,
)

__all__ = ["site"]


@pytest.fixture(scope="module")
def server(seaweedfs: objectstore.ObjectStore) -> objectstore.ObjectStore:
    """The store of all contract suites, for the cases that let it live."""
    return seaweedfs


@pytest.fixture
def line(site: Site) -> Iterator[FaultyLine]:
    """A line to the Hub that can stand."""
    parts = urlsplit(site.hub_url)
    assert parts.hostname and parts.port
    with FaultyLine(parts.hostname, parts.port) as line:
        yield line


def through(site: Site, line: FaultyLine) -> Site:
    return replace(site, environment=site.environment | {"HF_ENDPOINT": line.url})


def child_of(program: Program, other_than: int = 0) -> int:
    """Return the one child of a program, waiting for it to be there."""

    def children() -> list[int]:
        text = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text()
        return [int(pid) for pid in text.split() if int(pid) != other_than]

    program.wait_until(lambda: len(children()) == 1)
    return children()[0]


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_hub_that_stands_has_the_child_replaced_and_ends_the_pull_with_what_was_seen(
    site: Site, line: FaultyLine
) -> None:
    line.answers_held_after_bytes = 2 * PART
    quick = ("--stall-s", "0.8", "--kill-after-s", "2.5", "--min-bytes-per-s", "1000", "--processes", "2")
    code, message, _ = pull(through(site, line), *quick).end()
    assert (code, message["code"], message["where"]) == (11, "K2-UNA-001", BIG)
    assert "0 bytes moved in" in message["got"]
    assert f"of {len(site.files[BIG])}" in message["got"]
    assert message["details"]["processes"] == 2
    assert site.store.head(blob(site)) is None
    assert site.store.unfinished_upload(blob(site)) is not None  # to be gone on with


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_the_pull(site: Site, number: int) -> None:
    with slowed(site, "HF_ENDPOINT", 0) as slow:
        program = pull(slow)
        child = child_of(program)
        program.wait_until(lambda: site.store.unfinished_upload(blob(site)) is not None)
        program.kill(number)
        code, message, _ = program.end()
        wait_until_gone(child)
    assert (code, message.get("exit_code")) == ((11, 11) if number == signal.SIGTERM else (-9, None))
    assert site.store.head(blob(site)) is None


def test_a_child_that_is_killed_is_replaced_and_what_it_sent_is_taken_up(site: Site, line: FaultyLine) -> None:
    line.answers_held_after_bytes = 3 * PART
    program = pull(through(site, line))
    child = child_of(program)
    assert line.held.wait(30)
    program.wait_until(lambda: len((site.store.unfinished_upload(blob(site)) or ("", []))[1]) >= 1)
    os.kill(child, signal.SIGKILL)
    child_of(program, other_than=child)
    line.release()
    out, err = program.process.communicate(timeout=60)
    message = json.loads(program.log.read_text())
    assert (program.process.returncode, message["processes"]) == (0, 2), err
    assert "the transfers died: killed by SIGKILL from outside (out of memory?)" in err
    assert f"{BIG}: taking up an upload" in err
    assert_pulled(site)
    progress = json.loads(out.splitlines()[-1])["progress"]
    assert progress["done_bytes"] == progress["total_bytes"] == site.lock.total_bytes
    (moved,) = (row for row in message["moved"] if row[0] == BIG)
    assert (moved[1] > len(site.files[BIG]), moved[3]) == (True, 2)
    assert message["bytes_fetched"] == sum(row[1] for row in message["moved"])


def test_the_same_share_twice_at_once(site: Site) -> None:
    programs = [pull(site) for _ in range(2)]
    outcomes = [program.end() for program in programs]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert_pulled(site)


def test_uploads_of_dead_pulls_are_ended_and_counted(site: Site) -> None:
    dead, others = f"blobs/{'d' * 64}", f"blobs/{'e' * 64}"
    for key in (dead, others):
        site.store.put_part(key, site.store.start_upload(key), 1, b"d" * PART)
    site.store.start_upload("backup/not-ours")
    site.store.put(dead, b"another puller has brought it")
    site.store.put(f"{dead}.ok", b"{}")
    deadline = time.monotonic() + 20
    while min(upload.idle_s for upload in site.store.unfinished_uploads(dead)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    code, message, _ = pull(site, "--orphan-idle-s", "2").end()
    assert (code, message["orphans"]) == (0, {"uploads": 1, "bytes": PART})
    assert site.store.unfinished_upload(dead) is None
    assert site.store.unfinished_upload(others) is not None
    assert site.store.unfinished_upload("backup/not-ours") is not None
    assert_pulled(site)


def test_a_store_that_is_killed_and_comes_back_costs_no_byte_of_the_hub(site: Site, tmp_path: Path) -> None:
    with Supervisor(tmp_path / "own-store") as supervisor:
        own = objectstore.start(supervisor)
        keys = StoreCredentials(own.keys.access_key, own.keys.secret_key)
        store = S3Store(own.endpoint, "k2-own", keys)
        store.ensure_bucket()
        store.put(f"locks/{site.lock.digest}.json", site.lock.to_bytes())
        environment = {
            "K2_STORE_ENDPOINT": own.endpoint,
            "K2_STORE_BUCKET": "k2-own",
            "K2_STORE_ACCESS_KEY": keys.access_key,
            "K2_STORE_SECRET_KEY": keys.secret_key,
        }
        moved = replace(site, store=store, environment=site.environment | environment)
        parts = urlsplit(site.hub_url)
        assert parts.hostname and parts.port
        with FaultyLine(parts.hostname, parts.port) as line:
            line.answers_held_after_bytes = 3 * PART
            program = pull(through(moved, line))
            assert line.held.wait(30)
            spec = supervisor.child("object-store").spec
            supervisor.stop("object-store", grace_s=0)  # SIGKILL
            line.release()  # the pull runs into its absence
            assert supervisor.start(spec).alive()
            code, message, _ = program.end()
        assert code == 0, message
        assert message["bytes_fetched"] == site.lock.total_bytes
        assert message["processes"] == 1
        assert_pulled(moved)
