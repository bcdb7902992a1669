"""GGUF headers, written here byte by byte from the format's description, and malformed ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.header import FORMATS, GgufArray, GgufHeader, parse_gguf_header, read_gguf_header
from tests.weights.gguf.random_models import write_random

F32, F16, Q4_K, Q8_0 = 0, 1, 12, 8


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: bytes) -> bytes:
    return struct.pack("<I", kind) + content


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    """Return the bytes that describe a tensor. sizes: innermost dimension first, as in the file."""
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf(
    keys: list[tuple[str, bytes]],
    tensors: list[bytes],
    *,
    data: int = 0,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    header += b"".join(string(key) + content for key, content in keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + b"\0" * data


def parse(data: bytes, **options: Any) -> GgufHeader:
    return parse_gguf_header(lambda offset, size: data[offset : offset + size], len(data), "w.gguf", **options)


KEYS = [
    ("general.architecture", value(8, string("llama"))),
    ("a.u8", value(0, b"\xff")),
    ("a.i8", value(1, b"\xff")),
    ("a.u16", value(2, b"\x01\x02")),
    ("a.i16", value(3, b"\xff\xff")),
    ("a.u32", value(4, struct.pack("<I", 2**32 - 1))),
    ("a.i32", value(5, struct.pack("<i", -5))),
    ("a.f32", value(6, struct.pack("<f", 0.5))),
    ("a.bool", value(7, b"\x01")),
    ("a.u64", value(10, struct.pack("<Q", 2**63))),
    ("a.i64", value(11, struct.pack("<q", -(2**40)))),
    ("a.f64", value(12, struct.pack("<d", 1e300))),
    ("a.numbers", value(9, struct.pack("<IQ3i", 5, 3, 1, -2, 3))),
    ("a.flags", value(9, struct.pack("<IQ2B", 7, 2, 0, 1))),
    ("a.tokens", value(9, struct.pack("<IQ", 8, 3) + string("ab") + string(b"\xff") + string(""))),
]
VALUES = {
    "general.architecture": "llama", "a.u8": 255, "a.i8": -1, "a.u16": 0x201, "a.i16": -1, "a.u32": 2**32 - 1,
    "a.i32": -5, "a.f32": 0.5, "a.bool": True, "a.u64": 2**63, "a.i64": -(2**40), "a.f64": 1e300,
    "a.numbers": [1, -2, 3], "a.flags": [False, True], "a.tokens": ["ab", "\udcff", ""],
}  # fmt: skip
TENSORS = [tensor("x.weight", [512, 3], Q4_K, 0), tensor("norm", [7], F32, 864)]
WHOLE = gguf(KEYS, TENSORS, data=864 + 28)


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value(version: int) -> None:
    header = parse(gguf(KEYS, TENSORS, data=892, version=version))
    assert (header.version, header.values) == (version, VALUES)
    assert header.values["a.bool"] is True


def test_tensors() -> None:
    first, second = parse(WHOLE).tensors
    begin = len(WHOLE) - 892
    assert (first.name, first.shape, first.format.name) == ("x.weight", (3, 512), "Q4_K")
    assert (first.offset, first.num_bytes) == (begin, 3 * 2 * 144)  # two blocks of 256 in each of three rows
    assert (second.shape, second.offset, second.num_bytes) == ((7,), begin + 864, 28)


def test_vocabularies_can_be_skipped() -> None:
    values = parse(WHOLE, keep_arrays=False).values
    assert values["a.tokens"] == GgufArray(8, 3)
    assert values["a.numbers"] == parse(WHOLE).values["a.numbers"]
    assert values["a.f64"] == 1e300


def test_another_alignment() -> None:
    keys = [("general.alignment", value(4, struct.pack("<I", 128)))]
    header = parse(gguf(keys, [tensor("a", [4], F32, 0), tensor("b", [4], F32, 128)], alignment=128, data=144))
    assert [tensor.offset % 128 for tensor in header.tensors] == [0, 0]


def test_long_headers_are_read_in_pieces() -> None:
    tokens = [f"token{number}" * 30 for number in range(20_000)]
    content = struct.pack("<IQ", 8, len(tokens)) + b"".join(map(string, tokens))
    data = gguf([("tokens", value(9, content)), ("after", value(0, b"\x05"))], [])
    sizes = []

    def read(offset: int, size: int) -> bytes:
        sizes.append(size)
        return data[offset : offset + size]

    assert len(data) > 3 * 2**20
    assert parse_gguf_header(read, len(data), "w").values == {"tokens": tokens, "after": 5}
    assert max(sizes) <= 2**20
    assert len(sizes) < 10


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    path.write_bytes(WHOLE)
    assert read_gguf_header(path) == parse(WHOLE)
    path.write_bytes(WHOLE[:-1])
    with pytest.raises(ModelLoadError, match="truncated: it has") as caught:
        read_gguf_header(path)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(ModelLoadError, match="cannot read"):
        read_gguf_header(tmp_path / "none.gguf")


def test_a_file_that_ends_early_is_malformed() -> None:
    end = len(WHOLE) - 892
    for length in range(end - 31):
        with pytest.raises(ModelLoadError, match="not a usable GGUF file"):
            parse(WHOLE[:length])


LARGE = 2**63 + 5
MALFORMED = {
    "nothing": b"",
    "another format": b"PK\x03\x04" * 10,
    "version 1": gguf([], [], version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensors without end": gguf([], [], counts=(LARGE, 0)),
    "keys without end": gguf([], [], counts=(0, LARGE)),
    "more tensors than bytes": gguf([], [], counts=(1000, 0), data=64),
    "a long key": gguf([], [], counts=(0, 1)) + struct.pack("<Q", LARGE) + b"x" * 64,
    "an empty key": gguf([("", value(0, b"\0"))], []),
    "a key twice": gguf([("a", value(0, b"\0")), ("a", value(0, b"\0"))], []),
    "a key that is not UTF-8": gguf([], [], counts=(0, 1))[:24] + string(b"\xff\xfe") + value(0, b"\0"),
    "an unknown type": gguf([("a", value(13, b"\0" * 8))], []),
    "a bool of 2": gguf([("a", value(7, b"\x02"))], []),
    "a long string": gguf([("a", value(8, struct.pack("<Q", LARGE)))], [], data=64),
    "a long array": gguf([("a", value(9, struct.pack("<IQ", 0, LARGE)))], [], data=64),
    "many empty strings": gguf([("a", value(9, struct.pack("<IQ", 8, 2**40)))], [], data=64),
    "arrays in arrays": gguf([("a", value(9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 0)))], [], data=64),
    "no dimensions": gguf([], [tensor("a", [], F32, 0)], data=64),
    "many dimensions": gguf([], [tensor("a", [1] * 5, F32, 0)], data=64),
    "a size of 0": gguf([], [tensor("a", [0], F32, 0)], data=64),
    "a product beyond 64 bits": gguf([], [tensor("a", [2**40, 2**40], F32, 0)], data=64),
    "an unknown format": gguf([], [tensor("a", [4], 4, 0)], data=64),
    "rows that blocks do not fill": gguf([], [tensor("a", [255], Q4_K, 0)], data=256),
    "an odd offset": gguf([], [tensor("a", [4], F32, 8)], data=64),
    "two at one place": gguf([], [tensor("a", [16], F32, 0), tensor("b", [16], F32, 32)], data=256),
    "one name for two": gguf([], [tensor("a", [8], F32, 0), tensor("a", [8], F32, 32)], data=64),
    "an alignment of 0": gguf([("general.alignment", value(4, b"\0" * 4))], []),
    "an alignment of 3": gguf([("general.alignment", value(4, b"\x03\0\0\0"))], []),
    "an alignment in words": gguf([("general.alignment", value(8, string("x")))], []),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("keep_arrays", [True, False])
def test_malformed(name: str, keep_arrays: bool) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(MALFORMED[name], keep_arrays=keep_arrays)
    assert str(caught.value).startswith("w.gguf is not a usable GGUF file: ")
    assert len(str(caught.value)) < 400


@given(st.data())
def test_wrong_bytes_are_refused_or_make_sense(data: st.DataObject) -> None:
    """Any changed byte gives one of our errors, or a header whose tensors do not overlap."""
    changed = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(WHOLE) - 893))] = data.draw(st.integers(0, 255))
    try:
        header = parse(bytes(changed))
    except ModelLoadError:
        return
    ends = 0
    for each in sorted(header.tensors, key=lambda each: each.offset):
        assert each.offset >= ends
        ends = each.offset + each.num_bytes


def test_formats_have_the_usual_bits_per_weight() -> None:
    # The numbers are from llama.cpp's documentation of quantize.
    published = {"Q4_0": 4.5, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625}
    published |= {"IQ2_XXS": 2.0625, "IQ4_XS": 4.25, "IQ4_NL": 4.5, "MXFP4": 4.25, "BF16": 16, "F16": 16}
    bits = {block.name: block.num_bytes * 8 / block.num_elements for block in FORMATS.values()}
    assert {name: bits[name] for name in published} == published


def test_a_header_is_read_again_if_its_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    first = write_random(path, "dense", "Q8_0")
    before = read_gguf_header(first)
    assert read_gguf_header(path) is before
    write_random(path, "dense", "Q4_0")
    assert {tensor.format.name for tensor in read_gguf_header(path).tensors} == {"F32", "Q4_0"}
