# SPDX-License-Identifier: Apache-2.0
"""`openenv prune`: give back what was installed for projects, and that nothing uses now."""

from __future__ import annotations

import click

from . import exit_codes, phrases
from .options import connect, json_option
from .output import Output


@click.command()
@json_option
def prune(as_json: bool) -> int:
    """Remove virtual environments of projects that no environment uses.

    The next launch of such a project installs its dependencies again.
    """
    from .following import run

    output = Output(as_json=as_json)
    result = run(connect(output), "prune", {})["result"]
    output.json(result)
    for venv in result["removed"]:
        made_for = venv["project"] or "a launch that was not finished"
        output.result(f"removed {phrases.size(venv['freed_bytes'])} of {made_for}")
    if not result["removed"]:
        output.result("nothing to remove: what there is is in use, or was within the last minute")
    else:
        output.result(f"{phrases.size(result['freed_bytes'])} are free again")
    return exit_codes.OK
