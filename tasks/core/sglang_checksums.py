"""A lock as SGLang's own checksum list, so that the engine itself can compare what it loads (`--model-checksum FILE`).

The form is that of `python -m sglang.srt.utils.model_file_verifier generate` on the staged directory
(sgl-project/sglang@048683f, python/sglang/srt/utils/model_file_verifier.py): files of the top directory only, no names
that begin with a dot, none of the names that it leaves out. The engine compares the listed files and no others.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from tasks.core.lock import Lock

_LEFT_OUT = (
    *("checksums.json", "*.lock", ".gitattributes", ".DS_Store"),
    *("LICENSE", "LICENSE.*", "README.md", "README.*", "NOTICE"),
)


def sglang_checksums(lock: Lock) -> bytes:
    """Return the list, byte for byte as SGLang writes it."""
    listed = {file.path: file.sha256 for file in lock.files if _is_listed(file.path)}
    return json.dumps({"checksums": listed}, indent=2, sort_keys=True).encode()


def _is_listed(path: str) -> bool:
    return "/" not in path and not path.startswith(".") and not any(fnmatchcase(path, name) for name in _LEFT_OUT)
