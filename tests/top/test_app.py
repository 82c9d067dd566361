"""Keys, mouse and dialogs, in a terminal that textual plays."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input, Static

from tests.top.played_node import PlayedNode, event, three
from vgpu.ctl.observe.top import parse_changes
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import Inspect, Migrate, Processes, Remove, Set, Watch
from vgpu.top.app import Top
from vgpu.top.dialogs import Ask, Confirm, TextScreen
from vgpu.top.panels import NodeFacts
from vgpu.top.widgets import Lines, Table

PATIENCE_S = 60.0
S = TypeVar("S", bound=Screen[Any])
Play = Callable[[Top, Pilot[None]], Awaitable[None]]
FIRST, SECOND, THIRD = (vgpu.vgpu_id for vgpu in three())


def play(what: Play, size: tuple[int, int] = (120, 36), *, utf8: bool = True) -> None:
    async def run() -> None:
        path = Path(os.environ["VGPU_RUNTIME_DIR"]) / "control.sock"
        app = Top(path, NodeFacts("host", 4711, "9.9.9", True, time.time() - 3600), 1.0, parse_changes, utf8=utf8)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "tokens/s" in screen(app) or "/s" in screen(app), "the first readings")
            await what(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not so():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s\n{screen(pilot.app)}"
        await pilot.pause(0.01)


def screen(app: Any) -> str:
    """What is to be read on it, of lines and table."""
    drawn = [
        widget.render_line(y).text
        for widget in app.screen_stack[0].query("Lines, Table")
        for y in range(widget.size.height)
    ]
    return "\n".join(drawn)


def drawn(app: Top) -> str:
    """What is to be read anywhere, also of a dialog."""
    return app.export_screenshot(simplify=True).replace("&#160;", " ")


async def met(pilot: Pilot[None], kind: type[S], part: str) -> S:
    """The dialog of that kind, once that part of it is there."""
    await until(pilot, lambda: isinstance(pilot.app.screen, kind) and pilot.app.screen.query(part), kind.__name__)
    assert isinstance(pilot.app.screen, kind)
    return pilot.app.screen


def order(app: Top) -> list[str]:
    """The vGPUs from top to bottom."""
    return list(dict.fromkeys(app.query_one(Table).keys))


def asked(node: PlayedNode, kind: type[Any]) -> list[Any]:
    return [request for request in node.asked if isinstance(request, kind)]


def test_what_is_to_be_seen(played: PlayedNode) -> None:
    async def looks(app: Top, pilot: Pilot[None]) -> None:
        shown = screen(app)
        for said in (
            "SIMULATED",
            "host",
            "3 vGPUs, 4 programs",
            "GPU 0",
            "GPU 1",
            "50.0",
            "10/30 %",
            "train",
            "created",
        ):
            assert said in shown, said
        assert shown.isprintable() or "\n" in shown
        played.tell(event=event("ended", SECOND, "process 7 died"))
        await until(pilot, lambda: f"ended infer ({SECOND}): process 7 died" in screen(app), "the event")

    play(looks)


def test_the_selection_follows_its_vgpu_through_sorting_and_updates(played: PlayedNode) -> None:
    async def selects(app: Top, pilot: Pilot[None]) -> None:
        assert order(app) == [FIRST, SECOND, THIRD]
        await pilot.press("j")
        assert app.choice.selected == SECOND
        await pilot.press("s", "s", "s", "s")
        assert app.choice.order == "tokens"
        assert order(app) == [SECOND, FIRST, THIRD]
        await pilot.press("S")
        assert order(app) == [THIRD, FIRST, SECOND]
        assert app.choice.selected == SECOND
        first, second, third = three()
        faster = third.model_copy(update={"tokens_per_second": 99.0})
        played.tell_vgpus(second, faster, first)
        await until(pilot, lambda: order(app) == [FIRST, SECOND, THIRD], "the new order")
        assert app.choice.selected == SECOND
        assert app.choice.order == "tokens"
        played.tell_vgpus(faster, first)
        await until(pilot, lambda: order(app) == [FIRST, THIRD], "one less")
        assert app.choice.selected == THIRD
        await pilot.press("greater_than_sign", "less_than_sign", "less_than_sign")
        assert app.choice.order == "busy"
        await pilot.press("up", "home", "end", "G")
        assert app.choice.selected == order(app)[-1]

    play(selects)


def test_programs_are_shown_and_hidden(played: PlayedNode) -> None:
    async def expands(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("down", "enter")
        await until(pilot, lambda: "222" in screen(app), "its programs")
        lines = screen(app).splitlines()
        at = next(i for i, line in enumerate(lines) if "infer" in line)
        assert "111" in lines[at + 1]
        assert "222" in lines[at + 2]
        assert THIRD in lines[at + 3]
        assert "train.py" in lines[at + 1]
        await pilot.press("j")
        assert app.choice.selected == THIRD
        await pilot.press("k", "space")
        assert "222" not in screen(app)
        await pilot.press("k", "enter")
        await until(pilot, lambda: "└" in screen(app), "that there are none")

    play(expands)


def test_the_filter_and_the_gpu_choose_rows(played: PlayedNode) -> None:
    async def filters(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"tra")
        assert order(app) == [FIRST]
        await pilot.press("enter", "down")
        assert (app.choice.words, app.choice.selected) == ("tra", FIRST)
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "the end")

    async def chooses(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"qqq")  # no command while it is typed
        assert "no vGPU is like that" in screen(app)
        await pilot.press("escape")
        assert len(order(app)) == 3
        await pilot.press("g")
        assert order(app) == [FIRST, SECOND]
        await pilot.press("g")
        assert order(app) == [THIRD]
        assert "GPU 0" not in screen(app)
        await pilot.press("g")
        assert len(order(app)) == 3

    play(filters)
    play(chooses)


def test_rows_are_grouped_below_headings(played: PlayedNode) -> None:
    async def groups(app: Top, pilot: Pilot[None]) -> None:
        first, second, third = three()
        away = {"state": "suspended", "processes": 0}
        played.tell_vgpus(first, second.model_copy(update=away), third.model_copy(update={"state": "running"}))
        await until(pilot, lambda: "suspended" in screen(app), "the state")
        await pilot.press("b")
        assert re.search(r"^ \S+  3 vGPUs, 2 programs, 4\.5/24 GiB", screen(app), re.M)
        await pilot.press("b")
        lines = [line.split()[:2] for line in screen(app).splitlines() if re.match(r" (running|suspended)  ", line)]
        assert lines == [["running", "2"], ["suspended", "1"]]
        await pilot.press("b")
        assert re.search(r"^ GPU 1  1 vGPU, 1 program,", screen(app), re.M)
        await pilot.press("b")
        assert app.choice.group == ""
        assert "3 vGPUs, 2 programs, " not in screen(app)

    play(groups)


def test_a_row_has_the_command_of_its_programs(played: PlayedNode) -> None:
    async def reads(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: re.search(r"infer .*train\.py", screen(app)), "the command")
        told = len(asked(played, Processes))
        played.tell_vgpus(*three())
        played.tell(event=event("ended", SECOND, "process 7 died"))
        await until(pilot, lambda: "process 7 died" in screen(app), "the next reading")
        assert len(asked(played, Processes)) == told  # as many programs as before

    play(reads, (220, 36))


def test_suspending_and_migrating(played: PlayedNode) -> None:
    def moved(request: Migrate) -> dict[str, Any]:
        if request.gpu == "7":
            raise VgpuError(ErrorCode.NOT_FOUND, "there is no GPU 7")
        return three()[0].model_copy(update={"gpu_index": 1}).model_dump(mode="json")

    async def acts(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("z")
        await until(pilot, lambda: f"done train ({FIRST}) is suspended" in screen(app), "the end of it")
        played.tell_vgpus(three()[0].model_copy(update={"state": "suspended"}), *three()[1:])
        await until(pilot, lambda: re.search(r"train +\S+ +\d +suspended ", screen(app)), "the state")
        await pilot.press("z")
        await until(pilot, lambda: f"done train ({FIRST}) is resumed" in screen(app), "it goes on")
        await pilot.press("m")
        ask = await met(pilot, Ask, "#reason")
        assert "GPU 1: " in str(ask.query(Static).first().content)
        for wrong, why in (("", "number of a GPU"), ("7", "there is no GPU 7")):
            ask.query_one(Input).value = wrong
            await pilot.press("enter")
            await until(pilot, lambda why=why: why in str(ask.query_one("#reason", Static).content), why)  # type: ignore[misc]
        ask.query_one(Input).value = "1"
        await pilot.press("enter")
        await until(pilot, lambda: f"done train ({FIRST}) is on GPU 1" in screen(app), "the move")

    one = three()[0].model_dump(mode="json")
    played.answers |= {"suspend": lambda request: one, "resume": lambda request: one, "migrate": moved}
    play(acts)


def test_a_pause_holds_what_is_shown(played: PlayedNode) -> None:
    async def pauses(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("p")
        assert "PAUSED" in screen(app)
        played.tell_vgpus(three()[0])
        await until(pilot, lambda: len(app.model.histories) == 3 and app.model._latest is not app.model.shown, "news")
        assert len(order(app)) == 3
        await pilot.press("p")
        assert order(app) == [FIRST]

    play(pauses)


def test_the_interval_is_asked_of_the_node_without_a_word_of_loss(played: PlayedNode) -> None:
    async def slower(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("plus")
        await until(pilot, lambda: asked(played, Watch)[-1].interval_ns == 2 * 10**9, "the new interval")
        await until(pilot, lambda: "every 2 s" in screen(app), "the new interval")
        assert app.model.lost is None
        await pilot.press("minus", "minus")
        await until(pilot, lambda: asked(played, Watch)[-1].interval_ns == 500_000_000, "the shorter one")
        assert "closed the link" not in screen(app)

    play(slower)


def test_a_node_that_restarts_is_met_again(played: PlayedNode) -> None:
    async def restarts(app: Top, pilot: Pilot[None]) -> None:
        def silent(request: Any) -> dict[str, Any]:
            raise VgpuError(ErrorCode.UNAVAILABLE, "not yet")

        told = played.answers["status"]
        played.answers["status"] = silent
        played.hang_up()
        await until(pilot, lambda: "NO ANSWER" in screen(app), "the loss is told")
        assert "the node closed the link" in screen(app)
        assert FIRST in screen(app)
        played.pid = 4712
        played.answers["status"] = told
        await until(pilot, lambda: "it was restarted: process 4712, was 4711" in screen(app), "it is met again")
        await until(pilot, lambda: "NO ANSWER" not in screen(app), "it is met again")

    play(restarts)


def test_what_is_told_while_it_ends_is_not_shown() -> None:
    """Its widgets go before the screen that they are on, in steps between which news are heard."""
    steps: list[bool] = []

    async def hear(app: Top) -> None:
        while app.screen_stack:
            app.redraw()
            steps.append(bool(app.screen_stack[0].query("#node")))
            await asyncio.sleep(0)

    async def run() -> None:
        app = Top(Path("/nowhere"), NodeFacts("host", 4711, "9.9.9", True, time.time()), 1.0, parse_changes)
        async with app.run_test(size=(80, 24)):
            hearing = asyncio.create_task(hear(app))
        await hearing

    asyncio.run(run())
    assert steps[0]
    assert not steps[-1]


def test_resizing_takes_the_words_of_set(played: PlayedNode) -> None:
    def resized(request: Set) -> dict[str, Any]:
        if request.changes.sm_percent == 90:
            raise VgpuError(ErrorCode.NO_ROOM, "no room for 90 %", "at most 50")
        return three()[0].model_copy(update={"warnings": ("a warning",)}).model_dump(mode="json")

    async def resizes(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        ask = await met(pilot, Ask, "#reason")

        def reason() -> str:
            return str(ask.query_one("#reason", Static).content)

        async def enter(text: str) -> None:
            ask.query_one(Input).value = text
            await pilot.press("enter")

        for wrong, why in (
            ("", "nothing to change"),
            ("--sm 130", "130 is not between 1 and 100"),
            ("--no-such 3", "no such option"),
            ("--name 'x", "quotation"),
            ("--sm 90", "no room for 90 %; at most 50"),
        ):
            await enter(wrong)
            await until(pilot, lambda why=why: why in reason(), why)  # type: ignore[misc]
        await enter("--sm 50 --mem 16G --priority high")
        await until(pilot, lambda: app.screen is not ask, "the end of the prompt")
        changes = asked(played, Set)[-1].changes
        assert (changes.sm_percent, changes.memory_bytes, changes.priority) == (50.0, 16 << 30, "high")
        await until(pilot, lambda: f"train ({FIRST}): a warning" in screen(app), "its warning")
        assert f"done train ({FIRST}) now has 30 %" in screen(app)
        await pilot.press("r", "escape")
        await until(pilot, lambda: not isinstance(app.screen, Ask), "nothing is asked any more")

    played.answers["set"] = resized
    play(resizes)


def test_removing_asks_first(played: PlayedNode) -> None:
    def removed(request: Remove) -> dict[str, Any]:
        if not request.force:
            raise VgpuError(ErrorCode.NOT_YOURS, "it belongs to uid 7")
        return three()[0].model_dump(mode="json")

    async def removes(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("x")
        asks = await met(pilot, Confirm, "#question")
        assert "its next GPU call fails" in str(asks.query_one("#question", Static).content)
        await pilot.press("n")
        await until(pilot, lambda: app.screen is not asks, "nothing is asked any more")
        assert not asked(played, Remove)
        await pilot.press("x", "y")
        await until(pilot, lambda: f"train ({FIRST}) is removed" in screen(app), "the removal")
        assert asked(played, Remove)[-1].vgpu == FIRST
        played.tell_vgpus(three()[0].model_copy(update={"processes": 0}))
        await until(pilot, lambda: len(order(app)) == 1, "one without programs")
        await pilot.press("x", "y")
        await until(pilot, lambda: "error it belongs to uid 7" in screen(app), "the refusal")

    played.answers["remove"] = removed
    play(removes)


def test_details_and_help(played: PlayedNode) -> None:
    async def reads(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, TextScreen), "the details")
        assert asked(played, Inspect)[-1].vgpu == FIRST
        await until(pilot, lambda: "a note" in drawn(app), "its notes")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, TextScreen), "the end of the details")
        await pilot.press("question_mark")
        await until(pilot, lambda: "in the words of vgpuctl set" in drawn(app), "the keys")
        await pilot.press("j", "k", "q")
        await until(pilot, lambda: not isinstance(app.screen, TextScreen), "the end of the keys")
        assert app.is_running

    play(reads)


def test_the_mouse_selects_expands_and_sorts(played: PlayedNode) -> None:
    async def clicks(app: Top, pilot: Pilot[None]) -> None:
        await pilot.click(Table, offset=(10, 1))
        assert app.choice.selected == SECOND
        await pilot.click(Table, offset=(10, 1))
        assert app.choice.expanded == {SECOND}
        title = app.query_one("#head", Lines).render_line(0).text
        await pilot.click("#head", offset=(title.index("TOKENS/S"), 0))
        assert order(app) == [SECOND, FIRST, THIRD]
        await pilot.click("#head", offset=(title.index("TOKENS/S"), 0))
        assert order(app) == [THIRD, FIRST, SECOND]
        await pilot.click(Table, offset=(10, 8))  # below the rows

    play(clicks)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (240, 60)])
def test_it_fits(played: PlayedNode, size: tuple[int, int]) -> None:
    async def looks(app: Top, pilot: Pilot[None]) -> None:
        shown = screen(app)
        assert all(label in shown for label in ("train", "infer", THIRD))
        assert all(len(line) <= size[0] for line in shown.splitlines())
        assert "10/30 %" in shown
        assert "50.0" in shown
        await pilot.resize_terminal(60, 15)
        await pilot.press("end", "enter", "home")
        await until(pilot, lambda: max(map(len, screen(app).splitlines())) <= 60, "the smaller screen")

    play(looks, size)


def test_what_is_selected_stays_in_view(played: PlayedNode) -> None:
    async def scrolls(app: Top, pilot: Pilot[None]) -> None:
        first = three()[0]
        played.tell_vgpus(*(first.model_copy(update={"vgpu_id": f"vgpu-{i:08x}", "name": None}) for i in range(64)))
        await until(pilot, lambda: len(order(app)) == 64, "64")
        await pilot.press("end")
        await until(pilot, lambda: "vgpu-0000003f" in screen(app), "the last one")
        assert "vgpu-00000000" not in screen(app)
        await pilot.press("home")
        await until(pilot, lambda: "vgpu-00000000" in screen(app), "the first one")

    play(scrolls, (100, 24))


def test_without_utf8_or_colours(played: PlayedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def looks(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        assert screen(app).isascii()
        await pilot.press("t", "question_mark")
        await until(pilot, lambda: "sort by the next column" in drawn(app), "the keys")

    play(looks, utf8=False)


def test_both_themes(played: PlayedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", "0;15")

    async def looks(app: Top, pilot: Pilot[None]) -> None:
        assert app.theme == "vgpu-light"
        light = app.query_one(Table).render_line(0)
        await pilot.press("t")
        assert app.theme == "vgpu-dark"
        await until(pilot, lambda: app.query_one(Table).render_line(0) != light, "other colours")

    play(looks)


def test_the_words_of_set_are_read_as_its_command_line_is() -> None:
    assert parse_changes("vgpu-1", "--burst --ttl 8h").ttl_ns == 8 * 3600 * 10**9
    for wrong in ("--help", "-o nonsense", "stray --sm 3", "--sm"):
        with pytest.raises(VgpuError) as caught:
            parse_changes("vgpu-1", wrong)
        assert caught.value.code is ErrorCode.INVALID
