# SPDX-License-Identifier: Apache-2.0
"""`rollouts`: those that run or ended lately, each with its last report."""

from __future__ import annotations

from ....requests_db.records import Request
from ....requests_db.sql import queries
from ....system.text.hidden_values import hide_credentials
from ....system.text.json_lines import Json
from ...api.dependencies import Dependencies
from ...api.routes_rollouts import last_mark, mark_of
from ...api.views import error_view
from ..live_state import LiveState, Turn

KIND = "rollouts"
MOST_ROLLOUTS = 50
_TIMES = ("created_at", "started_at", "finished_at")


class RolloutSource:
    """Reads the requests when one of a rollout changes; reports come with their events."""

    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self._requests: dict[str, Request] = {}
        self._reports: dict[str, Json] = {}

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Put the rollouts that changed, or made progress."""
        for event in turn.events:
            if event.request_id is not None and "rollout" in event.data:
                self._reports[event.request_id] = mark_of(event.at, event.data["rollout"])
        if turn.is_first:
            self._reports.clear()  # events of newer ones may have been dropped
        if self._is_listed_anew(turn):
            await self._list()
        state.replace(KIND, {r.id: self._view(r) for r in self._requests.values()})

    def _is_listed_anew(self, turn: Turn) -> bool:
        return turn.is_first or any(
            event.request is None or event.request.operation == "rollout"
            for event in turn.events
            if event.kind == "request.state"
        )

    async def _list(self) -> None:
        query = queries.list_requests(operation="rollout", limit=MOST_ROLLOUTS)
        found = await self._deps.store.read(query)
        self._requests = {request.id: request for request in found}
        self._reports = {i: r for i, r in self._reports.items() if i in self._requests}
        for request in found:  # one that was cancelled or killed has its reports alone
            if not request.result and request.id not in self._reports:
                self._reports[request.id] = await last_mark(self._deps.store, request.id) or {}

    def _view(self, request: Request) -> Json:
        payload = request.payload
        if request.finished_at and request.result:
            report = mark_of(request.finished_at, request.result)
        else:
            report = self._reports.get(request.id) or {}
        return {
            "id": request.id,
            "state": request.state,
            "environments": hide_credentials([payload["name"], *payload.get("more_names", [])]),
            "policy": hide_credentials(payload.get("policy")),
            "out": payload["out"],
            "episodes": payload.get("episodes"),
            **{name: getattr(request, name) for name in _TIMES},
            "error": error_view(request.error, request.payload),
            "report": report,
        }
