# SPDX-License-Identifier: Apache-2.0
"""What a command prints: JSON alone on stdout with `--json`, and then all text on stderr.

Progress, hints and errors are on stderr always, results on stdout. Colour only where the stream is
a terminal and `NO_COLOR` is not set. rich is imported when something is drawn, never before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..requests_db.states import EnvironmentState, ReplicaState, RequestState
from . import phrases

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Off a terminal nothing is wrapped: what reads us splits lines itself.
_UNWRAPPED_COLUMNS = 10_000


_STYLES: dict[str, str] = {
    EnvironmentState.READY: "green",
    EnvironmentState.DEGRADED: "yellow",
    EnvironmentState.STARTING: "cyan",
    EnvironmentState.STOPPING: "cyan",
    RequestState.RUNNING: "cyan",
    RequestState.SUCCEEDED: "green",
    RequestState.FAILED: "red",
    RequestState.CANCELLED: "dim",
}

_WHOLE = ("ID", "STATE", "ADDRESS")  # to be read at a glance, or copied: others are folded first


class Output:
    """The output of one command: JSON, results and notes."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def people(self) -> TextIO:
        """The stream for a result's text."""
        return sys.stderr if self.as_json else sys.stdout

    def result(self, text: str) -> None:
        """A result, for people."""
        echo(text, self.people)

    def note(self, text: str) -> None:
        """Something beside the result: progress, a hint."""
        echo(text, sys.stderr)

    def json(self, value: Any) -> None:
        """The result for programs; nothing without `--json`."""
        if self.as_json:
            sys.stdout.write(_dump(value, indent=2) + "\n")
            sys.stdout.flush()

    def json_line(self, value: Any) -> None:
        """One of several results for programs, on a line of its own."""
        if self.as_json:
            sys.stdout.write(_dump(value) + "\n")
            sys.stdout.flush()

    def draw(self, *renderables: Any) -> None:
        """Print rich's tables on the people's stream."""
        console = new_console(self.people)
        with console.capture() as captured:  # rich would end the process at a broken pipe
            for renderable in renderables:
                console.print(renderable)
        lines = (line.rstrip(" ") for line in captured.get().splitlines())
        self.people.write("".join(f"{line}\n" for line in lines))
        self.people.flush()


def _dump(value: Any, indent: int | None = None) -> str:
    escaped = sys.stdout.encoding.lower() != "utf-8"  # what cannot be shown must not be lost
    return json.dumps(value, indent=indent, ensure_ascii=escaped)


def echo(text: str, stream: TextIO) -> None:
    """A line; styles are dropped where they would not be seen as such."""
    click.echo(text, file=stream, color=is_coloured(stream))


def is_coloured(stream: TextIO) -> bool:
    """Whether colour is wanted there (https://no-color.org: set and not empty means no)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def new_console(stream: TextIO) -> Console:
    """A rich console that keeps to `is_coloured`, and wraps on terminals alone."""
    from rich.console import Console

    return Console(
        file=stream,
        no_color=not is_coloured(stream),
        highlight=False,
        markup=False,
        emoji=False,
        width=None if stream.isatty() else _UNWRAPPED_COLUMNS,
    )


def good(text: str) -> str:
    """Styled as success."""
    return click.style(text, fg="green")


def bad(text: str) -> str:
    """Styled as failure."""
    return click.style(text, fg="red", bold=True)


def faint(text: str) -> str:
    """Styled as less important."""
    return click.style(text, dim=True)


def environments_table(environments: Sequence[dict[str, Any]], now: float | None = None) -> Table:
    """One line for each environment."""
    now = time.time() if now is None else now
    table = _new_table("ENVIRONMENT", "STATE", "ADDRESS", "SESSIONS", "REPLICAS", "SOURCE", "AGE")
    for environment in environments:
        replicas = environment["replicas"]
        ready = sum(replica["state"] == ReplicaState.READY for replica in replicas)
        table.add_row(
            environment["name"],
            _state(environment["state"]),
            environment["address"] or "-",
            _sessions(environment),
            f"{ready}/{len(replicas)}" if replicas else "-",
            environment.get("source") or "-",
            phrases.duration(now - environment["created_at"]),
        )
    return table


def requests_table(requests: Sequence[dict[str, Any]], now: float | None = None) -> Table:
    """One line for each request."""
    now = time.time() if now is None else now
    table = _new_table("REQUEST", "ID", "STATE", "WHEN", "")
    for request in requests:
        table.add_row(
            request["label"],
            phrases.short_id(request["id"]),
            _state(request["state"]),
            phrases.timing(request, now),
            _remark(request),
        )
    return table


def _new_table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in _WHOLE)
    return table


def _state(state: str) -> Any:
    from rich.text import Text

    return Text(state, style=_STYLES.get(state, ""))


def _sessions(environment: dict[str, Any]) -> str:
    most = environment.get("max_sessions")
    return f"{environment['sessions']}/{most}" if most else str(environment["sessions"])


def _remark(request: dict[str, Any]) -> str:
    if request.get("pending_reason"):
        return str(request["pending_reason"])
    if request["state"] == RequestState.RUNNING and request.get("cancel_requested_at"):
        return "being cancelled"
    if request.get("error"):
        return str(request["error"]["message"]).partition("\n")[0]
    return ""
