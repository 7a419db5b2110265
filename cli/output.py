# SPDX-License-Identifier: Apache-2.0
"""Where words go: JSON alone on stdout with `--json`, and then everything for people on stderr.

Progress, hints and errors are on stderr always, results on stdout. Colour only where the stream is
a terminal and `NO_COLOR` is not set. rich is imported when something is drawn, never before.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

# Off a terminal nothing is wrapped: what reads us splits lines itself.
_UNWRAPPED_COLUMNS = 10_000


class Output:
    """One command's way to speak."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def people(self) -> TextIO:
        """The stream on which a result is told to people."""
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
        """rich's tables, on the people's stream."""
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
