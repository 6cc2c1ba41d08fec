"""What `ports.Engine` promises of a release's router, on the fake and on the real sglang-router: the same cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.router.conftest import ROLES, SERVING, URLS, Bed, eventually

NO_RELEASE = "ba9876543210"
NO_WORKER = "00000000-0000-0000-0000-000000000000"


def by_url(bed: Bed) -> dict[str, dict[str, Any]]:
    return {worker["url"]: worker for worker in bed.engine.workers(SERVING)}


def forget(bed: Bed, name: str) -> None:
    bed.engine.forget_worker(SERVING, by_url(bed)[URLS[name]]["id"])
    eventually(lambda: URLS[name] not in by_url(bed))


def test_a_router_lists_its_workers(bed: Bed) -> None:
    workers = bed.engine.workers(SERVING)
    assert {worker["url"]: worker["worker_type"] for worker in workers} == ROLES
    assert len(workers) == len(ROLES)
    assert all(worker["is_healthy"] is True for worker in workers)
    assert len({worker["id"] for worker in workers}) == len(ROLES)
    assert all(worker["id"] and isinstance(worker["id"], str) for worker in workers)
    assert bed.engine.router_ready(SERVING) is True


def test_asking_twice_gives_the_same_ids(bed: Bed) -> None:
    assert {url: worker["id"] for url, worker in by_url(bed).items()} == {
        url: worker["id"] for url, worker in by_url(bed).items()
    }


def test_what_is_listed_is_the_callers_to_change(bed: Bed) -> None:
    for worker in bed.engine.workers(SERVING):
        worker.clear()
    assert set(by_url(bed)) == set(ROLES)


def test_a_release_that_is_not_there_has_no_workers(bed: Bed) -> None:
    assert bed.engine.workers(NO_RELEASE) == []
    assert bed.engine.router_ready(NO_RELEASE) is False
    bed.engine.forget_worker(NO_RELEASE, NO_WORKER)


def test_a_worker_that_it_does_not_know_is_forgotten_already(bed: Bed) -> None:
    bed.engine.forget_worker(SERVING, NO_WORKER)
    assert set(by_url(bed)) == set(ROLES)
    assert bed.engine.router_ready(SERVING) is True


def test_a_forgotten_worker_is_gone_and_the_others_are_not(bed: Bed) -> None:
    before = by_url(bed)
    gone = before[URLS["decode-0"]]["id"]
    forget(bed, "decode-0")
    after = by_url(bed)
    assert {url: worker["id"] for url, worker in after.items()} == {
        url: worker["id"] for url, worker in before.items() if worker["id"] != gone
    }
    assert bed.engine.router_ready(SERVING) is True
    bed.engine.forget_worker(SERVING, gone)
    assert set(by_url(bed)) == set(after)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_router_without_one_of_the_roles_is_not_ready(bed: Bed, role: str) -> None:
    for name in URLS:
        if name.startswith(role):
            forget(bed, name)
    eventually(lambda: bed.engine.router_ready(SERVING) is False)
    assert {worker["worker_type"] for worker in bed.engine.workers(SERVING)} == {"prefill", "decode"} - {role}


def test_a_dead_worker_stays_listed_as_not_healthy_until_it_is_forgotten(bed: Bed) -> None:
    bed.kill("decode-1")
    eventually(lambda: not by_url(bed)[URLS["decode-1"]]["is_healthy"])
    listed = by_url(bed)
    assert {url for url, worker in listed.items() if worker["is_healthy"]} == set(ROLES) - {URLS["decode-1"]}
    assert bed.engine.router_ready(SERVING) is True
    forget(bed, "decode-0")
    eventually(lambda: bed.engine.router_ready(SERVING) is False)  # what is left of the decodes is the dead one
    forget(bed, "decode-1")
    assert set(by_url(bed)) == {URLS["prefill-0"]}
