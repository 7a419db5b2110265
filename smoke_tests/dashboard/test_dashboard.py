# SPDX-License-Identifier: Apache-2.0
"""What people do with the dashboard, in a real browser against a real daemon."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.client.errors import SessionError
from openenvd.client.session import Session

from ..conftest import REPOSITORY, Machine, copy_package, eventually
from .conftest import NARROW, Dashboard
from .pictures import Picture, differences, load, take

HERE = Path(__file__).parent
NEVER_READY = "import time\nprint('never ready', flush=True)\ntime.sleep(3600)\n"
REWARDS = re.compile(r"Reward of the episodes: -?\d")  # a chart that has its figures
PICTURE = {"width": 1280, "height": 860}
KEPT = REPOSITORY / "docs/images"
HOW_RENEWED = """The documentation's pictures are stale. Renew them, and look at each:
OPENENVD_SCREENSHOTS=docs/images pytest -n 0 smoke_tests/dashboard -k pictures"""
Open = Callable[..., Dashboard]


def launch_maze(machine: Machine) -> None:
    machine.ok("launch", "maze_env:Maze", "--name", "maze", cwd=HERE)


@pytest.fixture(scope="session")
def played(dashboard_machine: Machine) -> Iterator[str]:
    """The id of a finished rollout in the maze, whose observations are pictures."""
    machine = dashboard_machine
    launch_maze(machine)
    told = ("--episodes", "24", "--max-steps", "30", "--seed", "1", "--concurrency", "8")
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:  # a picture shows its name
        machine.ok("rollout", "maze", "--out", f"{folder}/walks", *told)
        [request] = [r for r in machine.status()["requests"] if r["operation"] == "rollout"]
        yield str(request["id"])


@pytest.fixture
def rollout(dashboard_machine: Machine, played: str) -> str:
    """The same, with its environment running again if a test has taken it down."""
    if "maze" not in [each["name"] for each in dashboard_machine.status()["environments"]]:
        launch_maze(dashboard_machine)
    return played


@pytest.fixture(scope="session")
def killed(dashboard_machine: Machine) -> str:
    """The id of a launch that was killed for memory."""
    words = ("launch", "hungry_env:Hungry", "--name", "killed", "--memory", "100M", "--json")
    return str(dashboard_machine.run(*words, cwd=HERE).json["request_id"])


@pytest.fixture
def launched(dashboard_machine: Machine) -> Iterator[str]:
    """The name of a running environment, which is taken down after the test."""
    dashboard_machine.ok("launch", "echo", "--name", "parrot")
    yield "parrot"
    dashboard_machine.ok("down", "parrot")


def launch_stuck(machine: Machine, folder: Path, name: str) -> str:
    """Launch an environment that never gets ready; return the request's id."""
    (folder / "stuck_env.py").write_text(NEVER_READY)
    words = ("launch", "stuck_env:Stuck", "--name", name, "--async")
    return machine.ok(*words, cwd=folder).out.strip()


def body_of(page: Any, section: str) -> Any:
    return page.locator(f"section#{section}")


def row_of(page: Any, section: str, text: str) -> Any:
    return body_of(page, section).locator("tbody tr").filter(has_text=text).first


@pytest.mark.parametrize(
    ("label", "value", "expected"),
    [
        ("Provider", "nonesuch", "nonesuch"),
        ("Replicas", "5000", "less than or equal to 1000"),
        ("Source", "", "required"),
        ("Session memory", "1", "greater than or equal to"),
        ("Token", "short", "16 to 256 letters"),
    ],
)
def test_what_the_daemon_refuses_is_told_beside_its_field(
    dashboard: Dashboard, label: str, value: str, expected: str
) -> None:
    page = dashboard.show("/launch")
    page.get_by_label("Source").fill("echo")
    folded = page.get_by_text("More options")
    folded.click()
    field = page.get_by_label(label, exact=label != "Source").first
    field.fill(value)
    folded.click()
    page.get_by_role("button", name="Launch", exact=True).click()
    problem = page.locator(f"#{field.get_attribute('id')}-problem")
    problem.filter(has_text=expected).wait_for()
    assert field.get_attribute("aria-invalid") == "true"
    assert field.evaluate("each => each === document.activeElement")
    assert page.url.endswith("#/launch")
    dashboard.errors.clear()  # the browser itself logs the 422


