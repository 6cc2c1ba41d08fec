"""Headers, index and sizes of safetensors shards; where the format's own reader has a say, it is asked."""

import json
import math

import pytest
import safetensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasks.core.errors import InputError
from tasks.core.safetensors import (
    HEADER_MAX_BYTES,
    ShardHeader,
    ShardIndex,
    check_names,
    check_shards,
    check_total,
    header_bytes,
    parse_header,
    parse_index,
)
from tests.fakes.safetensors_files import BITS, INDEX, framed, header, shard, sharded

NAME = "model-1-of-1.safetensors"
GOOD = {"a": ("BF16", (2, 3)), "b": ("F8_E4M3", (5,)), "c": ("I32", ()), "d": ("F32", (0, 7)), "e": ("F4", (2, 3))}


def read(data, size=None):
    """Return what is told of a file from its first bytes, as it is done over the wire."""
    size = len(data) if size is None else size
    return parse_header(NAME, size, data[8 : 8 + header_bytes(NAME, size, data[:16])])


def refusal(data, size=None):
    with pytest.raises(InputError) as caught:
        read(data, size)
    assert (caught.value.code, caught.value.where) == ("K2-INP-004", NAME)
    assert caught.value.got and caught.value.expected
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def reader_takes(data):
    """Return whether the format's own reader takes a file."""
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def changed(**changes):
    """Return a file of GOOD whose header was changed: a name to its new entry, or None to take it away."""
    entries, size = header(GOOD)
    entries = {name: entry for name, entry in {**entries, **changes}.items() if entry is not None}
    return framed(json.dumps(entries).encode(), bytes(size))


def test_a_header_tells_names_and_bytes():
    assert read(shard(GOOD)) == ShardHeader(NAME, frozenset("abcde"), 12 + 5 + 4 + 0 + 3)


def test_metadata_and_padding_are_part_of_the_format():
    entries, size = header(GOOD)
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    data = framed(text + b" " * (-len(text) % 8), bytes(size))
    assert reader_takes(data)
    assert read(data).names == frozenset("abcde")


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format_has_its_length(dtype):
    right = shard({"t": (dtype, (4, 2))})
    assert reader_takes(right)
    assert read(right).data_bytes == 8 * BITS[dtype] // 8
    entries, size = header({"t": (dtype, (4, 2))})
    entries["t"]["shape"] = [4, 4]
    wrong = framed(json.dumps(entries).encode(), bytes(size))
    assert not reader_takes(wrong)
    assert "another length than its dtype and shape" in refusal(wrong)


def test_of_an_unknown_dtype_the_extent_alone_is_checked():
    entry = {"dtype": "F2_NEW", "shape": [99], "data_offsets": [0, 4]}
    assert read(framed(json.dumps({"t": entry}).encode(), bytes(4))).data_bytes == 4
    assert "is not as long as its header says" in refusal(framed(json.dumps({"t": entry}).encode(), bytes(5)))


A = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
WRONG = {
    "no JSON": framed(b"not json", b""),
    "empty": b"",
    "short": b"\x08\0\0\0",
    "no header": framed(b"", b""),
    "cut header": shard(GOOD)[:40],
    "a header longer than the file": (10**6).to_bytes(8, "little") + shard(GOOD)[8:],
    "an endless header": (2**63).to_bytes(8, "little") + shard(GOOD)[8:],
    "not UTF-8": framed(b'{"\xff\xfe": 1}', b""),
    "a list": framed(b"[]", b""),
    "a number": framed(b"1 ", b""),
    "cut data": shard(GOOD)[:-1],
    "long data": shard(GOOD) + b"\0",
    "zero-filled": bytes(len(shard(GOOD))),
    "a hole": changed(b=None),
    "a hole at the front": changed(a=None),
    "an overlap": changed(b={"dtype": "F8_E4M3", "shape": [6], "data_offsets": [11, 17]}),
    "backwards": changed(a={"dtype": "BF16", "shape": [2, 3], "data_offsets": [12, 0]}),
    "negative": changed(a={"dtype": "BF16", "shape": [2, 3], "data_offsets": [-12, 0]}),
    "no dtype": changed(a={"shape": [2, 3], "data_offsets": [0, 12]}),
    "no shape": changed(a={"dtype": "BF16", "data_offsets": [0, 12]}),
    "no offsets": changed(a={"dtype": "BF16", "shape": [2, 3]}),
    "three offsets": changed(a={**A, "data_offsets": [0, 6, 12]}),
    "an offset in words": changed(a={**A, "data_offsets": [0, "12"]}),
    "a half offset": changed(a={**A, "data_offsets": [0, 12.5]}),
    "a shape in words": changed(a={**A, "shape": "23"}),
    "a shape with names": changed(a={**A, "shape": {}}),
    "a negative shape": changed(a={**A, "shape": [-2, -3]}),
    "a shape beyond all files": changed(a={**A, "shape": [2**40, 2**40, 0]}),
    "a true shape": changed(a={**A, "shape": [True, 6]}),
    "a tensor that is a list": changed(a=[1]),
    "a tensor that is nothing": framed(b'{"a": null}', b""),
    "metadata that is a number": framed(b'{"__metadata__": 3}', b""),
    "metadata with a number": framed(b'{"__metadata__": {"a": 3}}', b""),
    "deep": framed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b""),
    "not a number": framed(b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 0]}}', b""),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_the_formats_own_reader_refuses_is_refused(what):
    data = WRONG[what]
    assert not reader_takes(data)
    refusal(data)


