from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import gpu_reading, process_reading, vgpu_reading
from vgpu.protocol.messages import EventReading, ProcessReading, Snapshot, VgpuStatus
from vgpu.top.model import ORDER_NAMES, REMARKS, SPAN_S, Choice, History, Model, Row


def reading(number: int, **changes: object) -> VgpuStatus:
    return vgpu_reading(vgpu_id=f"vgpu-{number:08x}", **changes)


def snapshot(*vgpus: VgpuStatus, at_unix_s: float = 1_700_000_100.0) -> Snapshot:
    gpus = tuple(gpu_reading(index=index) for index in sorted({vgpu.gpu_index for vgpu in vgpus} | {0}))
    return Snapshot(at_unix_s=at_unix_s, gpus=gpus, vgpus=vgpus)


def ids(rows: list[Row]) -> list[str]:
    return [row.vgpu.vgpu_id for row in rows]


vgpus = st.builds(
    reading,
    st.integers(0, 14),
    name=st.sampled_from([None, "train", "Infer", "batch-7"]),
    gpu_index=st.integers(0, 2),
    state=st.sampled_from(["idle", "running", "waiting", "suspended"]),
    created_unix_s=st.sampled_from([1.0, 2.0]),
    held_ratio=st.sampled_from([0.0, 0.25, 0.5]),
    busy_ratio=st.floats(0, 1),
    tokens_per_second=st.sampled_from([0.0, 10.0, 25.0]),
    lag_ns=st.integers(-(10**9), 10**9),
    waiting_ns=st.integers(0, 10**9),
)
populations = st.lists(vgpus, max_size=12, unique_by=lambda vgpu: vgpu.vgpu_id)
choices = st.builds(
    Choice,
    order=st.sampled_from(ORDER_NAMES),
    reverse=st.booleans(),
    words=st.sampled_from(["", "train", "INF 0", "idle", "nothing-like-this"]),
    gpu=st.sampled_from([None, 0, 1]),
)


@given(populations, choices, st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_of_the_readings(
    told: list[VgpuStatus], choice: Choice, random: object
) -> None:
    first, second = Model(), Model()
    first.take(snapshot(*told))
    random.shuffle(told)  # type: ignore[attr-defined]
    second.take(snapshot(*told))
    assert ids(first.rows(choice)) == ids(second.rows(choice))


@given(populations, choices)
def test_rows_are_sorted_and_chosen(told: list[VgpuStatus], choice: Choice) -> None:
    model = Model()
    model.take(snapshot(*told))
    rows, backward = model.rows(choice), model.rows(replace(choice, reverse=not choice.reverse))
    assert sorted(ids(rows)) == sorted(ids(backward))
    chosen = {row.vgpu.vgpu_id for row in rows}
    for vgpu in told:
        said = f"{vgpu.vgpu_id} {vgpu.name or ''} {vgpu.state}".lower()
        wanted = all(word.lower() in said for word in choice.words.split()) and choice.gpu in (None, vgpu.gpu_index)
        assert (vgpu.vgpu_id in chosen) == wanted
    if choice.order == "tokens":
        rates = [row.vgpu.tokens_per_second for row in rows]
        assert rates == sorted(rates, reverse=not choice.reverse)
    if choice.order == "vgpu":
        assert ids(rows) == sorted(ids(rows), reverse=choice.reverse)


@given(populations, populations, choices, st.data())
def test_the_selection_is_a_vgpu_not_a_place(
    before: list[VgpuStatus], after: list[VgpuStatus], choice: Choice, data: st.DataObject
) -> None:
    model = Model()
    model.take(snapshot(*before))
    first = ids(model.rows(choice))
    choice = replace(choice, selected=data.draw(st.sampled_from(first)) if first else None)
    model.take(snapshot(*after))
    second = ids(model.rows(choice))
    settled = choice.settled(first, second)
    if choice.selected in second:
        assert settled == choice
    elif second:
        assert settled.selected in second
        if first:
            place = first.index(choice.selected or "")
            assert second.index(settled.selected or "") == min(place, len(second) - 1)
    else:
        assert settled.selected is None


@given(st.permutations("abcdef"), st.permutations("abcdef"), st.sampled_from("abcdef"))
def test_wherever_the_selected_row_goes_it_stays_selected(before: list[str], after: list[str], selected: str) -> None:
    choice = Choice(selected=selected)
    assert choice.settled(before, after).selected == selected


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 1e4)), max_size=900), st.integers(1, 200))
def test_a_history_is_bounded_whatever_the_clock_does(told: list[tuple[float, float]], count: int) -> None:
    history = History()
    for at, value in told:
        history.add(at, value)
        assert len(history) <= SPAN_S
    now = max((at for at, _ in told), default=0.0)
    cells = history.cells(count, now)
    assert len(cells) == count
    known = [cell for cell in cells if cell is not None]
    assert all(0 <= cell <= 1e4 * 1.0001 for cell in known)
    if told:
        assert cells[-1] is not None


