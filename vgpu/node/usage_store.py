"""The tables of usage in ``node.db``: what ``vgpu.usage.rows`` decides, as SQL. Each function runs in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Final, NamedTuple

from vgpu.protocol.usage import Grouping
from vgpu.usage.account import Label
from vgpu.usage.report import Part
from vgpu.usage.rows import MOST_ROWS, OTHERS, TIERS, Key, Rows, Sums, add, capped, coarser

_SUMS: Final = tuple(field.name for field in fields(Sums))
_COLUMNS: Final = ", ".join((*Key._fields, *_SUMS))
_PLACES: Final = ", ".join("?" for _ in (*Key._fields, *_SUMS))
_SUMMED: Final = ", ".join(f"sum({name})" for name in _SUMS)
_TOTALS: Final = ("promised_ns", "used_ns", "wasted_ns", "memory_promised_kib_s", "memory_used_kib_s")
_SPANS: Final = ", ".join(str(tier.span_s) for tier in TIERS)
_LONGEST: Final = TIERS[-1].span_s
MOST_TEAMS: Final = 32
"""Of one user. An engine names teams freely, so the later ones count as ``OTHERS``."""
BUCKETS: Final = 8
"""That one transaction merges: it has to be short."""
LONGEST_LABEL: Final = 253


class Total(NamedTuple):
    """What all rows of one user and team have summed to. It only grows."""

    owner_uid: int
    team: str
    promised_ns: int
    used_ns: int
    wasted_ns: int
    memory_promised_kib_s: int
    memory_used_kib_s: int


def put(db: sqlite3.Connection, rows: Mapping[Key, Sums], labels: Mapping[str, Label]) -> None:
    """Add ``rows`` to those that are there."""
    _sum_up(db, rows, labels)
    kept: Rows = {}
    for span_s, start in {key[:2] for key in rows}:
        bucket = {key: sums for key, sums in rows.items() if key[:2] == (span_s, start)}
        kept |= _replace(db, span_s, start, bucket)
    named = {key.vgpu_id for key in kept} & labels.keys()
    db.executemany(
        "INSERT INTO usage_vgpu VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET name = excluded.name",
        [
            (vgpu_id, labels[vgpu_id].owner_uid, labels[vgpu_id].name, labels[vgpu_id].claim[:LONGEST_LABEL])
            for vgpu_id in named
        ],
    )


def _replace(db: sqlite3.Connection, span_s: int, start: int, more: Rows) -> Rows:
    """One bucket, with ``more`` added to it."""
    bucket = _rows_of(db, "span_s = ? AND start_unix_s = ?", span_s, start)
    add(bucket, more)
    bucket = capped(bucket)
    db.execute("DELETE FROM usage WHERE span_s = ? AND start_unix_s = ?", (span_s, start))
    db.executemany(f"INSERT INTO usage ({_COLUMNS}) VALUES ({_PLACES})", [(*k, *s.values) for k, s in bucket.items()])
    return bucket


def _rows_of(db: sqlite3.Connection, condition: str, *values: int) -> Rows:
    found = db.execute(f"SELECT {_COLUMNS} FROM usage WHERE {condition}", values)
    return {Key(*row[:4]): Sums(*row[4:]) for row in found}


def _sum_up(db: sqlite3.Connection, rows: Mapping[Key, Sums], labels: Mapping[str, Label]) -> None:
    teams: dict[int, set[str]] = {}
    for owner_uid, team in db.execute("SELECT owner_uid, team FROM usage_total"):
        teams.setdefault(owner_uid, set()).add(team)
    sums: dict[tuple[int, str], Sums] = {}
    for key, more in rows.items():
        label = labels.get(key.vgpu_id)
        team = "" if label is None else label.tenant[:LONGEST_LABEL]
        known = teams.setdefault(key.owner_uid, set())
        if team and team not in known and len(known) >= MOST_TEAMS:
            team = OTHERS
        known.add(team)
        sums[key.owner_uid, team] = sums.get((key.owner_uid, team), Sums()) + more
    changes = ", ".join(f"{name} = {name} + excluded.{name}" for name in _TOTALS)
    db.executemany(
        f"INSERT INTO usage_total VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {changes}",
        [(*who, *(getattr(more, name) for name in _TOTALS)) for who, more in sums.items()],
    )


def totals(db: sqlite3.Connection) -> tuple[Total, ...]:
    return tuple(Total(*row) for row in db.execute("SELECT * FROM usage_total ORDER BY owner_uid, team"))


def age(db: sqlite3.Connection, now_unix_s: float, most_rows: int = MOST_ROWS) -> bool:
    """Merge and drop what is old enough, ``BUCKETS`` at most. True: there is more to do."""
    for tier, following in zip(TIERS, (*TIERS[1:], None), strict=True):
        span_s = tier.span_s if following is None else following.span_s
        due = [start for start in _starts(db, tier.span_s, span_s) if start + span_s + tier.keep_s <= now_unix_s]
        if due:
            for start in due[:BUCKETS]:
                _merge(db, tier.span_s, start, None if following is None else following.span_s)
            return True
    return _make_room(db, most_rows)


def _starts(db: sqlite3.Connection, of_span_s: int, span_s: int) -> list[int]:
    """The starts of buckets of ``span_s`` that have rows of ``of_span_s``, the oldest first."""
    query = "SELECT DISTINCT start_unix_s / ?1 * ?1 FROM usage WHERE span_s = ?2 ORDER BY 1 LIMIT ?3"
    return [start for (start,) in db.execute(query, (span_s, of_span_s, BUCKETS))]


def _merge(db: sqlite3.Connection, span_s: int, start: int, into_s: int | None) -> None:
    """The rows of ``span_s`` in one bucket of the next tier become that bucket's; None: they go."""
    condition = "span_s = ? AND start_unix_s >= ? AND start_unix_s < ?"
    values = span_s, start, start + (into_s or span_s)
    rows = _rows_of(db, condition, *values)
    db.execute(f"DELETE FROM usage WHERE {condition}", values)
    if into_s is not None:
        _replace(db, into_s, start, coarser(rows, into_s))


