import json
import math
import re
import runpy
import struct
from pathlib import Path

import pytest

from infra.rehearsal.checkpoint import INDEX_NAME, Layout, write_checkpoint

# Published facts of moonshotai/Kimi-K2-Instruct.
TENSORS = 139_644
PARAMETERS = 1_026_470_731_056
TENSOR_BYTES = 1_029_173_256_720


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("full") / "checkpoint", seed=1)


def small(directory: Path, seed: int):
    return write_checkpoint(directory, seed, layers=3, experts=4)


def read_header(path: Path) -> tuple[dict, int]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    return json.loads(content[8 : 8 + length]), len(content) - 8 - length


def test_unscaled_layout_has_the_published_tensors_parameters_and_bytes():
    layout = Layout()
    tensors = [tensor for number in range(1, 62) for tensor in layout.shard(number)]
    assert len(tensors) == TENSORS
    assert len({tensor.name for tensor in tensors}) == TENSORS
    assert sum(math.prod(tensor.shape) for tensor in tensors) == PARAMETERS
    assert sum(tensor.size_bytes for tensor in tensors) == TENSOR_BYTES


def test_full_checkpoint_has_61_shards_and_all_tensors_in_about_40_mb(full):
    assert (full.shards, full.tensors) == (61, TENSORS)
    assert 35e6 < full.total_bytes < 50e6
    assert 0.45e6 < (full.directory / "model-7-of-61.safetensors").stat().st_size < 0.8e6
    names = {path.name for path in full.directory.glob("*.safetensors")}
    assert names == {f"model-{number}-of-61.safetensors" for number in range(1, 62)}


def test_headers_are_valid_and_agree_with_the_index(full):
    index = json.loads((full.directory / INDEX_NAME).read_text())
    from_headers: dict[str, str] = {}
    total_bytes = 0
    for path in full.directory.glob("*.safetensors"):
        header, data_bytes = read_header(path)
        assert header.pop("__metadata__") == {"format": "pt"}
        end = 0
        for name, tensor in header.items():
            start, stop = tensor["data_offsets"]
            element_bytes = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[tensor["dtype"]]
            assert start == end
            assert start % element_bytes == 0
            assert stop - start == math.prod(tensor["shape"]) * element_bytes
            from_headers[name] = path.name
            end = stop
        assert end == data_bytes
        total_bytes += data_bytes
    assert from_headers == index["weight_map"]
    assert index["metadata"]["total_size"] == total_bytes == full.tensor_bytes


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("model.embed_tokens.weight", 1),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", 1),
        ("model.layers.1.mlp.gate.e_score_correction_bias", 2),
        ("model.layers.30.self_attn.kv_a_proj_with_mqa.weight", 31),
        ("model.layers.60.mlp.experts.383.up_proj.weight", 61),
        ("model.layers.60.mlp.shared_experts.gate_proj.weight", 61),
        ("model.norm.weight", 61),
        ("lm_head.weight", 61),
    ],
)
def test_tensors_stand_in_the_shard_of_their_layer(full, name, shard):
    index = json.loads((full.directory / INDEX_NAME).read_text())
    assert index["weight_map"][name] == f"model-{shard}-of-61.safetensors"


def test_config_keeps_the_real_architecture(full):
    config = json.loads((full.directory / "config.json").read_text())
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["num_hidden_layers"], config["n_routed_experts"], config["hidden_size"]) == (61, 384, 7168)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["rope_scaling"]["type"] == "yarn"


def test_every_small_file_is_there(full):
    files = {path.relative_to(full.directory).as_posix() for path in full.directory.rglob("*") if path.is_file()}
    assert {path for path in files if not path.endswith(".safetensors")} == {
        ".gitattributes",
        "LICENSE",
        "README.md",
        "THIRD_PARTY_NOTICES.md",
        "config.json",
        "configuration_deepseek.py",
        "docs/deploy_guidance.md",
        "docs/tool_call_guidance.md",
        "generation_config.json",
        "model.safetensors.index.json",
        "modeling_deepseek.py",
        "tiktoken.model",
        "tokenization_kimi.py",
        "tokenizer_config.json",
    }
    assert len(files) == full.files


def test_tokenizer_reads_its_vocabulary_and_round_trips(full):
    lines = (full.directory / "tiktoken.model").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9+/]+=* \d+", line) for line in lines)
    tokenizer = runpy.run_path(str(full.directory / "tokenization_kimi.py"))["TikTokenTokenizer"](
        str(full.directory / "tiktoken.model")
    )
    tokens = tokenizer.encode("to the world, 世界")
    assert tokenizer.decode(tokens) == "to the world, 世界"
    assert len(tokens) < len("to the world, 世界".encode())


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_same_seed_gives_same_bytes_and_another_seed_differs_in_every_shard_and_readme(tmp_path):
    first, again, other = (
        contents(small(tmp_path / name, seed).directory) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    differing = {path for path in first if first[path] != other[path]}
    assert differing == {"README.md", *(f"model-{number}-of-3.safetensors" for number in (1, 2, 3))}


def test_weights_are_finite(tmp_path):
    facts = small(tmp_path / "a", 1)
    for path in facts.directory.glob("*.safetensors"):
        header, data_bytes = read_header(path)
        data = path.read_bytes()[-data_bytes:]
        del header["__metadata__"]
        for tensor in header.values():
            start, stop = tensor["data_offsets"]
            if tensor["dtype"] == "F32":
                values = struct.unpack(f"<{(stop - start) // 4}f", data[start:stop])
                assert all(map(math.isfinite, values))
            elif tensor["dtype"] == "F8_E4M3":
                assert not {0x7F, 0xFF} & set(data[start:stop])


def test_existing_checkpoint_is_kept_and_a_different_one_refused(tmp_path):
    facts = small(tmp_path / "a", 1)
    before = (facts.directory / "model-1-of-3.safetensors").stat()
    assert small(tmp_path / "a", 1) == facts
    assert (facts.directory / "model-1-of-3.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(FileExistsError, match="seed 2"):
        small(tmp_path / "a", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_smaller_divisor_gives_bigger_shards(tmp_path):
    default = small(tmp_path / "a", 1)
    bigger = write_checkpoint(tmp_path / "b", 1, shard_scale=32, layers=3, experts=4)
    assert bigger.tensors == default.tensors
    assert bigger.tensor_bytes > 50 * default.tensor_bytes
