"""The store's two implementations: the fake of other tests, and the S3 adapter on a real S3 server."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from infra.rehearsal.objectstore import ObjectStore
from tasks.adapters.store import S3Store, StoreCredentials
from tests.fakes.memory_store import MemoryStore

BUCKET = "k2-store-cases"


@pytest.fixture(scope="session")
def connect(seaweedfs: ObjectStore) -> Any:
    """Return a function that makes an adapter of the real store."""

    def make(**changes: Any) -> S3Store:
        keys = seaweedfs.keys
        endpoint = changes.pop("endpoint", seaweedfs.endpoint)
        credentials = StoreCredentials(
            changes.pop("access_key", keys.access_key), changes.pop("secret_key", keys.secret_key)
        )
        return S3Store(endpoint, BUCKET, credentials, **changes)

    return make


@pytest.fixture(scope="session")
def s3(connect: Any) -> S3Store:
    """The adapter on the real store."""
    store: S3Store = connect()
    store.ensure_bucket()
    return store


@pytest.fixture(params=["fake", "real"])
def store(request: pytest.FixtureRequest) -> Any:
    """Each implementation in turn."""
    return request.getfixturevalue("s3") if request.param == "real" else MemoryStore()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this case alone."""
    return f"t/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
