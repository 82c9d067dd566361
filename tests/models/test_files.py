"""What is read of a safetensors file, what is refused, and where tensors lie in an owner's allocation."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import files
from vgpu.errors import ErrorCode, VgpuError
from vgpu.models.safetensors import DTYPES, Stored, read_header, read_headers
from vgpu.models.table import ALIGNMENT, Table, check_name, placed, table_of
from vgpu.protocol.codec import Decoder, ProtocolError, encode

PIECE = 2 << 20
SMALL: files.Tensors = {"a": ("F32", [2, 3], bytes(range(24))), "b": ("U8", [5], b"hello"), "c": ("I64", [0], b"")}


def test_a_model_of_two_files_is_read(tmp_path: Path) -> None:
    paths, contents = files.model(tmp_path, 1000)
    found = read_headers(paths)
    assert {tensor.name for tensor in found} == contents.keys()
    for tensor in found:
        data = tensor.path.read_bytes()[tensor.begin : tensor.begin + tensor.size_bytes]
        assert data == contents[tensor.name]
    assert [(t.dtype, t.shape) for t in found if t.name == "lm.weight"] == [("F8_E4M3", (3, 333))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}, "has 20 bytes, and its shape needs 24"),
        ({"a": {"dtype": "F32", "shape": [2, -3], "data_offsets": [0, 24]}}, "has no shape"),
        ({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24]}}, "has no data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2, True], "data_offsets": [0, 24]}}, "has no shape"),
        ({"a": 5}, "has no description"),
        ({"a": {"dtype": "Q9", "shape": [2, 3], "data_offsets": [0, 24]}}, "has the type Q9, which is not known here"),
        ({"a": None}, "do not follow those before it"),
        ({"b": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}, "do not follow those before it"),
        ({"d": {"dtype": "U8", "shape": [1], "data_offsets": [29, 30]}}, "its tensors end at"),
    ],
)
def test_a_damaged_header_is_refused_with_its_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = files.written(tmp_path / "x.safetensors", SMALL, **changes)
    with pytest.raises(VgpuError, match=reason) as caught:
        read_header(path)
    assert caught.value.code is ErrorCode.INVALID
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "its header would have 0 bytes"),
        (b"\xff" * 30, "its header would have"),
        (b"\x04\0\0\0\0\0\0\0[1]x", "no JSON"),
        (b"\x03\0\0\0\0\0\0\0[1]", "no JSON object"),
        (b"\x02\0\0\0\0\0\0\0{}", "the files have no tensors"),
        (b'\x0d\0\0\0\0\0\0\0{"a":1,"a":2}', "a key is there twice"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(VgpuError, match=reason):
        read_headers([path])


def test_a_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = files.written(tmp_path / "x.safetensors", SMALL).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(VgpuError, match=r"no whole safetensors file|have no tensors"):
            read_headers([cut])


def test_a_missing_file_and_a_tensor_in_two_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VgpuError, match=r"cannot read .*No such file"):
        read_header(tmp_path / "none")
    one, two = (files.written(tmp_path / name, SMALL) for name in "12")
    with pytest.raises(VgpuError, match=r"both .* have a tensor a"):
        read_headers([one, two])


@given(st.dictionaries(st.text(max_size=3), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3))
def test_any_header_is_read_or_refused(header: dict[str, object]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        files.raw(Path(file.name), json.dumps(header), b"12345678")
        with pytest.raises(VgpuError):
            read_headers([Path(file.name)])


tensors = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=8
)


def size_of(dtype: str, shape: list[int]) -> int:
    size = DTYPES[dtype]
    for length in shape:
        size *= length
    return size


@given(tensors)
def test_each_tensor_has_its_own_aligned_place(found: list[tuple[str, list[int]]]) -> None:
    stored = [Stored(str(i), d, tuple(s), Path("x"), 0, size_of(d, s)) for i, (d, s) in enumerate(found)]
    rows, total = placed(stored, PIECE)
    assert total % PIECE == 0
    assert total >= PIECE
    end = 0
    for row in rows:
        assert row.offset % ALIGNMENT == 0
        assert row.offset >= end
        end = row.offset + row.size_bytes
    assert end <= total < end + PIECE + ALIGNMENT * (len(rows) + 1)


@given(tensors, st.booleans())
def test_a_table_arrives_as_it_was_sent(found: list[tuple[str, list[int]]], read_only: bool) -> None:
    stored = [Stored(str(i), d, tuple(s), Path("x"), 0, size_of(d, s)) for i, (d, s) in enumerate(found)]
    rows, total = placed(stored, PIECE)
    table = Table("m", "vgpu-1", 5, "GPU-1", total, read_only, rows)
    decoder = Decoder()
    decoder.feed(encode(table.message()))
    message = decoder.next()
    assert message is not None
    assert table_of(message) == table


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 2}, "speaks version 2"),
        ({"tensors": [["a", "F32", [1], 0]]}, "no whole table"),
        ({"tensors": [["a", "F32", [1], PIECE, 4, b""]]}, "a tensor that is none: a"),
        ({"tensors": [["a", "X", [1], 0, 4, b""]]}, "a tensor that is none: a"),
        ({"tensors": [["a", "F32", [1], -4, 4, b""]]}, "a tensor that is none: a"),
    ],
)
def test_a_table_that_is_none_is_refused(change: dict[str, Any], error: str) -> None:
    message = Table("m", "vgpu-1", 5, "GPU-1", PIECE, True, ()).message() | change
    with pytest.raises(VgpuError, match=error):
        table_of(message)
    without = {key: value for key, value in message.items() if key != "gpu_uuid"} | {"version": 1, "tensors": []}
    with pytest.raises(ProtocolError):
        table_of(without)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "x" * 49, ".hidden", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(VgpuError, match="cannot be called"):
        check_name(name)
    assert check_name("Qwen3-4B.v1_x") == "Qwen3-4B.v1_x"
