# SPDX-License-Identifier: Apache-2.0
"""`openenv config`: every setting of the daemon, and where its value was given."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..client import daemon
from ..server.settings import SETTINGS, Given, Paths, Settings, flags_of_killed, given_settings
from ..system.terminal_text import plain
from . import exit_codes
from .drawing import Table
from .options import json_option
from .output import Output

DEFAULT = "default"


@click.command()
@json_option
def config(as_json: bool) -> int:
    """List every setting with its value, and where it comes from.

    Options of `up` count before variables, and those before `config.toml` in the home, whose keys
    are the names that are listed. Of a daemon that runs, it is what is in force; no daemon is
    started for it.
    """
    output = Output(as_json=as_json)
    paths = Paths.from_environment()
    try:
        given = given_settings(paths, flags_of_killed(paths))
    except ValueError as exc:
        raise click.ClickException(str(exc)) from exc
    client = daemon.find(paths, any_version=True)
    values = asdict(Settings(**{name: each.value for name, each in given.items()}))
    origins = {name: each.origin for name, each in given.items()}
    pid, waiting = None, {}
    if client is not None:
        pid, next_ones = client.identity["pid"], values
        values = client.info()["settings"]
        origins = client.identity.get("settings_from", {})
        left = [n for n, origin in origins.items() if origin == paths.config_file.name]
        removed = {
            n: Given(next_ones[n], DEFAULT) for n in left if n in next_ones and n not in given
        }
        waiting = {
            name: one
            for name, one in (given | removed).items()
            if one.value != values.get(name) and not _is_any_port(name, one, origins)
        }
    found = {
        item.name: {"value": values.get(item.name), "from": origins.get(item.name, DEFAULT)}
        for item in SETTINGS
    }
    output.json(
        {"home": str(paths.home), "file": str(paths.config_file), "pid": pid, "settings": found}
    )
    whose = "no daemon runs: the next one has" if pid is None else f"the daemon (pid {pid}) has"
    output.draw(f"{plain(str(paths.config_file))}; {whose}", "", _table(found))
    for line in _not_in_force(waiting):
        output.note(line)
    return exit_codes.OK


def _is_any_port(name: str, one: Given, origins: dict[str, str]) -> bool:
    """Whether it is the port of a daemon that was to pick one: it tells which it has."""
    return name == "port" and one.value == 0 and origins.get(name) == one.origin


def _shown(value: Any) -> str:
    return "-" if value in (None, "") else str(value)


def _table(found: dict[str, dict[str, Any]]) -> Table:
    table = Table("SETTING", "VALUE", "FROM")
    for name, one in found.items():
        table.add_row(name, _shown(one["value"]), one["from"])
    return table


def _not_in_force(given: dict[str, Given]) -> list[str]:
    """What was given, or is given no more, since the daemon was started."""
    if not given:
        return []
    told = ", ".join(f"{name} = {_shown(one.value)} ({one.origin})" for name, one in given.items())
    return [f"not in force before the daemon is started again: {told}", "  openenv stop, then up"]
