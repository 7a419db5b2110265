# SPDX-License-Identifier: Apache-2.0
"""`openenv gateway`: the gateway's state."""

from __future__ import annotations

from typing import Any

import click

from . import exit_codes
from .options import connect, json_option
from .output import Output, bad, faint, good


@click.group()
def gateway() -> None:
    """Show the gateway, which gives environments launched with --gateway one address each."""


@gateway.command()
@json_option
def status(as_json: bool) -> int:
    """Show its address, and its replicas with their sessions as it sees them."""
    output = Output(as_json=as_json)
    answer = connect(output).gateway()
    output.json(answer)
    for line in _lines(answer["gateway"]):
        output.result(line)
    return exit_codes.OK


def _lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["no gateway runs; openenv launch --gateway starts one"]
    how = found["state"].lower()
    shown = good(how) if found["state"] == "READY" else bad(how)
    lines = [f"gateway  {found['address']}  {shown}  pid {found.get('pid') or '-'}"]
    if problem := found.get("problem"):
        lines.append(bad(problem))
    for environment in found["environments"]:
        lines.append(f"{environment['name']}  {environment['address']}")
        lines += [f"  {_replica(each)}" for each in environment["replicas"]] or ["  no replicas"]
    return [*lines, faint(f"log: {found['log']}")]


def _replica(found: dict[str, Any]) -> str:
    state = "draining" if found["is_draining"] else "ready"
    if not found["is_healthy"]:
        state = bad(found["problem"] or "unhealthy")
    return f"{found['address']}  {state}  {found['sessions']} sessions"
