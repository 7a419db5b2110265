# SPDX-License-Identifier: Apache-2.0
"""The system's Chromium, headless and driven by Playwright, for tests.

Tests are skipped without Playwright (`pip install '.[dev]'`) or a Chromium: `apt-get install
chromium`, or `OPENENVD_CHROMIUM` names one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return os.environ.get("OPENENVD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A running Chromium; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if (program := find_chromium()) is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=program, args=["--no-sandbox", *arguments]
        )
        yield browser
        browser.close()
