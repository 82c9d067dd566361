"""Brokers are forked from one template: named before they begin, in sessions of their own, buried when they end."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest
import trio

from client_hook import interpreter
from gpuserver.runtime.lifecycle import template as runtime_template
from gpuserver.runtime.lifecycle.template import BrokerTemplate, NoTemplateError, Order, _has_ended, start_broker
from vgpu.identity import Process
from vgpu.limits import DEFAULT_LIMITS, Limits
from vgpu.protocol.peer import is_alive, is_running

PATIENCE_S = 60


@asynccontextmanager
async def kept() -> AsyncIterator[BrokerTemplate]:
    """As a server has it: the template ends once nothing keeps it."""
    template = BrokerTemplate()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(template.keep)
            try:
                yield template
            finally:
                nursery.cancel_scope.cancel()
    finally:
        template.end()


def played(scene: Callable[[BrokerTemplate], Awaitable[None]]) -> None:
    async def run() -> None:
        with trio.fail_after(PATIENCE_S):
            async with kept() as template:
                await scene(template)

    trio.run(run)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a process that ends tells nobody here
        await trio.sleep(0.01)


def order(vgpu_id: str, directory: Path, limits: Limits = DEFAULT_LIMITS) -> Order:
    server, door, alive = (str(directory / name) for name in ("server", "door", "alive"))
    return Order(vgpu_id, server, door, alive, limits.as_option())


def arguments_of(process: Process) -> list[str]:
    return Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1]


def end(child: Process) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)


def open_files(process: Process) -> list[str]:
    found = []
    for one in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found.append(str(one.readlink()))
    return sorted(found)


def test_a_broker_waits_until_its_name_is_known_and_ends_if_its_server_does(tmp_path: Path) -> None:
    async def scene(template: BrokerTemplate) -> None:
        broker, goes = await template.fork(order("vgpu-00000001", tmp_path))
        assert is_running(broker)
        await until(lambda: b"vgpu-00000001" in Path(f"/proc/{broker.pid}/cmdline").read_bytes())
        assert os.getsid(broker.pid) == broker.pid
        os.close(goes)  # as when the server dies
        await until(lambda: not is_alive(broker))  # the template has buried it

    played(scene)


def test_a_broker_begins_with_no_descriptor_of_the_template(tmp_path: Path) -> None:
    inherited = set(open_files(Process(os.getpid(), 0)))  # by whatever runs the tests

    def pipes_of(process: Process) -> list[str]:
        return [name for name in open_files(process) if name.startswith("pipe:") and name not in inherited]

    async def scene(template: BrokerTemplate) -> None:
        first, goes = await template.fork(order("vgpu-00000001", tmp_path))
        second, goes_too = await template.fork(order("vgpu-00000002", tmp_path))
        await until(lambda: len(pipes_of(second)) == 1)
        assert not [name for name in open_files(second) if name.startswith("socket:")]
        assert pipes_of(first) != pipes_of(second)
        for descriptor in (goes, goes_too):
            os.close(descriptor)
        await until(lambda: not is_alive(first) and not is_alive(second))

    played(scene)


def test_a_template_that_died_is_started_again(tmp_path: Path) -> None:
    async def scene(template: BrokerTemplate) -> None:
        first, goes = await template.fork(order("vgpu-00000001", tmp_path))
        before = template.pid
        os.kill(before, signal.SIGKILL)
        second, goes_too = await template.fork(order("vgpu-00000001", tmp_path))
        assert template.pid != before
        assert is_running(first), "brokers outlive the template"
        assert is_running(second)
        for descriptor in (goes, goes_too):
            os.close(descriptor)
        await until(lambda: not is_running(first) and not is_running(second))

    played(scene)


def test_without_a_template_a_broker_is_started_with_the_whole_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def none(self: BrokerTemplate, order: Order) -> NoReturn:
        raise NoTemplateError

    monkeypatch.setattr(BrokerTemplate, "fork", none)
    wanted = order("vgpu-00000001", tmp_path, Limits(processes_per_vgpu=1))

    async def scene() -> None:
        with trio.fail_after(PATIENCE_S):
            broker, goes = await start_broker(BrokerTemplate(), wanted)
            try:
                assert goes == -1
                while not (argv := arguments_of(broker)):  # noqa: ASYNC110 - the kernel sets them after posix_spawn
                    await trio.sleep(0.01)
                assert argv == interpreter.command("vgpu.broker", *wanted.options())
                assert argv[argv.index("--limits") + 1] == '{"processes_per_vgpu":1}'
            finally:
                end(broker)

    trio.run(scene)


def test_a_server_without_descriptors_for_a_broker_goes_on(tmp_path: Path) -> None:
    """The broker that was forked ends; one that needs no descriptor of the server starts."""

    async def scene() -> None:
        with trio.fail_after(PATIENCE_S):
            template = BrokerTemplate()
            template.warm()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            next_free = os.open("/", os.O_RDONLY)
            os.close(next_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
            try:
                broker, goes = await start_broker(template, order("vgpu-00000001", tmp_path))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            end(broker)
            assert goes == -1
            forked, goes = await template.fork(order("vgpu-00000002", tmp_path))
            assert is_running(forked)
            os.close(goes)
            await until(lambda: not is_alive(forked))
            template.end()

    trio.run(scene)


def test_a_template_is_started_once_the_machine_has_the_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors or processes the server goes on."""
    tries = []

    def spawn(argv: list[str]) -> int:
        tries.append(argv)
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(argv)

    real = runtime_template.spawn
    monkeypatch.setattr(runtime_template, "spawn", spawn)
    monkeypatch.setattr(runtime_template, "PAUSE_S", 0.01)

    async def scene(template: BrokerTemplate) -> None:
        await until(lambda: template.pid > 0)
        assert len(tries) == 3

    played(scene)


def test_the_template_ends_with_its_server() -> None:
    async def scene() -> None:
        template = BrokerTemplate()
        template.warm()
        assert template._link is not None
        template._link.close()
        with trio.fail_after(PATIENCE_S):
            while not _has_ended(template.pid):  # noqa: ASYNC110 - a process that ends tells nobody here
                await trio.sleep(0.01)
        template.end()

    trio.run(scene)
