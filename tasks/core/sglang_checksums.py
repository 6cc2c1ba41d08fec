"""A lock as SGLang's own checksum list, so that the engine itself can compare what it loads (`--model-checksum FILE`).

The form is what `python -m sglang.srt.utils.model_file_verifier generate` of sglang 0.5.23 writes of the staged
directory (srt/utils/model_file_verifier.py in that wheel): files of its top level, no names that begin with a dot, and
none of those that it leaves out. The engine then compares the listed files and no others; that is why this is no
substitute for a stager that compares all. An older form, `{"checksums": {name: sha256}}`, is deprecated there.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from tasks.core.lock import Lock

_LEFT_OUT = ("*.lock", "LICENSE", "LICENSE.*", "README.md", "README.*", "NOTICE")


def sglang_checksums(lock: Lock) -> bytes:
    """Return the list, byte for byte as SGLang writes it."""
    files = {file.path: {"sha256": file.sha256, "size": file.size_bytes} for file in lock.files if _listed(file.path)}
    return json.dumps({"files": files}, indent=2, sort_keys=True).encode()


def _listed(path: str) -> bool:
    return "/" not in path and not path.startswith(".") and not any(fnmatchcase(path, name) for name in _LEFT_OUT)
