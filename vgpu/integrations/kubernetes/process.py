"""``vgpuctl kubelet``: the process of the DaemonSet. It stands between the kubelet and the node of this machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from vgpu.api.node import Node
from vgpu.errors import VgpuError
from vgpu.integrations.kubernetes.kubelet import DraSockets, Places, PluginSockets
from vgpu.integrations.kubernetes.profiles import Profile
from vgpu.loggers import get_logger

log = get_logger(__name__)
TICK_S: Final = 1.0
NAMING_S: Final = 5.0
CHECK_S: Final = 60.0
RECONCILE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    """``node``: the name of the Kubernetes node."""

    node: str
    places: Places
    profiles: tuple[Profile, ...] = ()
    compatible: tuple[str, ...] = ()


class Regularly:
    """Does something every ``period_s``, or earlier when asked. A failure is logged, and tried again
    at the next turn."""

    def __init__(self, name: str, period_s: float, act: Callable[[], None], *, at_once: bool = True) -> None:
        self._name, self._period_s, self._act = name, period_s, act
        self._due_s = 0.0 if at_once else time.monotonic() + period_s
        self._failed = ""

    def now(self) -> None:
        self._due_s = 0.0

    def turn(self) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + self._period_s
        try:
            self._act()
            self._failed = ""
        except VgpuError as error:
            self._due_s = time.monotonic() + TICK_S
            if str(error) != self._failed:
                log.warning(f"{self._name} failed and will be tried again", reason=str(error))
            self._failed = str(error)


def _naming(options: Options) -> Regularly:
    """Pods appear in the kubelet's list some time after their claims were prepared."""
    from vgpu.integrations.kubernetes import podfacts

    node, path = Node(), options.places.pod_resources
    return Regularly("naming the pods of vGPUs", NAMING_S, lambda: podfacts.name_vgpus(node, podfacts.holders(path)))


def serve_dra(options: Options) -> None:
    """Until SIGTERM or SIGINT. ``VgpuError``: it cannot begin."""
    from vgpu.integrations.kubernetes.driver import Driver
    from vgpu.integrations.kubernetes.health import Health
    from vgpu.integrations.kubernetes.objects import Cluster, open_client

    driver = Driver(Cluster(options.node, open_client()), Node())
    health = Health(options.node, Node(), options.profiles)
    check = Regularly("the check of the slices", CHECK_S, lambda: driver.publish(options.profiles, check=True))
    turns = [
        check,
        Regularly("publishing the slices", TICK_S, lambda: driver.publish(options.profiles)),
        Regularly("the removal of vGPUs without a claim", RECONCILE_S, driver.reconcile),
        Regularly("reading the states of GPUs", TICK_S, health.refresh),
        _naming(options),
    ]
    with ExitStack() as stack:
        sockets = DraSockets(options.places, driver.prepare, driver.unprepare, health.methods, check.now)
        stack.callback(sockets.close)
        stack.callback(health.close)
        # Brokers hold processes of such pods for a few seconds, whatever else is slow.
        stack.enter_context(_beside(Regularly("naming the pods that wait", TICK_S / 2, driver.admit_pods)))
        log.info("the kubelet's calls are answered", socket=str(options.places.dra))
        _run(turns)


def serve_plugins(options: Options) -> None:
    """As ``serve_dra``: a device plugin for each resource."""
    from vgpu.integrations.kubernetes import plugin, podfacts, resources

    def held() -> frozenset[str]:
        return podfacts.claims_of(podfacts.holders(options.places.pod_resources))

    served = [*map(resources.of_profile, options.profiles), *chain(*map(resources.compatible, options.compatible))]
    with ExitStack() as stack:
        turns = [_naming(options)]
        for resource in served:
            one = plugin.Plugin(resource, Node(), held)
            sockets = PluginSockets(options.places, resource.name, one.methods, plugin.OPTIONS)
            stack.callback(sockets.close)
            stack.callback(one.close)
            turns += [
                Regularly("reading the node", TICK_S, one.refresh),
                Regularly("registering with the kubelet", TICK_S / 4, sockets.turn),
                Regularly("the removal of vGPUs that no container has", CHECK_S, one.remove_unused, at_once=False),
            ]
        _run(turns)


def serve_assumed(options: Options) -> None:
    """As ``serve_plugins``: the scheduler extender has chosen the GPU of each pod."""
    from vgpu.integrations.kubernetes import plugin
    from vgpu.integrations.kubernetes.extender import allocate
    from vgpu.integrations.kubernetes.extender.objects import Objects
    from vgpu.integrations.kubernetes.objects import open_client

    offered = list(chain(*map(allocate.offered, options.compatible)))
    served = allocate.NodeShare(options.node, Objects(open_client()), Node())
    with ExitStack() as stack:
        turns = [
            Regularly("the check of the node's annotation", CHECK_S, lambda: served.publish(check=True)),
            Regularly("writing the GPUs at the node", TICK_S, served.publish),
            Regularly("the removal of vGPUs of pods that are over", NAMING_S, served.tidy),
        ]
        for resource in offered:
            one = allocate.AssumedPlugin(resource, served)
            sockets = PluginSockets(options.places, resource.name, one.methods, plugin.OPTIONS)
            stack.callback(sockets.close)
            stack.callback(one.close)
            turns += [
                Regularly("reading the node", TICK_S, one.refresh),
                Regularly("registering with the kubelet", TICK_S / 4, sockets.turn),
            ]
        _run(turns)


@contextmanager
def _beside(turn: Regularly) -> Iterator[None]:
    """Take these turns in a thread of their own."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(TICK_S / 4):
            turn.turn()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _run(turns: list[Regularly]) -> None:
    ended = threading.Event()

    def end(*_: Any) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while not ended.wait(TICK_S / 4):
        for one in turns:
            one.turn()
