"""The store that the ledger is written to: the fake of other tests, and a real S3 server."""

from __future__ import annotations

from typing import Any

import pytest

from infra.rehearsal.objectstore import ObjectStore
from tasks.adapters.store import S3Store, StoreCredentials
from tests.fakes.memory_store import MemoryStore

BUCKET = "k2-ledger-cases"


def adapter(server: ObjectStore, endpoint: str = "") -> S3Store:
    """Return an adapter of a real store."""
    return S3Store(
        endpoint or server.endpoint, BUCKET, StoreCredentials(server.keys.access_key, server.keys.secret_key)
    )


@pytest.fixture(scope="session")
def s3(seaweedfs: ObjectStore) -> S3Store:
    """The adapter on the real store."""
    store = adapter(seaweedfs)
    store.ensure_bucket()
    return store


@pytest.fixture(params=["fake", "real"])
def store(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return request.getfixturevalue("s3") if request.param == "real" else MemoryStore()


@pytest.fixture
def release(request: pytest.FixtureRequest) -> str:
    """A release of this case alone."""
    return request.node.originalname.replace("_", "-")
