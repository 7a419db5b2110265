# SPDX-License-Identifier: Apache-2.0
"""Prints for a command: results on stdout, and progress, hints and errors on stderr.

With `--json`, stdout has only JSON, and all text is on stderr. Colour is used only if the stream is
a terminal and `NO_COLOR` is not set.

Tables are aligned here, which takes microseconds a line; rich takes 0.6 ms, and 30 ms to import
(docs/decisions/0029-aligned-tables.md).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from ...schema.states import FAILING, EnvironmentState, GenerationState, ReplicaState, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import coloured, plain
from . import phrases

if TYPE_CHECKING:
    from rich.console import Console

# Without a terminal nothing is wrapped: programs that read the output split lines themselves.
_UNWRAPPED_COLUMNS = 10_000
_GAP = "  "  # between two columns

_COLOURS: dict[str, str] = {
    EnvironmentState.READY: "green",
    EnvironmentState.DEGRADED: "yellow",
    FAILING: "red",
    EnvironmentState.ASLEEP: "blue",
    EnvironmentState.STARTING: "cyan",
    EnvironmentState.STOPPING: "cyan",
    RequestState.RUNNING: "cyan",
    RequestState.SUCCEEDED: "green",
    RequestState.FAILED: "red",
    GenerationState.SERVING: "green",
    GenerationState.DRAINING: "cyan",
}

_LEFT_OUT = ("SOURCE", "AGE", "REPLICAS", "WHEN")  # dropped in this order from a wide table
_REPLICA_FAILED = re.compile(r"^replica \d+ of \S+ failed to start: ")
_MIN_REMARK = 12  # columns, in which a remark (the last cell, without a heading) is folded


class Cell(NamedTuple):
    """A text of a table, with its style: `click.style`'s arguments."""

    text: str
    style: Json
    is_cut: bool = False  # to one line, where a terminal is too narrow for it


class Table:
    """Rows below headings."""

    def __init__(self, *headings: str) -> None:
        self._headings = headings
        self._rows: list[tuple[Cell, ...]] = [tuple(Cell(one, {"bold": True}) for one in headings)]

    def add_row(self, *cells: str | Cell) -> None:
        """Add a row: a cell for each heading."""
        row = (c if isinstance(c, Cell) else Cell(c, {}) for c in cells)
        self._rows.append(tuple(cell._replace(text=_one_line(cell.text)) for cell in row))

    def lines(self, columns: int) -> list[str]:
        """Return the aligned lines, without some columns if a terminal is too narrow for all."""
        widths = [
            max(_width(cell.text) for cell in cells) for cells in zip(*self._rows, strict=True)
        ]
        remark = widths[-1]
        if not self._headings[-1]:
            widths[-1] = min(remark, _MIN_REMARK)
        kept = list(range(len(widths)))
        for heading in _LEFT_OUT:
            if sum(widths[number] + len(_GAP) for number in kept) > columns + len(_GAP):
                kept = [number for number in kept if self._headings[number] != heading]
        others = sum(widths[number] + len(_GAP) for number in kept[:-1])
        widths[-1] = max(widths[-1], min(remark, columns - others))
        lines = []
        for row in self._rows:
            folded = (_folded(row[number], widths[number]) for number in kept)
            for texts in zip_longest(*folded, fillvalue=""):
                parts = []
                for number, text in zip(kept, texts, strict=True):
                    styled = click.style(text, **row[number].style) if text else text
                    parts.append(styled + " " * (widths[number] - _width(text)))
                lines.append(_GAP.join(parts).rstrip(" "))
        return lines


def _one_line(text: str) -> str:
    return plain(text).replace("\n", " ").replace("\t", " ")


def _width(text: str) -> int:
    """Return how many columns a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _folded(cell: Cell, width: int) -> list[str]:
    """Return the lines of a cell; only those of a remark may be wider than its column."""
    if _width(cell.text) <= width:
        return [cell.text]
    from textwrap import wrap

    return wrap(cell.text, width, max_lines=1 if cell.is_cut else None, placeholder="…")


Drawn = str | Table  # a string may be styled (`click.style`), and have several lines


def lines_of(parts: Iterable[Drawn], columns: int) -> list[str]:
    """Return tables and lines as lines, which may be styled."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += part.lines(columns)
        else:
            lines += chain.from_iterable(_words(line, columns) for line in part.split("\n"))
    return lines


def _words(line: str, columns: int) -> list[str]:
    """Fold a line between words, unless it is styled."""
    if len(line) <= columns or "\x1b" in line:
        return [line]
    from textwrap import wrap

    indent = " " * (len(line) - len(line.lstrip()))
    return wrap(line, columns, subsequent_indent=indent, break_long_words=False)