def _make_room(db: sqlite3.Connection, most_rows: int) -> bool:
    """Merge the oldest bucket before its time, if there are too many rows. Names without a row go."""
    (count,) = db.execute("SELECT count(*) FROM usage").fetchone()
    if count <= most_rows:
        db.execute("DELETE FROM usage_vgpu WHERE vgpu_id NOT IN (SELECT vgpu_id FROM usage)")
        return False
    for least in (2, 1):  # first what is older than the bucket that still grows
        for tier, following in pairwise(TIERS):
            starts = _starts(db, tier.span_s, following.span_s)
            if len(starts) >= least:
                _merge(db, tier.span_s, starts[0], following.span_s)
                return True
    longest = TIERS[-1].span_s
    _merge(db, longest, _starts(db, longest, longest)[0], None)
    return True


def find(
    db: sqlite3.Connection,
    since_unix_s: float,
    until_unix_s: float,
    owner_uid: int | None,
    step_s: int,
    by: Grouping = "vgpu",
) -> list[Part]:
    """What the rows of each vGPU, or user, sum to, in steps of ``step_s`` from ``since_unix_s`` on (0: one step).
    ``owner_uid`` None: of all users. A bucket counts in the step in which it begins, and whole."""
    step = "max(0, start_unix_s - :since) / :step_s" if step_s else "0"
    vgpu = "''" if by == "user" else "vgpu_id"
    query = (
        f"SELECT {step} AS step, owner_uid, {vgpu} AS vgpu, {_SUMMED} FROM usage"
        f" WHERE span_s IN ({_SPANS}) AND start_unix_s > :since - {_LONGEST} AND start_unix_s < :until"
        " AND start_unix_s + span_s > :since AND (:owner IS NULL OR owner_uid = :owner) GROUP BY step, owner_uid, vgpu"
    )
    values = {"since": int(since_unix_s), "until": until_unix_s, "owner": owner_uid, "step_s": step_s}
    named = db.execute("SELECT vgpu_id, name, claim FROM usage_vgpu")
    labels: dict[str, tuple[str, str]] = {vgpu_id: (name, claim) for vgpu_id, name, claim in named}
    found = []
    for at, owner, vgpu_id, *sums in db.execute(query, values):
        name, claim = labels.get(vgpu_id, ("", ""))
        found.append(Part(at, owner, vgpu_id, name, claim, Sums(*sums)))
    return found


def recent(db: sqlite3.Connection, vgpu_id: str, since_unix_s: float) -> tuple[Sums, float | None]:
    """The sums of one vGPU since then, and when it used the GPU last (the end of that bucket)."""
    row = db.execute(
        f"SELECT {_SUMMED} FROM usage WHERE span_s IN ({_SPANS}) AND start_unix_s > ?2 - {_LONGEST}"
        " AND vgpu_id = ?1 AND start_unix_s + span_s > ?2",
        (vgpu_id, since_unix_s),
    ).fetchone()
    (last,) = db.execute(
        "SELECT max(start_unix_s + span_s) FROM usage WHERE vgpu_id = ? AND used_ns > 0", (vgpu_id,)
    ).fetchone()
    return Sums(*(value or 0 for value in row)), last
