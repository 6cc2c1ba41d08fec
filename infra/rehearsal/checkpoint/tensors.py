"""Names, types and shapes of the tensors of a Kimi K2 checkpoint, shard by shard."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

LAYERS = 61
EXPERTS = 384

_HIDDEN = 7168
_INTERMEDIATE = 18432
_MOE_INTERMEDIATE = 2048
_VOCABULARY = 163840
_HEADS = 64
_Q_LORA = 1536
_KV_LORA = 512
_QK_NOPE = 128
_QK_ROPE = 64
_V_HEAD = 128
# The published parameter count leaves room for exactly one tensor of 56 elements a layer: the rotary frequencies of
# a head of hidden / heads = 112.
_ROTARY_FREQUENCIES = _HIDDEN // _HEADS // 2
_QUANT_BLOCK = 128

_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a shard: its name, its safetensors dtype and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor in its shard."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tensors a checkpoint has and in which shard each one stands.

    `divisor` divides every dimension (never below 1); 1 gives the real sizes. A layer is a shard: the first also holds
    the embedding, the last the final norm and the head. Only layer 0 is dense.
    """

    divisor: int = 1
    layers: int = LAYERS
    experts: int = EXPERTS

    def __post_init__(self) -> None:
        if self.divisor < 1 or self.layers < 1 or self.experts < 1:
            raise ValueError(f"divisor, layers and experts must be at least 1: {self}")

    @property
    def shards(self) -> int:
        """Number of shard files."""
        return self.layers

    def shard_name(self, number: int) -> str:
        """File name of shard `number` (from 1), without zero padding as in the real repository."""
        return f"model-{number}-of-{self.shards}.safetensors"

    def shard(self, number: int) -> list[Tensor]:
        """Tensors of shard `number` (from 1) in the order of their bytes in the file."""
        layer = number - 1
        tensors = list(self._layer(layer))
        if layer == 0:
            tensors.append(self._plain("model.embed_tokens.weight", "BF16", _VOCABULARY, _HIDDEN))
        if number == self.shards:
            tensors.append(self._plain("model.norm.weight", "BF16", _HIDDEN))
            tensors.append(self._plain("lm_head.weight", "BF16", _VOCABULARY, _HIDDEN))
        # Wide elements first, so that every tensor starts at a multiple of its element size.
        return sorted(tensors, key=lambda tensor: (-tensor.element_bytes, tensor.name))

    def _layer(self, layer: int) -> Iterator[Tensor]:
        prefix = f"model.layers.{layer}."
        yield self._plain(f"{prefix}input_layernorm.weight", "BF16", _HIDDEN)
        yield self._plain(f"{prefix}post_attention_layernorm.weight", "BF16", _HIDDEN)
        yield from self._attention(f"{prefix}self_attn.")
        if layer == 0:
            yield from self._mlp(f"{prefix}mlp.", _INTERMEDIATE)
            return
        yield self._plain(f"{prefix}mlp.gate.weight", "BF16", self.experts, _HIDDEN)
        yield self._plain(f"{prefix}mlp.gate.e_score_correction_bias", "F32", self.experts)
        yield from self._mlp(f"{prefix}mlp.shared_experts.", _MOE_INTERMEDIATE)
        for expert in range(self.experts):
            yield from self._mlp(f"{prefix}mlp.experts.{expert}.", _MOE_INTERMEDIATE)

    def _attention(self, prefix: str) -> Iterator[Tensor]:
        yield from self._quantized(f"{prefix}q_a_proj", _Q_LORA, _HIDDEN)
        yield self._plain(f"{prefix}q_a_layernorm.weight", "BF16", _Q_LORA)
        yield from self._quantized(f"{prefix}q_b_proj", _HEADS * (_QK_NOPE + _QK_ROPE), _Q_LORA)
        yield from self._quantized(f"{prefix}kv_a_proj_with_mqa", _KV_LORA + _QK_ROPE, _HIDDEN)
        yield self._plain(f"{prefix}kv_a_layernorm.weight", "BF16", _KV_LORA)
        yield from self._quantized(f"{prefix}kv_b_proj", _HEADS * (_QK_NOPE + _V_HEAD), _KV_LORA)
        yield from self._quantized(f"{prefix}o_proj", _HIDDEN, _HEADS * _V_HEAD)
        yield self._plain(f"{prefix}rotary_emb.inv_freq", "BF16", _ROTARY_FREQUENCIES)

    def _mlp(self, prefix: str, width: int) -> Iterator[Tensor]:
        yield from self._quantized(f"{prefix}gate_proj", width, _HIDDEN)
        yield from self._quantized(f"{prefix}up_proj", width, _HIDDEN)
        yield from self._quantized(f"{prefix}down_proj", _HIDDEN, width)

    def _quantized(self, name: str, *shape: int) -> Iterator[Tensor]:
        scaled = self._scaled(shape)
        blocks = tuple(math.ceil(dimension / _QUANT_BLOCK) for dimension in scaled)
        yield Tensor(f"{name}.weight", "F8_E4M3", scaled)
        yield Tensor(f"{name}.weight_scale_inv", "F32", blocks)

    def _plain(self, name: str, dtype: str, *shape: int) -> Tensor:
        return Tensor(name, dtype, self._scaled(shape))

    def _scaled(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, dimension // self.divisor) for dimension in shape)
