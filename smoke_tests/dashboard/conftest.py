# SPDX-License-Identifier: Apache-2.0
"""A daemon with a home of its own, and its dashboard in a real, headless Chromium.

    machine ──`openenv dashboard`──▶ a link, once ──▶ signed_in: the browser's profile, kept
                                                        └──▶ dashboard: a new page for each test

All tests share the daemon and the profile, and so run in one process. A test fails if a page raises
an exception or logs an error, such as a violation of the content security policy.

A test compares the pictures of README and docs with the pages. With `OPENENVD_SCREENSHOTS` they are
written into that folder first. Renew them with a fresh daemon, without the other tests:

    OPENENVD_SCREENSHOTS=docs/images pytest -n 0 smoke_tests/dashboard -k pictures
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ..chromium import chromium
from ..conftest import Machine, free_port, new_machine

LOOK = Path(__file__).with_name("look.js")
WAIT_MILLISECONDS = 30_000
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 400, "height": 800}
SERIOUS = {"serious", "critical"}
# Chromium aborts what it loads when a network interface changes, as the tests of engines do.
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
MAX_RELOADS = 5


@dataclass
class Dashboard:
    """A page of the dashboard, signed in."""

    machine: Machine
    page: Any
    address: str
    errors: list[str] = field(default_factory=list)  # of the page's console; a test may clear them

    def __post_init__(self) -> None:
        self._has_lost_files = False
        self.page.set_default_timeout(WAIT_MILLISECONDS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, message: Any) -> None:
        if message.type == "error" and NETWORK_CHANGED in message.text:
            self._has_lost_files = True
        elif message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def show(self, place: str = "/") -> Any:
        """Open a view of the dashboard, such as `/launch`; returns the page."""
        self._has_lost_files = False
        self.page.goto(f"{self.address}/#{place}")
        for _ in range(MAX_RELOADS):
            if not self._has_lost_files:
                break
            self._has_lost_files = False
            self.page.reload()
        self.page.locator("[data-connection=connected]").wait_for()
        return self.page

    def serious_findings(self) -> list[str]:
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
        found = axe.Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}"
            for each in found
            if each["impact"] in SERIOUS
        ]

    def overflow(self) -> list[str]:
        """List elements that are wider than the page, which makes it scroll sideways."""
        return list(self.page.evaluate("look.tooWide()"))


@pytest.fixture(scope="session")
def dashboard_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine whose daemon keeps its port during all tests."""
    with new_machine(tmp_path_factory.mktemp("dashboard") / "home") as machine:
        machine.environ["OPENENV_PORT"] = str(free_port())
        machine.ok("up")
        yield machine


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def profile(browser: Any, dashboard_machine: Machine) -> tuple[str, Any]:
    """The daemon's address, and the browser's state after signing in with the one-time link."""
    link = dashboard_machine.ok("dashboard", "--no-open").out.split()[0]
    parts = urlsplit(link)
    address = f"{parts.scheme}://{parts.netloc}"
    context = browser.new_context()
    page = context.new_page()
    page.goto(link)
    page.locator("[data-connection=connected]").wait_for()
    assert page.url.rstrip("/") == address, "the code is still in the address"
    kept = context.storage_state()
    context.close()
    return address, kept


@pytest.fixture
def open_dashboard(
    browser: Any, dashboard_machine: Machine, profile: tuple[str, Any]
) -> Iterator[Callable[..., Dashboard]]:
    """Open a page in a window of its own: `viewport`, `color_scheme`, … are Playwright's."""
    address, kept = profile
    made: list[Dashboard] = []

    def make(**options: Any) -> Dashboard:
        context = browser.new_context(
            **{"storage_state": kept, "viewport": WIDE, "reduced_motion": "reduce", **options}
        )
        context.add_init_script(path=LOOK)
        made.append(Dashboard(dashboard_machine, context.new_page(), address))
        return made[-1]

    yield make
    for each in made:
        each.page.context.close()
    errors = [error for each in made for error in each.errors]
    assert not errors, errors


@pytest.fixture
def dashboard(open_dashboard: Callable[..., Dashboard]) -> Dashboard:
    return open_dashboard()


@pytest.fixture(scope="session")
def renewed() -> Path | None:
    """The folder for new pictures, if `OPENENVD_SCREENSHOTS` names one."""
    named = os.environ.get("OPENENVD_SCREENSHOTS")
    if named is None:
        return None
    Path(named).mkdir(parents=True, exist_ok=True)
    return Path(named)
