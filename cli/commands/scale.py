# SPDX-License-Identifier: Apache-2.0
"""`openenv scale` and `restart`: other replicas for an environment, without ending a session."""

from __future__ import annotations

from typing import Any

import click

from ...schema.operation_options import DrainOptions
from .. import completion
from ..following import async_option, carry_out
from ..options import connect, declared_options, given_options, json_option
from ..output import phrases
from ..output.output import Output, good


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.argument("replicas", type=int, metavar="N")
@declared_options(DrainOptions)
@async_option
@json_option
def scale(name: str, replicas: int, is_async: bool, output: Output, **options: Any) -> int:
    """Give an environment N replicas, at the same address.

    Too many: the youngest begin no session any more, and end with their last one.
    """
    payload = {"name": name, "replicas": replicas, **given_options(DrainOptions, options)}
    return carry_out(connect(output), "scale", payload, output, _scaled, is_async=is_async)


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option("--replica", type=int, metavar="N", help="Restart this one alone.")
@declared_options(DrainOptions)
@async_option
@json_option
def restart(name: str, replica: int | None, is_async: bool, output: Output, **options: Any) -> int:
    """Replace an environment's replicas one after another, at the same address.

    Each new one is ready before the old one begins no session any more and ends with its last.
    """
    payload = {"name": name} | ({} if replica is None else {"replica": replica})
    payload |= given_options(DrainOptions, options)
    return carry_out(connect(output), "restart", payload, output, _restarted, is_async=is_async)


def _scaled(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    count = phrases.plural(result["replicas"], "replica")
    line = f"{good('✓')} {result['environment']['name']} has {count}"
    draining = len(result["draining"])
    if draining and result.get("sessions") != 0:
        line += f", and {draining} more until {'its' if draining == 1 else 'their'} sessions end"
    return result, [line]


def _restarted(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    seconds = phrases.duration((final["finished_at"] or 0.0) - (final["started_at"] or 0.0))
    done = phrases.plural(len(result["restarted"]), "replica")
    name = result["environment"]["name"]
    return result, [f"{good('✓')} restarted {done} of {name} in {seconds}"]
