"""A scaled Kimi K2 checkpoint: real names and configuration, tiny random weights."""

from infra.rehearsal.checkpoint.tensors import EXPERTS, LAYERS, Layout, Tensor
from infra.rehearsal.checkpoint.writer import DEFAULT_SHARD_SCALE, INDEX_NAME, CheckpointFacts, write_checkpoint

__all__ = [
    "DEFAULT_SHARD_SCALE",
    "EXPERTS",
    "INDEX_NAME",
    "LAYERS",
    "CheckpointFacts",
    "Layout",
    "Tensor",
    "write_checkpoint",
]
