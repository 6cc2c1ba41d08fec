"""What a node program takes from its environment: where the store and the Hub are, and with which credentials."""

from __future__ import annotations

import os

from tasks.adapters.hub import HfHub
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.errors import InputError

ENVIRONMENT_HELP = """environment:
  K2_STORE_ENDPOINT, K2_STORE_BUCKET         the object store
  K2_STORE_ACCESS_KEY, K2_STORE_SECRET_KEY   its credentials (from a Secret)
  K2_TERMINATION_LOG                         where the outcome is left (default: /dev/termination-log)
"""


def required(name: str) -> str:
    """Return an environment variable; raise InputError if it is not set."""
    value = os.environ.get(name, "")
    if not value:
        raise InputError("K2-INP-001", f"{name} is not set.", where="environment", expected=f"{name}=...")
    return value


def store_from_environment(stall_s: float) -> S3Store:
    """Return the store that the environment names."""
    credentials = StoreCredentials(required("K2_STORE_ACCESS_KEY"), required("K2_STORE_SECRET_KEY"))
    return S3Store(required("K2_STORE_ENDPOINT"), required("K2_STORE_BUCKET"), credentials, stall_s=stall_s)


def hub_from_environment(stall_s: float) -> HfHub:
    """Return the Hub that the environment names; a token is read at each call, from a file that can be replaced if any.

    HF_TOKEN_PATH is huggingface_hub's own name for such a file.
    """
    endpoint, path = required("HF_ENDPOINT"), os.environ.get("HF_TOKEN_PATH", "")
    if path:
        return HfHub(endpoint, token_file=path, stall_s=stall_s)
    return HfHub(endpoint, token_variable="HF_TOKEN", stall_s=stall_s)  # noqa: S106 - a name
