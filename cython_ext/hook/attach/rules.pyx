"""VGPU_PREPEND_X and VGPU_APPEND_X join PATH, LD_LIBRARY_PATH or LD_PRELOAD, for this program and those that it starts.

``client_hook/path_rules.py`` has the rule, and does the same for programs that ``vgpuctl`` starts. In a container this
is the only place: the engine starts its programs. It runs before the program's first thread. A program with more rights
than its user (setuid) gets no rule: the loader has ignored that user's LD_PRELOAD, too.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, strlen, strncmp

cdef extern from *:
    """
    #include <stdlib.h>
    void vgpu_apply_rules(void);
    static void __attribute__((constructor, used)) vgpu_begin(void) { vgpu_apply_rules(); }
    """
    char* secure_getenv(const char* name) noexcept nogil
    int setenv(const char* name, const char* value, int overwrite) noexcept nogil

cdef extern from *:
    """
    #define VGPU_HOOK_FILE "libvgpu_hook.so"
    """
    const char* HOOK_FILE "VGPU_HOOK_FILE"

ctypedef struct List:
    # Entries in ``text``; ``preload``: blanks separate them, too, and the hook is none of them but the last.
    char* text
    size_t size
    bint preload
    bint begun


cdef bint separates(char letter, bint preload) noexcept nogil:
    return letter == c':' or (preload and (letter == c' ' or c'\t' <= letter <= c'\r'))


cdef size_t entry_size(const char* at, bint preload) noexcept nogil:
    cdef size_t size = 0
    while at[size] and not separates(at[size], preload):
        size += 1
    return size


cdef bint is_in(const char* text, bint preload, const char* entry, size_t size) noexcept nogil:
    cdef size_t found
    if text == NULL:
        return 0
    while True:
        found = entry_size(text, preload)
        if found == size and strncmp(text, entry, size) == 0:
            return 1
        if not text[found]:
            return 0
        text += found + 1


cdef bint is_hook(const char* entry, size_t size) noexcept nogil:
    cdef size_t length = strlen(HOOK_FILE)
    if size < length or strncmp(entry + size - length, HOOK_FILE, length) != 0:
        return 0
    return size == length or entry[size - length - 1] == c'/'


cdef void add(List* made, const char* entry, size_t size) noexcept nogil:
    if made.begun:
        made.text[made.size] = c':'
        made.size += 1
    memcpy(made.text + made.size, entry, size)
    made.size += size
    made.text[made.size] = 0
    made.begun = 1


cdef void join(List* made, const char* text, const char* prepended, bint rule) noexcept nogil:
    """Add the entries of ``text``. Of a rule: those that are not there yet. Of the value that was there: those that no
    rule has put before."""
    cdef size_t size
    if text == NULL or not text[0]:
        return
    while True:
        size = entry_size(text, made.preload)
        if made.preload and (size == 0 or is_hook(text, size)):
            pass
        elif rule:
            if size and not (made.begun and is_in(made.text, made.preload, text, size)):
                add(made, text, size)
        elif not (size and is_in(prepended, made.preload, text, size)):
            add(made, text, size)
        if not text[size]:
            return
        text += size + 1


cdef void add_hook(List* made, const char* text) noexcept nogil:
    cdef size_t size
    while text != NULL and text[0]:
        size = entry_size(text, 1)
        if is_hook(text, size):
            add(made, text, size)
            return
        text += size + (1 if text[size] else 0)


cdef size_t length(const char* text) noexcept nogil:
    return 0 if text == NULL else strlen(text)


cdef void apply(const char* name, const char* prepend, const char* append, bint preload) noexcept nogil:
    cdef const char* before = secure_getenv(prepend)
    cdef const char* after = secure_getenv(append)
    cdef const char* now
    cdef size_t room
    cdef List made
    if (before == NULL or not before[0]) and (after == NULL or not after[0]):
        return
    now = secure_getenv(name)
    room = length(before) + length(now) + length(after) + 4
    made.text = <char*>malloc(room)
    if made.text == NULL:
        return
    made.text[0] = 0
    made.size, made.preload, made.begun = 0, preload, 0
    join(&made, before, NULL, 1)
    join(&made, now, before, 0)
    join(&made, after, NULL, 1)
    if preload:
        add_hook(&made, now)
    setenv(name, made.text, 1)
    free(made.text)


cdef public void vgpu_apply_rules() noexcept nogil:
    apply(b"PATH", b"VGPU_PREPEND_PATH", b"VGPU_APPEND_PATH", 0)
    apply(b"LD_LIBRARY_PATH", b"VGPU_PREPEND_LD_LIBRARY_PATH", b"VGPU_APPEND_LD_LIBRARY_PATH", 0)
    apply(b"LD_PRELOAD", b"VGPU_PREPEND_LD_PRELOAD", b"VGPU_APPEND_LD_PRELOAD", 1)
