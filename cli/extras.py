# SPDX-License-Identifier: Apache-2.0
"""Installs the extra that a failed request needs, and runs the command again.

    the failure's text has the command that installs an extra for this Python?
      --yes, or the answer at a terminal ─▶ install ─▶ stop the daemon ─▶ the same command again
      otherwise                          ─▶ the failure's text was printed: the user types it

A daemon of another installation prints another command, for its own Python: nothing is offered.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import click

from ..client import daemon
from ..client.api import DaemonClient
from ..schema.settings import Paths
from ..schema.states import FINAL_STATES
from ..system.files.installation import install_command, is_of_uvx
from ..system.text.json_lines import Json
from .options import Command
from .output.output import Output

_YES = f"{__name__}.yes"
_TRIED = "OPENENV_EXTRAS_TRIED"  # those that this command has installed already


def _note_yes(context: click.Context, _option: click.Parameter, value: bool) -> None:
    context.meta[_YES] = value


def yes_option(command: Command) -> Command:
    """Give a command `--yes`, which `offer` reads."""
    text = "Install a missing extra of openenvd, unasked."
    option = click.option("--yes", is_flag=True, expose_value=False, callback=_note_yes, help=text)
    return option(command)


def offer(client: DaemonClient, failed: Json, output: Output) -> None:
    """Install the extra that a failed request needs, if the user agrees; does not return then.

    Raises `click.ClickException`: it cannot be installed.
    """
    tried = os.environ.get(_TRIED, "").split()
    extra = _missing(failed.get("error") or {})
    if extra is None or extra in tried:
        return
    if not click.get_current_context().meta.get(_YES):
        if output.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        if not click.confirm(f"Install openenvd[{extra}] now?", default=True, err=True):
            return
    os.environ[_TRIED] = " ".join([*tried, extra])
    again = [sys.executable, *sys.orig_argv[1:]]
    if is_of_uvx():
        again = [*shlex.split(install_command(",".join([*tried, extra]))), *sys.argv[1:]]
    else:
        _install(install_command(extra), output)
    if all(each["id"] == failed["id"] or each["state"] in FINAL_STATES
           for each in client.status()["requests"]):  # fmt: skip
        daemon.stop(Paths.from_environment())  # the next one has the extra from the beginning
    output.note(f"$ {shlex.join(again)}")
    sys.stdout.flush()
    try:
        os.execvp(again[0], again)  # noqa: S606  # no shell is what is wanted
    except OSError as exc:
        raise click.ClickException(f"{again[0]} cannot be run: {exc.strerror}") from exc


def _missing(error: Json) -> str | None:
    """Return the extra whose command is in an error's text."""
    from importlib import metadata

    text = f"{error.get('message')} {error.get('hint')}"
    extras = metadata.metadata("openenvd").get_all("Provides-Extra") or []
    return next((each for each in extras if install_command(each) in text), None)


def _install(command: str, output: Output) -> None:
    output.note(f"$ {command}")
    quiet = {**os.environ, "PIP_QUIET": "1"}  # pip names each package that is there already
    try:
        code = subprocess.run(shlex.split(command), stdout=2, env=quiet, check=False).returncode
    except OSError as exc:
        raise click.ClickException(f"{command}: {exc.strerror}") from exc
    if code:
        raise click.ClickException(f"{command} has failed with exit code {code}")
