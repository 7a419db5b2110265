# SPDX-License-Identifier: Apache-2.0
"""`openenv address`, `dashboard` and `gateway status`: the addresses of these.

A browser gets a file that leads to the dashboard's link, not the link itself: every user of the
machine can read the browser's command line, and anybody with the link can sign in.
"""

from __future__ import annotations

import os
import sys
from html import escape
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

import click

from ...client.sources import working_folder
from ...schema.settings import Paths
from ...system.text.json_lines import Json
from ...system.text.units import plural
from .. import completion
from ..options import connect, json_option
from ..output import phrases
from ..output.output import Output, bad, faint, good

_LEADS_ON = """\
<!DOCTYPE html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>openenvd</title>
<p><a href="{url}">The dashboard</a></p>
"""


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@json_option
def address(name: str, output: Output) -> None:
    """Print the base URL for clients of an environment, alone on a line.

    If the environment requires a token, the URL contains it, and is a secret. If no replica serves,
    a note on the standard error says so.

    Examples:
      openenv address my_env  # what `EnvClient(base_url=…)` takes
    """
    found = connect(output).base_url(name)
    if not found["is_served"]:
        output.note(
            f"no replica of {name} serves now: nothing may answer at this address, and the next "
            f"may be at another. See openenv status {name}"
        )
    output.answer(found, found["base_url"])


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link alone, and open no browser.")
@json_option
def dashboard(no_open: bool, output: Output) -> None:
    """Print a sign-in link to the dashboard, and open it in a browser.

    The link works once, for a few minutes. On another machine, forward the link's port with
    `ssh -L` first; in a session over SSH, that command is printed.

    Examples:
      openenv dashboard  # sign a browser in, and open the page
    """
    link = connect(output).dashboard_link(str(working_folder()))
    output.answer(link, link["url"])
    good_for = phrases.duration(link["expires_seconds"])
    output.note(faint(f"works once, within {good_for}"))
    if "SSH_CONNECTION" in os.environ:
        port = urlsplit(link["url"]).port
        output.note(f"on your own machine first: ssh -L {port}:127.0.0.1:{port} {gethostname()}")
    if not (no_open or output.as_json):
        _open(link["url"], Paths.from_environment().sign_in_page)


def _open(url: str, page: Path) -> None:
    """Open a browser if there is a display. A text browser would occupy the terminal."""
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


@click.group()
def gateway() -> None:
    """Show the gateway, which gives environments launched with --gateway one address each.

    Examples:
      openenv gateway status  # its address and replicas
    """


@gateway.command()
@json_option
def status(output: Output) -> None:
    """Show the gateway's address, and the replicas and sessions that it reports.

    Examples:
      openenv gateway status  # sessions and health of each replica
    """
    answer = connect(output).gateway()
    output.answer(answer, *_lines(answer["gateway"]))


def _lines(found: Json | None) -> list[str]:
    if found is None:
        return ["no gateway runs; openenv launch --gateway starts one"]
    if "address" not in found:  # its run file is unusable
        return [f"gateway  {bad(found['problem'])}"]
    how = found["state"].lower()
    shown = good(how) if found["state"] == "READY" else bad(how)
    lines = [f"gateway  {found['address']}  {shown}  pid {found.get('pid') or '-'}"]
    if problem := found.get("problem"):
        lines.append(bad(problem))
    for environment in found["environments"]:
        lines.append(f"{environment['name']}  {environment['address']}")
        lines += [f"  {_replica(each)}" for each in environment["replicas"]] or ["  no replicas"]
    return [*lines, faint(f"log: {found['log']}")]


def _replica(found: Json) -> str:
    state = "draining" if found["is_draining"] else "ready"
    if not found["is_healthy"]:
        state = bad(found["problem"] or "unhealthy")
    return f"{found['address']}  {state}  {plural(found['sessions'], 'session')}"
