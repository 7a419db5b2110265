# SPDX-License-Identifier: Apache-2.0
"""Who accepts, who waits, who is isolated, and how many: plain values, no processes."""

import uuid
from typing import Any

import pytest

from openenvd.env_host.environment.plan import ISOLATED_SESSION_BYTES, Machine, ServingPlan, plan_of
from openenvd.env_host.errors import NotConcurrent
from openenvd.env_host.ipc.scoreboard import ALIVE_SECONDS, MICROSECONDS, Field, Scoreboard
from openenvd.env_host.shard.admission import FAIR_SECONDS, place_of
from openenvd.env_host.shard.connections import Head, Owner, new_session_id, owner_of, read_head
from openenvd.env_host.startup import SPARE_FDS
from openenvd.env_host.supervisor.shard_policies import LINGER_SECONDS, ShardDemand
from openenvd.schema.protocol import DEFAULT_SESSIONS, HostConfig
from openenvd.system.process.backoff import EARLY_SECONDS, RestartSchedule

NOW = 1_000 * MICROSECONDS
MACHINE = Machine(cores=4, fds=20_000, memory_bytes=64 * 2**30)
UPGRADE = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n"


def scoreboard(*sessions: int, most: int = 100) -> Scoreboard:
    """A scoreboard of as many responsive shards, each with so many sessions."""
    made = Scoreboard.create(len(sessions))
    for counters, count in zip(made, sessions, strict=True):
        counters[Field.PID] = counters[Field.READY] = 1
        counters[Field.MAX_SESSIONS] = most
        counters[Field.SESSIONS] = count
        counters[Field.HEARTBEAT] = NOW
    return made


def stop_responding(made: Scoreboard, index: int) -> None:
    made[index][Field.HEARTBEAT] = NOW - int(ALIVE_SECONDS * MICROSECONDS) - 1


def place(made: Scoreboard, index: int, since: int = NOW) -> int | None:
    return place_of(since, made[index], made.others(index), NOW)


def test_connections_go_where_there_is_most_room_the_longest_waiting_first() -> None:
    assert place(scoreboard(99, 0), 0) == 0
    assert place(scoreboard(100, 98, 20), 0) == 2
    assert place(scoreboard(100, 100), 0) is None
    promised = scoreboard(99)
    promised[0][Field.PROMISED] = 1
    assert promised[0].room == 0
    made = scoreboard(99, 100)
    made[1][Field.OLDEST_WAIT] = NOW - int(2 * FAIR_SECONDS * MICROSECONDS)
    assert place(made, 0) is None
    assert place(made, 1, made[1][Field.OLDEST_WAIT]) == 0
    stop_responding(made, 1)  # nobody can help those, so they hold nobody up
    assert place(made, 0) == 0


@pytest.mark.parametrize(
    ("head", "meaning"),
    [
        (UPGRADE % b"/ws", Head(wants_session=True, is_upgrade=True)),
        (UPGRADE % b"/mcp?x=1", Head(wants_session=True, is_upgrade=True)),
        (UPGRADE % b"/ws?session_id=abc", Head(session_id="abc", is_upgrade=True)),
        # As upstream's client makes it of a base URL with a token.
        (UPGRADE % b"/?token=x%2Fws&session_id=abc", Head(session_id="abc", is_upgrade=True)),
        (UPGRADE % b"/mcp?session_id=abc", Head(wants_session=True, is_upgrade=True)),
        (UPGRADE % b"/%77s", Head(wants_session=True, is_upgrade=True)),
        (UPGRADE % b"/%77s?session_id=abc", Head(session_id="abc", is_upgrade=True)),
        (UPGRADE % b"/elsewhere", Head()),
        (b"GET /ws HTTP/1.1\r\nHost: x\r\n\r\n", Head()),
        (b"POST /mcp?session_id=abc HTTP/1.1\r\n\r\n", Head(session_id="abc")),
        (b"\x16\x03\x01 garbage", Head()),
        (b"", Head()),
    ],
)
def test_a_request_head_determines_where_its_connection_goes(head: bytes, meaning: Head) -> None:
    assert read_head(head) == meaning


def test_a_session_id_names_its_owner_and_is_otherwise_random() -> None:
    ids = {new_session_id(Owner(3, 70_000)) for _ in range(100)}
    assert len(ids) == 100
    assert {owner_of(text) for text in ids} == {Owner(3, 70_000 % 2**16)}
    assert all(str(uuid.UUID(text)) == text for text in ids)
    assert owner_of("mine") is None


def plan(
    *,
    is_concurrent: bool = True,
    has_own_hooks: bool = False,
    machine: Machine = MACHINE,
    **config: object,
) -> ServingPlan:
    said = HostConfig(**{"name": "x", "env_class": "m:C", **config})  # type: ignore[arg-type]
    return plan_of(
        said,
        machine,
        is_concurrent=is_concurrent,
        class_name="C",
        has_own_hooks=has_own_hooks,
    )


