"""A shared page: made, sealed, mapped, handed out, closed. Each kind of page has a module for its contents
(grantspage.pyx, activitypage.pyx, relaypage.pyx, storepage.pyx).

Theory of operation
-------------------
A page is a memfd. Its maker maps it writable, seals it, and hands out descriptors. A process that has mapped a page may
close the descriptor at once. SHRINK is sealed on every page. Reason: if another process can truncate a mapped file, the
next access dies of SIGBUS. The grants page is also sealed with F_SEAL_FUTURE_WRITE, so that its maker's mapping stays
the only writable one for ever. A read-only descriptor by itself could be reopened for writing through /proc.

A page that a native thread works on is pinned; closing it then is refused instead of pulling the mapping away.
"""

import fcntl
import os

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport uint64_t

from cython_ext cimport native
from cython_ext.pages cimport layout


cdef extern from "sys/mman.h" nogil:
    void* mmap(void* address, size_t length, int protection, int flags, int descriptor, long offset)
    int munmap(void* address, size_t length)
    const int PROT_READ, PROT_WRITE, MAP_SHARED
    void* MAP_FAILED

cdef extern from "string.h" nogil:
    size_t strnlen(const char* text, size_t size)

# linux/fcntl.h and linux/memfd.h; Python names only some of them.
cdef int F_ADD_SEALS = 1033
cdef int F_GET_SEALS = 1034
cdef int MFD_NOEXEC_SEAL = 8


class PageError(ValueError):
    """A descriptor does not lead to a page of this kind, or the page cannot be used as asked."""


cdef int make_memfd(str name, size_t size) except -1:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        descriptor = os.memfd_create(name, flags)
    # A read-only descriptor is opened for writing through /proc by every process that these bits let.
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    return descriptor


cdef int write_header(layout.PageHeader* header, size_t size, uint64_t magic) except -1:
    header.size = size
    header.version = layout.LAYOUT_VERSION
    header.min_version = layout.LAYOUT_MIN_VERSION
    native.store64(&header.magic, magic)
    return 0


cdef size_t whole_pages(size_t size) noexcept:
    cdef size_t page = 4096
    return (size + page - 1) // page * page


cdef str text_of(const char* source, size_t size):
    """At most ``size`` bytes up to NUL, as printable text: it ends up on an operator's terminal."""
    raw = PyBytes_FromStringAndSize(source, strnlen(source, size))
    return "".join(c if c.isprintable() else "?" for c in raw.decode("utf-8", "replace"))


cdef class Page:
    """A shared page: a mapping, and a descriptor for as long as it is kept. Not made directly."""

    def __cinit__(self):
        self.base = NULL
        self.descriptor = -1

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.mapped_bytes)
        if self.descriptor >= 0:
            os.close(self.descriptor)

    cdef int map_descriptor(self, int descriptor, size_t size, bint writable) except -1:
        cdef size_t length = whole_pages(size)
        cdef int protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        cdef void* base = mmap(NULL, length, protection, MAP_SHARED, descriptor, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"cannot map a {type(self).__name__}: {os.strerror(errno)}")
        self.base = base
        self.mapped_bytes = length
        self.writable = writable
        return 0

    cdef int make(self, str name, size_t size, uint64_t magic, int more_seals, size_t appended=0) except -1:
        """``appended``: bytes behind the page that makers of an older version do not have."""
        self.descriptor = make_memfd(name, whole_pages(size + appended))
        self.map_descriptor(self.descriptor, size + appended, True)
        write_header(<layout.PageHeader*>self.base, size, magic)
        fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | more_seals)
        return 0

    cdef int write_own_header(self, size_t size, uint64_t magic) except -1:
        """Anew: a tenant may have written there."""
        write_header(<layout.PageHeader*>self.base, size, magic)
        return 0

    cdef int adopt(
        self, int descriptor, size_t size, uint64_t magic, bint writable, size_t appended=0, bint repair=False
    ) except -1:
        """Map what another process made, with what it has of ``appended``. The descriptor stays the caller's.

        ``repair``: a tenant may have written the header, and the caller knows the page by its descriptor.
        """
        name = type(self).__name__
        try:
            seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        except OSError as error:
            raise PageError(f"descriptor {descriptor} is not a memfd, so it cannot be a {name}: {error}") from None
        if not seals & F_SEAL_SHRINK:
            raise PageError(f"the {name} at descriptor {descriptor} is not sealed against shrinking: no maker of ours")
        found = os.fstat(descriptor).st_size
        if found < <object>size:
            raise PageError(f"the {name} at descriptor {descriptor} has {found} bytes, not {size}: another version?")
        self.map_descriptor(descriptor, min(<size_t>found, size + appended), writable)
        cdef layout.PageHeader* header = <layout.PageHeader*>self.base
        if repair:
            write_header(header, size, magic)
        if header.magic != magic or header.size < size:
            raise PageError(f"descriptor {descriptor} leads to some other page than a {name}")
        if header.min_version > layout.LAYOUT_VERSION:
            raise PageError(
                f"the {name} needs layout version {header.min_version}, this program knows {layout.LAYOUT_VERSION}:"
                " update it"
            )
        return 0

    cdef int pin(self) except -1:
        self.check_open()
        self.pins += 1
        return 0

    cdef int unpin(self) except -1:
        self.pins -= 1
        return 0

    cdef int check_open(self) except -1:
        if self.base == NULL:
            raise PageError(f"this {type(self).__name__} is closed")
        return 0

    cdef int check_writable(self) except -1:
        self.check_open()
        if not self.writable:
            raise PageError(f"this {type(self).__name__} is mapped read-only: only its maker writes it")
        return 0

    def fileno(self):
        """The descriptor to hand out. Raises ``PageError`` once it was closed, or where this object never had it."""
        if self.descriptor < 0:
            raise PageError(f"this {type(self).__name__} keeps no descriptor")
        return self.descriptor

    def close_descriptor(self):
        """Close the descriptor and keep the mapping. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self):
        """Unmap, and close the descriptor. Idempotent. Raises ``PageError`` while a native thread uses the page."""
        if self.pins:
            raise PageError(f"this {type(self).__name__} is in use by a native thread: stop that first")
        if self.base != NULL:
            munmap(self.base, self.mapped_bytes)
            self.base = NULL
        self.close_descriptor()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def closed(self):
        return self.base == NULL

    @property
    def version(self):
        """Layout version of the page's maker."""
        self.check_open()
        return (<layout.PageHeader*>self.base).version
