# SPDX-License-Identifier: Apache-2.0
"""What viewers of the dashboard are sent: a snapshot, then what has changed, within bounds."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openenvd.server.dashboard.environments import REPORT_SECONDS, SILENT_SECONDS, StepRate
from openenvd.server.dashboard.live_state import MAX_WAITING_CHARACTERS, LiveState, Viewer
from openenvd.server.dashboard.memory import MemoryHistory


def sent(state: LiveState, viewer: Viewer) -> list[tuple[str, dict[str, Any]]]:
    return [(str(m.event), json.loads(m.raw_data or "")) for m in state.messages_for(viewer)]


@pytest.fixture
async def state() -> LiveState:
    state = LiveState()
    state.put("workers", "long-1", {"pid": 1})
    return state


async def test_nothing_is_sent_before_a_flush_and_who_left_is_forgotten(state: LiveState) -> None:
    with state.viewer() as viewer:
        assert sent(state, viewer) == []
        state.flush()
        assert viewer.wake.is_set()
        [(name, data)] = sent(state, viewer)
        assert name == "snapshot"
        assert data["put"] == {"workers": {"long-1": {"pid": 1}}}
    with state.viewer(), state.viewer():
        pass
    looking = bool(state.viewers)
    assert not looking


async def test_a_change_has_the_entities_that_have_changed_alone(state: LiveState) -> None:
    state.put("workers", "long-2", {"pid": 2})
    state.flush()
    with state.viewer() as viewer:
        sent(state, viewer)
        state.replace("workers", {"long-1": {"pid": 1}, "long-3": {"pid": 3}})
        state.flush()
        [(name, data)] = sent(state, viewer)
    assert name == "change"
    assert data["put"] == {"workers": {"long-3": {"pid": 3}}}
    assert data["drop"] == {"workers": ["long-2"]}


async def test_what_is_put_as_it_was_is_no_change_and_what_is_back_is_not_dropped(
    state: LiveState,
) -> None:
    state.flush()
    with state.viewer() as viewer:
        sent(state, viewer)
        viewer.wake.clear()
        state.put("workers", "long-1", {"pid": 1})
        state.flush()
        assert not viewer.wake.is_set()
        assert sent(state, viewer) == []
        state.replace("workers", {})
        state.put("workers", "long-1", {"pid": 5})
        state.flush()
        [(_, data)] = sent(state, viewer)
    assert data == {"at": data["at"], "put": {"workers": {"long-1": {"pid": 5}}}, "drop": {}}


async def test_all_viewers_are_sent_the_same_bytes(state: LiveState) -> None:
    """Each change is rendered once, however many look."""
    state.flush()
    with state.viewer() as first, state.viewer() as second:
        sent(state, first)
        sent(state, second)
        state.put("workers", "long-1", {"pid": 5})
        state.flush()
        assert state.messages_for(first)[0] is state.messages_for(second)[0]


async def test_a_viewer_that_does_not_read_gets_a_snapshot_and_costs_no_more(
    state: LiveState,
) -> None:
    state.flush()
    with state.viewer() as slow, state.viewer() as quick:
        sent(state, slow)
        sent(state, quick)
        for number in range(2 * MAX_WAITING_CHARACTERS // 100_000):
            state.put("requests", "one", {"number": number, "text": "x" * 100_000})
            state.flush()
            assert [name for name, _ in sent(state, quick)] == ["change"]
        waiting = sum(len(message.raw_data or "") for message in slow._waiting)
        assert waiting <= MAX_WAITING_CHARACTERS
        [(name, data)] = sent(state, slow)
        assert name == "snapshot"
        assert data["put"]["requests"]["one"]["number"] == number
        state.put("workers", "long-1", {"pid": 5})
        state.flush()
        assert [name for name, _ in sent(state, slow)] == ["change"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(0, 100)], None),
        ([(0, 100), (5, 200)], 20.0),
        ([(0, 100), (5, 200), (6, 200)], 20.0),  # it reports each five seconds
        ([(0, 100), (5, 200), (5 + SILENT_SECONDS + 1, 200)], 0.0),
        ([(0, 100), (60, 150)], 50 / REPORT_SECONDS),  # it had nothing to do meanwhile
        ([(0, 100), (5, 10), (10, 60)], 10.0),  # another server counts anew
    ],
)
def test_steps_a_second_are_told_by_totals(
    reports: list[tuple[float, int]], expected: float | None
) -> None:
    rate = StepRate()
    told = [rate.note(steps, float(at)) for at, steps in reports]
    assert told[-1] == expected


async def test_measuring_goes_on_after_a_failure(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    asked = 0

    def status() -> object:
        nonlocal asked
        asked += 1
        raise ProcessLookupError

    deps: Any = SimpleNamespace(
        paths=SimpleNamespace(home=tmp_path),
        reconciler=SimpleNamespace(replicas=SimpleNamespace(live={})),
        executor=SimpleNamespace(status=status),
    )
    history = MemoryHistory(deps)
    for _ in range(3):
        await history.look()
    assert asked == 3
    logged = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(logged) == 1
