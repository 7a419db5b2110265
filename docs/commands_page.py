# SPDX-License-Identifier: Apache-2.0
"""The page of commands and the manual pages, rendered from the commands as the site is built.

python docs/commands_page.py      print the page

`mkdocs build` calls the two hooks at the end: the site has `commands.md`, and a manual page for
each command in `man/`. Neither is in git.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from openenvd import __version__
from openenvd.cli import exit_codes
from openenvd.cli.help_pages import SetOption
from openenvd.cli.main import COMMANDS, cli
from openenvd.schema.settings import SETTINGS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

INTRODUCTION = """\
# Commands

Every command takes `-h`. `--json` prints JSON alone on stdout, and text for people on stderr. Every
command that needs the daemon starts it. A DURATION is a number of seconds, or has a unit: `90`,
`60s`, `5m`, `2h`; in JSON and in variables, times are seconds.
"""


def render() -> str:
    """The whole page."""
    commands = (_command(name) for name in COMMANDS)  # upstream documents its own
    return "\n".join([INTRODUCTION, *commands, _settings(), _exit_codes()])


def _command(name: str) -> str:
    context = click.Context(cli, info_name="openenv", help_option_names=["-h", "--help"])
    command = cli.get_command(context, name)
    assert command is not None
    return "\n".join(_pages(command, context, name, "##"))


def _pages(command: click.Command, parent: click.Context, name: str, mark: str) -> Iterator[str]:
    """Yield the help pages of a command, and of those below it."""
    inner = click.Context(command, parent=parent, info_name=name, terminal_width=96)
    yield f"{mark} {inner.command_path}\n\n```text\n{command.get_help(inner)}\n```\n"
    for option in command.params:
        if isinstance(option, SetOption):
            found = ((name, kind.replace("|", "\\|"), told) for name, kind, told in option.rows())
            rows = [f"| `{name}={kind}` | {told} |" for name, kind, told in found]
            yield "\n".join(["| `--set` | meaning |", "|---|---|", *rows, ""])
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
        "`config.toml` in the home, in which a setting has the name that `openenv config` lists "
        "(`max_long_workers = 2`). A flag counts before a variable, and that before the file; "
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=render()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write the manual pages beside the site's."""
    from click_man.core import write_man_pages

    folder = Path(config.site_dir, "man")
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:  # the group imports a command when it is called
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        cli.add_command(command, name)
    _set_short_help(cli)
    write_man_pages("openenv", cli, version=__version__, target_dir=folder)


def _set_short_help(command: click.Command) -> None:
    """Make the first line of the help the summary of a manual page, which is cut elsewhere."""
    command.short_help = (command.help or "").partition("\n")[0]
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _set_short_help(below)


if __name__ == "__main__":
    sys.stdout.write(render())
