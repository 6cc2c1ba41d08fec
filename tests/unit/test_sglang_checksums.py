"""The checksum list for SGLang, against a reader and a writer that do what its 0.5.23 does.

srt/utils/model_file_verifier.py of the wheel: `_discover_files` lists, `_compute_manifest_from_folder` hashes,
`generate_checksums` writes, `verify` and `_compare_manifests` compare the listed names below the model's directory.
"""

import fnmatch
import hashlib
import json

import pytest

from infra.rehearsal.engine.checkpoint import IntegrityError, verify_checksums
from tasks.core.sglang_checksums import sglang_checksums
from tests.fakes.checkpoints import contents, lock_of

LEFT_OUT = [".DS_Store", "*.lock", ".gitattributes", "LICENSE", "LICENSE.*", "README.md", "README.*", "NOTICE"]
FILES = contents(2, 1000) | {
    "LICENSE": b"MIT", "LICENSE.md": b"MIT", "LICENSE-CODE": b"MIT", "README.md": b"#", "README.zh.md": b"#",
    "NOTICE": b"", "THIRD_PARTY_NOTICES.md": b"", ".gitattributes": b"", ".hidden": b"", "pip.lock": b"",
    "docs/README.md": b"",
    "tiktoken.model": b"aGk= 1\n", "tokenization_kimi.py": b"pass\n", "checksums.json": b"{}", "é.txt": b"",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    for path, data in FILES.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    return tmp_path / "model"


def generated(model):
    """Return what SGLang's `generate` writes of a directory."""
    names = sorted(
        entry.name
        for entry in model.iterdir()
        if entry.is_file()
        and not entry.name.startswith(".")
        and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in LEFT_OUT)
    )
    files = {
        name: {
            "sha256": hashlib.sha256((model / name).read_bytes()).hexdigest(),
            "size": (model / name).stat().st_size,
        }
        for name in names
    }
    return json.dumps({"files": files}, indent=2, sort_keys=True)


def test_the_list_is_byte_for_byte_what_sglang_writes_of_the_same_directory(model):
    assert sglang_checksums(lock_of(FILES)).decode() == generated(model)


def test_everything_that_an_engine_loads_or_runs_is_on_the_list():
    listed = json.loads(sglang_checksums(lock_of(FILES)))["files"]
    assert {"config.json", "tiktoken.model", "tokenization_kimi.py", "model-1-of-2.safetensors"} < set(listed)
    assert not {"LICENSE", "README.zh.md", "pip.lock", ".hidden", "docs/README.md"} & set(listed)


def test_an_engine_with_the_list_refuses_what_is_not_the_locks(model, tmp_path):
    listing = tmp_path / "sglang.json"
    listing.write_bytes(sglang_checksums(lock_of(FILES)))
    assert verify_checksums(model, listing) == len(json.loads(listing.read_bytes())["files"])
    (model / "model-1-of-2.safetensors").write_bytes(b"\0" * 1001)
    (model / "config.json").unlink()
    with pytest.raises(IntegrityError, match=r"config\.json: missing") as caught:
        verify_checksums(model, listing)
    assert "model-1-of-2.safetensors: mismatch" in str(caught.value)
