# SPDX-License-Identifier: Apache-2.0
"""`openenv status --watch`: draw again whenever the daemon reports a change.

    thread  changes ──▶ /v1/events ──▶ `happened` is set ──▶ the drawing thread reads, and clears it

On a terminal it fills the screen, and waits for a daemon that is lost; elsewhere it prints one
picture, or one line of JSON, after the other, and ends with the daemon. Between changes only the
ages are drawn again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live

from ...client.api import DaemonClient
from ...client.errors import ClientError, ConnectionLost
from ...system.text.json_lines import Json
from ..options import reconnect
from ..output.output import Output, bad, for_rich, new_console
from .status import picture

REDRAW_SECONDS = 1.0  # for the ages
MIN_PAUSE_SECONDS = 0.1  # between two drawings, however much happens
RECONNECT_SECONDS = 0.5  # between two attempts to reach a daemon that is lost
MIN_REQUESTS = 3  # that are shown, however low the terminal is


Read = Callable[[DaemonClient], Json]  # what is shown


def watch(client: DaemonClient, read: Read, output: Output) -> None:
    """Draw what `status` shows until the command is interrupted."""
    is_screen = not output.as_json and sys.stdout.isatty()
    found = read(client)
    changes = Changes(client, is_patient=is_screen)
    changes.start()
    if is_screen:
        _fill_screen(changes, found, read)
    else:
        _print_each(changes, found, read, output)


def _print_each(changes: Changes, found: Json, read: Read, output: Output) -> None:
    while True:
        output.json_line(found)
        if not output.as_json:
            output.draw(*picture(found, time.time()), "")
        changes.happened.wait()
        time.sleep(MIN_PAUSE_SECONDS)  # many changes at once are one picture
        changes.happened.clear()  # before reading: what changes meanwhile is another picture
        if changes.problem is not None:
            raise changes.problem
        found = read(changes.client)


def _fill_screen(changes: Changes, found: Json, read: Read) -> None:
    console = new_console(sys.stdout)
    problem: ClientError | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(console, found, problem), refresh=True)
            if not changes.happened.wait(REDRAW_SECONDS):
                continue
            time.sleep(MIN_PAUSE_SECONDS)
            changes.happened.clear()
            problem = changes.problem
            if problem is None:
                try:
                    found = read(changes.client)
                except ConnectionLost as exc:
                    problem = exc


def _screen(console: Console, found: Json, problem: ClientError | None) -> Group:
    """Return what fits the terminal: the oldest requests are left out first."""
    notice = [] if problem is None else [bad(f"{problem.message}; waiting for it to come back"), ""]
    while True:
        group = Group(*map(for_rich, [*notice, *picture(found, time.time())]))
        excess = len(console.render_lines(group, pad=False)) - console.height
        requests = found["requests"]
        if excess <= 0 or len(requests) <= MIN_REQUESTS:
            return group
        found = {**found, "requests": requests[: max(MIN_REQUESTS, len(requests) - excess)]}


class Changes:
    """Tells that something has changed.

    The stream breaks when the daemon exits or drops a slow reader. The thread then looks for the
    daemon, and never starts one. When there is none, `problem` says so: for good, or, when patient,
    until it is back.

    Attributes:
        client: The daemon as it was found last.
        happened: Set at each change; the reader clears it before it reads.
        problem: Why there is no daemon; None while there is one.
    """

    def __init__(self, client: DaemonClient, *, is_patient: bool = False) -> None:
        self.client = client
        self.happened = threading.Event()
        self.problem: ClientError | None = None
        self._is_patient = is_patient
        self._thread = threading.Thread(target=self._listen, name="changes", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def _listen(self) -> None:
        after: str | None = None
        while self.problem is None:
            try:
                for event in self.client.changes(after=after):
                    after = event.id
                    self.happened.set()
            except ClientError:
                pass  # the stream's end and its break are answered alike
            self._come_back()
            self.happened.set()  # whatever was missed

    def _come_back(self) -> None:
        while not self._finds_daemon():
            self.happened.set()
            if not self._is_patient:
                return
            time.sleep(RECONNECT_SECONDS)

    def _finds_daemon(self) -> bool:
        try:
            found = reconnect()
        except ClientError as exc:
            self.problem = exc
            return False
        if found is None:
            self.problem = ConnectionLost("the daemon has exited", "openenv up starts a new one")
            return False
        self.client, self.problem = found, None
        return True
