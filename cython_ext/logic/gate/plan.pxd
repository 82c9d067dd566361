"""Publication of a ``Plan``: two copies and a counter, so that a writer killed anywhere leaves the last plan whole.

The writer fills the copy that is not published, then advances ``GrantsPage.published``. A reader copies
``plans[published & 1]`` and retries only if the counter moved meanwhile. Why that suffices: to tear a copy in use the
writer must first have published the other one, and its stores are releases, so a reader (acquires) that saw one word of
the newer plan also sees the counter moved.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.pages.layout cimport GrantsPage, Plan
from cython_ext.native cimport load32, load64, store32, store64

cdef enum:
    PLAN_READS = 64          # a reader torn this often in a row was starved; it reads again later


cdef inline void publish_plan(GrantsPage* page, const Plan* plan) noexcept nogil:
    """The one writer of the page makes ``plan`` the current one. Advancing ``change`` and waking is the caller's."""
    cdef uint32_t published = load32(&page.published) + 1
    cdef uint64_t* copy = <uint64_t*>&page.plans[published & 1]
    cdef const uint64_t* words = <const uint64_t*>plan
    cdef unsigned int i
    for i in range(sizeof(Plan) / sizeof(uint64_t)):
        store64(copy + i, words[i])
    store32(&page.published, published)


cdef inline bint read_plan(const GrantsPage* page, Plan* out) noexcept nogil:
    """The current plan into ``out``: 1; or 0 if the writer overtook every try (``out`` is then garbage)."""
    cdef uint64_t* words = <uint64_t*>out
    cdef const uint64_t* copy
    cdef uint32_t published
    cdef unsigned int i
    cdef int _attempt
    for _attempt in range(PLAN_READS):
        published = load32(&page.published)
        copy = <const uint64_t*>&page.plans[published & 1]
        for i in range(sizeof(Plan) / sizeof(uint64_t)):
            words[i] = load64(copy + i)
        if load32(&page.published) == published:
            return 1
    return 0
