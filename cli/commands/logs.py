# SPDX-License-Identifier: Apache-2.0
"""`openenv logs`: what an environment or a request printed, and at the end why it exited."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import click

from ...client.errors import ApiRefused
from ...schema.states import RequestState
from ...system.text.terminal_text import TextStream
from .. import completion, exit_codes
from ..options import connect, find_target, json_option
from ..output import phrases
from ..output.failures import environment_failure, request_failure
from ..output.output import Output

_REMEMBERED = 16 * 1024  # characters, to know whether a log tail has been seen already


@click.command()
@click.argument(
    "target", metavar="NAME|REQUEST_ID", shell_complete=completion.environments_and_requests
)
@click.option("-f", "--follow", is_flag=True, help="Follow the log as it grows.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start with the last N lines.",
)
@click.option(
    "--replica", metavar="ID", help="Replica of the environment, instead of the newest one."
)
@click.option(
    "--plain", is_flag=True, help="Print no colours; other escape sequences never are printed."
)
@json_option
def logs(
    target: str, follow: bool, tail: int | None, replica: str | None, plain: bool, output: Output
) -> int:
    """Print the log of an environment's replica, or of a request.

    With -f, a request's log ends with the request, an environment's when it is down. After an
    update it continues with the newest replica of what serves then.
    """
    shown = partial(_show, output=output, follow=follow, plain=plain)
    client = connect(output)
    environment, request = find_target(client, target)
    if environment is not None:
        name = environment["name"]
        pieces = client.environment_log(
            name, tail=tail, follow=follow, replica=replica,
            on_change=partial(_say_change, output, name),
        )  # fmt: skip
        try:
            if not shown(pieces) and tail != 0:
                silent = name if replica is None else f"replica {replica} of {name}"
                output.note(f"{silent} has printed nothing yet")
        except ApiRefused as exc:
            if exc.kind != "not_found" or replica or not environment.get("request_id"):
                raise
            request = client.request(environment["request_id"])
            short = phrases.short_id(request["id"])
            output.note(f"{name} has printed nothing yet; this is its launch, {short}:")
        else:
            output.note(*environment_failure(environment))
    if request is not None:
        seen = shown(client.request_log(request["id"], tail=tail, follow=follow))
        request = client.request(request["id"])  # as it ended
        if request["state"] == RequestState.FAILED:
            output.note(*request_failure(request, shown=seen))
    return exit_codes.OK


def _say_change(output: Output, name: str, replica: str | None) -> None:
    if replica is None:
        output.note(f"{name} is down")
    else:
        output.note(f"replica {replica} serves now; this is its log:")


def _show(pieces: Iterator[str], *, output: Output, follow: bool, plain: bool) -> list[str]:
    """Print the log as it comes; returns its last lines.

    A terminal gets what it may be shown of each piece; JSON has all of it, and escapes the rest.
    """
    if plain or not output.as_json:
        pieces = _safe(pieces, plain=plain)
    if not output.as_json:
        last = ""
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            last = (last + piece)[-_REMEMBERED:]
        return last.splitlines()
    lines = []
    for line in _lines(pieces):
        lines.append(line)
        if follow:
            output.json_line({"line": line})
    if not follow:
        output.json({"lines": lines})
    return lines


def _safe(pieces: Iterator[str], *, plain: bool) -> Iterator[str]:
    text = TextStream(keeps_colours=not plain)
    for piece in pieces:
        yield text.feed(piece)
    yield text.end()


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    if rest:
        yield rest
