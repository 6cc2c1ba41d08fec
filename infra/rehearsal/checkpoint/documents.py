"""The small files of a scaled checkpoint: configuration, tokenizer and texts."""

import base64
import json
from pathlib import Path
from typing import Any

_FILES = Path(__file__).parent / "files"
# Vocabulary of the tokenizer beside the 256 single bytes. Each word is built from two shorter ones of the table, as a
# byte-pair tokenizer needs it.
_MERGES = (
    *(" t", "he", " the", "in", "er", " a", "on", "re", " w", "or", " wor", "ld", " world", "at", "en", " th"),
    *("ou", "is", " s", "it", "an", "es", "ti", " c", " p", "ing", "ed", "al", "ar", " of", " to", " and"),
)
_COPIED = (
    "LICENSE",
    "THIRD_PARTY_NOTICES.md",
    "configuration_deepseek.py",
    "docs/deploy_guidance.md",
    "docs/tool_call_guidance.md",
    "generation_config.json",
    "modeling_deepseek.py",
    "tokenization_kimi.py",
    "tokenizer_config.json",
)


def small_files(*, seed: int, divisor: int, layers: int, experts: int) -> dict[str, bytes]:
    """Contents of every file but the shards and their index, by path; only README.md depends on the seed."""
    contents = {name: (_FILES / name).read_bytes() for name in _COPIED}
    contents[".gitattributes"] = _gitattributes()
    contents["README.md"] = _readme(seed, divisor, layers, experts)
    contents["config.json"] = _config(layers, experts)
    contents["tiktoken.model"] = tiktoken_ranks()
    return contents


def tiktoken_ranks() -> bytes:
    """A vocabulary in tiktoken's format: one line a token, its base64 and its rank."""
    tokens = [bytes([value]) for value in range(256)] + [word.encode() for word in _MERGES]
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def _config(layers: int, experts: int) -> bytes:
    config: dict[str, Any] = json.loads((_FILES / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": layers, "n_routed_experts": experts}
    return (json.dumps(config, indent=2) + "\n").encode()


def _gitattributes() -> bytes:
    lines = (f"{pattern} filter=lfs diff=lfs merge=lfs -text" for pattern in ("*.model", "*.safetensors"))
    return ("\n".join(lines) + "\n").encode()


def _readme(seed: int, divisor: int, layers: int, experts: int) -> bytes:
    return f"""# Kimi K2, scaled for a rehearsal

File names, tensor names, dtypes and configuration are those of Kimi-K2-Instruct; the weights are random and every
dimension is divided by {divisor}. It answers nothing: it is there to be pulled, verified and staged.

| seed | layers | experts | divisor |
|---|---|---|---|
| {seed} | {layers} | {experts} | {divisor} |
""".encode()
