# SPDX-License-Identifier: Apache-2.0
"""`/v1/environments`: what runs, where, how full it is, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from ...environments import run_files
from ...requests_db.records import Environment, Json, Replica
from ...requests_db.sql import queries
from ...system.access_tokens import with_token
from ..errors import NotFound
from .dependencies import Dependencies, Injected
from .routes_requests import TAIL, TEXT
from .streams import text_stream
from .views import environment_view

router = APIRouter()


@router.get("/environments")
async def list_environments(deps: Injected, include_stopped: bool = False) -> Json:
    """Every environment that is wanted, or that failed."""
    return {"environments": await environment_views(deps, include_stopped=include_stopped)}


@router.get("/environments/{name}")
async def get_environment(name: str, deps: Injected) -> Json:
    """One environment."""
    await deps.reconciler.queue.wait(name)
    environment = await deps.submitter.environment(name)
    replicas = await deps.store.read(queries.replicas(name))
    return {"environment": environment_view(environment, replicas, deps.reconciler.replicas.live)}


@router.get("/environments/{name}/base_url")
async def base_url(name: str, deps: Injected) -> Json:
    """What clients connect to: the address, with the token if the environment wants one."""
    environment = await deps.submitter.environment(name)
    found = await asyncio.to_thread(run_files.of_environment, deps.paths.runs, name)
    token = found[0].token if found else None
    # The launch's own word for it: the environment's row is written a moment later.
    address = found[0].address if found else environment.address
    return {
        "address": address,
        "token": token,
        "base_url": None if address is None else with_token(address, token),
    }


@router.get("/environments/{name}/logs")
async def environment_logs(
    name: str,
    deps: Injected,
    tail: Annotated[int | None, TAIL] = None,
    follow: bool = False,
    replica: str | None = None,
) -> StreamingResponse:
    """What a replica prints, as text: the named one, or the youngest."""
    environment = await deps.submitter.environment(name)
    path = _log_of(deps, environment, replica)
    until = deps.stopping.wait() if follow else None
    return StreamingResponse(text_stream(deps, path, tail=tail, until=until), media_type=TEXT)


async def environment_views(deps: Dependencies, *, include_stopped: bool = False) -> list[Json]:
    """All of them, by name."""
    await deps.reconciler.queue.wait()
    found = await deps.store.read(queries.environments(include_stopped=include_stopped))
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for replica in await deps.store.read(queries.replicas()):
        replicas[replica.environment].append(replica)
    live = deps.reconciler.replicas.live
    return [environment_view(each, replicas[each.name], live) for each in found]


def _log_of(deps: Dependencies, environment: Environment, replica: str | None) -> Path:
    folder = deps.paths.environment_logs / environment.name
    logs = oldest_first(folder.glob("*.log"))
    if replica is not None:
        logs = [path for path in logs if path.stem == replica or path.stem.startswith(replica)]
    if not logs:
        raise NotFound(
            f"{environment.name} has no log yet",
            f"its launch has one: openenv logs {environment.request_id}",
        )
    return logs[-1]


def oldest_first(paths: Iterable[Path]) -> list[Path]:
    """By when they were last written; one that is collected meanwhile is left out."""
    written: list[tuple[int, Path]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            written.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(written)]
