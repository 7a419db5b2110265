# SPDX-License-Identifier: Apache-2.0
"""What a command prints: JSON alone on stdout with `--json`, and then all text on stderr.

Progress, hints and errors are on stderr always, results on stdout. Colour only where the stream is
a terminal and `NO_COLOR` is not set. Tables are drawn by `drawing.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import click

from ...system.text.terminal_text import coloured
from .drawing import Drawn, draw, is_coloured

_CONTROL = re.compile("[\x7f-\x9f]")  # that JSON leaves as they are, and some terminals obey


class Output:
    """The output of one command: JSON, results and notes."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def people(self) -> TextIO:
        """The stream for a result's text."""
        return sys.stderr if self.as_json else sys.stdout

    def result(self, *lines: str) -> None:
        """A result, for people."""
        echo(lines, self.people)

    def note(self, *lines: str) -> None:
        """Something beside the result: progress, a hint."""
        echo(lines, sys.stderr)

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """The result for programs; nothing without `--json`."""
        if self.as_json:
            escaped = sys.stdout.encoding.lower() != "utf-8"  # what cannot be shown is not lost
            text = json.dumps(value, indent=indent, ensure_ascii=escaped)
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def json_line(self, value: Any) -> None:
        """One of several results for programs, on a line of its own."""
        self.json(value, indent=None)

    def draw(self, *parts: Drawn) -> None:
        """Print tables and lines on the people's stream."""
        draw(parts, self.people)


def echo(lines: Iterable[str], stream: TextIO) -> None:
    """Print lines; styles are dropped where they would not be seen as such."""
    for line in lines:
        click.echo(coloured(line), file=stream, color=is_coloured(stream))


def good(text: str) -> str:
    """Styled as success."""
    return click.style(text, fg="green")


def bad(text: str) -> str:
    """Styled as failure."""
    return click.style(text, fg="red", bold=True)


def faint(text: str) -> str:
    """Styled as less important."""
    return click.style(text, dim=True)