def is_coloured(stream: TextIO) -> bool:
    """Return whether a stream gets colour (https://no-color.org: set and not empty means no)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def new_console(stream: TextIO) -> Console:
    """Return a rich console that follows `is_coloured`, and wraps only on terminals."""
    from rich.console import Console

    return Console(
        file=stream,
        no_color=not is_coloured(stream),
        highlight=False,
        markup=False,
        emoji=False,
        width=None if stream.isatty() else _UNWRAPPED_COLUMNS,
    )


def environments_table(environments: Sequence[Json], now: float) -> Table:
    """Return a table with a line for each environment."""
    table = Table("ENVIRONMENT", "STATE", "ADDRESS", "SESSIONS", "REPLICAS", "SOURCE", "AGE")
    for environment in environments:
        most = environment.get("max_sessions")
        table.add_row(
            environment["name"],
            state_cell(environment["state"]),
            environment["address"] or "-",
            f"{environment['sessions']}/{most}" if most else str(environment["sessions"]),
            _count_replicas(environment["replicas"]),
            environment.get("source") or "-",
            phrases.duration(now - environment["created_at"]),
        )
    return table


def replicas_table(replicas: Sequence[Json]) -> Table:
    """Return a table with a line for each replica of an environment."""
    table = Table("REPLICA", "STATE", "SESSIONS", "PID")
    for each in replicas:
        cells = (each["id"], state_cell(each["state"]), str(each["sessions"]))
        table.add_row(*cells, str(each["pid"] or "-"))
    return table


def generations_table(generations: Sequence[Json], now: float) -> Table:
    """Return a table with a line for each generation of an environment."""
    table = Table("GENERATION", "LAUNCH", "STATE", "WHEN", "SOURCE", "")
    for generation in generations:
        table.add_row(
            str(generation["number"]),
            phrases.short_id(generation["request_id"]),
            state_cell(generation["state"]),
            phrases.generation_timing(generation, now),
            generation["spec"].get("source") or "-",
            str(generation["error"] or "").partition("\n")[0],
        )
    return table


def requests_table(
    requests: Sequence[Json], now: float, *, explained: Container[str] = ()
) -> Table:
    """Return a table with a line for each request, with a remark unless `explained` has its id."""
    table = Table("REQUEST", "ID", "STATE", "WHEN", "")
    for request in requests:
        table.add_row(
            request["label"],
            phrases.short_id(request["id"]),
            state_cell(request["state"]),
            phrases.timing(request, now),
            "" if request["id"] in explained else remark(request),
        )
    return table


def failures_table(
    environments: Sequence[Json], requests: Sequence[Json], times: Mapping[str, int], now: float
) -> Table:
    """Return a table with a line for each failure; `openenv status` takes its id."""
    table = Table("FAILED", "ID", "WHEN", "")
    for each in environments:
        message = str((each.get("error") or {}).get("message") or "")
        ago = phrases.duration(now - each.get("updated_at", now))
        cut = Cell(message.partition("\n")[0], {}, is_cut=True)
        table.add_row(Cell("environment", {"fg": "red"}), each["name"], f"{ago} ago", cut)
    for request in requests:
        ago = phrases.duration(now - request["finished_at"])
        often = f", {count} times" if (count := times[request["id"]]) > 1 else ""
        label = Cell(request["label"], {"fg": "red"})
        message = _REPLICA_FAILED.sub("", remark(request))  # the label names the environment
        cut = Cell(message, {}, is_cut=True)
        table.add_row(label, phrases.short_id(request["id"]), f"{ago} ago{often}", cut)
    return table


def state_cell(state: str) -> Cell:
    """Return a state in its colour."""
    if state == RequestState.CANCELLED:
        return Cell(state, {"dim": True})
    return Cell(state, {"fg": colour} if (colour := _COLOURS.get(state)) else {})


def _count_replicas(replicas: Sequence[Json]) -> str:
    """Return the number of ready replicas and of all, as text."""
    states = Counter(replica["state"] for replica in replicas)
    draining = states.pop(ReplicaState.DRAINING, 0)
    more = f" +{draining} draining" if draining else ""
    return f"{states[ReplicaState.READY]}/{states.total()}{more}" if replicas else "-"


def remark(request: Json) -> str:
    """Return why a request waits, is being ended, or failed."""
    if request.get("pending_reason"):
        return str(request["pending_reason"])
    if request["state"] == RequestState.RUNNING and request.get("cancel_requested_at"):
        return "being cancelled"
    if request.get("error"):
        return str(request["error"]["message"]).partition("\n")[0]
    if request.get("retried") and request["state"] == RequestState.RUNNING:
        return str(request["retried"]["message"])
    return ""


_CONTROL = re.compile("[\x7f-\x9f]")  # JSON does not escape these, and some terminals act on them


class Output:
    """The output of one command: JSON, results and notes."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def people(self) -> TextIO:
        """The stream for a result's text."""
        return sys.stderr if self.as_json else sys.stdout

    def result(self, *lines: str) -> None:
        """Print a result for people."""
        echo(lines, self.people)

    def note(self, *lines: str) -> None:
        """Print progress or a hint, which is not part of the result."""
        echo(lines, sys.stderr)

    def answer(self, value: Any, *lines: str) -> None:
        """Print a result: `value` for programs, `lines` for people."""
        self.json(value)
        self.result(*lines)

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print the result for programs; nothing without `--json`."""
        if self.as_json:
            escaped = sys.stdout.encoding.lower() != "utf-8"  # keeps every character
            text = json.dumps(value, indent=indent, ensure_ascii=escaped)
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def json_line(self, value: Any) -> None:
        """Print one of several results for programs, on a line of its own."""
        self.json(value, indent=None)

    def draw(self, *parts: Drawn) -> None:
        """Print tables and lines; off a terminal, tables have all of their columns."""
        is_wide = not self.people.isatty()
        columns = _UNWRAPPED_COLUMNS if is_wide else shutil.get_terminal_size().columns
        self.result("\n".join(lines_of(parts, columns)))


def echo(lines: Iterable[str], stream: TextIO) -> None:
    """Print lines; styles are dropped if the stream gets no colour."""
    for line in lines:
        click.echo(coloured(line), file=stream, color=is_coloured(stream))


def good(text: str) -> str:
    """Style a text as success."""
    return click.style(text, fg="green")


def bad(text: str) -> str:
    """Style a text as failure."""
    return click.style(text, fg="red", bold=True)


def faint(text: str) -> str:
    """Style a text as less important."""
    return click.style(text, dim=True)
