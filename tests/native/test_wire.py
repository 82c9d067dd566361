"""The wire format against the msgpack package, both ways, and against anything at all."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cython_ext.testing import bindings_wire as native

keys = st.text(max_size=40)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
)
edges = [
    0,
    31,
    32,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**64 - 1,
]
values = st.recursive(scalars, lambda inner: st.dictionaries(keys, inner, max_size=20), max_leaves=20)
messages = st.dictionaries(keys, values, max_size=20)
anything = st.recursive(
    st.one_of(scalars, st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.one_of(keys, st.integers(0, 5)), inner, max_size=5)
    ),
    max_leaves=20,
)


def body_of(message: dict[str, Any]) -> bytes:
    frame = native.encode_frame(message)
    assert frame is not None
    assert native.frame_length(frame) == int.from_bytes(frame[:4], "little") == len(frame) - 4
    return frame[4:]


@given(messages)
@example({"sizes": dict.fromkeys(map(str, range(70_000 // 9)), 1)})
@example({str(n): n for n in edges} | {str(-n): -n for n in edges if n <= 2**63})
@example({str(n): "x" * n for n in (0, 31, 32, 255, 256, 50_000)})
@example({str(n): b"x" * n for n in (0, 255, 256, 50_000)})
def test_msgpack_reads_what_we_write_and_we_too(message: dict[str, Any]) -> None:
    body = body_of(message)
    assert msgpack.unpackb(body) == message
    assert native.decode_body(body) == message


@given(messages)
def test_we_write_the_shortest_form_as_msgpack_does(message: dict[str, Any]) -> None:
    assert body_of(message) == msgpack.packb(message)


@given(messages, st.booleans())
def test_we_read_what_msgpack_writes(message: dict[str, Any], narrow: bool) -> None:
    try:
        packed = msgpack.packb(message, use_single_float=narrow)
    except OverflowError:  # a float beyond 32 bits
        packed = msgpack.packb(message)
    assert native.decode_body(packed) == msgpack.unpackb(packed)


def test_a_value_that_is_no_number_survives() -> None:
    assert math.isnan(native.decode_body(body_of({"x": math.nan}))["x"])  # type: ignore[arg-type]


@given(messages, st.integers(0, 400))
def test_a_small_buffer_is_never_overrun(message: dict[str, Any], capacity: int) -> None:
    frame = native.encode_frame(message, capacity)
    assert frame == (native.encode_frame(message) if len(body_of(message)) + 4 <= capacity else None)


def test_a_message_longer_than_a_frame_is_not_written() -> None:
    assert native.encode_frame({"": b"x" * native.FRAME_MAX_BYTES}, 2 * native.FRAME_MAX_BYTES) is None


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", -1),
        (b"\x01\0\0", -1),
        (b"\0\0\0\0", 0),
        (b"\x02\x01\0\0", 258),
        (b"\0\0\x01\0", 65536),
        (b"\x01\0\x01\0", -2),
        (b"\xff\xff\xff\xff", -2),
    ],
)
def test_the_header_of_a_frame(data: bytes, length: int) -> None:
    assert native.frame_length(data) == length


@given(anything, st.binary(max_size=10))
def test_skipping_steps_over_exactly_one_value(value: Any, rest: bytes) -> None:
    packed = msgpack.packb(value)
    assert native.skip_body(packed + rest) == len(packed)
    for cut in range(len(packed)):
        assert native.skip_body(packed[:cut]) is None


def test_deep_nesting_costs_no_stack() -> None:
    assert native.skip_body(b"\x91" * 1_000_000 + b"\xc0") == 1_000_001
    assert native.find_in_body(b"\x82\xa1a" + b"\x91" * 1_000_000 + b"\xc0\xa1b\x07", b"b") == (None, 7, None)


@pytest.mark.parametrize("tag", ["dd", "df", "db", "c6", "c9"])
def test_a_length_of_four_gibibytes_is_not_believed(tag: str) -> None:
    assert native.skip_body(bytes.fromhex(tag) + b"\xff" * 4 + b"\x00" * 100) is None


changes_of_bytes = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)))


@given(st.one_of(st.binary(max_size=200), messages.map(msgpack.packb)), changes_of_bytes)
def test_malformed_messages_are_refused_by_both_or_mean_the_same(data: bytes, changes: list[tuple[int, int]]) -> None:
    """Where we accept a body, msgpack does, and they agree but for what a hook does not know (None for us)."""
    mutated = bytearray(data)
    for at, value in changes:
        if at < len(mutated):
            mutated[at] = value
    body = bytes(mutated)
    native.find_in_body(body, b"x")
    end = native.skip_body(body)
    try:
        ours = native.decode_body(body)
    except ValueError:
        return
    assert end is not None
    theirs = msgpack.unpackb(body[:end], raw=False, unicode_errors="surrogateescape", strict_map_key=False, timestamp=0)
    assert agree(ours, theirs)


def agree(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(agree(ours[key], theirs[key]) for key in ours)
    known = isinstance(theirs, dict | str | bytes | int | float | bool)
    return ours is None if not known else (ours == theirs or ours != ours) and type(ours) is type(theirs)


@given(messages, keys, st.one_of(scalars))
def test_finding_by_key(message: dict[str, Any], key: str, value: Any) -> None:
    if "\0" in key:
        key = "k"
    message[key] = value
    text, number, flag = native.find_in_body(body_of(message), key.encode())
    is_text = isinstance(value, str) and "\0" not in value and len(value.encode()) < 256
    assert text == (value if is_text else None)
    is_int = isinstance(value, int) and not isinstance(value, bool) and value < 2**63
    assert number == (value if is_int else None)
    assert flag is (value if isinstance(value, bool) else None)


@given(messages)
def test_a_missing_key_is_not_found(message: dict[str, Any]) -> None:
    message.pop("absent", None)
    assert native.find_in_body(body_of(message), b"absent") == (None, None, None)


@given(st.text(max_size=20), st.integers(1, 30))
def test_a_text_that_does_not_fit_with_its_terminator_is_refused(text: str, capacity: int) -> None:
    found = native.find_in_body(body_of({"k": text}), b"k", capacity)[0]
    assert found == (text if len(text.encode()) < capacity and "\0" not in text else None)
