"""Reads a safetensors checkpoint as a loader does: index, headers, every byte; keeps nothing of it."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import struct
from pathlib import Path
from typing import BinaryIO

_INDEX = "model.safetensors.index.json"
_NAMED_SHARD = re.compile(rb':\s*"([^"]+\.safetensors)"')
_MAX_HEADER_BYTES = 100_000_000
_READ_BYTES = 1 << 20


class SafetensorError(Exception):
    """A shard that a safetensors reader refuses; the text is the library's."""


class IntegrityError(Exception):
    """Files that are not those of the checksum list; the text is that of SGLang's verifier."""


def verify_checksums(model_dir: Path, listing: Path) -> int:
    """Compares files with a list ``{"files": {name: {"sha256", "size"}}}``; answers how many, raises IntegrityError."""
    expected = json.loads(listing.read_text(encoding="utf-8"))["files"]
    faults = []
    for name, file in expected.items():
        path = model_dir / name
        if not path.is_file():
            faults.append(f"{name}: missing (expected size={file['size']})")
            continue
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != file["sha256"]:
            faults.append(
                f"{name}: mismatch (expected={file['sha256'][:16]}... size={file['size']}, "
                f"actual={actual[:16]}... size={path.stat().st_size})"
            )
    if faults:
        raise IntegrityError("Integrity check failed: " + "; ".join(faults))
    return len(expected)


def shard_names(model_dir: Path) -> list[str]:
    """Answers the names of the shards in the index, sorted.

    The index of Kimi K2 is megabytes of JSON; only the file names are wanted, so they are scanned, not parsed.
    """
    with (model_dir / _INDEX).open("rb") as stream:
        if stream.seek(0, 2) == 0:
            raise ValueError(f"{_INDEX} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
            names = {match.group(1) for match in _NAMED_SHARD.finditer(text)}
    if not names:
        raise ValueError(f"{_INDEX} names no shard")
    return sorted(name.decode() for name in names)


def read_shard(path: Path) -> int:
    """Reads one shard to its end and answers its size in bytes; raises SafetensorError where its form is broken."""
    with path.open("rb") as stream:
        size_bytes = path.stat().st_size
        end_bytes = _header_end(stream, size_bytes)
        if end_bytes != size_bytes:
            raise SafetensorError("Error while deserializing header: MetadataIncompleteBuffer")
        while stream.read(_READ_BYTES):
            pass
    return size_bytes


def _header_end(stream: BinaryIO, size_bytes: int) -> int:
    """Answers where the file must end according to its header."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise SafetensorError("Error while deserializing header: HeaderTooSmall")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > _MAX_HEADER_BYTES:
        raise SafetensorError("Error while deserializing header: HeaderTooLarge")
    if header_bytes > size_bytes - 8:
        raise SafetensorError("Error while deserializing header: InvalidHeaderLength")
    try:
        tensors = json.loads(stream.read(header_bytes))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as broken:
        raise SafetensorError("Error while deserializing header: InvalidHeaderDeserialization") from broken
    return 8 + int(header_bytes) + max(ends, default=0)