def test_parts_of_the_past_stay_as_they_are() -> None:
    history = History()
    for second in range(100):
        history.add(second, float(second))
    assert history.cells(4, 99.0, 40) == [64.5, 74.5, 84.5, 94.5]
    history.add(100.0, 7.0)
    assert history.cells(4, 100.0, 40) == [74.5, 84.5, 94.5, 7.0]
    history.add(101.0, 9.0)
    assert history.cells(4, 101.9, 40) == [74.5, 84.5, 94.5, 8.0]


def test_between_readings_far_apart_the_last_one_holds_but_not_over_an_interruption() -> None:
    history = History()
    history.add(10.0, 5.0)
    assert history.cells(4, 13.0, 4) == [5.0, 5.0, 5.0, 5.0]
    history.interrupt(12.0)
    assert history.cells(4, 13.0, 4) == [5.0, 5.0, None, None]
    history.add(13.2, 1.0)
    assert history.cells(4, 13.9, 4) == [5.0, 5.0, None, 1.0]


def test_a_frozen_model_shows_what_it_did_and_goes_on_remembering() -> None:
    model = Model()
    model.take(snapshot(reading(1, held_ratio=0.5), at_unix_s=100.0))
    model.freeze(True)
    model.take(snapshot(reading(2, held_ratio=0.7), at_unix_s=101.0))
    (row,) = model.rows(Choice())
    assert row.vgpu.vgpu_id == "vgpu-00000001"
    assert row.history.cells(1, 100.0, 1) == [0.5]
    model.freeze(False)
    (row,) = model.rows(Choice())
    assert (row.vgpu.vgpu_id, row.history.cells(1, 101.0, 1)) == ("vgpu-00000002", [0.7])
    model.take(snapshot(reading(2), at_unix_s=102.0))
    assert set(model.histories) == {"vgpu-00000002"}


def test_programs_belong_to_their_vgpu_and_go_with_it() -> None:
    model = Model()
    model.take(snapshot(reading(1), reading(2)))
    told = [
        process_reading(vgpu_id=f"vgpu-{number:08x}", slot=slot, pid=100 + slot)
        for number, slot in ((1, 1), (2, 0), (1, 0))
    ]
    model.know(map(ProcessReading.model_validate, told))
    first, second = model.rows(Choice(expanded=frozenset({"vgpu-00000001"})))
    assert first.processes is not None
    assert [process.pid for process in first.processes] == [100, 101]
    assert second.processes is None
    model.take(snapshot(reading(2)))
    model.take(snapshot(reading(1)))
    (row,) = model.rows(Choice(expanded=frozenset({"vgpu-00000001"})))
    assert row.processes == ()


def test_remarks_are_bounded_and_name_the_vgpu_once() -> None:
    model = Model()
    model.lose(1.0, "the node closed the link")
    model.lose(2.0, "no node answers")
    assert [remark.text for remark in model.remarks] == ["the node closed the link"]
    model.add_event(EventReading(at_unix_s=3.0, kind="ended", gpu_index=0, vgpu_id="vgpu-1", text="process 7 died"))
    model.add_event(EventReading(at_unix_s=3.0, kind="created", gpu_index=0, vgpu_id="vgpu-1", text="vgpu-1 created"))
    assert [remark.text for remark in model.remarks][1:] == ["vgpu-1: process 7 died", "vgpu-1 created"]
    named = reading(1, name="train")
    model.take(snapshot(named))
    model.add_event(
        EventReading(at_unix_s=3.5, kind="ended", gpu_index=0, vgpu_id=named.vgpu_id, text="process 8 died")
    )
    assert model.named_remarks(1)[0].text == "train (vgpu-00000001): process 8 died"
    model.take(snapshot())
    assert model.named_remarks(1)[0].text == "train (vgpu-00000001): process 8 died"
    for _ in range(2 * REMARKS):
        model.remark(4.0, "done", "again")
    assert len(model.remarks) == REMARKS


@pytest.mark.parametrize(
    ("order", "step", "following"), [("vgpu", -1, "refused"), ("refused", 1, "vgpu"), ("held", 1, "busy")]
)
def test_the_next_column_to_sort_by(order: str, step: int, following: str) -> None:
    assert Choice(order=order).next_order(step).order == following


def test_what_is_sorted_by_may_have_no_column() -> None:
    assert Choice(order="lag").next_order(1, ("vgpu", "busy")).order == "vgpu"
    assert Choice(order="lag").next_order(-1, ("vgpu", "busy")).order == "busy"
    assert Choice(order="busy").ordered_by("busy").reverse
    assert not Choice(order="busy", reverse=True).ordered_by("lag").reverse


def test_gpus_come_in_turn() -> None:
    seen: list[int | None] = [None, 0, 3, None]
    assert [Choice(gpu=before).next_gpu([0, 3]).gpu for before in seen[:-1]] == seen[1:]
    assert Choice(gpu=7).next_gpu([0, 1]).gpu == 0
    assert Choice().next_gpu([0]).gpu is None


def test_the_selection_moves_within_the_rows() -> None:
    rows = ["a", "b", "c"]
    assert Choice().moved(rows, 1).selected == "a"
    assert Choice(selected="a").moved(rows, 1).selected == "b"
    assert Choice(selected="b").moved(rows, 10).selected == "c"
    assert Choice(selected="b").moved(rows, -10).selected == "a"
    assert Choice(selected="b").moved([], 1).selected is None
