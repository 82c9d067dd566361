"""The 128-bit hash of a piece of 2 MiB: whether its copy in the store is still the same; and its parts of zeros.

256 lanes read the piece in turns, 16 bytes each. A lane's state is 128 bits, and a step maps it one to one. The hash is
the sum of all lanes' last states. So two pieces that differ in one vector have different sums. It is fast where 256
threads of a GPU are the lanes (hook/swap/piece_hash.ptx): it reads at the full speed of the memory.

A vector is followed by two steps, and a step rotates by 24 bits. Reason: the multiplications and the foldings by 32
bits map the highest bits of words to one another. After one step that rotates by 32, a change of a highest bit is a
change of few known bits in half of all states, which a change of the lane's next vector takes back.

A step takes the idea of multiplying, folding down the upper half and crossing two lanes from the finalizers of
Appleby's MurmurHash3 (2011). The hash is no defence against a program that searches collisions: it would damage only
its own memory.

A piece has 64 parts, of 32 KiB each. A part of zeros need not be copied: the card fills it again. Reason: the rows of
a cache that is made for long answers are zeros but for their beginnings.
"""

from libc.stdint cimport UINT64_MAX, uint64_t

cdef enum:
    HASH_LANES = 256
    HASH_LAST_STEPS = 3
    PARTS = 64
    PART_BYTES = 32 << 10


cdef struct PieceHash:
    uint64_t a
    uint64_t b
    uint64_t parts       # bit k: part k has a word that is not 0


cdef struct HashState:       # of a lane
    uint64_t a
    uint64_t b


cdef inline void hash_step(HashState* state, uint64_t x, uint64_t y) noexcept nogil:
    state.a = (state.a ^ x) * <uint64_t>0x9E3779B97F4A7C15
    state.a ^= state.a >> 32
    state.b = (state.b ^ y) * <uint64_t>0xC2B2AE3D27D4EB4F
    state.b ^= state.b >> 32
    state.a += state.b
    state.b ^= state.a << 24 | state.a >> 40


cdef inline HashState hash_begin(uint64_t lane) noexcept nogil:
    cdef HashState state
    state.a = lane * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>0x243F6A8885A308D3
    state.b = lane * <uint64_t>0xC2B2AE3D27D4EB4F ^ <uint64_t>0x13198A2E03707344
    return state


cdef inline void hash_vector(HashState* state, uint64_t x, uint64_t y) noexcept nogil:
    hash_step(state, x, y)
    hash_step(state, 0, 0)


cdef inline void hash_end(PieceHash* total, HashState* state, uint64_t lane) noexcept nogil:
    cdef int _step
    for _step in range(HASH_LAST_STEPS):
        hash_step(state, lane, lane)
    total.a += state.a
    total.b += state.b


cdef inline PieceHash piece_hash(const uint64_t* words, uint64_t count) noexcept nogil:
    """Of ``count`` words, a multiple of 512; the simulated GPU computes it so."""
    cdef PieceHash total
    cdef HashState state
    cdef uint64_t lane, at
    total.a = total.b = total.parts = 0
    for lane in range(HASH_LANES):
        state = hash_begin(lane)
        at = 2 * lane
        while at < count:
            hash_vector(&state, words[at], words[at + 1])
            if words[at] | words[at + 1]:
                total.parts |= <uint64_t>1 << at * PARTS / count
            at += 2 * HASH_LANES
        hash_end(&total, &state, lane)
    return total


cdef inline uint64_t parts_to_copy(uint64_t parts) noexcept nogil:
    """Of a piece with these parts: gaps of up to three parts are copied, too, and so is the end behind one of its last
    four. Reason: a copy of its own for what lies behind a gap takes as long as 0.1 MB more (H200)."""
    cdef uint64_t no
    parts |= parts << 1
    parts |= parts << 2          # each part, and the three behind it
    no = ~parts
    no |= no >> 1
    return ~(no | no >> 2)       # the parts with which the three behind them are copied, too


cdef inline uint64_t bytes_of(uint64_t parts) noexcept nogil:
    cdef uint64_t count = 0
    while parts:
        parts &= parts - 1
        count += 1
    return count * PART_BYTES


cdef inline uint64_t first_run(uint64_t parts, uint64_t* begin) noexcept nogil:
    """The number of the lowest part, and how many follow each other from there on; 0: there is none."""
    cdef uint64_t count = 0
    begin[0] = 0
    if parts == 0:
        return 0
    while parts & 1 == 0:
        parts >>= 1
        begin[0] += 1
    while parts & 1:
        parts >>= 1
        count += 1
    return count


cdef inline uint64_t without_run(uint64_t parts, uint64_t begin, uint64_t count) noexcept nogil:
    """``parts`` without ``count`` of them, from ``begin`` on."""
    return parts & ~(UINT64_MAX >> PARTS - count << begin)
