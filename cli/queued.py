# SPDX-License-Identifier: Apache-2.0
"""What a command does with the LONG request that it has queued: leave it, or follow it to its end.

`launch`, `rollout` and `bench` differ in what they queue, and in what they make of its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from . import exit_codes
from .following import Detached, follow_request
from .output import Output

if TYPE_CHECKING:
    from ..client.api import DaemonClient

Json = dict[str, Any]
# Of a final request: what `--json` tells beside id and error, and the lines for people.
Conclusion = Callable[[Json], tuple[Json, list[str]]]


def leave(request: Json, output: Output) -> int:
    """`--async`: its id, by which it is found again; the exit code."""
    if not output.as_json:
        click.echo(request["id"])
    output.json({"request_id": request["id"]})
    return exit_codes.OK


def follow(
    client: DaemonClient,
    request: Json,
    output: Output,
    conclude: Conclusion,
    *,
    is_told_later: Callable[[str], bool] = lambda _: False,
) -> int:
    """Its log until it is final, then what came of it; the exit code."""
    try:
        final = follow_request(client, request, output, is_told_later=is_told_later)
    except Detached:
        output.json({"request_id": request["id"]})
        return exit_codes.INTERRUPTED
    told, lines = conclude(final)
    answer = {"request_id": final["id"], **told}
    if final.get("error") is not None:
        answer["error"] = final["error"]
    output.json(answer)
    for line in lines:
        output.result(line)
    return exit_codes.of_request(final)
