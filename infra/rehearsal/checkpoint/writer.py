"""Writing a scaled checkpoint to a directory."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.rehearsal.checkpoint.documents import small_files
from infra.rehearsal.checkpoint.tensors import EXPERTS, LAYERS, Layout, Tensor

DEFAULT_SHARD_SCALE = 288
INDEX_NAME = "model.safetensors.index.json"

_BLOCK_BYTES = 4 * 1024 * 1024
# Clearing the second-highest bit of each byte keeps every F8, BF16 and F32 value finite.
_FINITE = bytes(value & 0xBF for value in range(256))


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a written checkpoint consists of."""

    directory: Path
    seed: int
    shards: int
    tensors: int
    tensor_bytes: int
    files: int
    total_bytes: int


def write_checkpoint(
    directory: Path,
    seed: int,
    *,
    shard_scale: int = DEFAULT_SHARD_SCALE,
    layers: int = LAYERS,
    experts: int = EXPERTS,
) -> CheckpointFacts:
    """Makes `directory` a scaled Kimi K2 checkpoint whose weights follow from `seed`.

    The directory appears whole or not at all (written beside it and renamed), so an existing one is taken as it is.

    Args:
        directory: Where the checkpoint goes; its parent is made if missing.
        seed: Source of the weights. Two seeds share no shard and no README.
        shard_scale: Divisor of every tensor dimension. The default gives MoE shards of about 0.5 MB, 64 gives 4 MB,
            16 gives 65 MB.
        layers: Layers, and so shards; fewer than 61 only for quick tests.
        experts: Routed experts a layer; fewer than 384 only for quick tests.

    Raises:
        FileExistsError: `directory` exists and was not written with these arguments.
    """
    layout = Layout(divisor=shard_scale, layers=layers, experts=experts)
    documents = small_files(seed=seed, divisor=shard_scale, layers=layers, experts=experts)
    shards = {layout.shard_name(number): layout.shard(number) for number in range(1, layout.shards + 1)}
    if not directory.exists():
        _write_and_rename(directory, seed, documents, shards)
    readme = directory / "README.md"
    if not readme.is_file() or readme.read_bytes() != documents["README.md"]:
        raise FileExistsError(f"{directory} exists and is not a checkpoint with seed {seed} and {layout}")
    return _facts(directory, seed, shards)


def _write_and_rename(directory: Path, seed: int, documents: dict[str, bytes], shards: dict[str, list[Tensor]]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name, tensors in shards.items():
            _write_file(partial / name, _shard_blocks(tensors, f"{seed}/{name}"))
        _write_file(partial / INDEX_NAME, iter([_index(shards)]))
        for name, content in documents.items():
            _write_file(partial / name, iter([content]))
        try:
            partial.rename(directory)
        except OSError:
            # Another process with the same arguments was faster; the caller checks what it left.
            if not directory.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_file(path: Path, blocks: Iterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(blocks)


def _shard_blocks(tensors: list[Tensor], seed: str) -> Iterator[bytes]:
    yield _header(tensors)
    left_bytes = sum(tensor.size_bytes for tensor in tensors)
    number = 0
    while left_bytes:
        block_bytes = min(left_bytes, _BLOCK_BYTES)
        yield hashlib.shake_128(f"{seed}/{number}".encode()).digest(block_bytes).translate(_FINITE)
        left_bytes -= block_bytes
        number += 1


def _header(tensors: list[Tensor]) -> bytes:
    """Safetensors header: its length as 8 bytes little-endian, then JSON filled with spaces to a multiple of 8."""
    entries = ['"__metadata__":{"format":"pt"}']
    start = 0
    for tensor in tensors:
        end = start + tensor.size_bytes
        shape = ",".join(map(str, tensor.shape))
        entries.append(f'"{tensor.name}":{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}')
        start = end
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(shards: dict[str, list[Tensor]]) -> bytes:
    total_bytes = sum(tensor.size_bytes for tensors in shards.values() for tensor in tensors)
    pairs = sorted((tensor.name, shard) for shard, tensors in shards.items() for tensor in tensors)
    # Written by hand: json.dumps with indent takes seconds for 139,644 entries.
    lines = ",\n".join(f'    "{name}": "{shard}"' for name, shard in pairs)
    head = f'{{\n  "metadata": {{\n    "total_size": {total_bytes}\n  }},\n  "weight_map": {{\n'
    return f"{head}{lines}\n  }}\n}}\n".encode()


def _facts(directory: Path, seed: int, shards: dict[str, list[Tensor]]) -> CheckpointFacts:
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return CheckpointFacts(
        directory=directory,
        seed=seed,
        shards=len(shards),
        tensors=sum(len(tensors) for tensors in shards.values()),
        tensor_bytes=sum(tensor.size_bytes for tensors in shards.values() for tensor in tensors),
        files=len(sizes),
        total_bytes=sum(sizes),
    )
