# SPDX-License-Identifier: Apache-2.0
"""`docs/commands.md` and the manual pages, rendered from the commands themselves.

python tests/repository/commands_page.py      write the page, and those in `docs/man`
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from openenvd.cli import exit_codes
from openenvd.cli.main import COMMANDS, cli
from openenvd.server.settings import SETTINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
# Upstream's commands are documented by upstream.
OWN = tuple(COMMANDS)

INTRODUCTION = """\
# Commands

Every command takes `-h`. `--json` prints JSON alone on stdout, and text for people on stderr. Every
command that needs the daemon starts it. A DURATION is a number of seconds, or has a unit: `90`,
`60s`, `5m`, `2h`; in JSON and in variables, times are seconds. This page is rendered from the
commands themselves: `python tests/repository/commands_page.py`.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_command(name) for name in OWN), _settings(), _exit_codes()]
    return "\n".join(parts)


def _command(name: str) -> str:
    context = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])
    command = cli.get_command(context, name)
    assert command is not None
    return "\n".join(_pages(command, context, name, "##"))


def _pages(command: click.Command, parent: click.Context, name: str, mark: str) -> Iterator[str]:
    """Yield the help pages of a command, and of those below it."""
    inner = click.Context(command, parent=parent, info_name=name, terminal_width=96)
    yield f"{mark} {inner.command_path}\n\n```text\n{command.get_help(inner)}\n```\n"
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            yield from _pages(below, inner, each, f"{mark}#")


def _settings() -> str:
    rows = [
        f"| `{s.flag}` | `{s.variable}` | {'' if s.default is None else s.default} | {s.help} |"
        for s in SETTINGS
    ]
    head = "| flag of `up` | variable | default | meaning |\n|---|---|---|---|"
    text = (
        "The daemon's settings: flags of `openenv up`, environment variables, or lines of "
        "`config.toml` in the home, in which a setting has the name of its flag "
        "(`max-long-workers = 2`). A flag counts before a variable, and that before the file; "
        "`openenv config` shows what each setting is, and where it comes from."
    )
    home = "`OPENENV_HOME` says where state lives (`~/.local/state/openenvd` on Linux)."
    killed = "A daemon that was killed comes back with its flags; `openenv stop` forgets them."
    return f"## Settings\n\n{text} {home} {killed}\n\n{head}\n" + "\n".join(rows) + "\n"


def _exit_codes() -> str:
    rows = []
    for line in Path(exit_codes.__file__).read_text().splitlines():
        name, _, rest = line.partition(" = ")
        if name.isupper() and "  # " in rest:
            code, _, meaning = rest.partition("  # ")
            rows.append(f"| {code} | {meaning} |")
    return "## Exit codes\n\n| code | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(render(), end="")
    else:
        PAGE.write_text(render())
        subprocess.run([sys.executable, str(Path(__file__).with_name("man_pages.py"))], check=True)
