# SPDX-License-Identifier: Apache-2.0
"""The screen of `openenv top`, driven by Textual's pilot, against a real daemon."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Footer, Input, RichLog, Static

from openenvd.cli.options import reconnect
from openenvd.cli.top_app import Confirm, Panel, TopApp

from .conftest import Machine

WITHIN_SECONDS = 30.0
SIZE = (80, 24)
WIDE = (200, 50)
FAT = """\
from openenvd.envs.echo.environment import EchoEnvironment

held = bytearray(250 << 20)
held[::4096] = b"1" * len(held[::4096])


class FatEnvironment(EchoEnvironment):
    pass
"""


@pytest.fixture
def app(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> TopApp:
    """The screen of a daemon that has one environment."""
    machine.ok("launch", "echo")
    monkeypatch.setenv("OPENENV_HOME", str(machine.home))
    client = reconnect()
    assert client is not None
    return TopApp(client)


async def until(pilot: Pilot[None], check: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_SECONDS):
        while not check():
            await pilot.pause(0.05)


def text(app: TopApp, name: str) -> str:
    """What a line of the main screen says; nothing while it is not shown."""
    line = app.screen_stack[0].query_one(f"#{name}", Static)
    return str(line.content) if line.display else ""


def cells(app: TopApp, panel: str) -> str:
    table = app.screen_stack[0].query_one(f"#{panel}", Panel)
    rows = (table.get_row_at(row) for row in range(table.row_count))
    return "\n".join(" ".join(str(cell) for cell in row) for row in rows)


def test_ctrl_c_quits(app: TopApp) -> None:
    async def press() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: "echo" in cells(app, "environments"))
            await pilot.press("ctrl+c")
            await until(pilot, lambda: not app.is_running)

    asyncio.run(press())


@pytest.mark.parametrize("size", [SIZE, WIDE])
async def test_environments_are_scaled_read_restarted_and_taken_down_by_keys(
    app: TopApp, size: tuple[int, int]
) -> None:
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "READY" in cells(app, "environments"))
        assert "launch echo" in cells(app, "requests")
        assert "long-1" in cells(app, "workers")
        assert {panel.region.width for panel in app.query(Panel)} == {size[0]}
        assert app.query_one(Footer).region.bottom == size[1]
        await pilot.press("s")
        await until(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press("backspace", "2")
        await until(pilot, lambda: app.screen.query_one(Input).value == "2")
        await pilot.press("enter")
        await until(pilot, lambda: "2/2" in cells(app, "environments"))
        await pilot.press("tab")
        await pilot.press("l")
        await until(pilot, lambda: len(app.screen_stack) == 2)
        await until(
            pilot, lambda: app.screen.query(RichLog) and app.screen.query_one(RichLog).lines
        )
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("shift+tab")
        await pilot.press("down")
        await pilot.press("r")
        await until(pilot, lambda: "restart echo" in cells(app, "requests"))
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("n")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: "echo" not in cells(app, "environments"))


async def test_a_death_for_want_of_memory_stays_until_it_was_seen(
    app: TopApp, machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "fat_environment.py").write_text(FAT)
    words = ("launch", "fat_environment:FatEnvironment", "--name", "fat", "--memory", "120M")
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.to_thread(machine.run, *words, cwd=tmp_path)
        await until(pilot, lambda: "OUT OF MEMORY  launch fat" in text(app, "deaths"))
        assert re.search(r"Try: openenv retry \w+ --memory 240M", text(app, "deaths"))
        await pilot.press("x")
        await until(pilot, lambda: text(app, "deaths") == "")


async def test_a_daemon_is_lost_and_regained(app: TopApp, machine: Machine) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "READY" in cells(app, "environments"))
        await asyncio.to_thread(machine.kill_daemon)
        await until(pilot, lambda: "DAEMON LOST" in text(app, "lost"))
        assert "openenv up" in text(app, "lost")
        assert "echo" in cells(app, "environments")
        await asyncio.to_thread(machine.ok, "up")
        await until(pilot, lambda: text(app, "lost") == "")
        assert "echo" in cells(app, "environments")
