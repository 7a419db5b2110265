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
from ...operations import registry
from ...requests_db.records import Environment, Json, Replica
from ...requests_db.sql import queries
from ...system.access_tokens import with_token
from ..dispatch.submission import Submission
from ..errors import NotFound
from .dependencies import Dependencies, Injected
from .routes_requests import TAIL, TEXT
from .schemas import Rollback
from .streams import text_stream, until_settled
from .views import environment_view, generation_view, request_view

router = APIRouter()


@router.get("/environments")
async def list_environments(deps: Injected, include_stopped: bool = False) -> Json:
    """Every environment that is wanted, or that failed."""
    return {"environments": await environment_views(deps, include_stopped=include_stopped)}


@router.get("/environments/{name}")
async def get_environment(name: str, deps: Injected) -> Json:
    """One environment, with its generations: the newest first."""
    await deps.reconciler.queue.wait(name)
    environment = await deps.submitter.environment(name)
    replicas = await deps.store.read(queries.replicas(name))
    history = await deps.store.read(queries.generations(name))
    view = environment_view(environment, replicas, deps.reconciler.replicas.live)
    return {"environment": view | {"generations": [generation_view(each) for each in history]}}


@router.get("/environments/{name}/base_url")
async def base_url(name: str, deps: Injected) -> Json:
    """What clients connect to: the address, with the token if the environment wants one."""
    await deps.reconciler.queue.wait(name)  # an update that succeeded takes over a moment later
    environment = await deps.submitter.environment(name)
    found = await asyncio.to_thread(run_files.that_serves, deps.paths.runs, name)
    token = None if found is None else found.token
    address = environment.address if found is None else found.address
    return {
        "address": address,
        "token": token,
        "base_url": None if address is None else with_token(address, token),
    }


@router.post("/environments/{name}/rollback", status_code=202)
async def rollback(name: str, body: Rollback, deps: Injected) -> Json:
    """Launch an earlier generation again: an update to what it was."""
    launch = Submission(
        operation=registry.by_name("launch"),
        payload={"drain_timeout_seconds": body.drain_timeout_seconds},
        idempotency_key=body.idempotency_key,
        priority=body.priority,
        timeout_seconds=body.timeout_seconds,
        retry_oom=body.retry_oom,
    )
    await until_settled(deps, name)
    request = await deps.submitter.rollback(name, body.to, launch)
    return {"request_id": request.id, "request": request_view(request)}


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
    path = log_of(deps, environment, replica)
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


def log_of(deps: Dependencies, environment: Environment, replica: str | None) -> Path:
    """The log of the named replica, or of the youngest.

    Raises:
        NotFound: Nothing was printed yet.
    """
    folder = deps.paths.environment_logs / environment.name
    logs = oldest_first(folder.glob("*.log"), environment.request_id)
    if replica is not None:
        logs = [path for path in logs if path.stem == replica or path.stem.startswith(replica)]
    if not logs:
        raise NotFound(
            f"{environment.name} has no log yet",
            f"its launch has one: openenv logs {environment.request_id}",
        )
    return logs[-1]


def oldest_first(paths: Iterable[Path], launch_id: str | None) -> list[Path]:
    """By when they were last written, but those of the latest launch last: a clock may step.

    One that is collected meanwhile is left out.
    """
    written: list[tuple[bool, int, Path]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            is_latest = path.stem.rpartition("-")[2] == launch_id
            written.append((is_latest, path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(written)]
