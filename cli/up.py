# SPDX-License-Identifier: Apache-2.0
"""`openenv up`, `stop` and `info`: the daemon, and what it found on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from ..client import daemon
from ..client.errors import ClientError, DaemonNotStarted
from ..requests_db.states import EnvironmentState
from ..server.settings import SETTINGS, Paths, Setting
from ..system.terminal_text import plain
from . import exit_codes, phrases
from .options import Command, Duration, connect, json_option
from .output import Output, good

ANSWER_SECONDS = 2.0  # of a daemon that is to be stopped


def setting_options(command: Command) -> Command:
    """One option for each of the daemon's settings, declared where they are."""
    decorated: Callable[..., Any] = command
    for item in reversed(SETTINGS):
        kind = Duration(min=0) if item.name.endswith("_seconds") else item.type
        default = "" if item.default is None else f"{item.default}; "
        text = f"{item.help.rstrip('.')} [{default}{item.variable}]."
        decorated = click.option(
            item.flag, item.name, type=kind, default=None, help=text, callback=_checking(item)
        )(decorated)
    return decorated  # type: ignore[return-value]  # click hands the command on as it was


def _checking(item: Setting) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def check(_context: click.Context, _option: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else item.check(value)
        except ValueError as exc:
            raise click.BadParameter(str(exc)) from exc

    return check


@click.command()
@click.option(
    "--foreground", is_flag=True, help="Run the daemon in this process, for service managers."
)
@json_option
@setting_options
def up(foreground: bool, as_json: bool, **settings: Any) -> int:
    """Start the daemon, if it is not running, and print the limits found."""
    output = Output(as_json=as_json)
    if foreground:
        _become_daemon(settings)
    client = daemon.connect(Paths.from_environment(), settings=settings)
    info = client.info()
    output.json(info)
    for line in _summary(info):
        output.result(line)
    for line in _not_in_force(settings, info):
        output.note(line)
    return exit_codes.OK


@click.command()
@json_option
def stop(as_json: bool) -> int:
    """Stop the daemon. Environments continue; the next daemon adopts them."""
    output = Output(as_json=as_json)
    paths = Paths.from_environment()
    rest = "; environments continue" if _has_environments(paths) else ""
    identity = daemon.stop(paths)
    output.json({"stopped": identity is not None, "pid": (identity or {}).get("pid")})
    if identity is None:
        output.result("the daemon is not running")
    else:
        output.result(f"stopped the daemon (pid {identity.get('pid')}){rest}")
    return exit_codes.OK


def _has_environments(paths: Paths) -> bool:
    """Whether some run, or may: a daemon that does not answer does not say."""
    try:
        client = daemon.find(paths, any_version=True, answer_seconds=ANSWER_SECONDS)
        ended = (EnvironmentState.STOPPED, EnvironmentState.FAILED)
        return client is None or any(e["state"] not in ended for e in client.environments())
    except ClientError:
        return True


@click.command()
@json_option
def info(as_json: bool) -> int:
    """Show the daemon's limits, plan, workers and settings."""
    output = Output(as_json=as_json)
    found = connect(output).info()
    output.json(found)
    found["daemon"].pop("pid_started_at", None)  # on no clock that people read
    for section, value in found.items():
        output.result(click.style(section, bold=True))
        lines = phrases.describe_json(value) if isinstance(value, dict) else _workers(value)
        for line in lines or ["  none"]:
            output.result(line)
    return exit_codes.OK


def _become_daemon(settings: dict[str, Any]) -> None:
    paths = Paths.from_environment()
    client = daemon.find(paths, any_version=True)
    if client is not None:
        raise DaemonNotStarted(
            "already_running",
            f"a daemon is already running, pid {client.identity['pid']} at {client.address}",
            "openenv stop",
        )
    command = daemon.server_command(settings)
    os.execv(sys.executable, command)  # noqa: S606  # no shell is what is wanted


def _summary(info: dict[str, Any]) -> list[str]:
    identity = info["daemon"]
    passed_over, traces = identity.get("passed_over"), identity.get("traces")
    return [
        f"{good('✓')} openenvd {identity['version']} is up at {identity['address']}",
        *([f"  port     {plain(passed_over)}"] if passed_over else []),
        f"  pid      {identity['pid']}",
        f"  limits   {_limits(info['limits'])}",
        f"  workers  {_plan(info['plan'])}",
        *([f"  traces   {plain(traces)}"] if traces else []),
    ]


def _limits(limits: dict[str, Any]) -> str:
    cpus, memory = limits.get("cpus"), limits.get("memory_bytes")
    sources = limits.get("sources") or {}
    told = [_limit(f"{cpus:g} CPUs", sources.get("cpus"))] if cpus else []
    if memory:
        found = sources.get("memory") or sources.get("memory_bytes")
        told.append(_limit(phrases.size(memory), found))
    if limits.get("pids"):
        told.append(_limit(f"{limits['pids']} processes", sources.get("pids")))
    return ", ".join(told) or "none found"


def _limit(text: str, found_in: str | None) -> str:
    return f"{text} ({found_in})" if found_in else text


def _plan(plan: dict[str, Any]) -> str:
    long, short = plan.get("guaranteed_long", 0), plan.get("guaranteed_short", 0)
    text = f"{long} long and {short} short"
    bursts = long + plan.get("burst_long", 0), short + plan.get("burst_short", 0)
    if bursts != (long, short):
        text += f", bursting to {bursts[0]} and {bursts[1]}"
    if budget := plan.get("budget_bytes"):
        text += f", within {phrases.size(budget)}"
    return text


def _not_in_force(asked: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """What was asked for, and a daemon that ran already does otherwise."""
    in_force = info.get("settings") or {}
    flags = {item.name: item.flag for item in SETTINGS}
    differing = [
        f"{flags[name]} {value} (it has {in_force[name]})"
        for name, value in asked.items()
        if value is not None
        and name in in_force
        and in_force[name] != value
        and (name, value) != ("port", 0)  # any
    ]
    if not differing:
        return []
    told = ", ".join(differing)
    return [f"the daemon was already running, without {told}", "  openenv stop, then up again"]


def _workers(workers: list[dict[str, Any]]) -> list[str]:
    return [
        f"  {w['name']}  pid {w['pid']}  {w['label'] or 'idle'}"
        + ("" if w.get("guaranteed", True) else "  (burst)")
        for w in workers
    ]
