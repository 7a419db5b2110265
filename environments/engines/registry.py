# SPDX-License-Identifier: Apache-2.0
"""The installed engines: the entry points of the group `openenvd.engines`, by name.

Each entry point names an `EngineEntry` (`base.py`) in a module that imports little, since daemon
and workers import it. `load` imports the engine itself, in the agent's process and in that of a
check: `python -m openenvd.environments.engines.registry [NAME…]` prints whether engines work here,
one line of JSON for each.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata

from ...schema.errors import EngineFailed, UnknownProvider
from ...schema.spec import EnvironmentSpec
from ...system.files.installation import install_command
from ...system.text.json_lines import Json
from ..agent_client import EngineAddress
from ..run_files import LOCAL
from .base import Check, Engine, EngineEntry, EngineError, EngineRefused, Preparation

GROUP = "openenvd.engines"
CHECK_SECONDS = 30.0  # for all engines; one that hangs does not work
_LOCAL_ENTRY = EngineEntry("", Preparation.PROGRAM)  # for this machine, which has no engine


def names() -> list[str]:
    """Return the names of all engines, including those of other packages."""
    return sorted(metadata.entry_points(group=GROUP).names)


@functools.cache  # no failure is cached: the engine may be installed later
def entry_of(name: str) -> EngineEntry:
    """Return the entry of an engine, or of this machine.

    Our own metadata are read first: those of all packages take a hundred times as long.

    Raises:
        EngineRefused: There is no such engine, or its package cannot be imported.
    """
    if name == LOCAL:
        return _LOCAL_ENTRY
    try:
        ours = metadata.distribution("openenvd").entry_points.select(group=GROUP, name=name)
        found = ours or metadata.entry_points(group=GROUP, name=name)
        entry = next(iter(found)).load() if found else None
    except (ImportError, AttributeError) as exc:
        raise EngineRefused(f"the engine {name} cannot be imported: {exc}") from exc
    if entry is None:
        there_is = ", ".join((LOCAL, *names()))
        raise EngineRefused(f"there is no provider {name!r}", f"use one of: {there_is}")
    if not isinstance(entry, EngineEntry):
        raise EngineRefused(f"the entry point {name!r} of {GROUP} names no EngineEntry")
    return entry


def address_here(name: str) -> EngineAddress:
    """Return the engine that our variables lead to; those of an address lead to that address.

    Raises `EngineFailed` if they lead nowhere, `EngineRefused` if there is no such engine.
    """
    return EngineAddress.of(name, entry_of(name).address(os.environ))


def load(name: str) -> Engine:
    """Import an engine and make it; raises `EngineRefused`: there is none, or no library of it."""
    entry = entry_of(name)
    module, _, cls = entry.location.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as exc:
        hint = None if entry.extra is None else install_command(entry.extra)
        raise EngineRefused(f"the library of {name} cannot be imported: {exc}", hint) from exc
    engine: Engine = getattr(found, cls)()
    return engine


def check_provider(name: str) -> str:
    """Return the name of a provider if there is one; raises `UnknownProvider` otherwise."""
    try:
        entry_of(name)
    except EngineRefused as exc:
        raise UnknownProvider(exc.message, exc.hint) from exc
    return name


def check_options(spec: EnvironmentSpec) -> None:
    """Refuse options that an engine would refuse, before it is used; raises `ValueError`."""
    try:
        entry = entry_of(spec.provider)
        if entry.check_options is not None:
            entry.check_options(spec.options_of_engine, sandbox=spec.sandbox)
    except EngineRefused as exc:
        raise ValueError(f"engine_options: {exc.message}; {exc.hint}") from exc


def needs_gateway(spec: EnvironmentSpec) -> bool:
    """Return whether an environment has no lasting address but the gateway's.

    Replicas of this machine share a listening socket; those of an engine have no common address.
    """
    most = max(spec.replicas, spec.max_replicas or 1)
    return spec.provider != LOCAL and (most > 1 or entry_of(spec.provider).moves)


def runs_elsewhere(provider: str | None) -> bool:
    """Return whether a provider's replicas use other machines' memory; None is this machine."""
    try:
        return entry_of(provider or LOCAL).has_own_addresses
    except EngineRefused:  # its package was uninstalled
        return False


def check_engines(*engines: str) -> dict[str, Json]:
    """Return the `Check` of these engines, or of all, made in a process of its own. Blocks."""
    asked = engines or names()
    command = [sys.executable, "-P", "-m", __name__, *asked]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS, check=False)
        answers = done.stdout
        problem = f"asking it ended with code {done.returncode}"
    except subprocess.TimeoutExpired as exc:
        answers = exc.stdout or b""
        problem = f"does not answer within {CHECK_SECONDS:g} s"
    found: dict[str, Json] = {}
    for line in answers.splitlines():
        found |= json.loads(line)
    return {name: found.get(name) or asdict(Check(problem=problem)) for name in asked}


def check_engine(name: str) -> Check:
    """Return whether one engine works; its library is imported here."""
    try:
        os.environ.update(address_here(name).variables)
        return load(name).check()
    except (EngineError, EngineFailed) as exc:
        return Check(problem=exc.message, remedy=exc.hint)
    except Exception as exc:  # of another package's engine
        return Check(problem=f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        print(json.dumps({name: asdict(check_engine(name))}), flush=True)  # noqa: T201  its answer
