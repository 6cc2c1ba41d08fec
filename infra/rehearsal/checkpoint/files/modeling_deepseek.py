"""Model classes of the scaled checkpoint (executed under --trust-remote-code, so they are part of the lock)."""

from typing import Any, NoReturn


class DeepseekV3Model:
    """Refuses to be built: the weights beside it are random and scaled down."""

    def __init__(self, *_arguments: Any, **_keys: Any) -> None:
        _refuse()


class DeepseekV3ForCausalLM(DeepseekV3Model):
    """Refuses to be built: the weights beside it are random and scaled down."""


def _refuse() -> NoReturn:
    raise NotImplementedError("this checkpoint was made for a rehearsal; its weights are random and scaled down")
