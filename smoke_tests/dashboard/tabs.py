# SPDX-License-Identifier: Apache-2.0
"""Tabs of one window of a headless Chromium, of which one is seen and the others are hidden.

Playwright makes every page believe that it is seen, so that these are driven by the browser's own
protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from ..conftest import eventually

SECONDS = 30.0
PORT_FILE = "DevToolsActivePort"  # written by Chromium: the port, and the path of its WebSocket


class Tabs:
    """The tabs of one window, by the order in which they were opened."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._tabs: list[tuple[str, str]] = []  # target and session

    def open(self, url: str) -> int:
        """Open a tab, which is then the one that is seen; returns its number."""
        target = self._call("Target.createTarget", url=url)["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._tabs.append((target, session))
        return len(self._tabs) - 1

    def show(self, number: int) -> None:
        self._call("Target.activateTarget", targetId=self._tabs[number][0])

    def value(self, number: int, expression: str) -> Any:
        """What an expression of JavaScript is in a tab; None while its page is being loaded."""
        session = self._tabs[number][1]
        answer = self._ask("Runtime.evaluate", session, expression=expression, returnByValue=True)
        return answer.get("result", {}).get("result", {}).get("value")

    def until(self, number: int, expression: str, within: float = SECONDS) -> None:
        """Wait until an expression is true in a tab."""
        eventually(lambda: self.value(number, expression), within=within)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        answer = self._ask(method, session, **parameters)
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        call: dict[str, Any] = {"id": next(self._ids), "method": method, "params": parameters}
        if session is not None:
            call["sessionId"] = session
        self._connection.send(json.dumps(call))
        while True:  # events come between
            answer: dict[str, Any] = json.loads(self._connection.recv(timeout=SECONDS))
            if answer.get("id") == call["id"]:
                return answer


@contextmanager
def tabs_of(program: str, profile: Path) -> Iterator[Tabs]:
    """A Chromium of its own, with this folder for its profile."""
    command = [program, "--headless=new", "--no-sandbox", "--remote-debugging-port=0"]
    running = subprocess.Popen(
        [*command, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually((profile / PORT_FILE).exists, within=SECONDS)
        port, path = (profile / PORT_FILE).read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as connection:
            yield Tabs(connection)
    finally:
        running.terminate()
        running.wait()
