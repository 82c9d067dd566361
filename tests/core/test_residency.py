"""Who is on the card: a model of a card on which moves take time, with vGPUs that want and stop wanting at random."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.states.residency import (
    AGAIN_LEAST_NS,
    AGAIN_MOST_NS,
    PASSING_BYTES,
    STAY_LEAST_NS,
    STORE_SLACK_BYTES,
    Arrival,
    HostMemory,
    Moves,
    Tenant,
    admit,
    decide,
    patience_ns,
    spare_bytes,
    usable_bytes,
)
from vgpu.share import Priority

GIB = 1 << 30
SECOND = 1_000_000_000


def tenant(key: int, memory: int, *, resident: bool = True, wants: bool = True, **more: int) -> Tenant:
    return Tenant(
        VgpuIndex(key),
        resident,
        memory * GIB,
        wants,
        wants_ns=more.get("wants_ns", 0),
        moving=bool(more.get("moving", 0)),
        pinned=bool(more.get("pinned", 0)),
        room_bytes=more.get("room", 0) * GIB,
        user=more.get("user", 0),
        came_ns=more.get("came_ns", 0),
        left_ns=more.get("left_ns", 0),
        move_ns=more.get("move_ns", 0),
        stray_bytes=more.get("stray", 0) * GIB,
        priority=Priority(more.get("priority", Priority.NORMAL)),
    )


def test_where_all_fit_nobody_moves() -> None:
    assert decide([tenant(1, 60), tenant(2, 60)], 140 * GIB, 0) == Moves()


def test_who_wants_comes_where_there_is_room() -> None:
    assert decide([tenant(1, 60), tenant(2, 60, resident=False)], 140 * GIB, 0) == Moves(come=(VgpuIndex(2),))
    assert decide([tenant(1, 60), tenant(2, 60, resident=False, wants=False)], 140 * GIB, 0) == Moves()


def test_the_least_recently_needed_makes_room() -> None:
    here = [tenant(1, 60, wants=False, wants_ns=5), tenant(2, 60, wants=False, wants_ns=4), tenant(3, 20)]
    moves = Moves(leave=(VgpuIndex(2),), come=(VgpuIndex(4),))
    assert decide([*here, tenant(4, 60, resident=False)], 140 * GIB, 10) == moves


def test_where_all_want_they_take_turns_of_a_stay_each() -> None:
    here = [tenant(1, 60, came_ns=5), tenant(2, 60, came_ns=3, move_ns=SECOND), tenant(3, 60, resident=False)]
    assert decide(here, 140 * GIB, 4 + STAY_LEAST_NS) == Moves()
    come = (VgpuIndex(3),)
    assert decide(here, 140 * GIB, 5 + STAY_LEAST_NS) == Moves((VgpuIndex(1),), come)
    later = 3 + 8 * SECOND
    assert decide([replace(here[0], came_ns=later), *here[1:]], 140 * GIB, later) == Moves((VgpuIndex(2),), come)


def test_who_has_had_a_stay_is_the_last_of_the_line() -> None:
    """However long it has wanted: it would else be the first again, and the others never."""
    left, waits = tenant(1, 60, resident=False, wants_ns=1, left_ns=9), tenant(2, 60, resident=False, wants_ns=5)
    assert decide([left, waits], 100 * GIB, 10) == Moves(come=(VgpuIndex(2),))


def test_as_many_leave_as_it_takes_and_no_more() -> None:
    idle = [tenant(key, 30, wants=False, wants_ns=key) for key in range(1, 5)]
    moves = Moves(leave=(VgpuIndex(1), VgpuIndex(2)), come=(VgpuIndex(9),))
    assert decide([*idle, tenant(9, 60, resident=False)], 130 * GIB, 10) == moves


def test_what_is_on_its_way_is_counted() -> None:
    leaving, coming = tenant(1, 60, moving=1), tenant(2, 60, resident=False)
    others = [coming, tenant(3, 60, wants=False)]
    assert decide([leaving, *others], 140 * GIB, 10) == Moves(come=(VgpuIndex(2),))
    assert decide([replace(leaving, memory_bytes=30 * GIB), *others], 110 * GIB, 10) == Moves(
        (VgpuIndex(3),), (VgpuIndex(2),)
    )
    assert decide([tenant(1, 60, resident=False, moving=1), coming], 100 * GIB, 10) == Moves()


def test_an_allocation_that_waits_for_room_is_in_line() -> None:
    asks, idle = tenant(1, 60, room=50), tenant(2, 60, wants=False)
    assert decide([asks, idle], 140 * GIB, 0) == Moves(leave=(VgpuIndex(2),))
    assert decide([asks], 140 * GIB, 0) == Moves(offered=(VgpuIndex(1),))
    assert decide([asks, replace(idle, moving=True)], 140 * GIB, 0) == Moves()  # not yet
    assert decide([replace(asks, room_bytes=90 * GIB), idle], 140 * GIB, 0) == Moves(hopeless=(VgpuIndex(1),))


def test_what_fits_neither_card_nor_store_is_hopeless() -> None:
    asks, away = tenant(1, 60, room=20), tenant(2, 60, resident=False, wants=False)
    assert decide([asks, away], 100 * GIB, 0, HostMemory(40 * GIB + PASSING_BYTES)) == Moves(offered=(VgpuIndex(1),))
    assert decide([asks, away], 100 * GIB, 0, HostMemory(40 * GIB)) == Moves(hopeless=(VgpuIndex(1),))
    # what is owned already is another matter
    assert decide([away, tenant(3, 60, resident=False)], 100 * GIB, 0, HostMemory(0)) == Moves(come=(VgpuIndex(3),))


def test_what_a_move_has_left_on_the_card_is_taken_and_no_more_needed_by_its_owner() -> None:
    astray, other = tenant(1, 60, resident=False, stray=40), tenant(2, 60, wants=False)
    come = (VgpuIndex(1),)
    assert decide([astray, replace(other, memory_bytes=40 * GIB)], 100 * GIB, 0) == Moves(come=come)
    assert decide([astray, other], 100 * GIB, 0) == Moves((VgpuIndex(2),), come)
    small = tenant(3, 50, resident=False, wants_ns=-1)
    assert decide([replace(astray, pinned=True), small], 100 * GIB, 0) == Moves(come=(VgpuIndex(3),))
    assert decide([replace(astray, pinned=True), replace(small, memory_bytes=70 * GIB)], 100 * GIB, 0) == Moves()


def test_what_another_user_could_never_put_away_is_hopeless() -> None:
    """His store keeps what it has got: whoever is away in the other one would wait for the card for ever."""
    away, asks = tenant(1, 80, resident=False, wants=False, user=1), tenant(2, 10, room=70, user=2)
    assert decide([away, replace(asks, user=1)], 100 * GIB, 0, HostMemory(100 * GIB)) == Moves(offered=(VgpuIndex(2),))
    assert decide([away, asks], 100 * GIB, 0, HostMemory(100 * GIB)) == Moves(hopeless=(VgpuIndex(2),))
    assert decide([away, asks], 100 * GIB, 0, HostMemory(161 * GIB)) == Moves(offered=(VgpuIndex(2),))
    assert decide([away, asks], 100 * GIB, 0, HostMemory(161 * GIB, {3: 5 * GIB})) == Moves(hopeless=(VgpuIndex(2),))
    assert decide([tenant(1, 20), asks], 100 * GIB, 0, HostMemory(0)) == Moves(offered=(VgpuIndex(2),))


users = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2)), min_size=1, max_size=5)


@example([(73, 0), (0, 1)], 101, {1: 28}, 1)
@given(users, st.integers(0, 300), st.dictionaries(st.integers(0, 3), st.integers(0, 60)), st.integers(0, 4))
def test_whoever_takes_all_that_is_spare_can_still_leave_for_the_others(
    guests: list[tuple[int, int]], limit: int, kept: dict[int, int], choice: int
) -> None:
    room, stores = 100 * GIB, {user: bytes_ * GIB for user, bytes_ in kept.items()}
    tenants = [tenant(key, memory, user=user) for key, (memory, user) in enumerate(guests)]
    taker = tenants[choice % len(tenants)]
    spare = spare_bytes(tenants, room, HostMemory(limit * GIB, stores))[taker.key]
    if spare <= 0:
        return
    assert taker.memory_bytes + spare <= room
    after = [replace(t, memory_bytes=t.memory_bytes + spare) if t is taker else t for t in tenants]
    owned = {t.user: sum(other.memory_bytes for other in after if other.user == t.user) for t in after}
    everybody = sum(owned.values())
    owners = [user for user, bytes_ in owned.items() if bytes_]
    if everybody > room and len(owners) > 1:  # all of each user's may be away, one after the other
        for user in owners:
            stores[user] = max(stores.get(user, 0), owned[user] + STORE_SLACK_BYTES)
        assert sum(stores.values()) <= limit * GIB
    elif everybody > room:
        others = sum(bytes_ for user, bytes_ in stores.items() if user not in owners)
        assert everybody + PASSING_BYTES <= room + limit * GIB - others


def test_who_cannot_be_moved_stays_and_is_counted() -> None:
    stuck, idle = tenant(1, 60, wants=False, pinned=1), tenant(2, 60, wants=False, wants_ns=5)
    moves = Moves(leave=(VgpuIndex(2),), come=(VgpuIndex(3),))
    assert decide([stuck, idle, tenant(3, 60, resident=False)], 140 * GIB, 10) == moves
    assert decide([stuck, tenant(3, 60, resident=False)], 100 * GIB, 10) == Moves()
    assert decide([tenant(3, 60, resident=False, pinned=1)], 100 * GIB, 10) == Moves()


def test_who_does_not_do_what_it_is_to_is_asked_less_and_less_often() -> None:
    asked = [patience_ns(failures) for failures in range(1, 40)]
    assert asked[:3] == [AGAIN_LEAST_NS, 2 * AGAIN_LEAST_NS, 4 * AGAIN_LEAST_NS]
    assert asked[-1] == AGAIN_MOST_NS
    assert asked == sorted(asked)


def test_what_the_driver_keeps_is_not_given_out_unless_somebody_needs_all_there_is() -> None:
    small = [tenant(1, 60), tenant(2, 60, resident=False)]
    assert usable_bytes(140 * GIB, 4 * GIB, small) == 136 * GIB
    assert usable_bytes(140 * GIB, 4 * GIB, [*small, tenant(3, 139, resident=False)]) == 139 * GIB
    assert usable_bytes(140 * GIB, 4 * GIB, [*small, tenant(3, 150, resident=False)]) == 140 * GIB
    assert usable_bytes(140 * GIB, 4 * GIB, [tenant(1, 130, room=8)]) == 138 * GIB
    assert usable_bytes(1 * GIB, 4 * GIB, []) == 0


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 59), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 8),
)
def test_who_fits_the_card_is_never_hopeless_for_what_the_driver_keeps(
    guests: list[tuple[int, int, bool, bool]], short: int
) -> None:
    """Its memory, and the allocation for which it waits."""
    tenants = [
        tenant(key, memory, resident=resident, wants=wants, wants_ns=key, room=min(room, 60 - memory))
        for key, (memory, room, resident, wants) in enumerate(guests, 1)
    ]
    assert not decide(tenants, 60 * GIB, 0, short_bytes=short * GIB).hopeless


def test_what_the_driver_seems_to_keep_makes_others_leave_and_no_wait_hopeless() -> None:
    """Where the store has room for the smaller one alone, too."""
    tenants = [tenant(1, 30, room=5), tenant(2, 20)]
    host = HostMemory(21 * GIB)
    assert decide(tenants, 60 * GIB, 10**12, host).offered == (1,)
    moves = decide(tenants, 60 * GIB, 10**12, host, short_bytes=10 * GIB)
    assert (moves.leave, moves.hopeless) == ((2,), ())
    assert not decide(tenants, 60 * GIB, 10**12, HostMemory(0), short_bytes=10 * GIB).hopeless


def test_who_comes_gets_what_has_been_given_up() -> None:
    first, second = Arrival(VgpuIndex(1), 60, 10, 20), Arrival(VgpuIndex(2), 60, 0)
    assert admit([first, second], others_bytes=70, room_bytes=100) == {1: 30, 2: 0}
    assert admit([first, second], others_bytes=40, room_bytes=100) == {1: 60, 2: 0}
    assert admit([first, second], others_bytes=30, room_bytes=100) == {1: 60, 2: 10}
    # a promise made meanwhile: nothing is taken back, nothing more is given
    assert admit([first, second], others_bytes=30, room_bytes=20) == {1: 20, 2: 0}


def test_a_class_goes_before_another() -> None:
    line = [
        tenant(1, 60, resident=False, wants_ns=1),
        tenant(2, 60, resident=False, wants_ns=2, priority=Priority.HIGH),
    ]
    assert decide(line, 100 * GIB, 5) == Moves(come=(VgpuIndex(2),))


def test_what_others_were_promised_is_left_at_once() -> None:
    here = [tenant(1, 60, came_ns=9), tenant(2, 60, wants=False)]
    assert decide(here, 100 * GIB, 10) == Moves(leave=(VgpuIndex(2),))
    assert decide(here, 30 * GIB, 10) == Moves(leave=(VgpuIndex(2), VgpuIndex(1)))


@dataclass
class Guest:
    memory: int
    priority: Priority
    resident: bool = False
    moving_until: int | None = None
    wants: bool = False
    wants_ns: int = 0
    room: int = 0
    came_ns: int = 0
    left_ns: int = 0
    move_ns: int = 0
    here: int = 0
    """Of its memory, on the card."""
    allowed: int = 0


class Card(RuleBasedStateMachine):
    """Commands are carried out late; time passes; what is promised to others changes."""

    ROOM = 100 * GIB

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.room = self.ROOM
        self.guests: dict[VgpuIndex, Guest] = {}
        self.next_key = 0

    def tenants(self) -> list[Tenant]:
        return [
            Tenant(
                key,
                guest.resident,
                guest.memory,
                guest.wants,
                guest.wants_ns,
                guest.moving_until is not None,
                guest.room,
                came_ns=guest.came_ns,
                left_ns=guest.left_ns,
                move_ns=guest.move_ns,
                priority=guest.priority,
            )
            for key, guest in self.guests.items()
        ]

    def settle(self) -> None:
        for guest in self.guests.values():
            if guest.resident and guest.moving_until is not None and guest.moving_until <= self.now:
                guest.moving_until, guest.resident, guest.here = None, False, 0
        coming = {key: g for key, g in self.guests.items() if not g.resident and g.moving_until is not None}
        before = sum(guest.here for guest in self.guests.values())
        others = before - sum(guest.here for guest in coming.values())
        arrivals = [Arrival(key, g.memory, g.here, g.allowed) for key, g in coming.items()]
        for key, allowed in admit(arrivals, others, self.room).items():
            assert allowed >= coming[key].here
            coming[key].here = coming[key].allowed = allowed
        here = sum(guest.here for guest in self.guests.values())
        assert here <= max(self.room, before)
        for guest in coming.values():
            assert guest.moving_until is not None
            if guest.here == guest.memory and guest.moving_until <= self.now:
                guest.moving_until, guest.resident, guest.allowed, guest.came_ns = None, True, 0, self.now

    def step(self) -> Moves:
        moves = decide(self.tenants(), self.room, self.now)
        assert not set(moves.leave) & set(moves.come)
        for key in moves.leave:
            assert self.guests[key].resident
            assert self.guests[key].moving_until is None
        for key in moves.come:
            guest = self.guests[key]
            assert not guest.resident
            assert guest.moving_until is None
            assert guest.wants or guest.room
            leaving = self.going() + sum(self.guests[other].memory for other in moves.leave)
            assert self.taken() + guest.memory - leaving <= self.room
        if moves.leave and self.taken() <= self.room:
            assert any(guest.wants or guest.room for guest in self.guests.values())
            for key in moves.leave:
                guest = self.guests[key]
                assert not guest.wants or self.now >= guest.came_ns + STAY_LEAST_NS
        for key in moves.leave:
            self.guests[key].left_ns = self.now
        for key in (*moves.leave, *moves.come):
            self.guests[key].moving_until = self.now + 1 + self.guests[key].move_ns
        return moves

    def going(self) -> int:
        return sum(g.memory for g in self.guests.values() if g.resident and g.moving_until is not None)

    def taken(self) -> int:
        return sum(g.memory for g in self.guests.values() if g.resident or g.moving_until is not None)

    @precondition(lambda self: len(self.guests) < 6)
    @rule(
        memory=st.integers(0, 100),
        priority=st.sampled_from(Priority),
        move=st.integers(0, 3 * SECOND),
    )
    def arrive(self, memory: int, priority: Priority, move: int) -> None:
        self.guests[VgpuIndex(self.next_key)] = Guest(memory * GIB, priority, move_ns=move, wants_ns=self.now)
        self.next_key += 1

    @precondition(lambda self: self.guests)
    @rule(choice=st.integers(0, 99))
    def end(self, choice: int) -> None:
        del self.guests[list(self.guests)[choice % len(self.guests)]]

    @precondition(lambda self: self.guests)
    @rule(choice=st.integers(0, 99), room=st.sampled_from((0, 0, 1, 40)))
    def change_mind(self, choice: int, room: int) -> None:
        guest = list(self.guests.values())[choice % len(self.guests)]
        guest.wants = not guest.wants
        guest.room = room * GIB if guest.wants else 0
        guest.wants_ns = self.now

    @rule(room=st.integers(20, 100))
    def promise(self, room: int) -> None:
        self.room = room * GIB

    @rule(ns=st.integers(0, 4 * SECOND))
    def wait(self, ns: int) -> None:
        self.now += ns
        self.settle()
        self.step()

    @rule()
    def everybody_who_can_has_a_turn(self) -> None:
        """If nothing else happens: who waits comes, or is let have its room, within everybody's stays and moves."""
        self.settle()
        missing = {
            key for key, g in self.guests.items() if g.wants and not g.room and g.memory <= self.room and not g.resident
        }
        if any(g.room for g in self.guests.values()) or len({g.priority for g in self.guests.values()}) > 1:
            return
        for _ in range(200):
            if not missing:
                return
            self.step()
            stays = [t.came_ns + t.stay_ns for t in self.tenants() if t.resident]
            pending = [g.moving_until for g in self.guests.values() if g.moving_until is not None]
            following = [at for at in (*pending, *stays) if at > self.now]
            assert following, f"nothing will happen, and {missing} wait: {self.tenants()}"
            self.now = min(following)
            self.settle()
            missing -= {key for key, guest in self.guests.items() if guest.resident}
        pytest.fail(f"{missing} waited in vain")

    @invariant()
    def never_more_than_there_is_once_those_who_must_have_left(self) -> None:
        moves = decide(self.tenants(), self.room, self.now)
        here = sum(g.memory for g in self.guests.values() if g.resident or g.moving_until is not None)
        going = sum(g.memory for g in self.guests.values() if g.resident and g.moving_until is not None)
        going += sum(self.guests[key].memory for key in moves.leave)
        coming = sum(g.memory for g in self.guests.values() if not g.resident and g.moving_until is not None)
        assert here - going <= self.room or coming


TestCard = Card.TestCase
