# SPDX-License-Identifier: Apache-2.0
"""The faults that only a running environment has, in a real browser; others: test_dashboard.py.

Each fault is whole on the page that it is about, with cause, command and button, and a bar
elsewhere. The memory of the last hour is here, too.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from openenvd.client.errors import SessionError
from openenvd.client.session import Session
from openenvd.system.memory.limits import available_memory_bytes
from openenvd.system.text.units import MB

from ..conftest import Machine, eventually, new_machine
from .conftest import Dashboard

HERE = Path(__file__).parent
NEVER_READY = "import time\ntime.sleep(3600)\n"
LATER_MILLISECONDS = 100_000  # a client that waits is a fault after a minute
NAME = "faulty"


def session_of(machine: Machine, **options: Any) -> Session:
    return Session(machine.environment(NAME)["address"], **options)


def fails(machine: Machine, folder: Path, _until: ExitStack) -> None:
    (folder / "licence").unlink()
    with pytest.raises(SessionError), session_of(machine) as session:
        session.reset()


def waits(machine: Machine, _folder: Path, until: ExitStack) -> None:
    first, second = session_of(machine), session_of(machine, answer_timeout=150)
    first.__enter__().reset()

    def wait() -> None:
        with second:
            second.reset()

    waiting = threading.Thread(target=wait)
    waiting.start()
    until.callback(waiting.join, 60)
    until.callback(first.close)  # before that


def abandons(machine: Machine, _folder: Path, until: ExitStack) -> None:
    for _ in range(4):  # some beside the hanging one: else its process would be replaced
        until.enter_context(session_of(machine))
    with session_of(machine, answer_timeout=1.0) as session:
        session.reset()
        with pytest.raises(SessionError, match="not answered"):
            session.step({"message": "hang"})


def kills_envoy(machine: Machine, _folder: Path, _until: ExitStack) -> None:
    pid = machine.ok("gateway", "status", "--json").json["gateway"]["pid"]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("happens", "kind", "cause", "button"),
    [
        (fails, "failing", "No session can begin: OSError: there is no licence", "Restart"),
        (waits, "waiting", "1 client waiting for a session: 1 of 1 session open", "Scale"),
        (abandons, "abandoned", "1 step still running after the end of the session", "Restart"),
        (kills_envoy, "gateway", "was killed by SIGKILL; its sessions ended", "Copy command"),
    ],
)
def test_a_fault_is_whole_on_its_page_and_a_bar_elsewhere_and_is_seen_for_good(
    dashboard: Dashboard,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    happens: Callable[[Machine, Path, ExitStack], None],
    kind: str,
    cause: str,
    button: str,
) -> None:
    machine = dashboard.machine
    shutil.copy(HERE / "faulty_env.py", tmp_path)
    (tmp_path / "licence").touch()
    more = ["--gateway"] if kind == "gateway" else ["--set", "admission-timeout=150"]
    room = "8" if kind == "abandoned" else "1"
    words = ["launch", "faulty_env:Faulty", "--name", NAME, "--max-sessions", room, *more]
    machine.ok(*words, cwd=tmp_path)
    request.addfinalizer(lambda: machine.ok("down", NAME))
    page = dashboard.show("/")
    fault = page.locator(f"#faults article[data-kind={kind}]").filter(has_text=cause)
    with ExitStack() as until:
        happens(machine, tmp_path, until)
        page.locator("#faults").get_by_text(cause).first.wait_for(timeout=LATER_MILLISECONDS)
        if kind != "gateway":
            assert "bar" in fault.get_attribute("class").split()
            fault.get_by_role("link", name="Environment and log").click()
        fault.locator("code").get_by_text("openenv ").wait_for()
        assert "bar" not in fault.get_attribute("class").split()
        assert fault.get_by_role("button", name=button).is_visible()
        dashboard.show("/launch")
        if not fault.is_visible():  # one bar is enough there: an earlier test left a newer fault
            page.get_by_role("button", name=re.compile("^Show ")).click()
        assert "bar" in fault.get_attribute("class").split()
        fault.get_by_role("button", name="Seen").click()
        fault.wait_for(state="detached")
        machine.kill_daemon()
        machine.ok("up")
        page.locator("[data-connection=connected]").wait_for()
        dashboard.show(f"/environment/{NAME}")
        page.get_by_role("button", name="Take down").wait_for()
        page.wait_for_function("() => document.querySelector('#page-environment dd .state')")
        assert not fault.count()
    dashboard.errors.clear()  # the browser logs each unanswered call


def test_a_request_that_waits_too_long_is_a_fault_that_its_button_cancels(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "stuck_env.py").write_text(NEVER_READY)
    with new_machine(tmp_path / "home") as machine:
        machine.environ["OPENENV_MAX_LONG_WORKERS"] = "1"
        ids = [
            machine.ok("launch", "stuck_env:Stuck", "--name", n, "--async", cwd=tmp_path).out
            for n in ("first", "second")
        ]
        with closing(sqlite3.connect(machine.home / "requests.db")) as store, store:
            older = "UPDATE requests SET created_at = created_at - 120 WHERE id = ?"
            store.execute(older, [ids[1].strip()])
        page = browser.new_page()
        page.goto(machine.ok("dashboard", "--no-open").out.split()[0])
        fault = page.locator("#faults article[data-kind=waiting]").filter(has_text="launch second")
        fault.get_by_text("waiting for a free worker").wait_for()
        fault.get_by_role("button", name="Cancel it").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
        fault.wait_for(state="detached")
        page.close()


def test_the_memory_of_the_last_hour_survives_a_restart_of_the_daemon(
    browser: Any, tmp_path: Path
) -> None:
    with new_machine(tmp_path / "home") as machine:
        machine.ok("up")
        kept = machine.home / "memory.json"
        eventually(kept.exists)
        machine.kill_daemon()
        samples = json.loads(kept.read_text())["samples"]
        samples[0][0] -= 1800  # seconds
        kept.write_text(json.dumps({"samples": samples}))
        machine.ok("up")
        page = browser.new_page()
        page.goto(machine.ok("dashboard", "--no-open").out.split()[0])
        page.locator("#memory summary").click()
        page.locator("#memory .chart").get_by_text(re.compile("^3[0-9] min")).wait_for()
        page.close()


def test_memory_is_large_only_where_it_is_short(
    dashboard: Dashboard, browser: Any, tmp_path: Path
) -> None:
    memory = dashboard.show("/").locator("#memory details")
    memory.get_by_text("free").first.wait_for()
    assert memory.get_attribute("open") is None
    with new_machine(tmp_path / "home") as machine:
        reserve = available_memory_bytes() // MB - 1000
        machine.environ["OPENENV_RESERVE_MB"] = str(reserve)
        page = browser.new_page()
        page.goto(machine.ok("dashboard", "--no-open").out.split()[0])
        page.locator("#memory details[open]").get_by_text("memory is short").wait_for()
        page.locator("#memory .chart").wait_for()
        page.close()
