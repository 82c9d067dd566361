"""What the driver finds in the environment while it starts: the devices and the MPS daemon of the vGPU.

The driver reads these variables inside cuInit and never again (seen on an H100 with an MPS daemon: without them right
after cuInit, its contexts keep their SMs and their memory limit). So they stand there for as long as the driver's
cuInit runs; afterwards the program, and each program that it starts, finds its own values again.

``environ`` is exchanged as a whole. ``setenv`` could move the table while another thread's ``getenv`` reads it. Neither
table is ever unmapped: a thread may still be reading it. A program that changes its environment meanwhile keeps its
change: then each variable is put back alone.
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport getenv
from libc.string cimport memcpy, strcmp, strlen, strncmp

from cython_ext.hook.hook cimport vgpu_say
from cython_ext.hook.state cimport CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS, Setting, State, attached, state
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport load32

cdef extern from *:
    """
    #include "hook/connect.h"
    extern char **environ;
    """
    char** environ

cdef extern from "hook/connect.h" nogil:
    int setenv(const char* name, const char* value, int overwrite) noexcept
    int unsetenv(const char* name) noexcept
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset) noexcept
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
    void* MAP_FAILED


cdef public bint vgpu_set_for_driver(const char* name, const char* value, bint stays) noexcept nogil:
    """The driver is to find this value (NULL: none) in the environment; ``stays``: later readers, too. Under
    attach_lock. 0: the value is too long."""
    cdef State* all = state()
    cdef Setting* setting = &all.settings[0]
    cdef uint32_t i = 0
    while i < all.setting_count and strcmp(all.settings[i].name, name) != 0:
        i += 1
    if i == sizeof(all.settings) / sizeof(Setting) or (value != NULL and strlen(value) >= sizeof(setting.value)):
        return 0
    setting = &all.settings[i]
    memcpy(setting.name, name, strlen(name) + 1)
    setting.given = value != NULL
    setting.stays = stays
    if value != NULL:
        memcpy(setting.value, value, strlen(value) + 1)
    if i == all.setting_count:
        all.setting_count += 1
    return 1


cdef inline bint names(const char* entry, const char* name) noexcept nogil:
    """Whether the entry is ``NAME=…``."""
    cdef size_t size = strlen(name)
    return strncmp(entry, name, size) == 0 and entry[size] == c'='


cdef size_t size_of(char** table) noexcept nogil:
    cdef size_t count = 0
    while table != NULL and table[count] != NULL:
        count += 1
    return count


cdef void put(char** table, const Setting* setting, char* entry) noexcept nogil:
    """The setting in place of what the table has under its name, or behind the last; ``entry``: ``NAME=VALUE``."""
    cdef size_t i = 0, kept = 0
    cdef bint done = not setting.given
    while table[i] != NULL:
        if not names(table[i], setting.name):
            table[kept] = table[i]
            kept += 1
        elif not done:
            table[kept] = entry
            kept += 1
            done = 1
        i += 1
    if not done:
        table[kept] = entry
        kept += 1
    table[kept] = NULL


cdef bint make_tables(State* all) noexcept nogil:
    """Tables for the driver's start and for afterwards, from the environment as it is. 0: no memory."""
    cdef size_t count = size_of(environ), room = count + sizeof(all.settings) / sizeof(Setting) + 1
    cdef size_t bytes_ = 4 * room * sizeof(char*) + sizeof(all.settings) + sizeof(all.settings) / sizeof(Setting)
    cdef void* memory = mmap(NULL, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef char* entry
    cdef size_t name_size, value_size
    cdef uint32_t i
    if memory == MAP_FAILED:
        return 0
    all.lent_environment = <char**>memory
    all.lent_copy = all.lent_environment + room
    all.later_environment = all.lent_copy + room
    all.own_environment = all.later_environment + room
    memcpy(all.lent_environment, environ, count * sizeof(char*))
    memcpy(all.later_environment, environ, count * sizeof(char*))
    memcpy(all.own_environment, environ, count * sizeof(char*))
    entry = <char*>(all.own_environment + room)
    for i in range(all.setting_count):
        name_size = strlen(all.settings[i].name)
        value_size = strlen(all.settings[i].value)
        memcpy(entry, all.settings[i].name, name_size)
        entry[name_size] = c'='
        memcpy(entry + name_size + 1, all.settings[i].value, value_size + 1)
        put(all.lent_environment, &all.settings[i], entry)
        if all.settings[i].stays:
            put(all.later_environment, &all.settings[i], entry)
        entry += name_size + value_size + 2
    memcpy(all.lent_copy, all.lent_environment, room * sizeof(char*))
    return 1


cdef bint untouched(const State* all) noexcept nogil:
    """Whether the environment is the one that was lent, and the program has not changed it."""
    cdef size_t i = 0
    if environ != all.lent_environment:
        return 0
    while all.lent_copy[i] != NULL and all.lent_environment[i] == all.lent_copy[i]:
        i += 1
    return all.lent_environment[i] == all.lent_copy[i]


cdef const char* own_value(const State* all, const char* name) noexcept nogil:
    """As the program had it; NULL: not at all."""
    cdef size_t i = 0
    while all.own_environment[i] != NULL:
        if names(all.own_environment[i], name):
            return all.own_environment[i] + strlen(name) + 1
        i += 1
    return NULL


cdef void put_back_each(const State* all) noexcept nogil:
    """The program has changed its environment meanwhile. What it has set of these variables itself stays."""
    cdef const Setting* setting
    cdef const char* now
    cdef const char* own
    cdef uint32_t i
    for i in range(all.setting_count):
        setting = &all.settings[i]
        now = getenv(setting.name)
        if setting.stays or (now != NULL) != setting.given or (now != NULL and strcmp(now, setting.value) != 0):
            continue
        own = own_value(all, setting.name)
        if own == NULL:
            unsetenv(setting.name)
        else:
            setenv(setting.name, own, 1)


cdef public int vgpu_lend_environment(bint* lent) noexcept nogil:
    """Before the driver's cuInit. ``lent``: vgpu_return_environment has to follow. Several threads may be in it, and
    one thread twice: a tool that the driver loads may call cuInit, too."""
    global environ
    cdef State* all = state()
    cdef int error = CUDA_SUCCESS
    lent[0] = 0
    if not attached() or load32(&all.started):
        return CUDA_SUCCESS
    lock_acquire(&all.attach_lock)
    if all.lenders == 0 and not make_tables(all):
        vgpu_say(b"no memory for the environment of the driver", b"", b"")
        error = CUDA_ERROR_OPERATING_SYSTEM
    else:
        if all.lenders == 0:
            environ = all.lent_environment
        all.lenders += 1
        lent[0] = 1
    lock_release(&all.attach_lock)
    return error


cdef public void vgpu_return_environment() noexcept nogil:
    """After it."""
    global environ
    cdef State* all = state()
    lock_acquire(&all.attach_lock)
    all.lenders -= 1
    if all.lenders == 0:
        if untouched(all):
            environ = all.later_environment
        else:
            put_back_each(all)
    lock_release(&all.attach_lock)
