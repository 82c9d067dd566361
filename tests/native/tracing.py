"""Run a piece of native code one machine instruction at a time, and kill its process between any two of them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import pytest

PTRACE_TRACEME, PTRACE_CONT, PTRACE_SINGLESTEP = 0, 7, 9

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


def ptrace(request: int, pid: int) -> None:
    if _ptrace(request, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {request}")


def traced_child(work: Callable[[], object], fork: Callable[[], int] = os.fork) -> int:
    """A child that runs ``work`` and has come to its first SIGSTOP; it stops before and after its native part."""
    pid = fork()
    if pid == 0:
        try:
            ptrace(PTRACE_TRACEME, 0)
            work()
        except OSError:
            os._exit(77)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 77:
        pytest.skip("this sandbox does not allow ptrace")
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    return pid


def step(pid: int) -> bool:
    """One instruction; False when the child has come to its second SIGSTOP."""
    ptrace(PTRACE_SINGLESTEP, pid)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), "the child ended between its stops"
    return os.WSTOPSIG(status) != signal.SIGSTOP


def let_finish(pid: int) -> None:
    """After its second stop: to the end."""
    ptrace(PTRACE_CONT, pid)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def kill_and_reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def killed_after_instructions(
    work: Callable[[], object], every: int = 1, fork: Callable[[], int] = os.fork
) -> Iterator[int]:
    """Start ``work`` anew for n = 0, ``every``, 2 ``every``, … and kill it after n instructions.

    Yields n each time it is dead; the caller puts the shared state back before it asks for the next. Ends with the
    first n at which ``work`` was through. Costs a fork and n steps per death, so ``every`` is above 1 for long pieces.
    """
    n = 0
    through = False
    while not through:
        pid = traced_child(work, fork)
        through = not all(step(pid) for _ in range(n))
        kill_and_reap(pid)
        yield n
        n += every
