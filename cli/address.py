# SPDX-License-Identifier: Apache-2.0
"""`openenv address`: the base URL of an environment, with its token if it wants one."""

from __future__ import annotations

import click

from . import completion, exit_codes
from .options import connect, json_option
from .output import Output


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@json_option
def address(name: str, as_json: bool) -> int:
    """Print the base URL that clients of an environment are given, alone on a line.

    It contains the environment's token, if it wants one, so it is a secret then. Where no replica
    serves, a note on the standard error says so.
    """
    output = Output(as_json=as_json)
    daemon = connect(output)
    found = daemon.base_url(name)
    if found["base_url"] is None:
        raise daemon.no_address(name)
    if not found["is_served"]:
        output.note(
            f"no replica of {name} serves now: nothing may answer at this address, and the next "
            f"may be at another. See openenv status {name}"
        )
    output.result(found["base_url"])
    output.json(found)
    return exit_codes.OK
