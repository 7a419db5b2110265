# SPDX-License-Identifier: Apache-2.0
"""The engines that are installed: the entry points of the group `openenvd.engines`, by name.

Each names an `EngineEntry` (`base.py`), in a module that imports little: the daemon and every
worker that starts a replica on that engine import it. `load` imports the engine itself, in the
agent's process alone.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from importlib import metadata

from ...system.files.installation import install_command
from ..agent_client import EngineAddress
from ..run_files import LOCAL
from .base import Engine, EngineEntry, EngineRefused, Preparation

GROUP = "openenvd.engines"
_LOCAL_ENTRY = EngineEntry("", Preparation.PROGRAM)  # this machine is no engine


def names() -> list[str]:
    """Return the names of all engines, those of other packages included."""
    return sorted(metadata.entry_points(group=GROUP).names)


@functools.cache  # a failure is not kept: the engine may be installed meanwhile
def entry_of(name: str) -> EngineEntry:
    """Return what distinguishes an engine, or this machine.

    Our own metadata are read first: those of all installed packages take a hundred times as long.

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


def address_here(name: str, environ: Mapping[str, str] = os.environ) -> EngineAddress:
    """Return the engine that these variables lead to. Those of an address lead to itself.

    Raises:
        EngineFailed: They lead nowhere.
        EngineRefused: There is no such engine.
    """
    return EngineAddress.of(name, entry_of(name).address(environ))


def load(name: str) -> Engine:
    """Import an engine and make it.

    Raises:
        EngineRefused: There is no such engine, or its library is not installed.
    """
    entry = entry_of(name)
    module, _, cls = entry.location.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as exc:
        hint = None if entry.extra is None else install_command(entry.extra)
        raise EngineRefused(f"the library of {name} cannot be imported: {exc}", hint) from exc
    engine: Engine = getattr(found, cls)()
    return engine
