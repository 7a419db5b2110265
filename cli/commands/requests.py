# SPDX-License-Identifier: Apache-2.0
"""`openenv requests`, `wait`, `cancel`, `retry`: the queue, its history, and requests of it."""

from __future__ import annotations

import time
from typing import Any

import click

from ...schema.spec import LaunchOptions
from ...schema.states import FINAL_STATES, RequestState
from .. import completion, exit_codes
from ..following import async_option, follow, leave, wait_quietly
from ..options import connect, declared_options, json_option
from ..output import phrases
from ..output.drawing import requests_table
from ..output.failures import request_failure
from ..output.output import Output, good

DEFAULT_LIMIT = 50
MEMORY_LIMITS = ("memory_mb", "session_memory_mb")  # that `retry` may change
_STATES = click.Choice([state.value for state in RequestState], case_sensitive=False)


@click.command()
@click.option(
    "--state",
    "states",
    multiple=True,
    type=_STATES,
    help="Show only requests in this state; repeatable.",
)
@click.option("--operation", metavar="NAME", help="Show only this operation, such as launch.")
@click.option("--environment", metavar="NAME", help="Show only requests for this environment.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=DEFAULT_LIMIT, show_default=True,
    help="Number of requests to show, newest first.",
)  # fmt: skip
@json_option
def requests(
    states: tuple[str, ...],
    operation: str | None,
    environment: str | None,
    limit: int,
    output: Output,
) -> int:
    """Show the queue and its history, newest first."""
    client = connect(output)
    found = client.requests(
        states=states, operation=operation, environment=environment, limit=limit
    )
    if output.as_json:
        output.json({"requests": found})
    elif not found:
        output.result("no requests")
    else:
        output.draw(requests_table(found, time.time()))
    return exit_codes.OK


active_requests_argument = click.argument(
    "request_ids",
    nargs=-1,
    required=True,
    metavar="REQUEST_ID…",
    shell_complete=completion.active_requests,
)


@click.command()
@active_requests_argument
@json_option
def wait(request_ids: tuple[str, ...], output: Output) -> int:
    """Wait until requests are final; the exit code is the outcome's (the worst of several)."""
    client = connect(output)
    # All are looked up first: a wrong id is said now, not after the others have ended.
    found = [client.request(request_id) for request_id in request_ids]
    ended = []
    for request in found:
        final = request if request["state"] in FINAL_STATES else wait_quietly(client, request["id"])
        _tell(final, output)
        ended.append(final)
    output.json({"request": ended[0]} if len(ended) == 1 else {"requests": ended})
    return exit_codes.of_requests(ended)


@click.command()
@active_requests_argument
@json_option
def cancel(request_ids: tuple[str, ...], output: Output) -> int:
    """Cancel requests at once, pending or running. Ended requests do not change."""
    client = connect(output)
    found = [client.request(request_id) for request_id in request_ids]
    answers = [client.cancel(request["id"]) for request in found]
    for answer in answers:
        output.result(phrases.cancellation(answer))
    output.json(answers[0] if len(answers) == 1 else {"requests": answers})
    return exit_codes.OK


@click.command()
@click.argument("request_id", shell_complete=completion.environments_and_requests)
@declared_options(LaunchOptions, only=MEMORY_LIMITS)
@async_option
@json_option
def retry(request_id: str, output: Output, is_async: bool, **limits: int | None) -> int:
    """Submit a request that has ended again: all of it as it was, but the memory that is given.

    A launch of what runs meanwhile is an update of that. Waits until it has ended; Ctrl-C
    detaches, a second one cancels.
    """
    from .launch import follow_launch
    from .rollout import follow_rollout

    client = connect(output)
    request = client.retry(request_id, **limits)
    if is_async:
        return leave(request, output)
    if request["operation"] == "launch":
        return follow_launch(client, request, output)
    if request["operation"] == "rollout":
        return follow_rollout(client, request, output)
    return follow(client, request, output, lambda final: ({"result": final.get("result")}, []))


def _tell(request: dict[str, Any], output: Output) -> None:
    if request["state"] == RequestState.SUCCEEDED:
        ran = phrases.duration(request["finished_at"] - request["created_at"])
        output.result(f"{good('✓')} {request['label']}  SUCCEEDED  in {ran}")
        return
    output.note(*request_failure(request))
