"""The part of msgpack that a hook speaks, over a buffer of the caller's, and the frame around it.

A message is one map with string keys behind a 4-byte little-endian length. The writer never writes beyond its buffer,
and remembers that it should have. The reader never reads beyond the message, whatever its bytes are. After the first
malformed one it returns nothing any more (``bad``). Unknown values are skipped without recursion: every step uses up at
least one byte.
"""

from libc.stdint cimport INT64_MAX, UINT32_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, strlen

cdef enum:
    FRAME_HEADER_BYTES = 4
    FRAME_MAX_BYTES = 65536  # of a hook's link, header not counted

    WIRE_BAD = 0             # what comes next, by wire_peek
    WIRE_NIL = 1
    WIRE_BOOL = 2
    WIRE_INT = 3
    WIRE_FLOAT = 4
    WIRE_STR = 5
    WIRE_BIN = 6
    WIRE_ARRAY = 7
    WIRE_MAP = 8
    WIRE_EXT = 9


cdef struct Writer:
    uint8_t* data
    size_t capacity
    size_t length
    bint full                # something did not fit; what is in the buffer is useless


cdef struct Reader:
    const uint8_t* data
    size_t length
    size_t at
    bint bad


# --- writing

cdef inline void wire_begin(Writer* writer, uint8_t* data, size_t capacity) noexcept nogil:
    """Start a frame in ``data``: room for the header is left."""
    writer.data = data
    writer.capacity = capacity
    writer.length = FRAME_HEADER_BYTES
    writer.full = capacity < FRAME_HEADER_BYTES


cdef inline size_t wire_finish(Writer* writer) noexcept nogil:
    """Fill in the header: bytes to send, header included; 0 if the message did not fit."""
    cdef size_t body = writer.length - FRAME_HEADER_BYTES
    cdef int i
    if writer.full or body > FRAME_MAX_BYTES:
        return 0
    for i in range(FRAME_HEADER_BYTES):
        writer.data[i] = <uint8_t>(body >> (8 * i))
    return writer.length


cdef inline void put_bytes(Writer* writer, const void* bytes, size_t size) noexcept nogil:
    if writer.full or size > writer.capacity - writer.length:
        writer.full = 1
        return
    memcpy(writer.data + writer.length, bytes, size)
    writer.length += size


cdef inline void put_head(Writer* writer, uint8_t tag, uint64_t value, int size) noexcept nogil:
    """A tag byte and ``size`` bytes of ``value``, big-endian."""
    cdef uint8_t[9] head
    cdef int i
    head[0] = tag
    for i in range(size):
        head[1 + i] = <uint8_t>(value >> (8 * (size - 1 - i)))
    put_bytes(writer, head, 1 + size)


cdef inline void wire_map(Writer* writer, uint32_t pairs) noexcept nogil:
    if pairs < 16:
        put_head(writer, 0x80 | <uint8_t>pairs, 0, 0)
    elif pairs <= 0xFFFF:
        put_head(writer, 0xDE, pairs, 2)
    else:
        put_head(writer, 0xDF, pairs, 4)


cdef inline void wire_str(Writer* writer, const char* text, size_t size) noexcept nogil:
    if size < 32:
        put_head(writer, 0xA0 | <uint8_t>size, 0, 0)
    elif size <= 0xFF:
        put_head(writer, 0xD9, size, 1)
    elif size <= 0xFFFF:
        put_head(writer, 0xDA, size, 2)
    else:
        put_head(writer, 0xDB, size, 4)
    put_bytes(writer, text, size)


cdef inline void wire_text(Writer* writer, const char* text) noexcept nogil:
    """A NUL-terminated string."""
    wire_str(writer, text, strlen(text))


cdef inline void wire_bin(Writer* writer, const void* data, size_t size) noexcept nogil:
    if size <= 0xFF:
        put_head(writer, 0xC4, size, 1)
    elif size <= 0xFFFF:
        put_head(writer, 0xC5, size, 2)
    else:
        put_head(writer, 0xC6, size, 4)
    put_bytes(writer, data, size)


cdef inline void wire_uint(Writer* writer, uint64_t value) noexcept nogil:
    if value < 128:
        put_head(writer, <uint8_t>value, 0, 0)
    elif value <= 0xFF:
        put_head(writer, 0xCC, value, 1)
    elif value <= 0xFFFF:
        put_head(writer, 0xCD, value, 2)
    elif value <= UINT32_MAX:
        put_head(writer, 0xCE, value, 4)
    else:
        put_head(writer, 0xCF, value, 8)


cdef inline void wire_int(Writer* writer, int64_t value) noexcept nogil:
    if value >= 0:
        wire_uint(writer, <uint64_t>value)
    elif value >= -32:
        put_head(writer, <uint8_t>value, 0, 0)
    elif value >= -128:
        put_head(writer, 0xD0, <uint64_t>value, 1)
    elif value >= -32768:
        put_head(writer, 0xD1, <uint64_t>value, 2)
    elif value >= -2147483648LL:
        put_head(writer, 0xD2, <uint64_t>value, 4)
    else:
        put_head(writer, 0xD3, <uint64_t>value, 8)


