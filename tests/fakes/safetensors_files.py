"""Safetensors files for tests, made without any library: shards, and an index over them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence

Shapes = Mapping[str, tuple[str, Sequence[int]]]

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
INDEX = "model.safetensors.index.json"


def header(tensors: Shapes) -> tuple[dict[str, dict[str, object]], int]:
    """Return the entries of a header with tensors one behind the other, and the bytes of all."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return entries, end


def framed(text: bytes, data: bytes) -> bytes:
    """Return a file of a header's text and the data behind it."""
    return len(text).to_bytes(8, "little") + text + data


def shard(tensors: Shapes, seed: str = "") -> bytes:
    """Return a shard with these tensors, of random content."""
    entries, size = header(tensors)
    return framed(json.dumps(entries).encode(), random.Random(seed).randbytes(size))


def sharded(count: int, pattern: str = "model-{n:05}-of-{count:06}.safetensors", seed: str = "") -> dict[str, bytes]:
    """Return `count` shards of three tensors each and their index: the files of a checkpoint that can be loaded."""
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for n in range(1, count + 1):
        path = pattern.format(n=n, count=count)
        tensors = {
            f"layers.{n}.qweight": ("I32", (8, n + 1)),
            f"layers.{n}.scale": ("BF16", (8,)),
            f"layers.{n}.fp8": ("F8_E4M3", (3, 5)),
        }
        files[path] = shard(tensors, f"{seed} {path}")
        weight_map |= dict.fromkeys(tensors, path)
        total += header(tensors)[1]
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return files | {INDEX: json.dumps(index).encode()}
