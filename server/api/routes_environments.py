# SPDX-License-Identifier: Apache-2.0
"""`/v1/environments`: what runs, where, how full it is, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from ...environments import run_files
from ...requests_db.records import Environment
from ...requests_db.sql import queries
from ...requests_db.sql.queries import Query
from ...schema.states import EnvironmentState, ReplicaState
from ...system.net.access import with_token
from ...system.text.json_lines import Json
from ..errors import ApiError, NotFound
from .dependencies import Dependencies, Injected
from .streams import SINCE, TAIL, TEXT, text_stream
from .views import environment_view, error_view, generation_view

LOG_HEADER = "OpenEnvd-Log"  # of an answer: the id of the replica whose log it is
POLL_INTERVAL_SECONDS = 1.0  # between two checks which replica's log to show
_SERVING = (ReplicaState.READY, ReplicaState.ASLEEP)  # a client that connects gets a session

router = APIRouter()


@router.get("/environments")
async def list_environments(deps: Injected) -> Json:
    """Return every environment that should run or has failed."""
    return {"environments": await environment_views(deps, queries.NOT_STOPPED)}


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
    """Return what clients connect to: the address, with the token if the environment wants one.

    It is the address that `GET /environments/NAME` shows. If no replica serves, it is that of the
    last one that did; a replica on an engine may come back at another.
    """
    await deps.reconciler.queue.wait(name)  # an update that succeeded takes over a moment later
    environment = await deps.submitter.environment(name)
    if (address := environment.address) is None:
        error = error_view(environment.error, environment.spec)
        why = f"{environment.state}: {error['message']}" if error else environment.state
        raise NotFound(f"{name} has no address, it is {why}", f"openenv status {name}")
    found = deps.reconciler.replicas.watches.that_serves(name)
    if found is None:
        found = await asyncio.to_thread(run_files.that_serves, deps.paths.runs, name)
    token = None if found is None else found.token
    states = await deps.store.read(queries.replica_states(name))
    return {
        "is_served": any(state in _SERVING for state in states.values()),
        "address": address,
        "token": token,
        "base_url": with_token(address, token),
    }


@router.get("/environments/{name}/logs")
async def environment_logs(
    name: str,
    deps: Injected,
    tail: Annotated[int | None, TAIL] = None,
    since_seconds: Annotated[float | None, SINCE] = None,
    follow: bool = False,
    replica: str | None = None,
    after: str | None = None,
) -> StreamingResponse:
    """Return what a replica prints, as text: the named one, or the youngest.

    A followed log ends when the environment is down, and, unless the replica was named, when others
    serve instead of it; `after` is the replica whose log was followed before.
    """
    environment = await deps.submitter.environment(name)
    known = await deps.store.read(queries.replicas(name))
    path = log_of(deps, environment, replica, [each.id for each in known])
    until = None
    if follow:
        if replica is None:
            path = await shown_log(deps, environment, f"{after}.log") or path
        if path.stem == after:
            tail = 0  # it was sent
        until = _log_ends(deps, name, path, is_named=replica is not None)
    text = text_stream(deps, path, tail=tail, since=since_seconds, until=until)
    return StreamingResponse(text, media_type=TEXT, headers={LOG_HEADER: path.stem})


async def environment_views(deps: Dependencies, query: Query[list[Environment]]) -> list[Json]:
    """Return the views of the environments that a query finds."""
    await deps.reconciler.queue.wait()
    found = await deps.store.read(query)
    replicas = await deps.store.read(queries.REPLICAS_OF_EACH)
    live = deps.reconciler.replicas.live
    return [environment_view(each, replicas[each.name], live) for each in found]


def log_of(
    deps: Dependencies, environment: Environment, replica: str | None, known: Iterable[str]
) -> Path:
    """Return the log of the named replica, or of the youngest; `known` are all replicas' ids.

    Raises:
        NotFound: Nothing was printed yet, or there is no such replica.
    """
    logs = _logs(deps, environment)
    if replica is not None:
        ids = sorted({*known, *(path.stem for path in logs)})
        named = [each for each in ids if f"{each}-".startswith(f"{replica}-")]
        if not named:
            raise NotFound(
                f"{environment.name} has no replica {replica!r}",
                f"its replicas are {', '.join(ids)}" if ids else "it has none",
            )
        logs = [path for path in logs if path.stem in named]
    if not logs:
        raise NotFound(
            f"{environment.name} has no log yet",
            f"its launch has one: openenv logs {environment.request_id}",
        )
    return logs[-1]


async def shown_log(deps: Dependencies, environment: Environment, shown: str) -> Path | None:
    """Return the `shown` log while its replica serves, else that of the youngest that does."""
    replicas = await deps.store.read(queries.replicas(environment.name))
    serving = {each.id for each in replicas if each.state is not ReplicaState.DRAINING}
    return log_to_show(_logs(deps, environment), serving, shown)


def _logs(deps: Dependencies, environment: Environment) -> list[Path]:
    folder = deps.paths.environment_logs / environment.name
    return oldest_first(folder.glob("*.log"), environment.request_id)


def log_to_show(logs: Sequence[Path], serving: Collection[str], shown: str) -> Path | None:
    """Choose one of these logs, the oldest first; `serving` are the replicas that do not drain."""
    return max(
        reversed(logs), key=lambda log: (log.stem in serving, log.name == shown), default=None
    )


async def _log_ends(deps: Dependencies, name: str, path: Path, *, is_named: bool) -> None:
    """Return when the log is not followed any more, or the daemon ends."""
    while not deps.stopping.is_set():
        try:
            environment = await deps.submitter.environment(name)
        except ApiError:
            return
        if environment.state is EnvironmentState.STOPPED:
            return
        if not is_named and await shown_log(deps, environment, path.name) != path:
            return
        with anyio.move_on_after(POLL_INTERVAL_SECONDS):
            await deps.stopping.wait()


def oldest_first(paths: Iterable[Path], launch_id: str | None) -> list[Path]:
    """Sort the logs that exist by their last write; the latest launch's come last."""
    written: list[tuple[bool, int, Path]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            is_latest = path.stem.rpartition("-")[2] == launch_id
            written.append((is_latest, path.stat().st_mtime_ns, path))
    return [path for *_, path in sorted(written)]
