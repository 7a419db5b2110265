# SPDX-License-Identifier: Apache-2.0
"""`openenv scale` and `restart`: other replicas for an environment, without ending a session."""

from __future__ import annotations

from typing import Any

import click

from ..operations.options import DrainOptions
from . import completion, phrases
from .following import Conclusion, async_option, follow, leave, submit
from .options import connect, declared_options, given_options, json_option
from .output import Output, good


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.argument("replicas", type=int, metavar="N")
@declared_options(DrainOptions)
@async_option
@json_option
def scale(name: str, replicas: int, is_async: bool, as_json: bool, **options: Any) -> int:
    """Give an environment N replicas, at the same address.

    Too many: the youngest begin no session any more, and end with their last one.
    """
    payload = {"name": name, "replicas": replicas, **given_options(DrainOptions, options)}
    return _change("scale", payload, is_async, Output(as_json=as_json), _scaled)


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option("--replica", type=int, metavar="N", help="Restart this one alone.")
@declared_options(DrainOptions)
@async_option
@json_option
def restart(name: str, replica: int | None, is_async: bool, as_json: bool, **options: Any) -> int:
    """Replace an environment's replicas one after another, at the same address.

    Each new one is ready before the old one begins no session any more and ends with its last.
    """
    payload = {"name": name} | ({} if replica is None else {"replica": replica})
    payload |= given_options(DrainOptions, options)
    return _change("restart", payload, is_async, Output(as_json=as_json), _restarted)


def _change(
    operation: str,
    payload: dict[str, Any],
    is_async: bool,
    output: Output,
    conclude: Conclusion,
) -> int:
    client = connect(output)
    request = submit(client, operation, payload, {})
    return leave(request, output) if is_async else follow(client, request, output, conclude)


def _scaled(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    line = f"{good('✓')} {result['environment']['name']} has {_count(result['replicas'])}"
    draining = len(result["draining"])
    if draining and result.get("sessions") != 0:
        line += f", and {draining} more until {'its' if draining == 1 else 'their'} sessions end"
    return result, [line]


def _restarted(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    seconds = phrases.duration((final["finished_at"] or 0.0) - (final["started_at"] or 0.0))
    done = _count(len(result["restarted"]))
    name = result["environment"]["name"]
    return result, [f"{good('✓')} restarted {done} of {name} in {seconds}"]


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
