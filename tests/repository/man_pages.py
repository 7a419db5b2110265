# SPDX-License-Identifier: Apache-2.0
"""The manual pages in `docs/man`, from the same text as the help pages.

python tests/repository/commands_page.py      write them, too

A page for each command, as git has them: openenv(1), openenv-launch(1), openenv-image-build(1).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from openenvd.cli.examples import EXAMPLES
from openenvd.cli.main import COMMANDS, cli

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "man"


def pages() -> dict[str, str]:
    """Return the text of each page, by its file's name."""
    top = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])
    found = {"openenv": _page(cli, top, [f"openenv-{name}" for name in COMMANDS])}
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        found |= dict(_pages(command, top, name))
    return {f"{name}.1": text for name, text in found.items()}


def write() -> None:
    """Write all pages, and remove others."""
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for file in FOLDER.glob("*.1"):
        if file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)


def _pages(command: click.Command, parent: click.Context, name: str) -> Iterator[tuple[str, str]]:
    context = click.Context(command, parent=parent, info_name=name)
    title = context.command_path.replace(" ", "-")
    below = list(command.commands) if isinstance(command, click.Group) else []
    yield title, _page(command, context, ["openenv", *(f"{title}-{each}" for each in below)])
    if isinstance(command, click.Group):
        for each in below:
            yield from _pages(command.commands[each], context, each)


def _page(command: click.Command, context: click.Context, related: list[str]) -> str:
    path = context.command_path
    title = path.replace(" ", "-")
    summary, _, rest = inspect.cleandoc(command.help or "").partition("\n\n")
    summary = " ".join(summary.split())
    lines = [
        f'.TH {title.upper()} 1 "" openenvd "User Commands"',
        ".SH NAME",
        f"{_text(title)} \\- {_text(summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        _text(summary),
    ]
    for paragraph in rest.split("\n\n") if rest else ():
        lines += [".PP", _text(" ".join(paragraph.split()))]
    lines += _options(command, context)
    if command is cli:
        lines.append(".SH COMMANDS")
        for name, (_, told) in COMMANDS.items():
            lines += [".TP", f".B openenv {_text(name)}", _text(told)]
    lines += [".SH EXAMPLES"]
    for line, told in EXAMPLES.get(path, ()):
        lines += [".TP", f".B {_text(line)}", _text(told)]
    codes = str(cli.epilog).removeprefix("Exit codes: ")
    lines += [".SH EXIT STATUS", _text(codes), ".SH SEE ALSO"]
    *others, last = (f".BR {_text(name)} (1)" for name in related)
    return "\n".join([*lines, *(f"{other}," for other in others), last]) + "\n"


def _options(command: click.Command, context: click.Context) -> list[str]:
    options = [p for p in command.get_params(context) if isinstance(p, click.Option)]
    records = [option.get_help_record(context) for option in options]
    lines = [".SH OPTIONS"]
    for flags, told in filter(None, records):
        lines += [".TP", f".B {_text(flags)}", _text(" ".join(told.split()))]
    return lines


def _text(text: str) -> str:
    """Escape what roff would read as a command, an escape or a typographic sign."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        written = {file.name: file.read_text() for file in FOLDER.glob("*.1")}
        sys.exit("the pages differ" if written != pages() else 0)
    write()
