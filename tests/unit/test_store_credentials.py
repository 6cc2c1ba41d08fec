"""Where the store's credentials come from, and that they are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.adapters.store import StoreCredentials
from tasks.core.errors import InputError


def test_credentials_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"access_key": "a", "secret_key": "b"}')
    environment = {"K2_STORE_ACCESS_KEY": "a", "K2_STORE_SECRET_KEY": "b"}
    assert StoreCredentials.from_file(path) == StoreCredentials.from_environment(environment)
    path.write_text('{"access_key": "hush"')
    for read in (lambda: StoreCredentials.from_file(path), lambda: StoreCredentials.from_environment({})):
        with pytest.raises(InputError) as caught:
            read()
        assert "hush" not in caught.value.as_text()
