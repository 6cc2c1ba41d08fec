"""Safetensors as far as a header tells it: which tensors a shard holds, and whether index, headers and sizes agree.

The format (github.com/safetensors/safetensors, README): 8 bytes little-endian N, N bytes of JSON, then the tensors'
bytes without a hole. What its own reader refuses is refused here, from the header alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tasks.core.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
HEADER_MAX_BYTES = 100_000_000
"""What the format's own reader takes at most."""
_SHOWN_CHARACTERS, _SHOWN_NAMES = 100, 3
_COUNTS = 2**64
_METADATA = "__metadata__"
_DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself: the names of its tensors and the bytes of all of them."""

    path: str
    names: frozenset[str]
    data_bytes: int


@dataclass(frozen=True)
class ShardIndex:
    """What an index says: the shard of each tensor, by a name beside the index, and the bytes of all if it tells."""

    path: str
    weight_map: Mapping[str, str]
    total_bytes: int | None

    @cached_property
    def names_by_shard(self) -> Mapping[str, frozenset[str]]:
        """The tensors of each shard."""
        names: dict[str, set[str]] = {}
        for name, shard in self.weight_map.items():
            names.setdefault(shard, set()).add(name)
        return {shard: frozenset(of) for shard, of in names.items()}


def header_bytes(path: str, size_bytes: int, start: bytes) -> int:
    """Return the length of a shard's JSON header, from the shard's first bytes.

    Raises:
        InputError: the shard is no safetensors file of that size.
    """
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    room = size_bytes - LENGTH_BYTES
    if room < 0 or not 2 <= length <= min(room, HEADER_MAX_BYTES):
        raise _wrong(
            path,
            "has no header of a possible length",
            f"{length} bytes of header in a file of {size_bytes}",
            f"2 to {max(min(room, HEADER_MAX_BYTES), 2)} bytes",
        )
    return length


def parse_header(path: str, size_bytes: int, header: bytes) -> ShardHeader:
    """Return what a shard's JSON header says, after the checks that need nothing else.

    Each tensor's extent follows the one before, is as long as its dtype and shape say, and the last one ends where the
    file does. Of a dtype that is not known here only the extent is checked.

    Args:
        path: the shard, for messages.
        size_bytes: the size of the file.
        header: the JSON, without the 8 bytes before it.

    Raises:
        InputError: any of that does not hold; names the shard, what is there and what should be (K2-INP-004).
    """
    if not header.startswith(b"{"):
        raise _wrong(path, "has a header that is no object", repr(header[:8]), "a JSON object")
    tensors = _object(path, "header", header)
    _check_metadata(path, tensors.pop(_METADATA, None))
    extents = sorted((*_extent(path, name, tensor), name) for name, tensor in tensors.items())
    end = 0
    for start, stop, name in extents:
        if start != end:
            what = f"has a hole or an overlap before tensor {_shown(name)}"
            raise _wrong(path, what, f"offset {start}", f"offset {end}")
        end = stop
    told = LENGTH_BYTES + len(header) + end
    if told != size_bytes:
        raise _wrong(path, "is not as long as its header says", f"a file of {size_bytes} bytes", f"{told} bytes")
    return ShardHeader(path, frozenset(tensors), end)


def parse_index(path: str, data: bytes) -> ShardIndex:
    """Return what an index says; InputError (K2-INP-004) if it is none."""
    index = _object(path, "index", data)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise _wrong(path, "has no weight_map", type(weight_map).__name__, "tensor names to shard names")
    total = metadata.get("total_size") if isinstance(metadata, dict) else metadata
    if total is not None and not _is_count(total):
        raise _wrong(path, "states no usable total_size", repr(total), "a number of bytes, or none")
    return ShardIndex(path, weight_map, total)


def check_shards(paths: Iterable[str], indexes: Mapping[str, ShardIndex]) -> None:
    """Check that each index names exactly the shards that stand beside it, and that the top directory can be loaded.

    A single shard needs no index. Shards below the top that have none are left alone: no engine loads them.

    Args:
        paths: every shard of the checkpoint.
        indexes: the index of each directory that has one; the top directory is "".

    Raises:
        InputError: an index and the shards disagree, or there is no way to tell which shards belong together.
    """
    shards: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        shards.setdefault(folder, set()).add(name)
    if "" not in shards:
        raise InputError("K2-INP-004", "The revision has no shard in its top directory.", where=INDEX_FILE)
    if "" not in indexes and len(shards[""]) > 1:
        raise InputError(
            "K2-INP-004", "The revision has no index of its shards.", where=INDEX_FILE, got=f"{len(shards[''])} shards"
        )
    for folder, index in indexes.items():
        named, there = set(index.weight_map.values()), shards.get(folder, set())
        if named != there:
            raise InputError(
                "K2-INP-004",
                "The index and the list of shards disagree.",
                where=index.path,
                got=f"{len(there)} shards, without tensors: {_some(there - named)}",
                expected=f"{len(named)} shards, missing: {_some(named - there)}",
            )


def check_names(header: ShardHeader, index: ShardIndex) -> None:
    """Check that a shard holds exactly the tensors that the index beside it says.

    Raises:
        InputError: a tensor stands in another shard than the index says, in none, or is not in the index.
    """
    # A name that stands in two headers is in one of them against the index, which names each tensor once.
    expected = index.names_by_shard.get(header.path.rpartition("/")[2], frozenset())
    if header.names != expected:
        raise _wrong(
            header.path,
            f"does not hold the tensors that {index.path} says",
            f"{len(header.names)} tensors, not in the index: {_some(header.names - expected)}",
            f"{len(expected)} tensors, missing: {_some(expected - header.names)}",
        )


def check_total(headers: Iterable[ShardHeader], index: ShardIndex) -> None:
    """Check that the tensors of all shards have the bytes that their index states, if it does.

    Raises:
        InputError: they have more or fewer.
    """
    told, there = index.total_bytes, sum(header.data_bytes for header in headers)
    if told is not None and told != there:
        raise InputError(
            "K2-INP-004",
            "The index states another total_size than the shards' tensors have.",
            where=index.path,
            got=f"{there} bytes of tensors",
            expected=f"{told} bytes (total_size)",
            hint="the shards themselves are whole: if the owner of the checkpoint says that only this figure is wrong, "
            "k2ctl lock REPO --revision R --ignore-total-size accepts it once, for every later release of the revision",
        )


def _check_metadata(path: str, metadata: Any) -> None:
    if metadata is not None and (
        not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values())
    ):
        raise _wrong(path, "has metadata of another form", type(metadata).__name__, "texts to texts")


def _extent(path: str, name: str, tensor: Any) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end, after a comparison with its dtype and shape."""
    try:
        dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        well_formed = isinstance(dtype, str) and isinstance(shape, list) and all(map(_is_count, (*shape, start, stop)))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed or start > stop:
        what = f"describes tensor {_shown(name)} in another form"
        raise _wrong(path, what, _shown(tensor), "dtype, shape and two data_offsets")
    bits = _DTYPE_BITS.get(dtype)
    if bits is not None and _elements(shape) * bits != (stop - start) * 8:
        what = f"gives tensor {_shown(name)} another length than its dtype and shape"
        raise _wrong(
            path, what, f"{stop - start} bytes", f"{_elements(shape) * bits / 8:g} bytes: {dtype} {_shown(shape)}"
        )
    return start, stop


