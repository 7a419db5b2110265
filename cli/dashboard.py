# SPDX-License-Identifier: Apache-2.0
"""`openenv dashboard`: the daemon's page, opened through a link that signs in once.

A browser is given a file that leads to the link, not the link: its command line is shown to every
user of the machine, and who has the link signs in.
"""

from __future__ import annotations

import os
import sys
from html import escape
from pathlib import Path

import click

from ..server.settings import Paths
from . import exit_codes, phrases
from .options import connect, json_option
from .output import Output, faint

_LEADS_ON = """\
<!DOCTYPE html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>openenvd</title>
<p><a href="{url}">The dashboard</a></p>
"""


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link alone, and open no browser.")
@json_option
def dashboard(no_open: bool, as_json: bool) -> int:
    """Open the dashboard in a browser, and print the link.

    The link works once, for a few minutes. From another machine: forward the port with
    ssh -L 8585:127.0.0.1:8585 first.
    """
    output = Output(as_json=as_json)
    link = connect(output).dashboard_link()
    output.json(link)
    output.result(link["url"])
    good_for = phrases.duration(link["expires_seconds"])
    output.note(faint(f"works once, within {good_for}"))
    if not (no_open or as_json):
        _open(link["url"], Paths.from_environment().sign_in_page)
    return exit_codes.OK


def _open(url: str, page: Path) -> None:
    """Open a browser where there is a display: a text browser would take the terminal."""
    has_display = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if has_display:
        import webbrowser

        try:
            page.unlink(missing_ok=True)  # an earlier one, whatever its mode
            with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(_LEADS_ON.format(url=escape(url)))
        except OSError:  # a full disk: the link is printed
            return
        webbrowser.open(page.as_uri())
