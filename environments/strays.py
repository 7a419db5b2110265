# SPDX-License-Identifier: Apache-2.0
"""Strays: instances and replicas of this home that run without a record.

    on an engine    an instance without a run file; the agent keeps a list of these
    any provider    a replica whose launch is in no table, if another launch has its environment's
                    name by now, or if its run file was set aside

Strays are shown, and stopped only on request: the loss of a table must not stop running replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ..schema.errors import EngineFailed
from ..schema.layout import Layout
from ..schema.spec import GRACE_SECONDS
from ..system.text.json_lines import Json
from . import run_files
from .agent_client import ADDRESS_FILE_NAME, STRAYS_FILE_NAME, EngineAddress, ask_agent
from .shim.files import read_json


def engines_used(layout: Layout) -> list[EngineAddress]:
    """Return the engines that this home has used, by reading one file for each."""
    found = []
    for path in layout.engines.glob(f"*/{ADDRESS_FILE_NAME}"):
        with suppress(ValueError, LookupError, TypeError):
            found.append(EngineAddress.from_json(read_json(path) or {}))
    return sorted(found, key=lambda at: at.key)


def strays_seen(layout: Layout) -> list[Json]:
    """Return the strays on engines that agents last listed, by reading one file for each."""
    found = {
        (at.engine, stray["id"]): {"provider": at.engine, **stray}
        for at in engines_used(layout)  # two addresses may lead to the same engine
        for stray in _read(layout, at)
    }
    return list(found.values())


def stray_of(found: run_files.RunFile | run_files.SetAside) -> Json:
    """Return the JSON that is shown of a replica that is in no table."""
    return {
        "provider": run_files.LOCAL if isinstance(found, run_files.SetAside) else found.provider,
        "id": found.replica_id,
        "environment": found.environment,
        "replica": found.replica_id,
        "generation": found.request_id,
        "problem": found.problem if isinstance(found, run_files.SetAside) else None,
    }


def look_again(layout: Layout) -> Iterator[tuple[str, str]]:
    """Make each agent list its strays; yield the engines where that fails, and why. Blocks."""
    for at in engines_used(layout):
        try:
            ask_agent(layout, at, "list")
        except OSError as exc:
            yield str(at), str(exc)


def stop_stray(layout: Layout, stray: Json) -> None:
    """Stop a stray, by the `provider` and `id` that were shown, and remove all of it. Blocks.

    Raises `EngineFailed` if its engine does not answer, or it is not a stray.
    """
    found = run_files.look_at(layout.run_dir(stray["id"]))
    if isinstance(found, run_files.SetAside):
        run_files.stop_set_aside(found)
    elif found is not None:
        run_files.stop_replicas([found.run_dir])
    if found is not None or stray["provider"] == run_files.LOCAL:
        return  # a local one without a folder is gone
    engines = [at for at in engines_used(layout) if at.engine == stray["provider"]]
    if not engines:
        raise EngineFailed(f"this home has used no engine {stray['provider']!r}")
    with_it = [at for at in engines if any(s["id"] == stray["id"] for s in _read(layout, at))]
    for at in with_it or engines:
        ask_agent(layout, at, "stop", instance=stray["id"], grace_seconds=GRACE_SECONDS)


def _read(layout: Layout, at: EngineAddress) -> list[Json]:
    strays = (read_json(layout.engines / at.key / STRAYS_FILE_NAME) or {}).get("strays")
    return strays if isinstance(strays, list) else []
