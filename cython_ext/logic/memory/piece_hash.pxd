"""The 128-bit hash of a piece of 2 MiB: whether its copy in the store is still the same.

256 lanes read the piece in turns, 16 bytes each. A lane's state is 128 bits, and a step maps it one to one. The hash is
the sum of all lanes' last states. So two pieces that differ in one vector have different sums. The lowest bit of ``a``
is then set: 0 for a piece of zeros, 1 for any other. It is fast where 256 threads of a GPU are the lanes
(hook/swap/piece_hash.ptx): it reads at the full speed of the memory.

A vector is followed by two steps, and a step rotates by 24 bits. Reason: the multiplications and the foldings by 32
bits map the highest bits of words to one another. After one step that rotates by 32, a change of a highest bit is a
change of few known bits in half of all states, which a change of the lane's next vector takes back.

A step takes the idea of multiplying, folding down the upper half and crossing two lanes from the finalizers of
Appleby's MurmurHash3 (2011). The hash is no defence against a program that searches collisions: it would damage only
its own memory.
"""

from libc.stdint cimport uint64_t

cdef enum:
    HASH_LANES = 256
    HASH_LAST_STEPS = 3


cdef struct PieceHash:
    uint64_t a
    uint64_t b


cdef inline void hash_step(PieceHash* state, uint64_t x, uint64_t y) noexcept nogil:
    state.a = (state.a ^ x) * <uint64_t>0x9E3779B97F4A7C15
    state.a ^= state.a >> 32
    state.b = (state.b ^ y) * <uint64_t>0xC2B2AE3D27D4EB4F
    state.b ^= state.b >> 32
    state.a += state.b
    state.b ^= state.a << 24 | state.a >> 40


cdef inline PieceHash hash_begin(uint64_t lane) noexcept nogil:
    cdef PieceHash state
    state.a = lane * <uint64_t>0x9E3779B97F4A7C15 ^ <uint64_t>0x243F6A8885A308D3
    state.b = lane * <uint64_t>0xC2B2AE3D27D4EB4F ^ <uint64_t>0x13198A2E03707344
    return state


cdef inline void hash_vector(PieceHash* state, uint64_t x, uint64_t y) noexcept nogil:
    hash_step(state, x, y)
    hash_step(state, 0, 0)


cdef inline void hash_end(PieceHash* total, PieceHash* state, uint64_t lane) noexcept nogil:
    cdef int _step
    for _step in range(HASH_LAST_STEPS):
        hash_step(state, lane, lane)
    total.a += state.a
    total.b += state.b


cdef inline void hash_mark(PieceHash* total, bint zeros) noexcept nogil:
    total.a = total.a & ~<uint64_t>1 | (not zeros)


cdef inline PieceHash piece_hash(const uint64_t* words, uint64_t count) noexcept nogil:
    """Of ``count`` words, a multiple of 512; the simulated GPU computes it so."""
    cdef PieceHash total, state
    cdef uint64_t lane, at, found = 0
    total.a = total.b = 0
    for lane in range(HASH_LANES):
        state = hash_begin(lane)
        at = 2 * lane
        while at < count:
            hash_vector(&state, words[at], words[at + 1])
            found |= words[at] | words[at + 1]
            at += 2 * HASH_LANES
        hash_end(&total, &state, lane)
    hash_mark(&total, found == 0)
    return total


cdef inline PieceHash hash_of_zeros(uint64_t count) noexcept nogil:
    """``piece_hash`` of ``count`` words of zeros."""
    cdef PieceHash total, state
    cdef uint64_t lane, _at
    total.a = total.b = 0
    for lane in range(HASH_LANES):
        state = hash_begin(lane)
        for _at in range(count / (2 * HASH_LANES)):
            hash_vector(&state, 0, 0)
        hash_end(&total, &state, lane)
    hash_mark(&total, 1)
    return total
