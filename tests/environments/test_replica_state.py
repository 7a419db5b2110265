# SPDX-License-Identifier: Apache-2.0
"""The state machine of a replica: the whole product of states and events, with a clock of ours."""

import math
from pathlib import Path

import pytest

from openenvd.environments import replica_state
from openenvd.environments.replica_state import (
    GIVE_UP_SECONDS,
    LEFT_GRACE_SECONDS,
    MAX_SECONDS,
    Action,
    Event,
    Life,
    State,
    advance,
)

NOW = 1000.0
PAGE = Path(__file__).parents[2] / "docs/decisions/0031-one-state-machine.md"
ENDS_A_DRAINED = (Event.EXITED, Event.SLEPT, Event.TIME)
RUNS = (State.STARTING, State.READY, State.DRAINING)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    begin = next(number for number, row in enumerate(found) if row[0] == "event")
    return [found[begin], *found[begin + 2 :][: len(Event)]]


TABLE = rows(replica_state.__doc__ or "")


def cell(event: Event, state: State) -> tuple[State, Action | None]:
    """What the table says; nothing follows where it says nothing."""
    columns = [name.strip() for group in TABLE[0][1:] for name in group.split(",")]
    widths = [group for group in TABLE[0][1:] for _ in group.split(",")]
    if state not in columns:  # stopped
        return state, None
    group = widths[columns.index(state)]
    [row] = [row for row in TABLE[1:] if row[0] == event]
    words = row[1:][TABLE[0][1:].index(group)].split(": ")
    if words == [""]:
        return state, None
    if words[0] in list(State):
        return State(words[0]), Action(words[1]) if words[1:] else None
    return state, Action(words[0])


def test_the_table_has_every_state_and_event_and_the_page_has_the_table() -> None:
    names = [name.strip() for group in TABLE[0][1:] for name in group.split(",")]
    assert sorted([*names, "stopped"]) == sorted(State)
    assert sorted(row[0] for row in TABLE[1:]) == sorted(Event)
    assert rows(PAGE.read_text()) == TABLE


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_event_in_each_state_has_what_the_table_says(event: Event, state: State) -> None:
    before = Life(state, deadline=NOW if state is State.STOPPING else None)
    after, action = advance(before, event, NOW, 5.0)
    assert (after.state, action) == cell(event, state)
    assert after == before or state is not State.STOPPED
    drains = Life(state, is_draining=True, deadline=NOW)
    after, action = advance(drains, event, NOW, 5.0)
    if event in ENDS_A_DRAINED and state in RUNS:
        assert (after.state, action) == (State.STOPPING, Action.STOP)
    elif event is Event.DRAIN and state in RUNS:
        assert (after, action) == (drains, None)
    else:
        assert (after.state, action) == cell(event, state)


def stopping(grace_seconds: float) -> Life:
    return advance(Life(State.READY), Event.STOP, NOW, grace_seconds)[0]


def draining(timeout_seconds: float) -> Life:
    return advance(Life(State.READY), Event.DRAIN, NOW, timeout_seconds)[0]


def due(life: Life, now: float) -> Action | None:
    return advance(life, Event.TIME, now)[1]


def test_a_start_counts_and_a_wake_is_no_restart() -> None:
    woken, _ = advance(Life(State.ASLEEP), Event.START, NOW)
    assert (woken.generation, woken.wakes, woken.restarts) == (2, 1, 0)
    again, _ = advance(woken._replace(state=State.EXITED), Event.START, NOW)
    assert (again.generation, again.wakes, again.restarts) == (3, 1, 1)


@pytest.mark.parametrize(("grace", "seconds"), [(5.0, 5.0), (-3.0, 0.0), (math.nan, 0.0)])
def test_a_server_is_killed_when_its_grace_is_over(grace: float, seconds: float) -> None:
    life = stopping(grace)
    assert due(life, NOW + seconds - 0.1) is None
    assert due(life, NOW + seconds) is Action.KILL


@pytest.mark.parametrize("begun", [stopping, draining])
@pytest.mark.parametrize(("second", "over_after"), [(1.0, 1.0), (600.0, 60.0)])
def test_a_second_request_can_only_shorten_the_time(
    begun: type[Life], second: float, over_after: float
) -> None:
    event = Event.STOP if begun is stopping else Event.DRAIN
    life, action = advance(begun(60.0), event, NOW, second)  # type: ignore[arg-type]
    assert (life.deadline, action) == (NOW + over_after, None)


def test_what_is_drained_is_stopped_in_time_or_before_and_a_stop_is_no_drain() -> None:
    life = draining(60.0)
    assert (life.state, life.is_draining, due(life, NOW + 59.9)) == (State.READY, True, None)
    assert due(life, NOW + 60.0) is Action.STOP
    stopped, action = advance(life, Event.STOP, NOW + 1.0, 5.0)
    assert (stopped.deadline, action) == (NOW + 6.0, Action.STOP)
    life = stopping(5.0)
    assert advance(life, Event.DRAIN, NOW, 1.0) == (life._replace(is_draining=True), None)
    life, _ = advance(Life(State.EXITED), Event.DRAIN, NOW, 600.0)
    assert (life.is_draining, life.deadline) == (True, NOW + LEFT_GRACE_SECONDS)


@pytest.mark.parametrize("life", [stopping(1.0), draining(1.0), Life(State.READY)])
def test_the_killed_are_waited_for_and_not_for_ever(life: Life) -> None:
    """Also what a server left that has exited by itself, and whatever is requested meanwhile."""
    killed, action = advance(life, Event.LEFT, NOW)
    assert (action, killed.state) == (Action.KILL, life.state)
    drained, _ = advance(killed, Event.DRAIN, NOW, 0.0)
    for one in (killed, drained):
        assert due(one, NOW + GIVE_UP_SECONDS - 0.1) is None
        assert due(one, NOW + GIVE_UP_SECONDS) is Action.GIVE_UP


def test_a_stop_waits_no_second_grace_for_the_killed_and_the_next_server_has_its_own() -> None:
    killed, _ = advance(Life(State.READY), Event.LEFT, NOW)
    stopped, _ = advance(killed, Event.STOP, NOW, 1.0)
    assert due(stopped, NOW + 1.0) is Action.GIVE_UP
    life, _ = advance(Life(State.READY), Event.LEFT, NOW)
    life, _ = advance(life, Event.EXITED, NOW)
    assert (life.deadline, due(life, NOW + 3600.0)) == (None, None)
    life, _ = advance(life, Event.START, NOW)
    life, _ = advance(life, Event.STOP, NOW, 5.0)
    assert due(life, NOW + 5.0) is Action.KILL


@pytest.mark.parametrize(
    ("deadline", "left"),
    [(None, 0.0), (99.0, 0.0), (100.0, 0.0), (130.0, 30.0), (100.0 + 2 * MAX_SECONDS, 0.0)],
)
def test_a_deadline_of_an_earlier_boot_is_over(deadline: float | None, left: float) -> None:
    """The last is one of a machine that had run for a decade when it was set."""
    assert Life(State.DRAINING, deadline=deadline).seconds_left(100.0) == left
    assert advance(Life(), Event.STOP, 100.0, math.inf)[0].seconds_left(100.0) == MAX_SECONDS
