# SPDX-License-Identifier: Apache-2.0
"""Deaths for memory as the dashboard tells them: what died, and what to do next."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import click
import pytest

from openenvd.cli.main import cli
from openenvd.requests_db.records import (
    RETRYING,
    Environment,
    Event,
    Replica,
    Request,
    RequestError,
)
from openenvd.schema.states import (
    EnvironmentState,
    ErrorKind,
    ReplicaState,
    RequestState,
    Schedule,
)
from openenvd.server.dashboard.environments import (
    death_of_attempt,
    death_of_replica,
    death_of_request,
    death_of_shard,
)
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason
from openenvd.system.text.units import MB

KILLED = ExitReason(
    ExitKind.OOM_KILLED,
    4711,
    signal_number=9,
    detector=Detector.CGROUP,
    limit_bytes=100 * MB,
    peak_bytes=100 * MB,
    seconds=3.0,
    evidence="cgroup openenvd/trial-0, oom_kill 0→1",
)
TRIAL = Environment(
    "trial", {"source": "my env:Env"}, EnvironmentState.DEGRADED, 1.0, 1.0, request_id="a" * 16
)
REPLICA = Replica("trial-0-a", "trial", 0, "local", ReplicaState.BACKING_OFF, "/run", 1.0)


def failed(kind: ErrorKind, hint: str, operation: str = "launch") -> Request:
    error = RequestError(kind, "it was killed", hint, KILLED.to_json(), ("the last line",))
    return Request(
        "b" * 16, operation, Schedule.LONG, {}, RequestState.FAILED, 1.0,
        environment="trial", finished_at=9.0, error=error,
    )  # fmt: skip


def parses(command: str) -> bool:
    """Whether the command line takes it."""
    _, name, *rest = shlex.split(command)
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    found.make_context(name, rest, parent=click.Context(cli, info_name="openenv"))
    return True


def test_the_button_does_what_the_suggested_command_does() -> None:
    death = death_of_request(failed(ErrorKind.OOM_KILLED, "openenv retry b0 --memory 200M"))
    assert death["again"] == {"request_id": "b" * 16, "limits": {"memory_mb": 200}}
    assert (death["subject"], death["log_tail"]) == ("launch trial", ["the last line"])
    assert death["evidence"]["evidence"] == KILLED.evidence


@pytest.mark.parametrize(
    ("hint", "operation"),
    [
        ("openenv up --worker-memory-mb 200", "benchmark"),
        ("it had all the memory that workers may use: openenv info shows the plan", "launch"),
    ],
)
def test_there_is_no_button_for_what_the_page_cannot_do(hint: str, operation: str) -> None:
    assert death_of_request(failed(ErrorKind.OOM_KILLED, hint, operation))["again"] is None


def test_a_death_after_which_a_request_runs_again_has_its_evidence_and_what_it_has_next() -> None:
    request = replace(failed(ErrorKind.OOM_KILLED, "x"), state=RequestState.RUNNING, error=None)
    error = {"evidence": KILLED.to_json(), "log_tail": ["the last line"]}
    sentence = "it was killed; it runs again with 200 MB (attempt 2 of 3)"
    data = {"phase": RETRYING, "message": sentence, "memory_bytes": 200 * MB, "error": error}
    event = Event(7, 5.0, "request.progress", request.id, "trial", data)
    death = death_of_attempt(request, event)
    assert (death["message"], death["at"], death["again"]) == (sentence, 5.0, None)
    assert death["runs_again_with_bytes"] == 200 * MB
    assert death["evidence"]["limit_bytes"] == 100 * MB
    assert death["log_tail"] == ["the last line"]
    assert death["id"] != death_of_attempt(request, replace(event, seq=9))["id"]


def test_a_replica_that_was_killed_is_launched_again_with_twice_as_much() -> None:
    death = death_of_replica(replace(REPLICA, exit=KILLED.to_json()), TRIAL, 7.0)
    assert death is not None
    assert (death["at"], death["subject"]) == (7.0, "trial replica 0")
    assert death["again"] == {"request_id": "a" * 16, "limits": {"memory_mb": 200}}
    assert death["hint"] == f"openenv retry {'a' * 16} --memory 200M"
    assert parses(death["hint"])


def test_each_death_of_a_replica_is_told_once_though_no_pid_is_known() -> None:
    killed = replace(KILLED, pid=0).to_json()
    down, up = ReplicaState.BACKING_OFF, ReplicaState.READY
    seen = [
        death_of_replica(replace(REPLICA, state=state, restarts=restarts, exit=killed), TRIAL, 7.0)
        for state, restarts in [(down, 0), (up, 1), (down, 1), (up, 2)]
    ]
    first, still_first, second, still_second = [death and death["id"] for death in seen]
    assert first == still_first
    assert second == still_second
    assert first != second


@pytest.mark.parametrize(
    "exit_reason", [None, ExitReason(ExitKind.SIGNALED, 1, signal_number=9).to_json()]
)
def test_what_did_not_die_for_memory_is_no_such_death(exit_reason: dict[str, Any] | None) -> None:
    assert death_of_replica(replace(REPLICA, exit=exit_reason), TRIAL, None) is None
    last = None if exit_reason is None else {"reason": exit_reason, "pid": 1, "message": "it ended"}
    assert death_of_shard({"id": "r", "ordinal": 0, "exits": [last] if last else []}, TRIAL) is None


@pytest.mark.parametrize(
    ("facts", "option", "limit"),
    [
        ({}, "--memory", "memory_mb"),
        (
            {"isolated": True, "out_of_memory": "was killed for memory"},
            "--session-memory",
            "session_memory_mb",
        ),
        ({"isolated": True, "out_of_memory": None}, "--memory", "memory_mb"),  # the replica's limit
    ],
)
def test_a_process_that_died_below_a_server_that_lives_has_a_button_too(
    facts: dict[str, Any], option: str, limit: str
) -> None:
    last = {"reason": KILLED.to_json(), "pid": 5, "at": 8.0, "message": "shard 1 was killed"}
    death = death_of_shard({"id": "trial-0-a", "ordinal": 0, "exits": [last | facts]}, TRIAL)
    assert death is not None
    assert (death["id"], death["at"], death["message"]) == ("trial-0-a:5", 8.0, last["message"])
    assert death["hint"] == f"openenv retry {'a' * 16} {option} 200M"
    assert parses(death["hint"])
    assert death["again"] == {"request_id": "a" * 16, "limits": {limit: 200}}


def test_a_process_of_an_environment_whose_launch_is_not_known_has_neither_command_nor_button() -> (
    None
):
    last = {"reason": KILLED.to_json(), "pid": 5, "at": 8.0, "message": "shard 1 was killed"}
    replica = {"id": "trial-0-a", "ordinal": 0, "exits": [last]}
    death = death_of_shard(replica, replace(TRIAL, request_id=None))
    assert death is not None
    assert (death["hint"], death["again"]) == (None, None)
