"""Groups that are swapped all or none: what one member does by the others' states, and several GPUs whose servers each
decide for themselves, with messages that are late or lost, servers that end, and vGPUs that want at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuserver.core.scheduler.leases import VgpuIndex
from gpuserver.core.states.residency import STAY_LEAST_NS, Moves, Tenant, could_come, decide
from gpuserver.core.states.together import (
    ASSEMBLY_NS,
    LAPSE_NS,
    NOT_SEEN,
    GangResidence,
    MemberResidence,
    Members,
    Seen,
    patience_ns,
    unite,
)

GIB = 1 << 30
SECOND = 1_000_000_000
ROOM = 100 * GIB
GPUS = 3
AWAY = MemberResidence(wants=True)
COMING = replace(AWAY, granted=True)
THERE = replace(COMING, there=True)
READY = replace(AWAY, ready=True)


def seen(
    here: int, own: MemberResidence, others: dict[int, MemberResidence], now_ns: int = 10, came_ns: int = 1
) -> GangResidence:
    return unite(here, own, others, NOT_SEEN, came_ns, now_ns)[0]


def test_a_member_comes_after_those_on_lower_gpus() -> None:
    assert seen(0, AWAY, {1: READY}).may_come
    assert not seen(1, AWAY, {0: AWAY}).may_come
    assert seen(1, AWAY, {0: COMING}).may_come
    assert not seen(2, AWAY, {0: THERE, 1: AWAY}).may_come


def test_the_first_waits_until_the_others_could_come_for_a_while() -> None:
    found, since = unite(0, AWAY, {1: AWAY, 2: READY}, NOT_SEEN, 0, 7)
    assert (found.may_come, since.waits_ns) == (False, 7)
    assert unite(0, AWAY, {1: READY, 2: READY}, since, 0, 8)[0].may_come
    assert unite(0, AWAY, {1: COMING, 2: AWAY}, since, 0, 8)[0].may_come
    assert unite(0, AWAY, {1: AWAY, 2: READY}, since, 0, 7 + 2 * STAY_LEAST_NS)[0].may_come
    assert unite(0, COMING, {1: AWAY, 2: READY}, since, 0, 8)[1].waits_ns is None
    assert unite(1, AWAY, {0: COMING, 2: AWAY}, since, 0, 8)[0].may_come  # the first has begun


def test_a_gang_wants_if_any_member_does() -> None:
    idle = MemberResidence()
    assert seen(0, idle, {1: AWAY}).wants
    assert not seen(0, idle, {1: idle}).wants


def test_it_makes_no_room_before_the_others_are_there_for_a_while() -> None:
    assert seen(0, THERE, {1: AWAY}).assembling
    assert seen(0, THERE, {1: COMING}).assembling
    assert not seen(0, THERE, {1: THERE}).assembling
    assert not seen(0, THERE, {1: replace(AWAY, able=False)}).assembling
    assert not seen(0, THERE, {1: AWAY}, now_ns=1 + ASSEMBLY_NS).assembling
    assert not seen(0, THERE, {1: AWAY}, now_ns=1 + ASSEMBLY_NS).must_leave


def test_what_nobody_wants_and_is_not_complete_leaves_in_the_end() -> None:
    idle, there = MemberResidence(), MemberResidence(granted=True, there=True)
    assert not seen(0, there, {1: idle}).must_leave
    assert seen(0, there, {1: idle}, now_ns=1 + ASSEMBLY_NS).must_leave
    assert not seen(0, there, {1: there}, now_ns=1 + ASSEMBLY_NS).must_leave


def test_where_one_has_left_the_others_leave() -> None:
    assert seen(1, THERE, {0: AWAY}).must_leave
    assert not seen(0, THERE, {1: AWAY}).must_leave  # it has yet to come
    found, memory = unite(0, THERE, {1: THERE}, NOT_SEEN, 1, 7)
    assert (found.complete, found.since_ns, memory) == (True, 7, Seen(frozenset({1}), 7))
    assert unite(0, THERE, {1: AWAY}, memory, 1, 9)[0].must_leave
    assert not unite(0, AWAY, {1: AWAY}, memory, 1, 9)[1].gpus
    assert not unite(0, THERE, {}, memory, 1, 9)[0].must_leave  # its server is silent


def test_while_one_is_suspended_the_others_are_away() -> None:
    suspended = MemberResidence(suspended=True)
    for here, other in ((0, 1), (1, 0)):
        found = seen(here, THERE, {other: suspended})
        assert (found.must_leave, found.wants, found.may_come) == (True, False, False)


def test_a_stay_pays_for_the_slowest_move_and_counts_from_the_last_arrival() -> None:
    found, _ = unite(0, replace(THERE, move_ns=3), {1: replace(THERE, move_ns=8)}, NOT_SEEN, 1, 7)
    assert (found.since_ns, found.move_ns) == (7, 8)


@pytest.mark.parametrize(
    ("here", "own", "others", "awaits"),
    [
        (0, AWAY, {1: READY}, ""),
        (0, AWAY, {1: AWAY}, "the vGPU of its group on GPU 1 has no room yet"),
        (1, AWAY, {0: AWAY}, "the vGPU of its group on GPU 0 has no room yet"),
        (0, THERE, {1: AWAY}, "the vGPU of its group on GPU 1 has no room yet"),
        (0, THERE, {1: COMING}, "the vGPU of its group on GPU 1 is on its way to that GPU"),
        (0, AWAY, {1: replace(AWAY, able=False)}, "the vGPU of its group on GPU 1 cannot come to that GPU now"),
        (0, AWAY, {1: replace(AWAY, suspended=True)}, "the vGPU of its group on GPU 1 is suspended"),
        (0, THERE, {1: THERE}, ""),
        (0, MemberResidence(), {1: MemberResidence()}, ""),
    ],
)
def test_it_is_said_why_a_group_waits(
    here: int, own: MemberResidence, others: dict[int, MemberResidence], awaits: str
) -> None:
    assert seen(here, own, others).awaits == awaits


def test_a_server_that_is_silent_binds_no_member() -> None:
    members = Members()
    members.receive(1, {"g": AWAY}, 5)
    assert members.of("g", 5 + LAPSE_NS - 1) == {1: AWAY}
    assert members.of("h", 5) == members.of("g", 5 + LAPSE_NS) == {}
    members.receive(1, {}, 6)
    assert members.of("g", 6) == {}


def tenant(key: int, memory: int, *, resident: bool = True, wants: bool = True, **more: bool) -> Tenant:
    return Tenant(VgpuIndex(key), resident, memory * GIB, wants, wants_ns=key, **more)


def test_who_may_not_come_yet_is_passed_over() -> None:
    early, late = tenant(1, 60, resident=False, may_come=False), tenant(2, 60, resident=False)
    assert decide([early, late], ROOM, 0) == Moves(come=(VgpuIndex(2),))
    assert decide([early], ROOM, 0) == Moves()
    assert decide([replace(early, memory_bytes=2 * ROOM)], ROOM, 0) == Moves(hopeless=(VgpuIndex(1),))


def test_who_assembles_makes_no_room() -> None:
    here, other = tenant(1, 60, assembling=True), tenant(2, 60, resident=False)
    assert decide([here, other], ROOM, 99 * SECOND) == Moves()
    assert decide([here], ROOM // 2, 0) == Moves(leave=(VgpuIndex(1),))  # others were promised its room


def test_who_must_leave_leaves_and_its_room_is_given_out() -> None:
    parts, other = tenant(1, 60, must_leave=True), tenant(2, 60, resident=False)
    assert decide([parts], ROOM, 0) == Moves(leave=(VgpuIndex(1),))
    assert decide([parts, other], ROOM, 0) == Moves(leave=(VgpuIndex(1),), come=(VgpuIndex(2),))
    assert decide([replace(parts, pinned=True)], ROOM, 0) == Moves()


flags = st.booleans()
residences = st.builds(
    lambda place, wants, suspended, able: replace(
        (AWAY, COMING, THERE)[place], wants=wants, suspended=suspended, able=able
    ),
    *(st.integers(0, 2), flags, flags, flags),
)


@given(residences, st.dictionaries(st.sampled_from((0, 1, 3)), residences), st.frozensets(st.integers(0, 3)), flags)
def test_the_rules_never_contradict_each_other(
    own: MemberResidence, others: dict[int, MemberResidence], gpus: frozenset[int], late: bool
) -> None:
    found, _ = unite(2, own, others, Seen(gpus, 1), 1, 2 + late * ASSEMBLY_NS)
    suspended = own.suspended or any(member.suspended for member in others.values())
    if found.complete:
        assert not found.assembling
        assert found.must_leave == suspended
    if found.may_come:
        assert not suspended
        assert all(others[gpu].granted for gpu in others if gpu < 2)
    if not others:
        assert found.may_come == (not suspended)
        assert not found.assembling
    if own.there and suspended:
        assert found.must_leave


@dataclass(eq=False)
class Guest:
    gang: str | None
    memory: int
    move_ns: int
    resident: bool = False
    moving_until: int | None = None
    wants: bool = False
    wanted: bool = False
    wants_ns: int = 0
    suspended: bool = False
    came_ns: int = 0
    left_ns: int = 0
    seen: Seen = NOT_SEEN
    ready: bool = False

    @property
    def there(self) -> bool:
        return self.resident and self.moving_until is None

    @property
    def granted(self) -> bool:
        return self.there or (not self.resident and self.moving_until is not None)

    def residence(self) -> MemberResidence:
        return MemberResidence(
            self.granted, self.there, self.wants, self.suspended, ready=self.ready, move_ns=self.move_ns
        )


@dataclass
class Site:
    """A GPU and its server. Moves take time; a vGPU on its way arrives once its room is there."""

    index: int
    guests: dict[VgpuIndex, Guest] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    up: bool = True
    tenants: list[Tenant] = field(default_factory=list)

    def carry_on(self, now: int) -> None:
        for guest in self.guests.values():
            if guest.resident and guest.moving_until is not None and guest.moving_until <= now:
                guest.resident, guest.moving_until = False, None
        for guest in self.guests.values():
            arrives = not guest.resident and guest.moving_until is not None and guest.moving_until <= now
            if arrives and self.taken() + guest.memory <= ROOM:
                guest.resident, guest.moving_until, guest.came_ns = True, None, now

    def taken(self) -> int:
        return sum(guest.memory for guest in self.guests.values() if guest.resident)

    def step(self, now: int) -> None:
        if not self.up:
            return
        self.tenants = [self.tenant(key, guest, now) for key, guest in self.guests.items()]
        moves = decide(self.tenants, ROOM, now)
        for key, guest in self.guests.items():
            guest.ready = could_come(key, self.tenants, ROOM, now)
        suspended = [key for key, guest in self.guests.items() if guest.suspended and guest.there]
        for key in (*moves.leave, *suspended):
            guest = self.guests[key]
            assert guest.there
            guest.left_ns, guest.moving_until = now, now + 1 + guest.move_ns
        for key in moves.come:
            assert not self.guests[key].suspended
            self.guests[key].moving_until = now + 1 + self.guests[key].move_ns

    def tenant(self, key: VgpuIndex, guest: Guest, now: int) -> Tenant:
        others = {} if guest.gang is None else self.members.of(guest.gang, now)
        gang, guest.seen = unite(self.index, guest.residence(), others, guest.seen, guest.came_ns, now)
        wants = gang.wants if others else guest.wants
        if wants != guest.wanted:
            guest.wanted, guest.wants_ns = wants, now
        rules = (gang.may_come, gang.assembling, gang.must_leave) if others else (True, False, False)
        return Tenant(
            key,
            guest.resident,
            guest.memory,
            wants,
            guest.wants_ns,
            moving=guest.moving_until is not None,
            pinned=guest.suspended,
            came_ns=gang.since_ns,
            left_ns=guest.left_ns,
            move_ns=gang.move_ns,
            may_come=rules[0],
            assembling=rules[1],
            must_leave=rules[2],
        )

    def says(self) -> dict[str, MemberResidence]:
        return {guest.gang: guest.residence() for guest in self.guests.values() if guest.gang is not None}

    def restart(self, now: int) -> None:
        """A new server: it puts away what is half-way, and knows nothing of the past."""
        self.up, self.members = True, Members()
        for guest in self.guests.values():
            if guest.moving_until is not None:
                guest.resident, guest.moving_until = guest.resident or guest.memory == 0, None
            guest.seen, guest.came_ns, guest.left_ns = NOT_SEEN, 0, 0
            guest.wanted, guest.wants_ns = guest.wants, now


def test_a_gang_that_is_never_complete_leaves_most_of_the_time_to_others() -> None:
    """Its member on GPU 1 never has room there, and another vGPU of GPU 0 wants all the time."""
    site, now, served = Site(0), SECOND, 0
    site.guests = {VgpuIndex(1): Guest("g", ROOM, 0, wants=True), VgpuIndex(2): Guest(None, ROOM, 0, wants=True)}
    for _ in range(1500):
        now += SECOND
        site.members.receive(1, {"g": AWAY}, now)
        site.carry_on(now)
        site.step(now)
        served += site.guests[VgpuIndex(2)].there
    assert served > 750


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = SECOND
        self.sites = [Site(index) for index in range(GPUS)]
        self.late: dict[tuple[int, int], dict[str, MemberResidence]] = {}
        self.next_key = 0

    @property
    def guests(self) -> list[Guest]:
        return [guest for site in self.sites for guest in site.guests.values()]

    def gangs(self) -> dict[str, list[Guest]]:
        found: dict[str, list[Guest]] = {}
        for guest in self.guests:
            if guest.gang is not None:
                found.setdefault(guest.gang, []).append(guest)
        return {gang: members for gang, members in found.items() if len(members) > 1}

    def add(self, gpu: int, gang: str | None, memory: int, move_ns: int) -> None:
        self.sites[gpu].guests[VgpuIndex(self.next_key)] = Guest(gang, memory * GIB, move_ns, wants_ns=self.now)
        self.next_key += 1

    @precondition(lambda self: len(self.guests) < 9)
    @rule(gpu=st.integers(0, GPUS - 1), memory=st.integers(1, 100), move=st.integers(0, 2 * SECOND))
    def a_vgpu_arrives(self, gpu: int, memory: int, move: int) -> None:
        self.add(gpu, None, memory, move)

    @precondition(lambda self: len(self.guests) < 9)
    @rule(
        gpus=st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)]),
        memories=st.tuples(*[st.integers(0, 100)] * GPUS),
        move=st.integers(0, 2 * SECOND),
    )
    def a_gang_arrives(self, gpus: tuple[int, ...], memories: tuple[int, ...], move: int) -> None:
        for gpu in gpus:
            self.add(gpu, f"gang{self.next_key - gpus.index(gpu)}", memories[gpu], move)

    @precondition(lambda self: self.guests)
    @rule(choice=st.integers(0, 99))
    def one_ends(self, choice: int) -> None:
        site = [site for site in self.sites if site.guests][choice % sum(bool(site.guests) for site in self.sites)]
        del site.guests[list(site.guests)[choice % len(site.guests)]]

    @precondition(lambda self: self.guests)
    @rule(choice=st.integers(0, 99))
    def change_mind(self, choice: int) -> None:
        guest = self.guests[choice % len(self.guests)]
        guest.wants = not guest.wants

    @precondition(lambda self: self.guests)
    @rule(choice=st.integers(0, 99))
    def suspend_or_resume(self, choice: int) -> None:
        guest = self.guests[choice % len(self.guests)]
        guest.suspended = not guest.suspended

    @rule(gpu=st.integers(0, GPUS - 1))
    def a_server_ends_or_begins(self, gpu: int) -> None:
        site = self.sites[gpu]
        if site.up:
            site.up = False
        else:
            site.restart(self.now)

    @rule(ns=st.sampled_from((0, SECOND // 10, SECOND, 3 * SECOND, 70 * SECOND)), seed=st.integers(0, 1 << 16))
    def wait(self, ns: int, seed: int) -> None:
        """Each message arrives, or is lost, or an older one does."""
        self.now += ns
        chance = random.Random(seed)
        for site in self.sites:
            if site.up:
                site.carry_on(self.now)
            site.step(self.now)
            for other in self.sites:
                if other is site or not (site.up and other.up):
                    continue
                link, says = (site.index, other.index), site.says()
                match chance.randrange(4):
                    case 0:
                        self.late[link] = says
                    case 1:
                        other.members.receive(site.index, self.late.get(link, says), self.now)
                    case _:
                        other.members.receive(site.index, says, self.now)

    def exchange(self) -> None:
        for site in self.sites:
            site.carry_on(self.now)
        for _ in range(4):
            for site in self.sites:
                for other in self.sites:
                    if other is not site:
                        other.members.receive(site.index, site.says(), self.now)
            for site in self.sites:
                site.step(self.now)

    @rule()
    def all_that_want_have_a_turn(self) -> None:
        """If messages arrive, and nothing else happens."""
        for site in self.sites:
            if not site.up:
                site.restart(self.now)
        gangs = self.gangs()
        bound = {id(guest) for members in gangs.values() for guest in members}
        missing: dict[str, list[Guest]] = {
            str(id(guest)): [guest]
            for guest in self.guests
            if id(guest) not in bound and guest.wants and not guest.suspended
        }
        missing |= {
            gang: members
            for gang, members in gangs.items()
            if any(guest.wants for guest in members) and not any(guest.suspended for guest in members)
        }
        began, partly = self.now, dict.fromkeys(gangs, self.now)
        for _ in range(600):
            self.exchange()
            missing = {name: group for name, group in missing.items() if not all(guest.there for guest in group)}
            self.check_gangs(gangs, partly, began)
            following = self.following()
            if not following or (not missing and self.now > began + 5 * SECOND):
                break
            self.now = min(following)
        assert not missing, [site.tenants for site in self.sites]

    def following(self) -> list[int]:
        times = [guest.moving_until for guest in self.guests if guest.moving_until is not None]
        for site in self.sites:
            for key, guest in site.guests.items():
                if guest.there:
                    (seen,) = (one for one in site.tenants if one.key == key)
                    times += [seen.came_ns + seen.stay_ns, guest.came_ns + ASSEMBLY_NS]
                elif guest.seen.waits_ns is not None:
                    stay = max(one.stay_ns for one in site.tenants)
                    times.append(guest.seen.waits_ns + patience_ns(stay, guest.seen.failures))
        return [at for at in times if at > self.now]

    def check_gangs(self, gangs: dict[str, list[Guest]], partly: dict[str, int], began: int) -> None:
        for gang, members in gangs.items():
            granted = [guest.granted for guest in members]
            if all(granted) or not any(granted):
                partly[gang] = self.now
            elif any(self.is_wanted_by_another(guest) for guest in members if guest.granted):
                assert self.now <= partly[gang] + ASSEMBLY_NS + 5 * SECOND, gang
            if any(guest.suspended for guest in members) and self.now > began + 5 * SECOND:
                assert not any(granted), gang

    def is_wanted_by_another(self, guest: Guest) -> bool:
        (site,) = (site for site in self.sites if guest in site.guests.values())
        return any(one.waits and one.may_come for one in site.tenants)

    @invariant()
    def never_more_than_there_is(self) -> None:
        assert all(site.taken() <= ROOM for site in self.sites)


TestCluster = Cluster.TestCase
