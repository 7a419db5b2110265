# SPDX-License-Identifier: Apache-2.0
"""`openenv retry`: submit a request that has ended again, and follow it."""

from __future__ import annotations

from typing import Any

import click

from ..environments.spec import LaunchOptions
from . import completion
from .following import async_option, follow, leave
from .launch import follow_launch
from .options import connect, declared_options, json_option
from .output import Output
from .rollout import follow_rollout

_LIMITS = ("memory_mb", "session_memory_mb")


@click.command()
@click.argument("request_id", shell_complete=completion.environments_and_requests)
@declared_options(LaunchOptions, only=_LIMITS)
@async_option
@json_option
def retry(request_id: str, as_json: bool, is_async: bool, **limits: int | None) -> int:
    """Submit a request that has ended again: all of it as it was, but the memory that is given.

    A launch of what runs meanwhile is an update of that. Waits until it has ended; Ctrl-C
    detaches, a second one cancels.
    """
    output = Output(as_json=as_json)
    client = connect(output)
    request = client.retry(request_id, **limits)
    if is_async:
        return leave(request, output)
    if request["operation"] == "launch":
        return follow_launch(client, request, output)
    if request["operation"] == "rollout":
        return follow_rollout(client, request, output)
    return follow(client, request, output, _conclude)


def _conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return {"result": final.get("result")}, []
