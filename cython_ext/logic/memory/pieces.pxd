"""What linear memory takes from the card: pieces of 2 MiB, which small allocations share.

The driver takes whole pieces (benchmarks/experiments/allocation_granularity.py, H200). An allocation of more than a
megabyte has its own pieces. Smaller ones share a piece as long as it has room. The driver alone chooses the piece;
the address shows it afterwards. So the charge of a small allocation depends on its neighbours. The first allocation
in a piece is charged for it, and the last one to leave gives the charge back.

The caller serialises.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint64_t

from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_find, alloc_insert, alloc_remove

cdef enum:
    PIECE_BYTES = 2 << 20
    SMALL_BYTES = 1 << 20    # what is longer shares nothing


cdef struct Pieces:          # all zero: none
    AllocTable shared        # those that small allocations touch: address → Block (bytes: used; aux: by so many)
    int64_t room_bytes       # not used, in all of those; below 0 while an address is taken again before it was given


cdef inline uint64_t pieces_for(uint64_t size) noexcept nogil:
    """Bytes of the pieces that ``size`` bytes take alone; no overflow."""
    return UINT64_MAX if size > UINT64_MAX - PIECE_BYTES else size + (<uint64_t>-size) % PIECE_BYTES


cdef inline uint64_t pieces_for_rows(uint64_t row_bytes, uint64_t rows, uint64_t unit_bytes) noexcept nogil:
    """The same for rows, each made longer to a multiple of ``unit_bytes``."""
    if rows == 0 or row_bytes > UINT64_MAX - unit_bytes:
        return UINT64_MAX if rows else 0
    row_bytes += (<uint64_t>-row_bytes) % unit_bytes
    return UINT64_MAX if row_bytes > UINT64_MAX / rows else pieces_for(row_bytes * rows)


cdef inline bint join_piece(Pieces* pieces, uint64_t piece, uint64_t part) noexcept nogil:
    """Whether another allocation is charged for the piece already."""
    cdef Block* known = alloc_find(&pieces.shared, piece)
    cdef Block block
    if known != NULL:
        known.bytes += part
        known.aux += 1
        pieces.room_bytes -= part
        return 1
    block.address, block.bytes, block.aux = piece, part, 1
    block.kind = block.flags = 0
    if alloc_insert(&pieces.shared, &block):     # without memory for the entry, no allocation shares the piece
        pieces.room_bytes += PIECE_BYTES - <int64_t>part
    return 0


cdef inline bint leave_piece(Pieces* pieces, uint64_t piece, uint64_t part) noexcept nogil:
    """Whether another allocation stays charged for the piece."""
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


cdef inline bint pieces_are_shared(uint64_t size) noexcept nogil:
    """Whether other allocations may lie in the pieces of one of this size. Else its charge does not depend on them."""
    return size <= SMALL_BYTES


cdef inline uint64_t pieces_alone(uint64_t address, uint64_t size) noexcept nogil:
    """Bytes of the pieces touched."""
    return pieces_for(size + address % PIECE_BYTES)


cdef inline uint64_t each_piece(Pieces* pieces, uint64_t address, uint64_t size, Step step) noexcept nogil:
    """Bytes of the pieces touched, less those that other allocations are charged for, by ``step``."""
    cdef uint64_t piece = address - address % PIECE_BYTES, end = address + size, bytes = 0
    while piece < end:
        if not step(pieces, piece, min(piece + PIECE_BYTES, end) - max(piece, address)):
            bytes += PIECE_BYTES
        piece += PIECE_BYTES
    return bytes


cdef inline uint64_t pieces_take(Pieces* pieces, uint64_t address, uint64_t size) noexcept nogil:
    """``size`` bytes are at ``address`` from now on: what the card has lost by that."""
    return each_piece(pieces, address, size, join_piece) if pieces_are_shared(size) else pieces_alone(address, size)


cdef inline uint64_t pieces_give(Pieces* pieces, uint64_t address, uint64_t size) noexcept nogil:
    """The bytes are freed: what the card has back."""
    return each_piece(pieces, address, size, leave_piece) if pieces_are_shared(size) else pieces_alone(address, size)
