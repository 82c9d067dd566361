"""The description of one function of the driver that the hook intercepts or calls (symbols.py lists them)."""

from __future__ import annotations

from dataclasses import dataclass

PER_THREAD = "_ptsz"
"""Suffix of the twin for which stream 0 is the calling thread's own default stream."""

PER_THREAD_SYNCHRONOUS = "_ptds"
"""The same for a function that takes no stream, and means the default one."""

_FAST = ("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGraphLaunch")
_SEVERAL = "cuLaunchCooperativeKernelMultiDevice"
_WAITING = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
_UNCOUNTED = ("cuInit", "cuGetProcAddress", "cuLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported function of ``library``.

    ``base`` and ``version`` are what one passes to ``cuGetProcAddress`` to get exactly this function (version 0: it
    cannot be asked for that way); ``per_thread`` then needs the flag for per-thread default streams.
    """

    library: str  # "cuda" or "nvml"
    name: str
    arguments: str  # C parameter list, or "void"
    base: str
    version: int
    per_thread: bool
    intercepted: bool
    before: str = ""
    """``NAME(arguments)``: ``vgpu_NAME`` lets the call through, or returns the reason for a refusal
    (``cython_ext/hook/entry/transfers.pyx``)."""
    after: str = ""
    """``NAME(arguments)``: the wrapper calls ``vgpu_NAME`` after a call that succeeded."""
    bare: bool = False
    """The hook intercepts it only to know that a thread is in it."""

    @property
    def counted(self) -> bool:
        """Whether the hook knows that a thread is in it (``Thread.calling``). It does not for launches: they pass the
        gate."""
        return self.library == "cuda" and (self.bare or not self.name.startswith(_UNCOUNTED))

    @property
    def waits(self) -> bool:
        """Whether it returns only once work of the GPU is done: the time in it is no host time
        (``cython_ext/logic/meter/demand.pxd``)."""
        copies = self.name.startswith("cuMemcpy") and "Async" not in self.name
        return self.counted and (copies or self.name.startswith(_WAITING))

    @property
    def guarded(self) -> bool:
        """Whether no thread can be cancelled in it (``vgpu_hold_cancel``). Symbol lookup holds nothing. Functions that
        are only counted leave cancellation to the driver. Launches hold it up themselves, off the fast path."""
        fast = self.name.startswith(_FAST) and not self.name.startswith(_SEVERAL)
        return self.intercepted and not self.bare and not fast and not self.name.startswith("cuGetProcAddress")

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(type, name) pairs."""
        if self.arguments == "void":
            return ()
        return tuple(
            (kind.strip(), name) for kind, _, name in (p.strip().rpartition(" ") for p in self.arguments.split(","))
        )
