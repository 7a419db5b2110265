# SPDX-License-Identifier: Apache-2.0
"""`/v1/rollouts`: the rollouts that this daemon knows, their progress, and their episodes.

Reads only the folders of the daemon's own requests, and writes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Request
from ...system.text.json_lines import Json
from ..errors import NotFound
from .dependencies import Dependencies, Injected
from .streams import event_pages
from .views import request_view

MAX_LIST = 200
MAX_MARKS = 240  # rows of a history: no line of a chart has more points
FIGURES = (
    *("episodes", "failed", "steps", "mean_reward", "retries", "unit", "wanted", "earlier"),
    *("there", "failures", "seconds", "damaged"),
    *("truncated", "truncated_mean_reward", "odd_rewards"),
)

router = APIRouter()
From = Annotated[int, Query(ge=0)]


@router.get("/rollouts/{request_id}")
async def get_rollout(request_id: str, deps: Injected) -> Json:
    """Return one rollout, and its progress so far: one row of `history` per some seconds."""
    request = await _rollout(deps, request_id)
    return {"rollout": request_view(request), "history": await history(deps.store, request.id)}


@router.get("/rollouts/{request_id}/summary")
async def summary(request_id: str, deps: Injected) -> Response:
    """Return counts of the finished episodes, and rewards as a histogram and over time."""
    return await _ask(deps, request_id, show="summary")


@router.get("/rollouts/{request_id}/episodes")
async def episodes(
    request_id: str,
    deps: Injected,
    offset: From = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 50,
) -> Response:
    """Finished episodes, in the order in which they were written."""
    return await _ask(deps, request_id, show="episodes", offset=offset, limit=limit)


@router.get("/rollouts/{request_id}/episodes/{episode_id}/steps")
async def steps(request_id: str, episode_id: str, deps: Injected, first: From = 0) -> Response:
    """Steps of one episode, with images apart; `next` is where the following answer begins."""
    return await _ask(deps, request_id, show="steps", episode=episode_id, first=first)


async def _ask(deps: Dependencies, request_id: str, **question: Any) -> Response:
    request = await _rollout(deps, request_id)
    answer = await deps.replay.ask({"folder": request.payload["out"], **question})
    return Response(answer, media_type="application/json")


async def _rollout(deps: Dependencies, request_id: str) -> Request:
    request = await deps.submitter.find(request_id)
    if request.operation != "rollout":
        raise NotFound(f"{request.id} is no rollout", f"it is a {request.operation}")
    return request


async def history(store: AsyncStore, request_id: str) -> list[Json]:
    """Return the rollout's reports, thinned out evenly if there are many, but with the last."""
    marks: list[Json] = []
    last: Json | None = None
    number, every = 0, 1
    async for page in event_pages(store, 0, request_id):
        for event in (event for event in page if "rollout" in event.data):
            last = mark_of(event.at, event.data["rollout"])
            if number % every == 0:
                marks.append(last)
            number += 1
        while len(marks) > MAX_MARKS:
            marks, every = marks[::2], every * 2
    return marks if last is None or last is marks[-1] else [*marks, last]


def mark_of(at: float, report: Json) -> Json:
    """The figures of one report of a rollout, as of a time."""
    lag = report.get("lag") or {}
    return {
        "at": at,
        **{name: report.get(name) for name in FIGURES},
        "lag_p99_seconds": lag.get("p99_seconds"),
        "lag_max_seconds": lag.get("max_seconds"),
    }