STRICTER = {
    "a name twice": framed(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
                           b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
    "space before the brace": framed(b' {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
}  # fmt: skip


@pytest.mark.parametrize("what", STRICTER)
def test_where_we_are_stricter_than_the_reader_its_documentation_is_too(what):
    """README of the format: duplicate keys are disallowed, not all parsers respect this; a header begins with `{`."""
    assert reader_takes(STRICTER[what])
    refusal(STRICTER[what])


TENSORS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@settings(max_examples=150)
@given(TENSORS, st.data())
def test_a_damaged_header_gets_the_verdict_of_the_formats_own_reader(tensors, dice):
    assume(all(math.prod(shape) * BITS[dtype] % 8 == 0 for dtype, shape in tensors.values()))
    data = bytearray(shard(tensors))
    assert reader_takes(bytes(data))
    assert read(bytes(data)).names == frozenset(tensors)
    place = dice.draw(st.integers(0, len(data) - 1))
    data[place] ^= 1 << dice.draw(st.integers(0, 7))
    try:
        read(bytes(data))
        ours = True
    except InputError:
        ours = False
    theirs = reader_takes(bytes(data))
    # Never laxer, but for a dtype that it does not know.
    assert theirs or not ours or any(entry["dtype"] not in BITS for entry in _entries(bytes(data)))


def _entries(data):
    length = int.from_bytes(data[:8], "little")
    return [value for name, value in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"]


def test_a_header_of_a_layer_with_384_experts_is_read_and_a_longer_one_than_the_format_has_is_not():
    tensors = {
        f"model.layers.1.mlp.experts.{n}.{part}.weight": ("F8_E4M3", (2, 2)) for n in range(384) for part in "abc"
    }
    assert len(read(shard(tensors)).names) == 1152
    size = HEADER_MAX_BYTES + 100
    assert header_bytes(NAME, size, HEADER_MAX_BYTES.to_bytes(8, "little")) == HEADER_MAX_BYTES
    with pytest.raises(InputError):
        header_bytes(NAME, size, (HEADER_MAX_BYTES + 1).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "data",
    [
        b"not json", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"t": 3}}', b"\xff\xfe",
        b'{"weight_map": {"t": "a", "t": "b"}}', b'{"weight_map": {}, "weight_map": {}}',
        b'{"metadata": {"total_size": "800"}, "weight_map": {}}', b'{"metadata": {"total_size": -1}, "weight_map": {}}',
        b'{"metadata": 800, "weight_map": []}',
    ],
)  # fmt: skip
def test_what_is_no_index_is_refused(data):
    with pytest.raises(InputError) as caught:
        parse_index(INDEX, data)
    assert (caught.value.code, caught.value.where) == ("K2-INP-004", INDEX)


@pytest.mark.parametrize(
    ("data", "total"),
    [
        (b'{"weight_map": {"t": "s"}}', None),
        (b'{"metadata": {}, "weight_map": {"t": "s"}}', None),
        (b'{"metadata": null, "weight_map": {"t": "s"}}', None),
        (b'{"metadata": {"total_size": 800, "total_parameters": 4}, "weight_map": {"t": "s"}}', 800),
    ],
)
def test_an_index_need_not_state_a_total(data, total):
    assert parse_index(INDEX, data) == ShardIndex(INDEX, {"t": "s"}, total)


def index(*shards, path=INDEX):
    return ShardIndex(path, {f"t{number}": name for number, name in enumerate(shards)}, None)


@pytest.mark.parametrize(
    ("paths", "indexes"),
    [
        (["model.safetensors"], {}),
        (["whatever.safetensors"], {}),
        (["a.safetensors", "b.safetensors"], {"": index("a.safetensors", "b.safetensors")}),
        (["a.safetensors", "extra/x.safetensors", "extra/y.safetensors"], {}),
        (["a.safetensors", "eagle/a.safetensors"], {"": index("a.safetensors"), "eagle": index("a.safetensors")}),
    ],
)
def test_shards_that_belong_together(paths, indexes):
    check_shards(paths, indexes)


@pytest.mark.parametrize(
    ("paths", "indexes", "words"),
    [
        (["a.safetensors", "b.safetensors"], {}, "no index"),
        (["extra/a.safetensors"], {}, "no shard in its top directory"),
        (["a.safetensors"], {"": index("a.safetensors", "b.safetensors")}, "missing: b.safetensors"),
        (["a.safetensors", "b.safetensors"], {"": index("a.safetensors")}, "without tensors: b.safetensors"),
        (["a.safetensors"], {"": index("../a.safetensors")}, "missing: ../a.safetensors"),
        (["a.safetensors"], {"": index("A.safetensors")}, "missing: A.safetensors"),
        (["a.safetensors", "e/a.safetensors"], {"": index("a.safetensors"), "e": index("b.safetensors")}, "missing: b"),
        (["a.safetensors"], {"": index("x\n.safetensors")}, 'missing: "x\\n.safetensors"'),
    ],
)
def test_shards_and_index_that_disagree(paths, indexes, words):
    with pytest.raises(InputError) as caught:
        check_shards(paths, indexes)
    assert caught.value.code == "K2-INP-004"
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def check_headers(headers, index):
    for one in headers:
        check_names(one, index)
    check_total(headers, index)


def parsed(files):
    headers = [
        parse_header(p, len(d), d[8 : 8 + header_bytes(p, len(d), d[:8])]) for p, d in files.items() if p != INDEX
    ]
    return headers, parse_index(INDEX, files[INDEX])


@pytest.mark.parametrize("count", [1, 2, 61, 62, 64])
@pytest.mark.parametrize("pattern", ["model-{n}-of-{count}.safetensors", "model-{n:05}-of-{count:06}.safetensors"])
def test_any_number_of_shards_padded_or_not_of_any_dtype(count, pattern):
    check_headers(*parsed(sharded(count, pattern)))


def test_tensors_that_are_not_where_the_index_says_are_named_with_their_shard():
    files = sharded(3)
    first, second, _ = sorted(path for path in files if path != INDEX)
    swapped = {**files, first: files[second], second: files[first]}
    with pytest.raises(InputError) as caught:
        check_headers(*parsed(swapped))
    assert caught.value.where == first
    assert "layers.2.qweight" in caught.value.got or "layers.2.fp8" in caught.value.got
    assert "layers.1.fp8" in caught.value.expected


@pytest.mark.parametrize("which", ["not in the index", "not in the shard", "in two shards"])
def test_a_tensor_that_stands_on_one_side_only_is_named(which):
    files = sharded(2)
    first, second = sorted(path for path in files if path != INDEX)
    data = json.loads(files[INDEX])
    if which == "not in the index":
        del data["weight_map"]["layers.1.scale"]
    elif which == "not in the shard":
        data["weight_map"]["mtp.fc.weight"] = first
    else:
        files[second] = shard({"layers.1.scale": ("BF16", (8,)), **{f"layers.2.{n}": ("U8", (1,)) for n in "qsf"}})
        data["weight_map"] |= {f"layers.2.{n}": second for n in "qsf"}
        data["weight_map"] = {
            k: v for k, v in data["weight_map"].items() if k[9:] not in ("qweight", "scale", "fp8") or v == first
        }
    files[INDEX] = json.dumps(data).encode()
    with pytest.raises(InputError) as caught:
        check_headers(*parsed(files))
    assert caught.value.where == (second if which == "in two shards" else first)
    assert ("mtp.fc.weight" if which == "not in the shard" else "layers.1.scale") in str(caught.value)


def test_a_total_that_is_not_that_of_the_tensors_is_refused():
    headers, made = parsed(sharded(2))
    wrong = ShardIndex(made.path, made.weight_map, made.total_bytes + 1)
    with pytest.raises(InputError) as caught:
        check_headers(headers, wrong)
    assert (caught.value.code, caught.value.where) == ("K2-INP-004", INDEX)
    assert str(made.total_bytes) in caught.value.got and str(made.total_bytes + 1) in caught.value.expected
    check_headers(headers, ShardIndex(made.path, made.weight_map, None))
