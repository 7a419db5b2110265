# SPDX-License-Identifier: Apache-2.0
"""`openenv up`, `stop`, `info`, `config`: the daemon, this machine's limits, the settings."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from ...client import daemon
from ...client.errors import DaemonNotStarted
from ...client.service import service_of
from ...schema.settings import SETTINGS, Paths, Setting, Settings, flags_of_killed, given_settings
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ..options import Command, Duration, connect, json_option
from ..output import phrases
from ..output.output import Output, Table, good

DEFAULT = "default"
SERVICE_SECONDS = 30.0  # until a service answers
# Variables of one shell or service. The service gets all others, as a daemon started by `up` does.
OF_A_SHELL = {"_", "PWD", "OLDPWD", "SHLVL", "TERM", "INVOCATION_ID", "JOURNAL_STREAM"}
OF_A_SHELL |= {"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}


def setting_options(command: Command) -> Command:
    """Give a command an option for each of the daemon's settings, which `Settings` declares."""
    decorated: Callable[..., Any] = command
    for item in reversed(SETTINGS):
        kind = Duration(min=0) if item.name.endswith("_seconds") else item.kind
        default = "" if item.default is None else f"{item.default}; "
        text = f"{item.help.rstrip('.')} [{default}{item.variable}]."
        checking = partial(_check, item)
        option = click.option(item.flag, item.name, type=kind, help=text, callback=checking)
        decorated = option(decorated)
    return decorated  # type: ignore[return-value]  # click hands the command on as it was


