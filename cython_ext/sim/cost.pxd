"""What a kernel costs, read from the comments of its PTX.

A real driver ignores comments; the simulated one finds there how long a kernel runs, so one program serves both::

    // sim: NAME ns=EXPRESSION sms=EXPRESSION interval=EXPRESSION

``ns`` is the kernel's duration when it has all the SMs it can fill, ``sms`` how many those are (default: one per
block, at most all), ``interval`` the address of two 64-bit words that receive the times, in ns of the GPU's clock
(%globaltimer), of the kernel's start and end. An expression has numbers, + - * /, brackets, ``min(a,b)``,
``max(a,b)``, ``ceil(a)``, and the names ``blocks`` (of the grid), ``threads`` (of a block), ``sms`` (of the GPU) and
``p0`` … ``p15``, the kernel's integer parameters. It contains no blank.
"""

from libc.math cimport ceil
from libc.stdint cimport uint64_t
from libc.stdlib cimport strtod
from libc.string cimport strlen, strncmp, strstr


# The values of an expression's names.
cdef struct SimTerms:
    double blocks
    double threads
    double sms
    uint64_t parameter[16]
    int parameters


cdef struct SimExpression:
    const char* at
    SimTerms* terms
    bint failed


cdef inline bint sim_word(SimExpression* e, const char* word) noexcept nogil:
    cdef size_t n = strlen(word)
    if strncmp(e.at, word, n) != 0:
        return False
    e.at += n
    return True


cdef inline double sim_atom(SimExpression* e) noexcept nogil:
    cdef double a, b
    cdef char* end
    cdef int kind
    if sim_word(e, b"("):
        a = sim_sum(e)
        e.failed |= not sim_word(e, b")")
        return a
    kind = 1 if sim_word(e, b"min(") else 2 if sim_word(e, b"max(") else 3 if sim_word(e, b"ceil(") else 0
    if kind:
        a = sim_sum(e)
        if kind != 3:
            e.failed |= not sim_word(e, b",")
            b = sim_sum(e)
            a = b if (b < a) == (kind == 1) else a
        e.failed |= not sim_word(e, b")")
        return ceil(a) if kind == 3 else a
    if sim_word(e, b"blocks"):
        return e.terms.blocks
    if sim_word(e, b"threads"):
        return e.terms.threads
    if sim_word(e, b"sms"):
        return e.terms.sms
    kind = sim_word(e, b"p")
    a = strtod(e.at, &end)
    if end == e.at:
        e.failed = True
        return 0
    e.at = end
    if not kind:
        return a
    if not 0 <= a < e.terms.parameters:
        e.failed = True
        return 0
    return <double>e.terms.parameter[<int>a]


cdef inline double sim_product(SimExpression* e) noexcept nogil:
    cdef double a = sim_atom(e)
    while not e.failed:
        if sim_word(e, b"*"):
            a *= sim_atom(e)
        elif sim_word(e, b"/"):
            a /= sim_atom(e)
        else:
            break
    return a


cdef inline double sim_sum(SimExpression* e) noexcept nogil:
    cdef double a = sim_product(e)
    while not e.failed:
        if sim_word(e, b"+"):
            a += sim_product(e)
        elif sim_word(e, b"-"):
            a -= sim_product(e)
        else:
            break
    return a


cdef inline bint sim_ends_word(char c) noexcept nogil:
    return c in (0, 9, 10, 13, 32)


cdef inline bint sim_evaluate(const char* text, SimTerms* terms, double* value) noexcept nogil:
    """Whether `text` begins with one whole expression; its value."""
    cdef SimExpression e
    e.at = text
    e.terms = terms
    e.failed = False
    value[0] = sim_sum(&e)
    return not e.failed and sim_ends_word(e.at[0])


cdef inline const char* sim_annotation(const char* ptx, const char* kernel, const char* key) noexcept nogil:
    """The expression of ``key=`` in the annotation of `kernel`; NULL if there is none."""
    cdef const char* line = strstr(ptx, b"// sim: ")
    cdef const char* at
    cdef size_t n = strlen(kernel), k = strlen(key)
    while line != NULL:
        at = line + 8
        if strncmp(at, kernel, n) == 0 and at[n] == 32:
            at += n
            while at[0] == 32:
                at += 1
                if strncmp(at, key, k) == 0 and at[k] == 61:
                    return at + k + 1
                while not sim_ends_word(at[0]):
                    at += 1
        line = strstr(line + 8, b"// sim: ")
    return NULL
