"""Settings that all tests share: properties are tried on the same examples in every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("k2", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("k2")
