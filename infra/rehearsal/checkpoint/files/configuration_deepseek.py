"""Configuration class of the scaled checkpoint (executed under --trust-remote-code, so it is part of the lock)."""

from typing import Any


class DeepseekV3Config:
    """Holds the keys of config.json as attributes."""

    model_type = "kimi_k2"

    def __init__(self, **keys: Any) -> None:
        self.__dict__.update(keys)
