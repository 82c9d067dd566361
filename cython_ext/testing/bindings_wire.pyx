"""The wire format of ``cython_ext/logic`` for Python; ``bindings_logic`` describes these bindings."""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free

from cython_ext.logic cimport wire

FRAME_MAX_BYTES = wire.FRAME_MAX_BYTES


cdef void put_value(wire.Writer* writer, value) except *:
    cdef bytes raw
    if value is None:
        wire.wire_nil(writer)
    elif isinstance(value, bool):
        wire.wire_bool(writer, value)
    elif isinstance(value, int):
        if value < 0:
            wire.wire_int(writer, value)
        else:
            wire.wire_uint(writer, value)
    elif isinstance(value, float):
        wire.wire_float(writer, value)
    elif isinstance(value, str):
        raw = value.encode()
        wire.wire_str(writer, raw, len(raw))
    elif isinstance(value, bytes):
        raw = value
        wire.wire_bin(writer, <const char*>raw, len(raw))
    elif isinstance(value, dict):
        wire.wire_map(writer, len(value))
        for key, item in value.items():
            put_value(writer, key)
            put_value(writer, item)
    else:
        raise TypeError(f"a hook's messages hold no {type(value).__name__}")


def encode_frame(dict message not None, size_t capacity=wire.FRAME_MAX_BYTES + wire.FRAME_HEADER_BYTES):
    """Header and body of a frame; None if the frame exceeds ``capacity`` bytes."""
    cdef wire.Writer writer
    cdef uint8_t* buffer = <uint8_t*>calloc(1, capacity + 1)
    cdef size_t length
    if buffer == NULL:
        raise MemoryError
    buffer[capacity] = 0xA5                          # a sentinel: the writer must not write beyond the end
    try:
        wire.wire_begin(&writer, buffer, capacity)
        put_value(&writer, message)
        length = wire.wire_finish(&writer)
        if buffer[capacity] != 0xA5:
            raise AssertionError("the writer left its buffer")
        return buffer[:length] if length else None
    finally:
        free(buffer)


cdef take_value(wire.Reader* reader):
    cdef int kind = wire.wire_peek(reader)
    cdef size_t size
    cdef const char* text
    cdef const uint8_t* data
    if kind == wire.WIRE_NIL:
        wire.wire_skip(reader)
        return None
    if kind == wire.WIRE_BOOL:
        return bool(wire.wire_read_bool(reader))
    if kind == wire.WIRE_INT:
        return wire.wire_read_uint(reader) if reader.data[reader.at] == 0xCF else wire.wire_read_int(reader)
    if kind == wire.WIRE_FLOAT:
        return wire.wire_read_float(reader)
    if kind == wire.WIRE_STR:
        text = wire.wire_read_str(reader, &size)
        return text[:size].decode("utf-8", "surrogateescape") if text != NULL else None
    if kind == wire.WIRE_BIN:
        data = wire.wire_read_bin(reader, &size)
        return data[:size] if data != NULL else None
    if kind == wire.WIRE_MAP:
        pairs = {}
        for _ in range(wire.wire_read_map(reader)):
            key = take_value(reader)
            if reader.bad or not isinstance(key, str):
                reader.bad = True
                break
            pairs[key] = take_value(reader)
        return pairs
    wire.wire_skip(reader)
    return None


def decode_body(const uint8_t[::1] body not None):
    """The map in ``body``, with None for values of kinds unknown to a hook. ValueError if it is malformed."""
    cdef wire.Reader reader
    wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
    value = take_value(&reader)
    if reader.bad or not isinstance(value, dict):
        raise ValueError("malformed message")
    return value


def skip_body(const uint8_t[::1] body not None):
    """The length in bytes of the value at the start of ``body``; None if it is malformed."""
    cdef wire.Reader reader
    wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
    wire.wire_skip(&reader)
    return None if reader.bad else reader.at


def find_in_body(const uint8_t[::1] body not None, bytes key not None, size_t capacity=256):
    """The value of ``key``: (text or None, int or None, bool or None)."""
    cdef wire.Reader reader
    cdef int64_t number
    cdef bint flag, found
    cdef char* text = <char*>calloc(1, capacity)
    if text == NULL:
        raise MemoryError
    try:
        wire.wire_open(&reader, &body[0] if body.shape[0] else NULL, body.shape[0])
        found = wire.wire_find_text(&reader, key, text, capacity)
        as_text = (<bytes>text).decode("utf-8", "surrogateescape") if found else None
        as_int = number if wire.wire_find_int(&reader, key, &number) else None
        as_bool = bool(flag) if wire.wire_find_bool(&reader, key, &flag) else None
        return as_text, as_int, as_bool
    finally:
        free(text)


def frame_length(const uint8_t[::1] data not None):
    """The length of the body according to its header; −1: the header is incomplete, −2: the body is too long."""
    return wire.wire_frame(&data[0] if data.shape[0] else NULL, data.shape[0])
