"""Children in PID namespaces of their own: each is process 1 there, as the programs of two containers are."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import pytest

CLONE_NEWPID = 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@cache
def may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _call(_libc.unshare, CLONE_NEWPID)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def fork_apart() -> int:
    """``os.fork``, but the child is process 1 of a PID namespace of its own. The parent gets its own namespace's id of
    it. Skips the test where this process may make no namespace: that takes CAP_SYS_ADMIN."""
    if not may_unshare():
        pytest.skip("making a PID namespace takes CAP_SYS_ADMIN")
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _call(_libc.unshare, CLONE_NEWPID)
        pid = os.fork()
        if pid != 0:
            _call(_libc.setns, own, CLONE_NEWPID)
    finally:
        os.close(own)
    return pid