def _check(item: Setting, _context: click.Context, _option: click.Parameter, value: Any) -> Any:
    try:
        return None if value is None else item.check(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command()
@click.option(
    "--foreground", is_flag=True, help="Run the daemon in this process, for service managers."
)
@click.option(
    "--service/--no-service", default=None,
    help="Run it as a service of this user, by systemd or launchd; or no longer.",
)  # fmt: skip
@json_option
@setting_options
def up(foreground: bool, service: bool | None, output: Output, **settings: Any) -> None:
    """Start the daemon if it is not running, and print the limits that it has found.

    Examples:
      openenv up                                   # start it, if it does not run
      openenv up --port 9000 --max-long-workers 4  # with settings of its own
      openenv up --service                         # start it when you log in
      openenv up --foreground                      # for other service managers
    """
    paths = Paths.from_environment()
    if foreground:
        client = daemon.find(paths, any_version=True)
        if client is not None:
            where = f"pid {client.identity['pid']} at {client.address}"
            text = f"a daemon is already running, {where}"
            raise DaemonNotStarted("already_running", text, "openenv stop")
        command = daemon.server_command(settings)
        os.execv(sys.executable, command)  # noqa: S606  # no shell is what is wanted
    if service is False:
        service_of(paths.home).remove()
        output.result("the service is removed; environments continue")
        return
    if service:
        _start_service(paths, daemon.server_command(settings), output)
    info = daemon.connect(paths, settings=settings).info()
    output.answer(info, *_summary(info))
    output.note(*_not_in_force(settings, info))


def _start_service(paths: Paths, command: list[str], output: Output) -> None:
    """Replace the running daemon, if any, with a service, and wait until it answers."""
    found = service_of(paths.home)
    found.check()
    daemon.stop(paths)
    kept = {k: v for k, v in os.environ.items() if k not in OF_A_SHELL and "\n" not in v}
    found.start(command, {**kept, "OPENENV_HOME": str(paths.home)})
    deadline = time.monotonic() + SERVICE_SECONDS
    while daemon.find(paths) is None:
        if time.monotonic() > deadline:
            raise DaemonNotStarted("service", f"{found.path} was started, and no daemon answers")
        time.sleep(0.1)
    output.note(f"the service is {found.path}; {found.lasts}")


@click.command()
@json_option
def stop(output: Output) -> None:
    """Stop the daemon. Its environments continue, and the next daemon adopts them.

    Before an uninstall, end them by `openenv down --all`.

    Examples:
      openenv stop  # environments continue
    """
    identity = daemon.stop(Paths.from_environment())
    pid = (identity or {}).get("pid")
    text = f"stopped the daemon (pid {pid}); environments continue"
    text = "the daemon is not running" if identity is None else text
    output.answer({"stopped": identity is not None, "pid": pid}, text)


@click.command()
@json_option
def info(output: Output) -> None:
    """Show the daemon's limits, plan, workers and settings.

    Examples:
      openenv info  # limits, plan and workers
    """
    found = connect(output).info()
    output.json(found)
    found["daemon"].pop("pid_started_at", None)  # not a wall-clock time
    for section, value in found.items():
        output.result(click.style(section, bold=True))
        if isinstance(value, dict):
            lines = phrases.describe_json(value)
        else:
            lines = [
                f"  {w['name']}  pid {w['pid']}  {w['label'] or 'idle'}"
                + ("" if w.get("guaranteed", True) else "  (burst)")
                for w in value
            ]
        output.result(*lines or ["  none"])


@click.command()
@json_option
def config(output: Output) -> None:
    """List each setting with its value and the source of the value.

    Options of `up` override variables, and these override `config.toml` in the home, whose keys are
    the listed names. If a daemon runs, its effective values are listed; none is started.

    Examples:
      openenv config  # each setting, and where it comes from
    """
    paths = Paths.from_environment()
    try:
        given = given_settings(paths, flags_of_killed(paths))
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    client = daemon.find(paths, any_version=True)
    pid = None
    values = asdict(Settings(**{name: each.value for name, each in given.items()}))
    origins = {name: each.origin for name, each in given.items()}
    if client is not None:
        pid, values = client.identity["pid"], client.info()["settings"]
        origins = client.identity.get("settings_from", {})
    found = {
        item.name: {"value": values.get(item.name), "from": origins.get(item.name, DEFAULT)}
        for item in SETTINGS
    }
    file = str(paths.config_file)
    output.json({"home": str(paths.home), "file": file, "pid": pid, "settings": found})
    whose = "no daemon runs: the next one has" if pid is None else f"the daemon (pid {pid}) has"
    table = Table("SETTING", "VALUE", "FROM")
    for name, one in found.items():
        table.add_row(name, _shown(one["value"]), str(one["from"]))
    output.draw(f"{plain(file)}; {whose}", "", table)


def _shown(value: Any) -> str:
    return "-" if value in (None, "") else str(value)


def _summary(info: Json) -> list[str]:
    identity, limits = info["daemon"], info["limits"]
    traces = identity.get("traces")
    shown: dict[str, Callable[[float], str]] = {
        "cpus": lambda count: f"{count:g} CPUs",
        "memory_bytes": phrases.size,
        "pids": lambda count: f"{count:,} processes",
    }
    sources = limits.get("sources") or {}
    found = [
        show(limits[name]) + (f" ({sources[name]})" if name in sources else "")
        for name, show in shown.items()
        if limits.get(name)
    ]
    return [
        f"{good('✓')} openenvd {identity['version']} is up at {identity['address']}",
        f"  pid      {identity['pid']}",
        f"  limits   {', '.join(found) or 'none found'}",
        f"  workers  {_plan(info['plan'])}",
        *([f"  traces   {plain(traces)}"] if traces else []),
    ]


def _plan(plan: Json) -> str:
    long, short = plan.get("guaranteed_long", 0), plan.get("guaranteed_short", 0)
    text = f"{long} long and {short} short"
    bursts = long + plan.get("burst_long", 0), short + plan.get("burst_short", 0)
    if bursts != (long, short):
        text += f", bursting to {bursts[0]} and {bursts[1]}"
    if budget := plan.get("budget_bytes"):
        text += f", within {phrases.size(budget)}"
    return text


def _not_in_force(asked: Json, info: Json) -> list[str]:
    in_force = info.get("settings") or {}
    differing = [
        f"{item.flag} {value} (it has {in_force.get(item.name)})"
        for item in SETTINGS
        if (value := asked[item.name]) not in (None, in_force.get(item.name))
        and (item.name, value) != ("port", 0)  # any
    ]
    if not differing:
        return []
    message = f"the daemon was already running, without {', '.join(differing)}"
    return [message, "  openenv stop, then up again"]
