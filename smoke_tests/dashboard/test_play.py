# SPDX-License-Identifier: Apache-2.0
"""Environments that are reset and stepped by hand, on a page of the dashboard."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts.folder.readers import open_rollouts

from ..conftest import Machine, eventually
from .conftest import NARROW, Dashboard

HERE = Path(__file__).parent


@pytest.fixture
def fields(dashboard_machine: Machine) -> Iterator[str]:
    dashboard_machine.ok("launch", "fields_env:Fields", "--name", "fields", cwd=HERE)
    yield "fields"
    dashboard_machine.ok("down", "fields")


def play(dashboard: Dashboard, name: str) -> Any:
    """Open the page from the environment's page, and begin an episode."""
    page = dashboard.show(f"/environment/{name}")
    page.get_by_role("link", name="Play", exact=True).click()
    page.get_by_label("Action").get_by_role("button", name="Step", exact=True).wait_for()
    return page


def save(page: Any, button: str, path: Path, saved: str) -> None:
    page.get_by_role("button", name=button).click()
    page.get_by_label("Path on the daemon's machine").fill(str(path))
    if path.suffix == ".py":
        page.get_by_label("Episode", exact=True).fill("0")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text(f"Saved {saved}, in {path}").wait_for()


def test_what_was_played_by_a_form_is_saved_as_an_episode_and_as_a_pytest(
    dashboard: Dashboard, fields: str, tmp_path: Path
) -> None:
    page = play(dashboard, fields)
    seen = page.get_by_role("region", name="Observation")
    step = page.get_by_role("button", name="Step", exact=True)
    assert step.is_disabled(), "an episode begins with a reset"
    page.get_by_label("Seed").fill("7")
    page.get_by_text("Further arguments", exact=True).click()
    page.get_by_label("More").fill('{"level": 2}')
    page.get_by_role("button", name="Reset", exact=True).click()
    seen.get_by_text("seed 7, {'level': 2}").wait_for()
    page.get_by_label("Side").select_option("left")
    page.get_by_label("Count").fill("3")
    page.get_by_label("Words").fill('["a"]')
    page.get_by_label("Note").fill("two")
    page.get_by_label("Note").press("Shift+Enter")
    page.get_by_label("Note").press_sequentially("lines")
    page.get_by_label("Note").press("Enter")
    seen.get_by_text(r"left 3 ['a'] 'two\\nlines'").wait_for()
    page.get_by_label("Words").fill("")
    page.get_by_label("Note").fill("")
    page.get_by_label("Is last").select_option("true")
    step.click()
    page.get_by_text("The episode has ended").wait_for()
    assert "0.6" in page.locator(".played dl.tiles").inner_text(), "the rewards are added"
    page.get_by_role("button", name="State").click()
    page.get_by_role("region", name="State").get_by_text('"step_count": 2').wait_for()
    page.get_by_role("button", name="1", exact=True).click()  # of the history
    seen.get_by_text("left 3 ['a']").wait_for()
    assert page.get_by_label("Note").input_value() == "two\nlines"
    page.get_by_role("button", name="Reset", exact=True).click()
    seen.get_by_text("seed 7").wait_for()
    page.get_by_role("button", name="Random step").click()
    assert page.get_by_role("row").nth(2).inner_text().startswith("reset")
    save(page, "Save as episodes", tmp_path / "played", "2 episodes, 3 steps")
    save(page, "Save as pytest", tmp_path / "test_played.py", "1 episode, 2 steps")
    episode, _ = open_rollouts(tmp_path / "played")
    assert (episode.row["seed"], episode.row["total_reward"]) == (7, pytest.approx(0.6))
    words = [sys.executable, "-m", "pytest", "-q", "--openenv-source=fields_env:Fields"]
    environ = dashboard.machine.environ | {"PYTHONPATH": str(HERE)}
    subprocess.run(
        [*words, str(tmp_path / "test_played.py")], env=environ, cwd=HERE, check=True, timeout=120
    )


def test_what_is_wrong_with_an_action_is_told_beside_its_field(
    dashboard: Dashboard, fields: str
) -> None:
    page = play(dashboard, fields)
    page.get_by_role("button", name="Reset", exact=True).click()
    page.get_by_role("region", name="Observation").get_by_text("seed None").wait_for()
    step = page.get_by_role("button", name="Step", exact=True)
    page.get_by_label("Side").select_option("right")
    step.click()
    page.locator("#field-count-problem").get_by_text("Field required").wait_for()
    page.get_by_label("Count").fill("10")
    step.click()
    page.locator("#field-count-problem").get_by_text("less than or equal to 9").wait_for()
    page.get_by_label("Count").fill("9")
    page.get_by_label("Words").fill("[a")
    step.click()
    page.locator("#field-words-problem").get_by_text("No JSON").wait_for()
    page.get_by_label("Words").fill("")
    page.get_by_label("Note").fill("raise")
    step.click()
    page.get_by_role("alert").get_by_text("LookupError: there is no such note").wait_for()
    page.get_by_role("alert").get_by_text("fields_env.py:").wait_for()
    page.get_by_role("button", name="Random step").click()
    page.get_by_role("button", name="1", exact=True).wait_for()


def test_a_page_that_plays_shows_pictures_opens_a_lost_session_again_and_ends_it(
    dashboard: Dashboard, dashboard_machine: Machine
) -> None:
    dashboard_machine.ok("launch", "maze_env:Maze", "--name", "maze", cwd=HERE)
    page = play(dashboard, "maze")
    page.get_by_role("button", name="Reset", exact=True).click()
    page.get_by_role("img", name="screen at step 0").wait_for()
    page.get_by_label("Direction").select_option("up")
    page.get_by_role("button", name="Step", exact=True).click()
    page.get_by_role("img", name="screen at step 1").wait_for()
    assert not dashboard.serious_findings()
    page.set_viewport_size(NARROW)
    assert not dashboard.overflow()
    assert dashboard_machine.environment("maze")["sessions"] == 1
    os.kill(dashboard_machine.replica("maze")["pid"], signal.SIGKILL)
    page.get_by_role("button", name="Step", exact=True).click()
    page.get_by_role("alert").get_by_text("connection was lost").wait_for()
    eventually(lambda: dashboard_machine.environment("maze")["state"] == "READY")
    page.get_by_role("button", name="Reset", exact=True).click()
    page.get_by_role("img", name="screen at step 0").wait_for()
    dashboard.show("/")
    eventually(lambda: dashboard_machine.environment("maze")["sessions"] == 0)