cdef inline void wire_bool(Writer* writer, bint value) noexcept nogil:
    put_head(writer, 0xC3 if value else 0xC2, 0, 0)


cdef inline void wire_nil(Writer* writer) noexcept nogil:
    put_head(writer, 0xC0, 0, 0)


cdef inline void wire_float(Writer* writer, double value) noexcept nogil:
    cdef uint64_t bits
    memcpy(&bits, &value, sizeof(bits))
    put_head(writer, 0xCB, bits, 8)


# --- reading

cdef inline void wire_open(Reader* reader, const uint8_t* data, size_t length) noexcept nogil:
    """Read the body of a frame, without its header."""
    reader.data = data
    reader.length = length
    reader.at = 0
    reader.bad = 0


cdef inline int64_t wire_frame(const uint8_t* data, size_t length) noexcept nogil:
    """Length of the body that the header at ``data`` announces; -1: header incomplete, -2: beyond FRAME_MAX_BYTES."""
    cdef uint32_t body
    if length < FRAME_HEADER_BYTES:
        return -1
    body = data[0] | (<uint32_t>data[1] << 8) | (<uint32_t>data[2] << 16) | (<uint32_t>data[3] << 24)
    return body if body <= FRAME_MAX_BYTES else -2


cdef inline const uint8_t* take_bytes(Reader* reader, uint64_t size) noexcept nogil:
    cdef const uint8_t* bytes = reader.data + reader.at
    if reader.bad or size > reader.length - reader.at:
        reader.bad = 1
        return NULL
    reader.at += size
    return bytes


cdef inline uint64_t take_uint(Reader* reader, int size) noexcept nogil:
    cdef const uint8_t* bytes = take_bytes(reader, size)
    cdef uint64_t value = 0
    cdef int i
    if bytes == NULL:
        return 0
    for i in range(size):
        value = (value << 8) | bytes[i]
    return value


cdef inline int wire_kind(uint8_t tag) noexcept nogil:
    if tag < 0x80 or tag >= 0xE0 or 0xCC <= tag <= 0xD3:
        return WIRE_INT
    if tag < 0x90 or tag == 0xDE or tag == 0xDF:
        return WIRE_MAP
    if tag < 0xA0 or tag == 0xDC or tag == 0xDD:
        return WIRE_ARRAY
    if tag < 0xC0 or 0xD9 <= tag <= 0xDB:
        return WIRE_STR
    if tag == 0xC0:
        return WIRE_NIL
    if tag == 0xC2 or tag == 0xC3:
        return WIRE_BOOL
    if 0xC4 <= tag <= 0xC6:
        return WIRE_BIN
    if tag == 0xCA or tag == 0xCB:
        return WIRE_FLOAT
    return WIRE_BAD if tag == 0xC1 else WIRE_EXT


cdef inline int wire_peek(const Reader* reader) noexcept nogil:
    """What comes next (WIRE_*); WIRE_BAD at the end."""
    if reader.bad or reader.at >= reader.length:
        return WIRE_BAD
    return wire_kind(reader.data[reader.at])


cdef inline bint expect(Reader* reader, int kind) noexcept nogil:
    if wire_peek(reader) != kind:
        reader.bad = 1
        return 0
    return 1


cdef inline uint64_t take_size(Reader* reader) noexcept nogil:
    """The head of what comes next: items of a container, bytes of a str, bin, ext or number."""
    cdef uint8_t tag = <uint8_t>take_uint(reader, 1)
    if tag < 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
        return 0
    if tag < 0xA0:
        return tag & 0x0F
    if tag < 0xC0:
        return tag & 0x1F
    if tag == 0xC4 or tag == 0xD9:
        return take_uint(reader, 1)
    if tag == 0xC5 or tag == 0xDA or tag == 0xDC or tag == 0xDE:
        return take_uint(reader, 2)
    if tag == 0xC6 or tag == 0xDB or tag == 0xDD or tag == 0xDF:
        return take_uint(reader, 4)
    if 0xC7 <= tag <= 0xC9:                              # ext: a type byte behind the size
        return take_uint(reader, 1 << (tag - 0xC7)) + 1
    if tag == 0xCA or tag == 0xCB:
        return 4 << (tag - 0xCA)
    if 0xCC <= tag <= 0xCF:
        return 1 << (tag - 0xCC)
    if 0xD0 <= tag <= 0xD3:
        return 1 << (tag - 0xD0)
    if 0xD4 <= tag <= 0xD8:                              # fixext
        return (1 << (tag - 0xD4)) + 1
    reader.bad = 1                                       # 0xC1 is never used
    return 0


cdef inline void wire_skip(Reader* reader) noexcept nogil:
    """Step over one value, whatever it is."""
    cdef uint64_t left = 1, size
    cdef int kind
    while left and not reader.bad:
        kind = wire_peek(reader)
        size = take_size(reader)
        left -= 1
        if kind == WIRE_MAP:
            left += 2 * size
        elif kind == WIRE_ARRAY:
            left += size
        else:
            take_bytes(reader, size)


