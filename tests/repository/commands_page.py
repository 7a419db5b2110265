# SPDX-License-Identifier: Apache-2.0
"""`docs/commands.md`, rendered from the commands themselves.

python tests/repository/commands_page.py      write the page
"""

from __future__ import annotations

import sys
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
command that needs the daemon starts it. This page is rendered from the commands themselves:
`python tests/repository/commands_page.py`.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_command(name) for name in OWN), _settings(), _exit_codes()]
    return "\n".join(parts)


def _command(name: str) -> str:
    context = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])
    command = cli.get_command(context, name)
    assert command is not None
    inner = click.Context(command, parent=context, info_name=name, terminal_width=96)
    return f"## openenv {name}\n\n```text\n{command.get_help(inner)}\n```\n"


def _settings() -> str:
    rows = [f"| `{s.flag}` | `{s.variable}` | {s.default} | {s.help} |" for s in SETTINGS]
    head = "| flag of `up` | variable | default | meaning |\n|---|---|---|---|"
    text = "The daemon's settings: flags of `openenv up`, or environment variables."
    home = "`OPENENV_HOME` says where state lives (`~/.local/state/openenvd` on Linux)."
    return f"## Settings\n\n{text} {home}\n\n{head}\n" + "\n".join(rows) + "\n"


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
