"""A simulated GPU that is obviously right: it lives through every nanosecond, with fractions and plain lists.

Same rules as cython_ext/sim/engine.pxd, none of its shortcuts: no events, no bit sets, no look-ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from cython_ext.simengine import COPY_IN, COPY_OUT, EXTERNAL, KERNEL, LEGACY, MARK, NONBLOCKING, WAIT


@dataclass(eq=False)
class Op:
    kind: int
    remaining: Fraction
    sms: int
    seq: int
    wait: tuple[int, int] | None
    released: bool = False
    start: int | None = None
    end: int | None = None


@dataclass(eq=False)
class Stream:
    context: int
    flags: int
    priority: int
    ops: list[Op] = field(default_factory=list)
    done: int = 0

    @property
    def head(self) -> Op | None:
        return self.ops[self.done] if self.done < len(self.ops) else None


@dataclass(eq=False)
class Twin:
    sms: int
    slice_ns: int
    switch_ns: int
    idle_switch_ns: int
    now: int = 1
    seq: int = 1
    contexts: dict[int, tuple[int, int]] = field(default_factory=dict)  # group, cap
    streams: list[Stream] = field(default_factory=list)
    active: int = 0
    slice_end: int = 0
    switch_end: int = 0

    def submit(self, stream: int, kind: int, ns: int, sms: int, wait: tuple[int, int] | None) -> None:
        self.streams[stream].ops.append(Op(kind, Fraction(ns), sms or self.sms, self.seq, wait))
        self.seq += 1

    def held_back(self, stream: Stream, op: Op) -> bool:
        if stream.flags & NONBLOCKING:
            return False
        for other in self.streams:
            if other is stream or other.context != stream.context or other.head is None:
                continue
            between = (stream.flags | other.flags) & LEGACY and not other.flags & NONBLOCKING
            if between and other.head.seq < op.seq:
                return True
        return False

    def is_finished(self, op: Op) -> bool:
        if op.kind == WAIT:
            assert op.wait is not None
            return self.streams[op.wait[0]].done >= op.wait[1]
        if op.kind == EXTERNAL:
            return op.released
        return op.kind == MARK or (op.start is not None and op.remaining <= 0)

    def settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for stream in self.streams:
                op = stream.head
                if op is not None and self.is_finished(op) and not self.held_back(stream, op):
                    op.start = self.now if op.start is None else op.start
                    op.end = self.now
                    stream.done += 1
                    changed = True

    def ready(self, kinds: tuple[int, ...]) -> list[tuple[Stream, Op]]:
        heads = [(s, s.head) for s in self.streams]
        return [(s, op) for s, op in heads if op and op.kind in kinds and not self.held_back(s, op)]

    def choose(self, kernels: list[tuple[Stream, Op]]) -> None:
        groups = {self.contexts[s.context][0] for s, _ in kernels}
        present = self.active in groups
        if not groups - {self.active} or self.now < self.switch_end or (present and self.now < self.slice_end):
            return
        cost = self.switch_ns if present else self.idle_switch_ns if self.active else 0
        self.switch_end = self.now + cost
        self.slice_end = self.switch_end + self.slice_ns
        self.active = min((g for g in groups if g > self.active), default=min(groups))

    def granted(self, kernels: list[tuple[Stream, Op]]) -> dict[int, Fraction]:
        """Max-min fair: the smallest demand first, each offered an equal part of what is left."""
        wanted: dict[int, int] = {}
        for s, op in kernels:
            wanted[s.context] = min(self.contexts[s.context][1], wanted.get(s.context, 0) + op.sms)
        left = Fraction(self.sms)
        shares = {}
        for i, (context, demand) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
            shares[context] = min(Fraction(demand), left / (len(wanted) - i))
            left -= shares[context]
        return shares

    def tick(self) -> None:
        kernels = self.ready((KERNEL,))
        self.choose(kernels)
        if self.now >= self.switch_end:
            running = [(s, op) for s, op in kernels if self.contexts[s.context][0] == self.active]
            shares = self.granted(running)
            for s, op in sorted(running, key=lambda item: (item[0].priority, item[1].seq)):
                got = min(Fraction(op.sms), shares[s.context])
                shares[s.context] -= got
                if got:
                    op.start = self.now if op.start is None else op.start
                    op.remaining -= got / op.sms
        for kind in (COPY_IN, COPY_OUT):
            copies = [op for _, op in self.ready((kind,))]
            if copies:
                op = min(copies, key=lambda op: (op.start is None, op.seq))
                op.start = self.now if op.start is None else op.start
                op.remaining -= 1
        self.now += 1
        self.settle()

    def advance(self, now: int) -> None:
        self.settle()
        while self.now < now:
            self.tick()
