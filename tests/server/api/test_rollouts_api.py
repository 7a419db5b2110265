# SPDX-License-Identifier: Apache-2.0
"""`/v1/rollouts`: what a rollout of this daemon has written, and how it went."""

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from openenvd.client import daemon
from openenvd.client.api import DaemonClient
from openenvd.client.errors import ApiRefused
from openenvd.client.following import run, wait
from openenvd.client.http import HttpClient
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.records import NewRequest, Outcome, Submitted
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.settings import Paths
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.api.dependencies import Dependencies
from openenvd.server.api.routes_rollouts import MAX_MARKS, history
from openenvd.server.dashboard.live_state import LiveState, Turn
from openenvd.server.dashboard.requests import RolloutSource
from openenvd.system.text.json_lines import Json


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonClient]:
    paths = Paths(tmp_path_factory.mktemp("rollouts") / "home")
    yield daemon.connect(paths, settings={"port": 0})
    daemon.stop(paths)


@pytest.fixture
def api(client: DaemonClient) -> HttpClient:
    return client._http


def rollout_into(client: DaemonClient, folder: Path) -> Json:
    """A rollout with nobody to play with: its folder is all there is of it."""
    payload = {"name": "http://127.0.0.1:9", "out": str(folder), "episodes": 1, "retries": 0}
    return wait(lambda: client, client.submit("rollout", payload)["id"])


def test_only_folders_of_rollouts_are_read(client: DaemonClient, api: HttpClient) -> None:
    other = run(client, "check", {})
    for rest in ("", "/summary", "/episodes", "/episodes/000000/steps"):
        with pytest.raises(ApiRefused, match="is no rollout"):
            api.request("GET", f"/v1/rollouts/{other['id']}{rest}")


def test_a_folder_without_rollouts_is_told_apart(
    client: DaemonClient, api: HttpClient, tmp_path: Path
) -> None:
    request = rollout_into(client, tmp_path / "out")
    shutil.rmtree(tmp_path / "out", ignore_errors=True)  # where it came to be made at all
    with pytest.raises(ApiRefused, match="has no rollouts") as caught:
        api.request("GET", f"/v1/rollouts/{request['id']}/summary")
    assert caught.value.status == 404


@pytest.fixture
def request_id(dispatch: WriteConnection) -> str:
    new = NewRequest("rollout", Schedule.LONG, {"name": "echo", "out": "/out"})
    submitted = dispatch.write(submitting.submit, new, now=0.0)
    assert isinstance(submitted, Submitted)
    return submitted.request.id


@pytest.mark.parametrize("count", [1, MAX_MARKS, 2600])
async def test_a_long_history_is_thinned_out_evenly(
    store: AsyncStore, dispatch: WriteConnection, request_id: str, count: int
) -> None:
    dispatch.write(dispatching.claim, Schedule.LONG, 1, 1.0)
    reports = [
        (request_id, {"rollout": {"steps": at, "lag": {"p99_seconds": 0.5}}}, float(at))
        for at in range(count)
    ]
    dispatch.write(dispatching.record, progress=reports)
    marks = await history(store, request_id)
    steps = [mark["steps"] for mark in marks]
    assert (steps[0], steps[-1]) == (0, count - 1)
    assert min(count, MAX_MARKS // 2) <= len(steps) <= MAX_MARKS + 1
    assert len({b - a for a, b in pairwise(steps[:-1])}) <= 1
    assert marks[0]["lag_p99_seconds"] == 0.5


@pytest.mark.parametrize("state", list(RequestState))
async def test_a_rollout_that_has_no_result_is_shown_as_it_last_reported(
    store: AsyncStore, dispatch: WriteConnection, request_id: str, state: RequestState
) -> None:
    """Also one that was cancelled or killed, and whose events the dashboard has missed."""
    shown, deps = LiveState(), cast("Dependencies", SimpleNamespace(store=store))
    source = RolloutSource(deps)
    await source.refresh(shown, Turn(1.0, is_first=True))
    if state is not RequestState.PENDING:
        dispatch.write(dispatching.claim, Schedule.LONG, 1, 1.0)
        progress = [(request_id, {"rollout": {"episodes": 3}}, 2.0)]
        dispatch.write(dispatching.record, progress=progress)
    if state in (RequestState.SUCCEEDED, RequestState.FAILED, RequestState.CANCELLED):
        result = {"episodes": 4} if state is RequestState.SUCCEEDED else None
        dispatch.write(dispatching.record, outcomes=[Outcome(request_id, state, 3.0, result)])
    await source.refresh(shown, Turn(4.0, is_first=True))
    shown.flush()
    with shown.viewer() as viewer:
        [snapshot] = shown.messages_for(viewer)
    report = json.loads(snapshot.raw_data or "")["put"]["rollouts"][request_id]["report"]
    episodes = {RequestState.PENDING: None, RequestState.SUCCEEDED: 4}.get(state, 3)
    assert report.get("episodes") == episodes
