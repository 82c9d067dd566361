"""The tables of usage: rows age, sums stay, and whatever a user does, there is a bound."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.node.database import NodeDatabase
from vgpu.node.usage_store import MOST_TEAMS, age, find, put, recent, totals
from vgpu.usage.account import Label
from vgpu.usage.rows import DAY_S, HOUR_S, MOST_OF_A_USER, OTHERS, Key, Rows, Sums

NOW = 1_800_000_000
NOBODY = Label(0, "", "", "")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    database = NodeDatabase(tmp_path / "node.db")
    database.write_now(lambda _: None)
    database.close()
    connection = sqlite3.connect(tmp_path / "node.db")
    yield connection
    connection.close()


def row(start: int, vgpu: int = 0, owner: int = 1000, amount: int = 10) -> Rows:
    sums = Sums(measured_ns=amount, promised_ns=amount, used_ns=amount // 2, wasted_ns=amount - amount // 2)
    return {Key(60, start // 60 * 60, owner, f"vgpu-{vgpu:08x}"): sums}


def in_all(db: sqlite3.Connection) -> int:
    return sum(part.sums.promised_ns for part in find(db, 0, 1e11, None, 0))


def settle(db: sqlite3.Connection, now: float, most_rows: int = 200_000) -> None:
    while age(db, now, most_rows):
        pass


def spans(db: sqlite3.Connection) -> dict[int, int]:
    return dict(db.execute("SELECT span_s, count(*) FROM usage GROUP BY span_s"))


def test_rows_add_up_and_keep_their_names(db: sqlite3.Connection) -> None:
    labels = {"vgpu-00000000": Label(1000, "web", "dra/pod", "science")}
    put(db, row(NOW), labels)
    put(db, row(NOW) | row(NOW + 60), labels)
    [part] = find(db, 0, NOW + 3600, None, 0)
    assert (part.name, part.claim, part.owner_uid, part.sums.promised_ns) == ("web", "dra/pod", 1000, 30)
    assert [total[:3] for total in totals(db)] == [(1000, "science", 30)]


def test_a_user_finds_the_own_rows(db: sqlite3.Connection) -> None:
    put(db, row(NOW, 0, 1000) | row(NOW, 1, 1001), {})
    assert [part.vgpu_id for part in find(db, 0, NOW + 1, 1001, 0)] == ["vgpu-00000001"]


def test_steps_begin_at_since(db: sqlite3.Connection) -> None:
    for hour in range(4):
        put(db, row(NOW + HOUR_S * hour, amount=10 + hour), {})
    found = find(db, NOW - 7, NOW + 4 * HOUR_S, None, 2 * HOUR_S)
    assert [(part.step, part.sums.promised_ns) for part in found] == [(0, 21), (1, 25)]


def test_rows_grow_older_and_go_after_two_years(db: sqlite3.Connection) -> None:
    for minute in range(0, 2 * DAY_S, 600):
        put(db, row(NOW - 2 * DAY_S + minute), {})
    before = in_all(db)
    settle(db, NOW)
    assert in_all(db) == before
    assert spans(db) == {60: 144 + 5, HOUR_S: 24 - 1} or set(spans(db)) == {60, HOUR_S}
    settle(db, NOW + 40 * DAY_S)
    assert in_all(db) == before
    assert set(spans(db)) == {DAY_S}
    settle(db, NOW + 732 * DAY_S)
    assert in_all(db) == 0
    assert db.execute("SELECT count(*) FROM usage_vgpu").fetchone() == (0,)
    assert totals(db)[0].promised_ns == before


def test_a_user_that_makes_and_removes_vgpus_has_a_bounded_number_of_rows(db: sqlite3.Connection) -> None:
    amount, vgpu = 0, 0
    for minute in range(90):
        rows: Rows = {}
        for _ in range(100):
            vgpu += 1
            rows |= row(NOW + 60 * minute, vgpu, amount=vgpu)
            amount += vgpu
        put(db, rows, {key.vgpu_id: NOBODY for key in rows})
    assert spans(db)[60] <= 90 * 17
    settle(db, NOW + 3 * DAY_S)
    assert spans(db)[HOUR_S] <= 2 * 17 + 17
    assert in_all(db) == amount
    names = db.execute("SELECT count(*) FROM usage_vgpu").fetchone()[0]
    assert names <= spans(db)[HOUR_S]
    assert any(part.vgpu_id == OTHERS for part in find(db, 0, 1e11, None, 0))
    assert MOST_OF_A_USER < 60_000


def test_too_many_rows_merge_before_their_time(db: sqlite3.Connection) -> None:
    for owner in range(40):
        rows: Rows = {}
        for minute in range(120):
            rows |= row(NOW + 60 * minute, owner, owner)
        put(db, rows, {})
    before = in_all(db)
    settle(db, NOW + 7200, most_rows=3000)
    assert set(spans(db)) == {60, HOUR_S}
    assert sum(spans(db).values()) <= 3000
    settle(db, NOW + 7200, most_rows=90)
    assert sum(spans(db).values()) <= 90
    assert in_all(db) == before
    settle(db, NOW + 7200, most_rows=10)
    assert sum(spans(db).values()) <= 10
    assert in_all(db) < before


def test_teams_of_a_user_have_a_bound(db: sqlite3.Connection) -> None:
    for team in range(100):
        rows = row(NOW, team)
        put(db, rows, {key.vgpu_id: Label(1000, "", "api/x", f"team-{team}") for key in rows})
    found = totals(db)
    assert len(found) <= MOST_TEAMS + 1
    assert sum(total.promised_ns for total in found) == 1000


def test_recent_has_the_sums_and_the_last_use(db: sqlite3.Connection) -> None:
    put(db, row(NOW - 7200) | row(NOW - 600), {})
    sums, last = recent(db, "vgpu-00000000", NOW - 3600)
    assert (sums.promised_ns, last) == (10, (NOW - 600) // 60 * 60 + 60)
    assert recent(db, "vgpu-00000009", 0) == (Sums(), None)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200 * DAY_S), st.integers(0, 30), st.integers(0, 2), st.integers(0, 2**40)),
        max_size=60,
    ),
    st.lists(st.integers(0, 300 * DAY_S), max_size=3).map(sorted),
)
def test_aging_changes_no_sum_of_a_user(rows: list[tuple[int, int, int, int]], looks: list[int]) -> None:
    connection = sqlite3.connect(":memory:")
    from vgpu.node.database import USAGE

    connection.executescript(USAGE)
    whole: dict[int, int] = {}
    for start, vgpu, owner, amount in rows:
        put(connection, row(NOW + start, vgpu, owner, amount), {})
        whole[owner] = whole.get(owner, 0) + amount
    for look in looks:
        settle(connection, NOW + look)
    for owner, amount in whole.items():
        assert sum(part.sums.promised_ns for part in find(connection, 0, 1e11, owner, 0)) == amount
        assert sum(total.promised_ns for total in totals(connection) if total.owner_uid == owner) == amount
    connection.close()
