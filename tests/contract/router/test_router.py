"""What `ports.Engine` promises of a release's router, on the fake and on the real sglang-router: the same cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.router.conftest import ADDRESSES, ROLES, SERVING, URLS, Bed, eventually

NO_RELEASE = "ba9876543210"


def by_url(bed: Bed) -> dict[str, dict[str, Any]]:
    return {worker["url"]: worker for worker in bed.engine.workers(SERVING)}


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_router_without_a_healthy_worker_of_one_of_the_roles_is_not_ready(bed: Bed, role: str) -> None:
    for name in (name for name in ADDRESSES if name.startswith(role)):
        bed.kill(name)
    eventually(lambda: bed.engine.router_ready(SERVING) is False)
    assert {worker["worker_type"] for worker in bed.engine.workers(SERVING)} == {"prefill", "decode"}


def test_a_dead_worker_stays_listed_as_not_healthy(bed: Bed) -> None:
    bed.kill("decode-1")
    eventually(lambda: not by_url(bed)[URLS["decode-1"]]["is_healthy"])
    listed = by_url(bed)
    assert {url for url, worker in listed.items() if worker["is_healthy"]} == set(ROLES) - {URLS["decode-1"]}
    assert bed.engine.router_ready(SERVING) is True
