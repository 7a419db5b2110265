# SPDX-License-Identifier: Apache-2.0
"""`openenv dashboard`: the link, and the browser that it is opened in."""

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..client.fake_daemon import FakeDaemon

Process = Callable[..., subprocess.Popen[str]]
URL = "http://127.0.0.1:8585/#a-code"
LINK = {"address": "http://127.0.0.1:8585", "url": URL, "expires_seconds": 300.0}


@pytest.fixture
def opened(fake: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a browser notes what it is to open."""
    fake.answers["POST", "/v1/dashboard/link"] = LINK
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    return opened


def run(started: subprocess.Popen[str]) -> str:
    out, err = started.communicate(timeout=60)
    assert started.returncode == 0, err
    return out


def test_the_browser_is_led_to_the_link_by_a_file_of_its_owner_alone(
    process: Process, fake: FakeDaemon, opened: Path
) -> None:
    """Its command line, which every user of the machine can read, has no code."""
    page = fake.paths.sign_in_page
    page.write_text("an earlier one")
    page.chmod(0o644)
    assert run(process("dashboard")) == f"{URL}\n"
    assert opened.read_text() == f"{page.as_uri()}\n"
    assert f'content="0; url={URL}"' in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_no_browser_is_opened_for_the_link_alone_or_where_there_is_no_display(
    process: Process, opened: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert URL in run(process("dashboard", "--json"))
    assert run(process("dashboard", "--no-open")) == f"{URL}\n"
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert run(process("dashboard")) == f"{URL}\n"
    assert not opened.exists()