def test_numbers_and_times_are_written_as_people_write_them(dashboard: Dashboard) -> None:
    page = dashboard.show("/")
    assert page.evaluate(WRITTEN) == [
        *("0", "999", "1,000", "1,234,567.3", "0.1", "12.3", "-4,096", NONE, NONE),
        *("13:05:09", NONE),
    ]


NONE = "\N{EN DASH}"
WRITTEN = """
async () => {
  const { clock, number } = await import("/dashboard/dom.js");
  const numbers = [0, 999, 1000, 1234567.26, 0.06, 12.25, -4096, null, undefined];
  return [...numbers.map(number), clock(new Date(2026, 0, 2, 13, 5, 9) / 1000), clock(null)];
}
"""


def test_the_lines_to_connect_run_where_openenvd_is_installed(
    dashboard: Dashboard, launched: str
) -> None:
    page = dashboard.show(f"/environment/{launched}")
    shown = page.get_by_label("Address").locator("pre")
    shown.nth(1).filter(has_text="from openenv import GenericEnvClient").wait_for()
    words = [sys.executable, "-c", shown.first.inner_text()]
    ran = subprocess.run(words, env=dashboard.machine.environ, capture_output=True, text=True)
    assert "StepResult(" in ran.stdout, ran.stderr


def test_an_app_without_sessions_has_no_lines_to_connect(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    (tmp_path / "openenv.yaml").write_text("name: own\napp: app:app\n")
    (tmp_path / "app.py").write_text(
        "from fastapi import FastAPI\napp = FastAPI()\n"
        "@app.post('/reset')\ndef reset(): return {}\n"
    )
    dashboard.machine.ok("launch", str(tmp_path), "--name", "own")
    shown = dashboard.show("/environment/own").get_by_label("Address")
    shown.get_by_text("This app has no sessions").wait_for()
    assert not shown.locator("pre").first.is_visible()
    dashboard.machine.ok("down", "own")


def test_an_environment_is_scaled(dashboard: Dashboard, launched: str) -> None:
    page = dashboard.show("/")
    row = row_of(page, "environments", launched)
    row.get_by_role("button", name=f"Scale {launched}").click()
    page.get_by_role("spinbutton", name="Replicas").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Scale").click()
    row.get_by_text("2/2").wait_for()
    assert len(dashboard.machine.environment(launched)["replicas"]) == 2


def test_environments_are_sorted_by_a_column_and_a_page_has_source_and_options(
    dashboard: Dashboard, launched: str
) -> None:
    dashboard.machine.ok("launch", "echo", "--name", "zebra", "--replicas", "2")
    page = dashboard.show("/")
    row_of(page, "environments", "zebra").get_by_text("2/2").wait_for()
    first = body_of(page, "environments").locator("tbody tr").first
    assert "zebra" not in first.inner_text()
    page.get_by_role("columnheader", name="Replicas").get_by_role("button").click()
    first.get_by_text("zebra").wait_for()
    page.locator("th[aria-sort=descending]").get_by_text("Replicas").wait_for()
    first.get_by_role("link", name="zebra").click()
    body_of(page, "page-environment").locator("dd").get_by_text("echo", exact=True).wait_for()
    page.get_by_text("Options of the newest generation").click()
    page.get_by_text('"replicas": 2').wait_for()
    dashboard.machine.ok("down", "zebra")


def test_a_launch_that_dies_of_memory_cannot_be_missed(dashboard: Dashboard) -> None:
    """The form launches with too little memory; the button launches again with more."""
    page = dashboard.show("/launch")
    page.get_by_label("Source").fill("hungry_env:Hungry")
    page.get_by_label("Name", exact=True).fill("hungry")
    page.get_by_label("Memory", exact=True).fill("100M")
    page.get_by_text("More options").click()
    page.get_by_label("Folder").fill(str(HERE))
    page.get_by_role("button", name="Launch", exact=True).click()
    page.locator("section#page-request").wait_for()
    dashboard.show("/")
    death = body_of(page, "faults").locator("article").first
    death.wait_for()
    assert "Out of memory" in death.inner_text()
    assert "100 MB" in death.inner_text()
    assert body_of(page, "faults").bounding_box()["y"] < 400, "it is not at the top"
    death.get_by_role("button", name=re.compile("Run again with")).click()
    page.locator("section#page-request").wait_for()
    dashboard.machine.ok("down", "hungry")


def test_a_death_after_which_a_launch_runs_again_cannot_be_missed(dashboard: Dashboard) -> None:
    machine = dashboard.machine
    told = ("--memory", "100M", "--retry-oom", "--async")
    request_id = machine.ok("launch", "hungry_env:Hungry", "--name", "fed", *told, cwd=HERE).out
    page = dashboard.show("/")
    deaths = body_of(page, "faults").locator("article")
    death = deaths.filter(has_text=re.compile("It runs again by itself, with [24]00 MB")).first
    death.wait_for()
    assert "launch fed" in death.inner_text()
    death.get_by_role("link", name="Timeline and log").click()
    deaths.get_by_text("it runs again with").first.wait_for()
    deaths.get_by_text("Peak").first.wait_for()
    retried = machine.request(request_id.strip())["retried"]
    assert retried["error"]["kind"] == "oom_killed"
    machine.run("cancel", request_id.strip())


def test_the_page_of_a_request_has_the_button_after_its_death_was_seen(
    dashboard: Dashboard, killed: str
) -> None:
    page = dashboard.show(f"/request/{killed}")
    death = body_of(page, "faults").locator("article").filter(has_text="launch killed")
    death.get_by_text("Evidence").wait_for()
    death.get_by_role("button", name="Seen").click()
    death.wait_for(state="detached")
    problem = body_of(page, "page-request").get_by_role("alert")
    problem.get_by_role("button", name="Run again with 200 MB").wait_for()


def test_a_page_of_an_environment_that_is_not_there_says_so_alone(dashboard: Dashboard) -> None:
    page = body_of(dashboard.show("/environment/nonesuch"), "page-environment")
    page.get_by_text("There is no environment nonesuch").wait_for()
    assert not page.get_by_role("table").count()
    assert not page.get_by_role("button").count()


def test_who_is_signed_out_sees_how_to_sign_in_and_no_empty_figures(open_dashboard: Open) -> None:
    dashboard = open_dashboard(storage_state=None, viewport=NARROW)
    page = dashboard.page
    page.goto(dashboard.address)
    page.get_by_role("region", name="Sign in").get_by_text("openenv dashboard").wait_for()
    assert not page.locator("#figures").is_visible()
    assert not dashboard.overflow()
    assert not dashboard.serious_findings()


def test_the_death_of_a_process_below_a_server_has_its_command_as_a_button(
    dashboard: Dashboard,
) -> None:
    machine, name, limit = dashboard.machine, "growing", "--session-memory"
    words = ("launch", "growing_env:Growing", "--name", name, "--isolate", limit, "200M")
    machine.ok(*words, cwd=HERE)
    page = dashboard.show("/")
    session = Session(machine.environment(name)["address"])
    with session, pytest.raises(SessionError):
        step_for_ever(session)
    death = body_of(page, "faults").locator("article").filter(has_text=name)
    death.get_by_role("link", name="Environment and log").click()
    death.get_by_text(f"{limit} 400M").wait_for()
    shown = body_of(page, "page-environment").get_by_role("table", name=f"Replicas of {name}")
    shown.get_by_text(f"{limit} 400M").wait_for()
    death.get_by_role("button", name="Run again with 400 MB a session", exact=True).click()
    page.locator("section#page-request").wait_for()
    body_of(page, "page-request").get_by_text("succeeded").first.wait_for()
    again = machine.request(page.url.rpartition("/")[2])["payload"]
    assert again["session_memory_mb"] == 400
    machine.ok("down", name)


def test_200_000_lines_at_once_are_bounded_drawn_in_part_searched_paused_and_downloaded(
    dashboard: Dashboard,
) -> None:
    machine = dashboard.machine
    machine.ok("launch", "flood_env:Flood", "--name", "flood", cwd=HERE)
    page = dashboard.show("/environment/flood")
    log, rows = page.get_by_role("log"), page.locator(".log .row")
    with Session(machine.environment("flood")["address"]) as session:
        session.reset()
        red = log.get_by_text("red and bold", exact=True)
        red.wait_for()
        assert red.get_attribute("class") == "bold"
        assert rows.last.inner_text() == "red and bold, green, plain"
        assert log.get_by_text("30 %", exact=True).count()
        assert rows.count() < MAX_ROWS
        parts = log.get_by_text(re.compile("^x+$"))
        assert parts.count() > 1, "a long line is not wrapped"
        page.get_by_label("Wrap").uncheck()
        parts.nth(1).wait_for(state="detached")
        assert parts.count() == 1
        page.get_by_text("50,000 lines; 150,003 earlier ones").wait_for()
        page.get_by_label("Search the log").fill("LINE 1999")
        page.get_by_text("100", exact=True).wait_for()
        page.keyboard.press("Shift+Enter")
        log.locator(".current mark").get_by_text("line 1999").wait_for()
        page.get_by_role("button", name="Pause").click()
        seen = rows.first.inner_text()
        session.reset()
        page.get_by_role("button", name="Resume (more has arrived)").click()
        page.get_by_role("button", name="Pause").wait_for()
        assert seen.startswith("line 1999")
        with page.expect_download() as downloading:
            page.get_by_role("button", name="Download").click()
        assert downloading.value.path().read_text().count("line 199999 of 200000") == 2
    machine.ok("down", "flood")


MAX_ROWS = 100  # of a window: the visible ones and some beyond


def step_for_ever(session: Session) -> None:
    session.reset()
    while True:
        session.step({"message": "more"})


def test_a_running_request_is_cancelled(dashboard: Dashboard, tmp_path: Path) -> None:
    launch_stuck(dashboard.machine, tmp_path, "stuck")
    page = dashboard.show("/")
    row = row_of(page, "queue", "launch stuck")
    row.get_by_role("button", name=re.compile("Cancel")).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
    row_of(page, "ended", "launch stuck").get_by_text("cancelled").wait_for()


def test_all_requests_are_listed_by_state_and_filtered(
    dashboard: Dashboard, killed: str, launched: str
) -> None:
    dashboard.machine.run("launch", "json:nonesuch", "--name", "no-such")
    page = dashboard.show("/")
    page.get_by_role("link", name="All requests").click()
    rows = body_of(page, "page-requests").locator("tbody tr")
    rows.filter(has_text=f"launch {launched}").first.wait_for()
    page.get_by_label("State").select_option("failed")
    rows.filter(has_text=f"launch {launched}").first.wait_for(state="detached")
    rows.filter(has_text="no-such").first.wait_for()
    page.get_by_label("Filter requests").fill(killed)
    rows.filter(has_text="no-such").first.wait_for(state="detached")
    rows.get_by_text("launch killed").wait_for()
    assert rows.count() == 1


def test_an_answer_that_comes_late_is_not_shown_for_the_newest(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    request_id = launch_stuck(dashboard.machine, tmp_path, "late")
    held: list[Any] = []

    def hold_the_first(route: Any) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)
            held.append(route.fetch())

    dashboard.page.route(re.compile(f"/v1/requests/{request_id}$"), hold_the_first)
    page = dashboard.show(f"/request/{request_id}")
    shown = body_of(page, "page-request")
    shown.get_by_text("running").first.wait_for()
    dashboard.machine.ok("cancel", request_id)
    shown.get_by_text("cancelled").first.wait_for()
    first, running = held
    with page.expect_response(first.request.url):
        first.fulfill(response=running)
    page.wait_for_timeout(300)  # by then the log was read, and would be shown
    assert shown.get_by_text("cancelled").count()


def test_an_episode_is_replayed_with_its_images(dashboard: Dashboard, rollout: str) -> None:
    page = dashboard.show("/rollouts")
    page.get_by_role("link", name="maze").first.click()
    page.get_by_text("1 to 24 of 24").wait_for()
    page.get_by_label(REWARDS).wait_for()
    assert page.locator("svg.chart").count() == 5
    page.get_by_role("button", name="000003").click()
    image = page.get_by_role("img", name="screen at step 0")
    image.wait_for()
    assert image.evaluate("each => [each.naturalWidth, each.naturalHeight]") == [72, 72]
    observed = page.get_by_role("region", name="Observation")
    assert '"screen": "image/png, 72 x 72' in observed.inner_text()
    first = observed.inner_text()
    page.get_by_role("button", name="Next").click()
    page.get_by_role("img", name="screen at step 1").wait_for()
    assert '"direction"' in page.get_by_role("region", name="Action").inner_text()
    page.get_by_label("Steps a second", exact=True).select_option("25")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("img", name="screen at end").wait_for()
    page.get_by_role("button", name="Play").wait_for()
    assert observed.inner_text() != first


def test_a_live_rollout_is_followed(dashboard: Dashboard, rollout: str, tmp_path: Path) -> None:
    """Its figures change without a reload; after a cancel, finished episodes stay."""
    told = ("--episodes", "100000", "--max-steps", "30", "--async")
    dashboard.machine.ok("rollout", "maze", "--out", str(tmp_path / "live"), *told)
    page = dashboard.show("/rollouts")
    row_of(page, "page-rollouts", str(tmp_path)).get_by_role("link").click()
    page.locator("dl.tiles").wait_for()
    page.wait_for_function("() => look.moves()")
    page.get_by_label("Reward of the episodes: ").and_(page.locator("svg")).wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
    page.get_by_text("cancelled", exact=True).wait_for()


PLACES = (
    *("/", "/launch", "/requests", "/rollouts", "/rollouts/{rollout}/000003"),
    *("/environment/maze", "/request/{rollout}", "/request/{killed}"),
)


def settled(dashboard: Dashboard, place: str, rollout: str, killed: str) -> Any:
    """Open a view and wait until it has loaded, including the death for memory on each view."""
    page = dashboard.show(place.format(rollout=rollout, killed=killed))
    body_of(page, "faults").locator("article").first.wait_for()
    if place.endswith("000003"):
        page.get_by_role("img", name="screen at step 0").wait_for()
    elif place.startswith("/environment"):
        page.get_by_role("link", name=re.compile("^[0-9a-f]{8}$")).wait_for()
    elif place == "/request/{killed}":
        body_of(page, "page-request").get_by_text("failed").first.wait_for()
    elif place == "/requests":
        body_of(page, "page-requests").locator("tbody tr").first.wait_for()
    elif place.startswith("/request"):
        page.get_by_text("succeeded").first.wait_for()
    return page


OF_AUTHORS = re.compile(r"zygote|\bLONG\b|\bSHORT\b|\bGen\.|p99")  # words


@pytest.mark.parametrize("place", PLACES)
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_a_telephone(
    dashboard: Dashboard, rollout: str, killed: str, place: str
) -> None:
    page = settled(dashboard, place, rollout, killed)
    assert not OF_AUTHORS.findall(page.locator("main").inner_text())
    for color_scheme in ("light", "dark"):
        page.emulate_media(color_scheme=color_scheme)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = max(map(int, re.findall(r"\d+", background)[:3])) < 100
        assert is_dark == (color_scheme == "dark")
        assert not dashboard.serious_findings()
    page.set_viewport_size(NARROW)
    assert not dashboard.overflow()
    assert not dashboard.serious_findings()


def test_no_button_of_a_table_is_cut_off_on_a_telephone(
    open_dashboard: Open, dashboard_machine: Machine, launched: str
) -> None:
    dashboard_machine.ok("launch", "echo", "--name", launched, "--max-sessions", "3")
    dashboard_machine.run("launch", "json:Env", "--name", "never_of_a_long_name")
    page = open_dashboard(viewport=NARROW).show("/")
    row_of(page, "ended", "never_of").get_by_role("button").wait_for()
    cut_off = page.evaluate("look.cutOff()")
    page.evaluate("name => { location.hash = `/environment/${name}`; }", launched)
    page.get_by_role("button", name="Take down").wait_for()
    page.wait_for_function("() => look.hasAges()")
    assert (cut_off, page.evaluate("look.cutOff()")) == ([], [])


def test_a_keyboard_is_enough(dashboard: Dashboard) -> None:
    """Keys alone launch an environment from the top of the page, and take it down."""
    page = dashboard.show("/")

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("look.focused()").startswith(name):
                assert page.evaluate("look.isOutlined()"), (
                    f"{name} does not show that it has the focus"
                )
                return
        raise AssertionError(f"Tab does not get to {name}")

    tab_to("Launch")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.name === 'source'")
    page.keyboard.type("echo")
    page.keyboard.press("Tab")
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    page.get_by_role("log").get_by_text("typed is ready at").wait_for()
    dashboard.show("/")
    row_of(page, "environments", "typed").get_by_text("ready").wait_for()
    tab_to("Down typed")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("look.focused()").startswith("Down typed"), (
        "the focus is lost with the dialog"
    )
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("look.focused()").startswith("Take down")
    page.keyboard.press("Enter")
    row_of(page, "environments", "typed").wait_for(state="detached")


def test_every_fault_has_its_cause_evidence_and_button_on_its_page_and_is_a_bar_elsewhere(
    dashboard: Dashboard, open_dashboard: Open, tmp_path: Path
) -> None:
    """Three launches with one cause are one row; a fault seen in one window is hidden in others."""
    machine = dashboard.machine
    for number in "123":
        machine.run("launch", "json:absent", "--name", f"no-such-{number}", cwd=tmp_path)
    machine.ok("launch", "echo", "--name", "shot")
    os.kill(machine.replica("shot")["pid"], signal.SIGKILL)
    page = dashboard.show("/")
    faults = body_of(page, "faults").locator("article")
    one = faults.filter(has_text="no-such-3")
    one.get_by_text(TIMES_3).wait_for()
    assert row_of(page, "ended", "no-such-3").inner_text().count(TIMES_3) == 1
    one.get_by_role("link", name="Timeline and log").click()
    one.get_by_text("openenv retry").wait_for()
    assert one.get_by_role("button", name="Run again").is_visible()
    dashboard.show("/environment/shot")
    restarted = faults.filter(has_text="its server was killed by SIGKILL")
    restarted.get_by_text("Certainty").wait_for()
    assert restarted.get_by_role("button", name="Seen").is_visible()  # it is back by itself
    page.get_by_role("button", name="All seen").click()
    faults.first.wait_for(state="detached")
    other = open_dashboard().show("/")
    row_of(other, "environments", "shot").wait_for()
    other.wait_for_function("() => document.querySelector('#ended tbody tr')")
    assert not faults.count()
    assert not body_of(other, "faults").locator("article").count()
    machine.ok("down", "shot")


def test_what_is_empty_launches_something_and_keys_lead_everywhere(
    open_dashboard: Open, dashboard_machine: Machine
) -> None:
    for environment in dashboard_machine.status()["environments"]:
        dashboard_machine.ok("down", environment["name"])
    dashboard = open_dashboard(permissions=["clipboard-read", "clipboard-write"])
    page = dashboard.show("/")
    body_of(page, "environments").get_by_text(re.compile(r"^openenvd \d")).wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("g e").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Launch echo").click()
    page.get_by_role("log").get_by_text("echo is ready at").wait_for()
    page.keyboard.press("/")
    assert page.evaluate("look.focused()") == "Search the log"
    page.get_by_role("heading", name="Log").click()
    page.keyboard.type("ge")
    row_of(page, "environments", "echo").wait_for()
    commands = page.evaluate(COMMANDS)
    assert commands == [
        "openenv logs NAME",
        "openenv retry ab --memory 200M",
        "pip install x",
        None,
    ]
    dashboard_machine.ok("down", "echo")


TIMES_3 = "\N{MULTIPLICATION SIGN} 3"
COMMANDS = """
async () => {
  const { commandIn } = await import("/dashboard/actions.js");
  return ["openenv logs NAME shows what it printed; the traceback is there",
    "openenv retry ab --memory 200M   or fewer at once: openenv up --max-long-workers 1",
    "pip install x", "fix the error above"].map(commandIn);
}
"""


def test_the_form_offers_sources_and_reads_paths_as_the_shell_that_asked_for_the_link(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    machine = dashboard.machine
    shutil.copy(HERE / "maze_env.py", tmp_path / "own_env.py")
    machine.ok("dashboard", "--no-open", cwd=tmp_path)
    page = dashboard.show("/launch")
    page.get_by_role("button", name="brigade").click()
    source = page.get_by_label("Source")
    assert source.input_value() == "brigade"
    source.fill("'own_env:Maze'")
    page.get_by_label("Name", exact=True).fill("own")
    page.get_by_role("button", name="Launch", exact=True).click()
    page.get_by_role("log").get_by_text("own is ready at").wait_for()
    dashboard.show("/launch")
    page.get_by_role("button", name="own_env:Maze").click()
    page.get_by_text("More options").click()
    assert page.get_by_label("Folder").input_value() == str(tmp_path)
    machine.ok("down", "own")


def test_a_page_outlives_its_daemon(dashboard: Dashboard, launched: str) -> None:
    page, machine = dashboard.show("/"), dashboard.machine
    row_of(page, "environments", launched).wait_for()
    machine.kill_daemon()
    page.locator("[data-connection=lost]").wait_for()
    assert row_of(page, "environments", launched).is_visible(), "what was known is gone"
    command = page.get_by_role("alert").locator("code").inner_text()
    assert command == f"OPENENV_HOME={machine.home} openenv up"
    machine.ok("up")
    page.locator("[data-connection=connected]").wait_for()
    page.wait_for_function(
        "pid => document.getElementById('connection').title.includes(`pid ${pid}`)",
        arg=machine.daemon_pid,
    )
    row_of(page, "environments", launched).get_by_text("ready").wait_for()
    lost = [error for error in dashboard.errors if "net::ERR_" not in error]
    assert not lost, lost  # the browser logs each unanswered call
    dashboard.errors.clear()


@pytest.fixture(scope="session")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from: a copy of this package, with one more rule in a style sheet."""
    folder = tmp_path_factory.mktemp("other")
    copy_package(folder)
    with (folder / "openenvd/server/dashboard/static/style.css").open("a") as style:
        style.write(".another { color: red; }\n")
    return folder


@pytest.fixture
def replace_daemon(dashboard: Dashboard, other_files: Path) -> Iterator[Callable[[], None]]:
    """Replace the daemon by one with other files, until the test's end."""
    machine = dashboard.machine

    def replace() -> None:
        machine.kill_daemon()
        machine.environ["PYTHONPATH"] = str(other_files)
        machine.ok("up")

    yield replace
    dashboard.page.close()
    machine.environ.pop("PYTHONPATH", None)
    machine.kill_daemon()
    machine.ok("up")
    dashboard.errors.clear()  # the browser logs each unanswered call


def test_a_page_loads_itself_again_once_when_its_daemon_has_other_files(
    dashboard: Dashboard, replace_daemon: Callable[[], None]
) -> None:
    """An empty form does not prevent that."""
    page = dashboard.show("/launch")
    page.get_by_label("Source").wait_for()
    loads: list[Any] = []
    page.on("load", lambda loaded: loads.append(loaded))
    replace_daemon()
    page.wait_for_function("() => look.hasOtherFiles()")
    page.locator("[data-connection=connected]").wait_for()
    page.wait_for_timeout(SOME_CHANGES)
    assert len(loads) == 1


def test_a_form_that_was_typed_into_is_not_lost_to_other_files(
    dashboard: Dashboard, replace_daemon: Callable[[], None]
) -> None:
    page = dashboard.show("/launch")
    source = page.get_by_label("Source")
    source.fill("half a na")
    page.get_by_text("More options").click()
    sandbox, choice = page.get_by_role("checkbox", name="Sandbox"), page.locator("select")
    replace_daemon()
    note = page.get_by_role("alert").filter(has_text="The daemon was updated")
    note.wait_for()
    page.wait_for_timeout(SAID)
    assert (note.is_visible(), source.input_value()) == (True, "half a na")
    sandbox.check()
    source.fill("")
    page.wait_for_timeout(SOME_CHANGES)
    assert (note.is_visible(), sandbox.is_checked()) == (True, True)
    choice.first.select_option(index=1)
    sandbox.uncheck()
    page.wait_for_timeout(SOME_CHANGES)
    assert note.is_visible()
    with page.expect_event("load"):
        choice.first.select_option(index=0)
    assert page.evaluate("look.hasOtherFiles()")


def test_a_question_is_not_lost_to_other_files(
    dashboard: Dashboard, launched: str, replace_daemon: Callable[[], None]
) -> None:
    page = dashboard.show("/")
    row = row_of(page, "environments", launched)
    row.get_by_role("button", name=f"Scale {launched}").click()
    replicas = page.get_by_role("spinbutton", name="Replicas")
    replicas.fill("3")
    replace_daemon()
    page.get_by_text("The daemon was updated").wait_for()
    page.wait_for_timeout(SOME_CHANGES)
    assert replicas.input_value() == "3"
    with page.expect_event("load"):
        page.get_by_role("button", name="Cancel").click()


SOME_CHANGES = 3000  # milliseconds; the stream sends the daemon's state more than once in them
SAID = 7000  # milliseconds; by then no other announcement is shown
HIDDEN_MILLISECONDS = 75_000  # a hidden window asks every 30 seconds


def test_a_hidden_window_has_no_connection_and_its_title_tells_of_a_death(
    dashboard: Dashboard, tmp_path: Path
) -> None:
    """It shows the present state when it is visible again. Playwright cannot hide a page."""
    machine = dashboard.machine
    request_id = launch_stuck(machine, tmp_path, "held")
    page = dashboard.show(f"/request/{request_id}")
    page.get_by_role("log").get_by_text("starting").first.wait_for()
    page.evaluate("look.hide(true)")
    is_looking = "() => look.streams().at(-1).includes('is_look=true')"
    page.wait_for_function(is_looking, timeout=HIDDEN_MILLISECONDS)
    quiet = page.title()
    machine.run("launch", "hungry_env:Hungry", "--name", "hidden", "--memory", "100M", cwd=HERE)
    sentence = "quiet => document.title.includes('out of memory') && document.title !== quiet"
    page.wait_for_function(sentence, arg=quiet, timeout=HIDDEN_MILLISECONDS)
    machine.ok("cancel", request_id)
    shown = body_of(page, "page-request")
    assert not shown.get_by_text("cancelled").count()
    page.evaluate("look.hide(false)")
    shown.get_by_text("cancelled").first.wait_for(
        timeout=10_000
    )  # before the hidden window asks again


@pytest.mark.timeout(400)  # each window is a process of the browser's
def test_eight_windows_are_seen_at_once(
    open_dashboard: Open, dashboard_machine: Machine, tmp_path: Path
) -> None:
    """Each follows the log of one request to its end; the last one polls instead of streaming."""
    machine, first = dashboard_machine, open_dashboard()
    request_id = launch_stuck(machine, tmp_path, "seen")
    context = first.page.context
    windows = [first, *(Dashboard(machine, context.new_page(), first.address) for _ in "1234567")]
    for window in windows:
        page = window.show(f"/request/{request_id}")
        assert not page.evaluate("document.hidden")
        page.get_by_role("log").get_by_text("starting").first.wait_for()
    machine.ok("cancel", request_id)
    for window in windows:
        body_of(window.page, "page-request").get_by_text("cancelled").first.wait_for()
        assert window.page.locator("[data-connection=connected]").count()
    calls = windows[-1].page.evaluate("look.streams()")
    assert len(calls) > 1
    assert all("is_look=true" in each for each in calls[1:]), calls
    assert not [error for window in windows for error in window.errors]


@pytest.fixture
def live(dashboard_machine: Machine, launched: str, rollout: str) -> Iterator[str]:
    """The id of a running rollout; there are also environments and a death for memory."""
    machine = dashboard_machine
    machine.run("launch", "hungry_env:Hungry", "--name", "hungry", "--memory", "100M", cwd=HERE)
    told = ("--episodes", "100000", "--max-steps", "30", "--async", "--json")
    with tempfile.TemporaryDirectory(prefix="walks-") as folder:
        request_id = machine.ok("rollout", "maze", "--out", folder, *told).json["request_id"]
        machine.ok("scale", launched, "3")
        yield request_id
        machine.ok("cancel", request_id)
        eventually(lambda: machine.request(request_id)["state"] == "CANCELLED")


OF_OTHER_TESTS = re.compile(r"^(?!maze_env)\w+_env:")  # recently launched sources
FEWER_DEATHS = "count => document.querySelectorAll('#faults article').length < count"


@pytest.mark.timeout(400)  # each window is a process of the browser's
def test_the_pictures_of_the_documentation_show_what_the_pages_do(
    open_dashboard: Open, live: str, rollout: str, launched: str, renewed: Path | None
) -> None:
    """The pictures show what runs in these tests."""
    taken: dict[str, Picture] = {}
    for color_scheme in ("light", "dark"):
        dashboard = open_dashboard(color_scheme=color_scheme, viewport=PICTURE)
        page = dashboard.show("/")
        row = row_of(page, "environments", launched)
        row.get_by_text("3/3").wait_for()
        row.get_by_text(re.compile(r"\d MB$")).wait_for()  # measured since it was launched
        row_of(page, "environments", "maze").get_by_text(re.compile(r"^\d+\.\d$")).wait_for()
        deaths = body_of(page, "faults").locator("article")
        deaths.first.wait_for()
        more = body_of(page, "faults").get_by_role("button", name=re.compile(r"^Show \d+ more"))
        if more.is_visible():  # otherwise the next one takes the place of one that is seen
            more.click()
        while (count := deaths.count()) > 1:
            deaths.last.get_by_role("button", name="Seen").click()
            page.wait_for_function(FEWER_DEATHS, arg=count)  # else the next click hits another one
        taken[color_scheme] = take(page)
    deaths.get_by_role("button", name="Seen").click()
    page = dashboard.show(f"/rollouts/{rollout}/000003")
    page.get_by_role("img", name="screen at step 0").wait_for()
    page.get_by_text("1 to 24 of 24").wait_for()
    page.get_by_label(REWARDS).wait_for()
    taken["rollout"] = take(page, full_page=True)
    page = open_dashboard(color_scheme="light", viewport=PICTURE).show("/launch")
    page.get_by_label("Source").wait_for()
    page.get_by_role("button", name=OF_OTHER_TESTS).evaluate_all("all => all.map(e => e.remove())")
    taken["launch"] = take(page, "section#page-launch")
    if renewed:
        for name, picture in taken.items():
            picture.save(renewed / f"dashboard-{name}.png")
    stale = {
        name: found
        for name, picture in taken.items()
        if (found := differences(load(KEPT / f"dashboard-{name}.png"), picture))
    }
    assert not stale, f"{HOW_RENEWED}\n{json.dumps(stale, indent=2)}"
