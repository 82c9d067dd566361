"""Turns signals that end a program into exceptions, so that the program also ends what it has started."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar, TypeVarTuple

import trio

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


async def ended_by_signals(work: Callable[[*Arguments], Awaitable[Result]], *arguments: *Arguments) -> Result:
    """``await work(*arguments)``, ended with ``SystemExit`` 128 + n by SIGTERM and SIGHUP. (SIGINT is Python's own.)"""
    async with trio.open_nursery() as nursery:
        await nursery.start(_raise_at_signal)  # nothing is started before signals are caught
        result = await work(*arguments)
        nursery.cancel_scope.cancel()
    return result


def cause_of(error: BaseException) -> BaseException:
    """The first cause of an exception, for a person to read. Nurseries wrap what ended them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _raise_at_signal(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as received:
        task_status.started()
        async for number in received:
            raise SystemExit(128 + number)
    raise AssertionError("the stream of signals has no end")
