# SPDX-License-Identifier: Apache-2.0
"""`openenv top`: the command alone. The screen is `top_app.py`, which imports Textual."""

from __future__ import annotations

import sys

import click

from ..client.errors import ClientError
from ..system.extras import install_command
from . import exit_codes
from .options import connect
from .output import Output

PLAIN = "openenv status --watch shows the same as text"


@click.command()
def top() -> int:
    """Watch environments, queue and workers on a full screen, and change them by keys.

    Needs Textual, which the extra `top` installs; `openenv status --watch` is the plain form.
    """
    try:
        from .top_app import TopApp
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "textual":
            raise
        hint = f"{install_command('top')}; {PLAIN}"
        raise ClientError("openenv top needs Textual", hint) from exc
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(f"openenv top needs a terminal; {PLAIN}")
    TopApp(connect(Output())).run()
    return exit_codes.OK
