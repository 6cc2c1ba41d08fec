"""Nothing is fetched where that is forbidden, and what would be is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.rehearsal.errors import SiteError
from tests.kubelet import packages


def test_forbidden_to_fetch_it_fails_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2_CACHE", str(tmp_path))
    monkeypatch.setenv(packages.NO_INSTALL, "1")
    with pytest.raises(SiteError) as caught:
        packages.ensure_programs(print)
    assert all(name in str(caught.value) for name in packages.PACKAGES)
    assert list(tmp_path.iterdir()) == []
