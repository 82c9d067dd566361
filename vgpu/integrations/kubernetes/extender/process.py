"""``vgpuctl extender``: the scheduler's requests, the reservations that answer them, and the API server.

The reservations belong to the event loop alone. Requests to the API server run in threads. A bind waits for its turn,
because the kubelet allocates one pod of a size after the other, which takes milliseconds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.http.serving import Tls, serve_http
from vgpu.integrations.kubernetes.dra import Object
from vgpu.integrations.kubernetes.extender import assumed
from vgpu.integrations.kubernetes.extender.app import application
from vgpu.integrations.kubernetes.extender.assumed import Held
from vgpu.integrations.kubernetes.extender.messages import Binding
from vgpu.integrations.kubernetes.extender.objects import ChangedError, Node, Objects, Pod, RefusedError
from vgpu.integrations.kubernetes.extender.reservations import Assume, Bound, Later, Refused, Reservations
from vgpu.limits import DEFAULT_LIMITS
from vgpu.loggers import get_logger
from vgpu.placement import POLICIES

log = get_logger(__name__)
STOP_S: Final = 1.0
TURN_S: Final = 20.0
"""How long a bind waits for its turn. The scheduler gives it 30 s and then tries again."""
TICK_S: Final = 1.0
RELIST_S: Final = 300.0
"""A watch that broke without a word is found by then."""
MOST_TRIES: Final = 3
AT_ONCE: Final = 32
"""Requests to the API server."""
MOST_LINKS: Final = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """``limit_s``: a pod that the kubelet does not allocate within this time loses its GPU."""

    policy: str
    limit_s: float
    tls: Tls | None = None


class Extender:
    """``objects``: the API server."""

    def __init__(self, objects: Objects, policy: str, limit_s: float) -> None:
        self.reservations = Reservations(POLICIES[policy], limit_s)
        self._objects = objects
        self._at_once = trio.CapacityLimiter(AT_ONCE)
        self._changed = trio.Event()
        self._underway: set[str] = set()
        self._failed = ""

    # --- what is

    async def read(self) -> None:
        """The pods and nodes that there are. ``VgpuError``."""
        nodes = await self._ask(self._objects.nodes)
        self.reservations.see_nodes(nodes.items)
        pods = await self._ask(self._objects.pods)
        self.reservations.see_pods(pods.items, pods.version)
        self._wake()

    async def follow(self) -> None:
        """Keep the reservations up to date, and give back what is overdue."""
        async with trio.open_nursery() as nursery:
            for kind, change in ((Pod, self._pod_changed), (Node, self._node_changed)):
                nursery.start_soon(self._watch, kind, change)
            nursery.start_soon(self._regularly, RELIST_S, self.read)
            nursery.start_soon(self._regularly, TICK_S, self.give_back_overdue)

    async def _watch(self, kind: type[Pod] | type[Node], change: Callable[[str, Object], None]) -> None:
        def changed(event: str, found: Object) -> None:
            trio.from_thread.run_sync(change, event, found)

        while True:
            try:
                version = await self._list(kind)
                await trio.to_thread.run_sync(
                    self._objects.watch, kind, version, changed, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
            except VgpuError as error:
                log.info("the watch begins anew", of=kind.__name__, reason=str(error))
            await trio.sleep(TICK_S)

    async def _list(self, kind: type[Pod] | type[Node]) -> str:
        if kind is Pod:
            pods = await self._ask(self._objects.pods)
            self.reservations.see_pods(pods.items, pods.version)
            self._wake()
            return pods.version
        nodes = await self._ask(self._objects.nodes)
        self.reservations.see_nodes(nodes.items)
        self._wake()
        return nodes.version

    def _pod_changed(self, event: str, pod: Object) -> None:
        if event == "DELETED":
            self.reservations.lose(pod["metadata"]["uid"])
        else:
            self.reservations.see(pod)
        self._wake()

    def _node_changed(self, event: str, node: Object) -> None:
        if event == "DELETED":
            self.reservations.lose_node(node["metadata"]["name"])
        else:
            self.reservations.see_node(node)
        self._wake()

    async def _regularly(self, period_s: float, act: Callable[[], Any]) -> None:
        while True:
            await trio.sleep(period_s)
            try:
                await act()
            except VgpuError as error:
                log.warning("a regular task failed and will be tried again", reason=str(error))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- bind

    async def bind(self, asked: Binding) -> str:
        """Choose the GPU of a pod, write it, and bind the pod. "": done; else the reason, and the scheduler asks
        again."""
        try:
            with self._alone(f"{asked.namespace}/{asked.name}"), trio.move_on_after(TURN_S) as turn:
                return await self._bind(asked, turn)
        except VgpuError as error:
            log.warning("a pod is not bound", pod=f"{asked.namespace}/{asked.name}", reason=str(error))
            return str(error)
        return "the bind did not get its turn"

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """One task at a time changes the pod ``key``. The scheduler may ask again before the first answer."""
        if key in self._underway:
            raise VgpuError(ErrorCode.IN_USE, f"{key} is being bound by an earlier request")
        self._underway.add(key)
        try:
            yield
        finally:
            self._underway.remove(key)

    async def _bind(self, asked: Binding, turn: trio.CancelScope) -> str:
        pod, tries = await self._read(asked), 0
        while True:
            changed = self._changed
            match self.reservations.decide(pod, asked.node, time.time()):
                case Bound():
                    self.reservations.see(pod)
                    self.reservations.end(pod["metadata"]["uid"])
                    return ""
                case Refused(reason):
                    return reason
                case Later(reason):
                    if trio.current_time() >= turn.deadline - TICK_S:
                        return reason
                    with trio.move_on_at(turn.deadline - TICK_S):
                        await changed.wait()
                case Assume(held, annotations):
                    try:
                        with trio.CancelScope(shield=True):  # half of it would have to be undone
                            await self._assume(pod, held, annotations)
                    except ChangedError:  # in its status, say
                        tries += 1
                        if tries == MOST_TRIES:
                            raise
                        pod = await self._read(asked)
                    else:
                        return ""

    async def _read(self, asked: Binding) -> Object:
        pod = await self._ask(partial(self._objects.pod, asked.namespace, asked.name))
        if pod is None or (asked.uid and pod["metadata"]["uid"] != asked.uid):
            raise RefusedError("the pod is gone")
        return pod

    async def _assume(self, pod: Object, held: Held, annotations: Any) -> None:
        """``VgpuError``: it is not bound. The GPU is free again, or is given back once that is known to be safe."""
        self.reservations.begin(held)
        try:
            if annotations:
                pod = self._seen(await self._ask(partial(self._objects.annotate, pod, annotations)), held)
            if not await self._ask(partial(self._objects.bind, pod, held.node)):
                raise RefusedError(f"the pod {held} is gone")
        except (ChangedError, RefusedError):
            await self._give_back(held, bound_too=False)
            raise
        self.reservations.end(held.uid)
        log.info("a pod is bound", pod=str(held), node=held.node, gpus=[part.index for part in held.parts])

    def _seen(self, pod: Object | None, held: Held) -> Object:
        if pod is None:
            self.reservations.lose(held.uid)
            raise RefusedError(f"the pod {held} is gone")
        self.reservations.see(pod)
        return pod

    # --- what is overdue

    async def give_back_overdue(self) -> None:
        """One pod that the API server refuses does not keep the others waiting."""
        for held in self.reservations.overdue(time.time()):
            try:
                with self._alone(str(held)):
                    if held not in self.reservations.overdue(time.time()):  # it was bound or allocated meanwhile
                        continue
                    log.warning("a GPU is taken back from a pod that the kubelet has not allocated", pod=str(held))
                    await self._give_back(held)
            except VgpuError as error:
                log.info("a pod keeps its GPU for now", pod=str(held), reason=str(error))

    async def _give_back(self, held: Held, *, bound_too: bool = True) -> None:
        """The annotations go if the pod is still as it was read, so that a bind or an allocation that comes late fails.
        ``VgpuError``: the API server does not answer; a later turn tries again."""
        try:
            pod = await self._ask(partial(self._objects.pod, held.namespace, held.name))
            if pod is None or pod["metadata"]["uid"] != held.uid:
                self.reservations.lose(held.uid)
            else:
                self.reservations.see(pod)
                if assumed.is_waiting(pod) and (bound_too or not pod["spec"].get("nodeName")):
                    after = await self._ask(partial(self._objects.annotate, pod, assumed.taken_back()))
                    self._seen(after, held)
        except (ChangedError, RefusedError) as error:
            log.info("a pod keeps its GPU for now", pod=str(held), reason=str(error))
        self.reservations.end(held.uid)
        self._wake()

    async def _ask(self, question: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(question, limiter=self._at_once)


async def serve(objects: Objects, options: Options, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. ``VgpuError``: the API server does not answer at the start."""
    extender = Extender(objects, options.policy, options.limit_s)
    await extender.read()
    # The scheduler is one source of connections, and has one for each bind.
    # Another source may not take all places, since a place is taken before the peer has shown its certificate.
    limits = DEFAULT_LIMITS.model_copy(update={"http_links": MOST_LINKS, "http_links_per_source": MOST_LINKS // 4})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(extender.follow)
        await serve_http(application(extender), listening, ready, STOP_S, limits, options.tls)
        nursery.cancel_scope.cancel()