def _elements(shape: Sequence[int]) -> int:
    """Return the product of a shape, or of its beginning where that is more than any file has."""
    product = 1
    for dimension in shape:
        product *= dimension
        if product >= _COUNTS:
            break
    return product


def _object(path: str, what: str, data: bytes) -> dict[str, Any]:
    """Return a JSON object in which no key stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise _wrong(path, f"has an entry twice in its {what}", _shown(twice), "each name once")
        return made

    try:
        found = json.loads(data.decode(), object_pairs_hook=unique)
        if b"\\ud" in data.lower():
            # Half of a pair of surrogates is no text, though Python takes it for one.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"has a {what} that cannot be read", type(error).__name__, "a JSON object") from error
    if not isinstance(found, dict):
        raise _wrong(path, f"has a {what} that is no object", type(found).__name__, "a JSON object")
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNTS


def _wrong(path: str, what: str, got: str, expected: str) -> InputError:
    return InputError("K2-INP-004", f"A file of the checkpoint {what}.", where=path, got=got, expected=expected)


def _shown(value: Any) -> str:
    """Return a value as one can print and store it, whatever its characters, and not all of it if it is long."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _some(names: Collection[str]) -> str:
    shown = ", ".join(map(_shown, sorted(names)[:_SHOWN_NAMES]))
    return (f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown) or "none"
