"""Starts programs so that the launcher is invisible: exit codes and signals pass through as Docker passes them.

``replace_process`` becomes the program (``vgpuctl exec``). ``Supervision`` stays behind to clean up (``vgpuctl run``).

Ctrl-C in a terminal goes to the whole foreground group, so the program gets it by itself. ``kill`` reaches only the
launcher. The kernel reports which of the two it was (``si_code``), and the launcher passes on only the latter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, NoReturn, Self

from client_hook.errors import CannotStart

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
SIGNALLED: Final = 128
"""A program that died of signal n counts as exit code 128 + n."""

FORWARDED: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM}
)
# Python ignores these for itself; a program must not inherit that.
_PYTHON_IGNORES: Final = (signal.SIGPIPE, signal.SIGXFSZ)


def replace_process(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes ``argv`` (looked up on the PATH of ``environment``). Raises :class:`CannotStart` if it cannot."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as error:
        raise _cannot_start(argv[0], error) from error


class Supervision:
    """From ``__enter__`` on no forwarded signal interrupts this process, so what it has made it also removes.

    A signal that arrives before the program runs is held, and reaches the program as its first.
    """

    def __enter__(self) -> Self:
        self._previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous)

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Starts ``argv`` and waits for its end. Returns its exit code, 128 + n if signal n ended it.

        Raises :class:`CannotStart` if it is not found or not executable.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.posix_spawnp(
                argv[0], list(argv), dict(environment), setsigmask=self._previous, setsigdef=_PYTHON_IGNORES
            )
        except OSError as error:
            raise _cannot_start(argv[0], error) from error
        while True:
            received = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
            if received.si_signo != signal.SIGCHLD:
                if received.si_code <= 0:  # from a process (kill, sigqueue), not from the terminal
                    os.kill(pid, received.si_signo)
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return SIGNALLED - code if code < 0 else code


def _cannot_start(program: str, error: OSError) -> CannotStart:
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    reason = "no such program" if code == NOT_FOUND else (error.strerror or str(error)).lower()
    return CannotStart(code, f"{program}: {reason}")