SMALL = Machine(cores=4, fds=1024, memory_bytes=6 * ISOLATED_SESSION_BYTES)
FEW_FDS = Machine(cores=2, fds=2 * SPARE_FDS + 10, memory_bytes=None)
TWO_CORES = Machine(cores=2, fds=20_000, memory_bytes=None)
SINGLE: dict[str, Any] = {"is_concurrent": False}
HOOKS: dict[str, Any] = {"has_own_hooks": True}


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, {"shards": 4, "max_sessions": DEFAULT_SESSIONS, "isolates": False}),
        ({"max_sessions": 3}, {"shards": 3}),
        ({"shards": 2, "max_sessions": 400}, {"shards": 2, "max_sessions": 400}),
        ({"machine": FEW_FDS}, {"max_sessions": 20}),
        # As many shards as they need descriptors.
        ({"machine": TWO_CORES, "max_sessions": 10_000}, {"shards": 2}),
        ({"machine": TWO_CORES, "max_sessions": 65_536}, {"shards": 4, "max_sessions": 65_536}),
        ({"machine": TWO_CORES, "max_sessions": 65_536, "shards": 2}, {"max_sessions": 39_488}),
        # A limit for each session gives each a process, and so does the wish.
        ({"session_memory_mb": 64}, {"isolates": True}),
        ({"session_memory_mb": 64, **HOOKS}, {"isolates": True}),
        ({"session_memory_mb": 64, "max_sessions": 1, **SINGLE}, {"isolates": True}),
        (
            {"isolate": True, "max_sessions": 5},
            {"shards": 1, "max_sessions": 5, "isolates": True, "exclusive": False},
        ),
        # One process that stays serves what start-up hooks were made for.
        (HOOKS, {"shards": 1, "keeps_one": True}),
        ({"shards": 3, **HOOKS}, {"shards": 3}),
        ({**HOOKS, **SINGLE}, {"max_sessions": 1, "isolates": False}),
        ({"max_sessions": 8, **HOOKS, **SINGLE}, {"isolates": True}),
        # A class for one session is isolated when it is to have several.
        (SINGLE, {"max_sessions": 64, "isolates": True}),
        ({"machine": SMALL, **SINGLE}, {"max_sessions": 3}),
        ({"max_sessions": 16, **SINGLE}, {"shards": 1, "isolates": True, "keeps_one": True}),
        ({"machine": TWO_CORES, "max_sessions": 65_536, "isolate": True}, {"max_sessions": 9_744}),
        ({"max_sessions": 1, **SINGLE}, {"isolates": False, "exclusive": True, "keeps_one": False}),
        ({"isolate": False, **SINGLE}, {"max_sessions": 1, "isolates": False, "exclusive": True}),
    ],
)
def test_a_plan_follows_from_what_is_asked_of_which_machine(
    given: dict[str, Any], planned: dict[str, Any]
) -> None:
    found = plan(**given)
    assert {name: getattr(found, name) for name in planned} == planned


def test_sessions_are_shared_evenly_and_several_in_a_process_of_a_class_for_one_refused() -> None:
    shared = plan(max_sessions=402)
    assert [shared.share(index) for index in range(4)] == [101, 101, 100, 100]
    with pytest.raises(NotConcurrent, match="--max-sessions 1"):
        plan(is_concurrent=False, isolate=False, max_sessions=2)


def test_early_exits_and_failed_starts_delay_restarts_unless_cancelled() -> None:
    restarts = RestartSchedule()
    waits = []
    for seconds in (0.0, 0.0, 0.0, EARLY_SECONDS, 0.0):
        restarts.exited(1, seconds=seconds, now=10.0)
        due = restarts.next_due()
        assert due is not None
        assert restarts.take_due(due) == [1]
        waits.append(round(due - 10.0, 3))
    assert waits == [0.0, 0.1, 0.2, 0.0, 0.0]
    assert restarts.next_due() is None
    restarts = RestartSchedule()
    assert [restarts.could_not_start(0, now=1.0) for _ in range(2)] == [0.1, 0.2]
    assert restarts.take_due(1.1) == []
    restarts.cancel()
    assert restarts.take_due(99.0) == []


def test_each_session_wants_a_shard_as_planned_and_fewer_only_after_a_while() -> None:
    demand = ShardDemand(4)
    assert [demand.update(load, 0.0) for load in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 4]
    assert demand.update(0, 10.0) == 4  # until then there was no reason to look
    assert demand.due() == 10.0 + LINGER_SECONDS
    assert demand.update(2, 20.0) == 4
    assert demand.update(0, 10.0 + LINGER_SECONDS) == 2
    assert demand.update(0, 10.0 + 2 * LINGER_SECONDS) == 1
    assert demand.due() is None
    demand = ShardDemand(4)
    for second in range(100):
        assert demand.update(4 if second % 20 == 0 else 0, float(second)) == 4


def test_the_last_shard_is_given_back_of_a_replica_that_may_do_without() -> None:
    demand = ShardDemand(4, least=0)
    assert demand.update(0, 10.0) == 1
    assert demand.due() == 10.0 + LINGER_SECONDS
    assert demand.update(0, 10.0 + LINGER_SECONDS) == 0
    assert demand.due() is None
    assert demand.update(1, 50.0) == 1
    demand.least = 1  # that was a session
    assert demand.update(0, 50.0 + 2 * LINGER_SECONDS) == 1
    assert demand.due() is None