cdef inline uint32_t wire_read_map(Reader* reader) noexcept nogil:
    """Number of pairs that follow; 0 and ``bad`` if it is no map."""
    return <uint32_t>take_size(reader) if expect(reader, WIRE_MAP) else 0


cdef inline const char* wire_read_str(Reader* reader, size_t* size) noexcept nogil:
    """The bytes of a string, in the buffer, not terminated; NULL and ``bad`` if it is none."""
    cdef const char* text
    size[0] = 0
    if not expect(reader, WIRE_STR):
        return NULL
    size[0] = take_size(reader)
    text = <const char*>take_bytes(reader, size[0])
    if text == NULL:
        size[0] = 0
    return text


cdef inline const uint8_t* wire_read_bin(Reader* reader, size_t* size) noexcept nogil:
    cdef const uint8_t* data
    size[0] = 0
    if not expect(reader, WIRE_BIN):
        return NULL
    size[0] = take_size(reader)
    data = take_bytes(reader, size[0])
    if data == NULL:
        size[0] = 0
    return data


cdef inline int64_t wire_read_int(Reader* reader) noexcept nogil:
    """A signed 64-bit integer; one beyond that is ``bad``."""
    cdef uint8_t tag
    cdef uint64_t value
    cdef int size
    if not expect(reader, WIRE_INT):
        return 0
    tag = reader.data[reader.at]
    size = <int>take_size(reader)
    if size == 0:
        return <int8_t>tag
    value = take_uint(reader, size)
    if tag == 0xD0:
        return <int8_t>value
    if tag == 0xD1:
        return <int16_t>value
    if tag == 0xD2:
        return <int32_t>value
    if tag == 0xCF and value > <uint64_t>INT64_MAX:
        reader.bad = 1
        return 0
    return <int64_t>value


cdef inline uint64_t wire_read_uint(Reader* reader) noexcept nogil:
    """An unsigned 64-bit integer; a negative one is ``bad``."""
    cdef int64_t value
    if wire_peek(reader) == WIRE_INT and reader.data[reader.at] == 0xCF:
        take_size(reader)
        return take_uint(reader, 8)
    value = wire_read_int(reader)
    if value < 0:
        reader.bad = 1
        return 0
    return <uint64_t>value


cdef inline bint wire_read_bool(Reader* reader) noexcept nogil:
    return take_uint(reader, 1) == 0xC3 if expect(reader, WIRE_BOOL) else 0


cdef inline double wire_read_float(Reader* reader) noexcept nogil:
    """A float of either width, or an integer."""
    cdef uint64_t bits
    cdef uint32_t narrow_bits
    cdef double value = 0.0
    cdef float narrow
    if wire_peek(reader) == WIRE_INT:
        return <double>wire_read_int(reader)
    if not expect(reader, WIRE_FLOAT):
        return 0.0
    if take_size(reader) == 8:
        bits = take_uint(reader, 8)
        memcpy(&value, &bits, sizeof(value))
        return value
    narrow_bits = <uint32_t>take_uint(reader, 4)
    memcpy(&narrow, &narrow_bits, sizeof(narrow))
    return narrow


cdef inline bint wire_find(const Reader* message, const char* key, Reader* value) noexcept nogil:
    """Put ``value`` before the value of ``key`` in the map at ``message``: 1; 0 if absent or malformed."""
    cdef size_t size, wanted = strlen(key)
    cdef const char* text
    cdef uint32_t pairs, _i
    value[0] = message[0]
    pairs = wire_read_map(value)
    for _i in range(pairs):
        text = wire_read_str(value, &size)
        if value.bad:
            return 0
        if size == wanted and memcmp(text, key, wanted) == 0:
            return 1
        wire_skip(value)
    value.bad = 1
    return 0


cdef inline bint wire_find_text(const Reader* message, const char* key, char* out, size_t capacity) noexcept nogil:
    """The string under ``key`` into ``out``, NUL-terminated: 1; 0 (and "") if absent, too long, or holding a NUL."""
    cdef Reader value
    cdef const char* text
    cdef size_t size, i
    out[0] = 0
    if not wire_find(message, key, &value):
        return 0
    text = wire_read_str(&value, &size)
    if text == NULL or size >= capacity:
        return 0
    for i in range(size):
        if text[i] == 0:
            return 0
    memcpy(out, text, size)
    out[size] = 0
    return 1


cdef inline bint wire_find_int(const Reader* message, const char* key, int64_t* out) noexcept nogil:
    cdef Reader value
    out[0] = 0
    if not wire_find(message, key, &value):
        return 0
    out[0] = wire_read_int(&value)
    return not value.bad


cdef inline bint wire_find_bool(const Reader* message, const char* key, bint* out) noexcept nogil:
    cdef Reader value
    out[0] = 0
    if not wire_find(message, key, &value):
        return 0
    out[0] = wire_read_bool(&value)
    return not value.bad
