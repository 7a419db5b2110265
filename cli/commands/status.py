# SPDX-License-Identifier: Apache-2.0
"""`openenv status`: the daemon, its environments, requests, and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from ...client.api import DaemonClient
from ...client.errors import ApiRefused
from ...schema.states import EnvironmentState, RequestState
from .. import completion, exit_codes
from ..options import connect, find_target, json_option
from ..output import phrases
from ..output.failures import environment_failure, exit_lines, request_failure
from ..output.output import (
    Drawn,
    Output,
    bad,
    environments_table,
    faint,
    generations_table,
    requests_table,
)

REQUESTS_OF_ENVIRONMENT = 10
FAILURES_SHOWN = 3  # the latest in full; the table has the message of each other one
_ENDED = frozenset({"FAILED", "STOPPED"})


@click.command()
@click.argument(
    "target",
    required=False,
    metavar="[NAME|REQUEST_ID]",
    shell_complete=completion.environments_and_requests,
)
@click.option("--watch", is_flag=True, help="Redraw whenever something changes; Ctrl-C exits.")
@click.option(
    "--all", "shows_all", is_flag=True, help="Show all launches that failed, not the newest."
)
@json_option
def status(target: str | None, watch: bool, shows_all: bool, output: Output) -> int:
    """Show the daemon, environments and requests, or one of them."""
    client = connect(output)
    if watch:
        from .watch import watch as draw_changes

        draw_changes(client, partial(read_status, target=target, shows_all=shows_all), output)
        return exit_codes.OK
    found = read_status(client, target, shows_all=shows_all)
    if output.as_json:
        output.json(found)
    else:
        output.draw(*picture(found, time.time()))
    return exit_codes.OK


def read_status(
    client: DaemonClient, target: str | None, *, shows_all: bool = False
) -> dict[str, Any]:
    """`{"daemon", "environments", "requests"}`, of everything or what is about `target`."""
    found = client.status(all_failed=shows_all)
    if target is None:
        return found
    environment, request = find_target(client, target)
    if environment is not None:
        name = environment["name"]
        requests = client.requests(environment=name, limit=REQUESTS_OF_ENVIRONMENT)
        return _about(found, [environment], requests)
    assert request is not None
    return _about(found, _environments_of(client, request), [request])


def _about(found: dict[str, Any], environments: list[Any], requests: list[Any]) -> dict[str, Any]:
    left_out = {"failed_launches_left_out": 0}
    return {**found, "environments": environments, "requests": requests, **left_out}


def picture(found: dict[str, Any], now: float) -> list[Drawn]:
    """Return what is drawn: a headline, the two tables, and the failures."""
    environments, requests = found["environments"], found["requests"]
    said = {  # launches whose environment says why they failed
        each.get("request_id", "")
        for each in environments
        if each["state"] == EnvironmentState.FAILED and each.get("error")
    }
    failed = _failed(requests, said)
    parts: list[Drawn] = [_headline(found["daemon"])]
    if environments:
        parts += ["", environments_table(environments, now)]
        for environment in environments:
            parts += _remarks(environment, now)
    for environment in environments:
        if history := environment.get("generations"):  # of the one that was named
            parts += ["", generations_table(history, now)]
    if strays := found.get("strays"):
        parts += ["", *_strays(strays)]
    if requests:
        explained_below = said | {request["id"] for request in failed[:FAILURES_SHOWN]}
        parts += ["", requests_table(requests, now, explained=explained_below)]
    if left_out := found.get("failed_launches_left_out"):
        earlier = phrases.plural(left_out, "earlier launch request")
        parts += [faint(f"  and {earlier} that failed: openenv status --all")]
    if not environments and not requests:
        parts += ["", "Nothing has been launched yet. Try: openenv launch echo"]
    gateway = found.get("gateway") or {}
    failures = [
        *_failures(environments, failed, found.get("failed_launches_left_out", 0)),
        *exit_lines("  gateway:", gateway, now),
        *[f"  gateway: {bad(problem)}" for problem in [gateway.get("problem")] if problem],
    ]
    if failures:
        parts += ["", "\n".join(failures)]
    return parts


def _remarks(environment: dict[str, Any], now: float) -> Iterator[str]:
    """How it is served, what keeps its sessions from beginning or going on, who may reach it."""
    name, serving = environment["name"], environment.get("serving") or {}
    if serving:
        most = environment["max_sessions"] or "?"
        sessions = f"{environment['sessions']}/{most} sessions"
        yield faint(f"  {name}: {serving['sentence']}, {sessions}")
    if gpus := environment.get("gpus"):
        yield faint(f"  {name}: {gpus['each']:g} {gpus['resource'] or 'GPU'} for each replica")
    if cause := environment.get("sessions_fail"):
        yield f"  {name}: {bad('sessions fail')}: {cause} (see openenv logs {name})"
    if held := serving.get("held"):
        shards = phrases.plural(serving["shards"], "shard")
        are = "is" if held["shards"] == 1 else "are"
        since = phrases.duration(now - held["since"])
        yield (
            f"  {name}: {held['shards']} of {shards} {are} blocked for {since} "
            f"(see openenv logs {name})"
        )
    if environment.get("is_exposed") and environment["state"] not in _ENDED:
        host = environment["host"]
        yield f"  {name}: listens on {host}: other machines can connect, with its token"


def _strays(strays: list[dict[str, Any]]) -> list[str]:
    """Return the replicas that run although the database has no record of them."""
    head = f"{phrases.plural(len(strays), 'stray')} without a record"
    lines = [
        f"  {stray['replica']} ({stray['provider']})"
        + (f": {stray['problem']}" if stray.get("problem") else "")
        for stray in strays
    ]
    return [f"{head}; openenv down --strays stops them:", *lines]


def _headline(daemon: dict[str, Any]) -> str:
    up = phrases.duration(daemon["uptime_seconds"])
    sessions = phrases.plural(daemon["sessions"], "session")
    text = f"openenvd {daemon['version']} at {daemon['address']}, up {up}, {sessions}"
    loop = daemon.get("loop")
    if loop and loop["samples"]:
        p99, most = (loop[f"{key}_seconds"] * 1000 for key in ("p99", "max"))
        text += f", loop lag p99 {p99:.0f} ms, max {most:.0f} ms"
    return faint(text)


def _failures(
    environments: list[dict[str, Any]], failed: list[dict[str, Any]], left_out: int
) -> list[str]:
    lines: list[str] = []
    for environment in environments:
        lines += environment_failure(environment)
    for request in failed[:FAILURES_SHOWN]:
        lines += request_failure(request)
    if len(failed) > FAILURES_SHOWN:
        more = len(failed) - FAILURES_SHOWN + left_out
        lines.append(f"  and {more} more: openenv requests --state failed")
    return lines


def _failed(requests: list[dict[str, Any]], said: set[str]) -> list[dict[str, Any]]:
    """Return the failed requests, the newest first.

    A failed launch is left out if the table of environments shows its error (`said`), or if its
    environment was launched successfully since.
    """
    failed, launched = [], set()
    for request in requests:
        is_old = request["operation"] == "launch" and request["environment"] in launched
        if request["state"] == RequestState.FAILED and not is_old and request["id"] not in said:
            failed.append(request)
        if request["operation"] == "launch" and request["state"] == RequestState.SUCCEEDED:
            launched.add(request["environment"])
    return failed


def _environments_of(client: DaemonClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    if not request.get("environment"):
        return []
    try:
        return [client.environment(request["environment"])]
    except ApiRefused:
        return []  # taken down and forgotten since
