"""What linear memory takes from the card: pieces of 2 MiB, which small allocations share.

The driver takes whole pieces (benchmarks/gpu/taken.py, H200): an allocation of more than a megabyte has its own, and
smaller ones lie in one as long as there is room. Where, it alone knows, and the address tells afterwards: an
allocation takes every piece that it touches, and shares at most its first and its last. So what it is worth changes
with its neighbours: who comes first into a piece pays for it, and who leaves last gives it back.

The caller serialises.
"""

from libc.stdint cimport uint64_t

from cython_ext.logic.alloctable cimport AllocTable, Block, alloc_find, alloc_insert, alloc_remove

cdef enum:
    PIECE_BYTES = 2 << 20


cdef struct Pieces:          # all zero: none
    AllocTable shared        # those that allocations touch in part: address → Block (bytes: used; aux: by so many)
    uint64_t room_bytes      # not used, in all of those


cdef inline uint64_t pieces_first(uint64_t address) noexcept nogil:
    return address - address % PIECE_BYTES


cdef inline uint64_t pieces_for(uint64_t size) noexcept nogil:
    """Bytes of the pieces that ``size`` bytes take at most, if they begin with one."""
    return size if size > <uint64_t>-PIECE_BYTES else size + (<uint64_t>-size) % PIECE_BYTES


cdef inline uint64_t overlap(uint64_t piece, uint64_t address, uint64_t size) noexcept nogil:
    return min(piece + PIECE_BYTES, address + size) - max(piece, address)


cdef inline bint join_piece(Pieces* pieces, uint64_t piece, uint64_t part) noexcept nogil:
    """Whether somebody has paid for the piece already."""
    cdef Block* known = alloc_find(&pieces.shared, piece)
    cdef Block block
    if known != NULL:
        known.bytes += part
        known.aux += 1
        pieces.room_bytes -= part
        return 1
    block.address, block.bytes, block.aux = piece, part, 1
    block.kind = block.flags = 0
    if alloc_insert(&pieces.shared, &block):     # without memory for it, nobody shares it
        pieces.room_bytes += PIECE_BYTES - part
    return 0


cdef inline bint leave_piece(Pieces* pieces, uint64_t piece, uint64_t part) noexcept nogil:
    """Whether somebody goes on paying for the piece."""
    cdef Block* known = alloc_find(&pieces.shared, piece)
    cdef Block gone
    if known == NULL:
        return 0
    known.bytes -= part
    known.aux -= 1
    pieces.room_bytes += part
    if known.aux:
        return 1
    pieces.room_bytes -= PIECE_BYTES
    alloc_remove(&pieces.shared, piece, &gone)
    return 0


ctypedef bint (*Step)(Pieces*, uint64_t, uint64_t) noexcept nogil


cdef inline uint64_t with_edges(Pieces* pieces, uint64_t address, uint64_t size, Step step) noexcept nogil:
    """Bytes of all pieces touched, less those of the edges that ``step`` says others pay for."""
    cdef uint64_t first = pieces_first(address), last, bytes
    if size == 0:
        return 0
    last = pieces_first(address + size - 1)
    bytes = last - first + PIECE_BYTES
    if overlap(first, address, size) < PIECE_BYTES and step(pieces, first, overlap(first, address, size)):
        bytes -= PIECE_BYTES
    if last != first and overlap(last, address, size) < PIECE_BYTES and step(
        pieces, last, overlap(last, address, size)
    ):
        bytes -= PIECE_BYTES
    return bytes


cdef inline uint64_t pieces_take(Pieces* pieces, uint64_t address, uint64_t size) noexcept nogil:
    """``size`` bytes are at ``address`` from now on: what the card has lost by that."""
    return with_edges(pieces, address, size, join_piece)


cdef inline uint64_t pieces_give(Pieces* pieces, uint64_t address, uint64_t size) noexcept nogil:
    """They are not any more: what the card has back."""
    return with_edges(pieces, address, size, leave_piece)
