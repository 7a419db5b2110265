# SPDX-License-Identifier: Apache-2.0
"""Faults as the dashboard shows them: what is wrong, the evidence, and what to do next."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from openenvd.cli.main import cli
from openenvd.requests_db import records
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.transactions import dispatching, submitting
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState, RequestState, Schedule
from openenvd.server.api.views import exit_views
from openenvd.server.dashboard.environments import (
    Faults,
    death_of_attempt,
    death_of_shard,
    exit_of_envoy,
    exit_of_replica,
    fault_of_request,
    faults_of,
)
from openenvd.server.dashboard.live_state import LiveState, Turn
from openenvd.server.dashboard.requests import RequestSource
from openenvd.system.process.exit_reason import ExitKind, ExitReason
from openenvd.system.text.units import MB

from ..conftest import oom_killed

EVIDENCE = "cgroup openenvd/trial-0, oom_kill 0→1"
KILLED = oom_killed(4711, 100 * MB, 100 * MB, seconds=3.0, evidence=EVIDENCE)
TRIAL = records.Environment(
    "trial", {"source": "my env:Env"}, EnvironmentState.DEGRADED, 1.0, 1.0, request_id="a" * 16
)
REPLICA = records.Replica("trial-0-a", "trial", 0, "local", ReplicaState.BACKING_OFF, "/run", 1.0)


def failed(kind: ErrorKind, hint: str, operation: str = "launch") -> records.Request:
    error = records.RequestError(kind, "it was killed", hint, KILLED.to_json(), ("the last line",))
    return records.Request(
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


def test_a_request_that_was_killed_has_evidence_and_command_and_another_can_be_run_again() -> None:
    fault = fault_of_request(failed(ErrorKind.OOM_KILLED, "openenv retry b0 --memory 200M"))
    assert (fault["kind"], fault["hint"]) == ("out_of_memory", "openenv retry b0 --memory 200M")
    assert (fault["subject"], fault["log_tail"]) == ("launch trial", ["the last line"])
    assert fault["evidence"]["evidence"] == KILLED.evidence
    fault = fault_of_request(failed(ErrorKind.OPERATION_ERROR, "fix the error"))
    assert (fault["kind"], fault["hint"]) == ("failed", "fix the error")
    assert fault["command"] == f"openenv retry {'b' * 16}"


def test_a_death_after_which_a_request_runs_again_has_its_evidence_and_what_it_has_next() -> None:
    request = replace(failed(ErrorKind.OOM_KILLED, "x"), state=RequestState.RUNNING, error=None)
    error = {"evidence": KILLED.to_json(), "log_tail": ["the last line"]}
    sentence = "it was killed; it runs again with 200 MB (attempt 2 of 3)"
    data = {
        "phase": records.RETRYING,
        "message": sentence,
        "memory_bytes": 200 * MB,
        "error": error,
    }
    event = records.Event(7, 5.0, "request.progress", request.id, "trial", data)
    death = death_of_attempt(request, event)
    assert (death["message"], death["at"], death["command"]) == (sentence, 5.0, None)
    assert death["runs_again_with_bytes"] == 200 * MB
    assert death["evidence"]["limit_bytes"] == 100 * MB
    assert death["log_tail"] == ["the last line"]
    assert death["id"] != death_of_attempt(request, replace(event, seq=9))["id"]


def test_a_killed_replica_is_launched_with_more_and_others_restarted() -> None:
    death = exit_of_replica(replace(REPLICA, exit=KILLED.to_json()), TRIAL)
    assert death is not None
    assert (death["kind"], death["subject"]) == ("out_of_memory", "trial replica 0")
    assert death["command"] == f"openenv retry {'a' * 16} --memory 200M"
    assert parses(death["command"])
    signaled = ExitReason(ExitKind.SIGNALED, 1, signal_number=9).to_json()
    fault = exit_of_replica(replace(REPLICA, exit=signaled, restarts=2), TRIAL)
    assert fault is not None
    assert (fault["kind"], fault["count"]) == ("restarting", 3)
    assert parses(fault["command"])
    back = exit_of_replica(replace(REPLICA, exit=signaled, state=ReplicaState.READY), TRIAL)
    assert back is not None
    assert back["command"] is None  # it serves again: nothing is to be restarted
    assert exit_of_replica(replace(REPLICA, exit=None), TRIAL) is None
    drained = replace(REPLICA, exit=signaled, state=ReplicaState.DRAINING)
    assert exit_of_replica(drained, TRIAL) is None


def test_each_death_of_a_replica_is_told_once_though_no_pid_is_known() -> None:
    killed = replace(KILLED, pid=0).to_json()
    down, up = ReplicaState.BACKING_OFF, ReplicaState.READY
    seen = [
        exit_of_replica(replace(REPLICA, state=state, restarts=restarts, exit=killed), TRIAL)
        for state, restarts in [(down, 0), (up, 1), (down, 1), (up, 2)]
    ]
    first, still_first, second, still_second = [death and death["id"] for death in seen]
    assert first == still_first
    assert second == still_second
    assert first != second


def test_the_gateway_and_steps_without_a_session_are_faults_as_well() -> None:
    envoy = exit_of_envoy({"message": "Envoy (pid 5) was killed", "at": 3.0, "reason": {"pid": 5}})
    assert (envoy["kind"], envoy["page"]) == ("gateway", "#/")
    assert parses(envoy["command"])
    view: dict[str, Any] = {"error": None, "sessions_fail": None}
    abandoned = [{"shard": 0, "count": 2, "since": 1.0}, {"shard": 1, "count": 1, "since": 95.0}]
    replica = {"id": "trial-0-a", "ordinal": 0, "exits": [], "abandoned": abandoned}
    [fault] = faults_of(TRIAL, [], view, [replica], 100.0)
    assert (fault["kind"], fault["at"]) == ("abandoned", 1.0)
    assert fault["message"] == "2 steps still running after the end of the session"
    view["sessions_fail"] = "no licence"
    [fault] = faults_of(TRIAL, [], view, [replica | {"abandoned": []}], 100.0)
    assert (fault["kind"], fault["message"]) == ("failing", "No session can begin: no licence")


async def test_failures_of_one_cause_are_one_fault_until_seen_also_by_the_next_daemon(
    tmp_path: Path,
) -> None:
    def fault(number: int, message: str) -> dict[str, Any]:
        request = failed(ErrorKind.OPERATION_ERROR, "x")
        error = replace(request.error, message=message)  # type: ignore[type-var]
        made = replace(request, id=f"{number:016}", environment=f"try-{number}", error=error)
        return fault_of_request(replace(made, finished_at=float(number)))

    def shown(faults: Faults) -> dict[str, tuple[int, bool]]:
        state = LiveState()
        faults.put(
            state, "failed", [fault(n, f"replica 0 of try-{n} has no class") for n in (1, 2)]
        )
        faults.put(state, "others", [fault(3, "another cause")])
        state.flush()
        with state.viewer() as viewer:
            [message] = state.messages_for(viewer)
        put = json.loads(message.raw_data or "")["put"]["faults"].values()
        return {each["id"]: (each["count"], each["is_seen"]) for each in put}

    faults = Faults(tmp_path / "seen.json")
    assert shown(faults) == {f"{2:016}": (2, False), f"{3:016}": (1, False)}
    faults.see([f"{1:016}", f"{2:016}"])
    assert shown(Faults(tmp_path / "seen.json")) == {f"{2:016}": (2, True), f"{3:016}": (1, False)}


@pytest.mark.parametrize(
    ("facts", "option"),
    [
        ({}, "--memory"),
        (
            {"isolated": True, "out_of_memory": "was killed for memory"},
            "--session-memory",
        ),
        ({"isolated": True, "out_of_memory": None}, "--memory"),  # the replica's limit
    ],
)
def test_a_process_that_died_below_a_server_that_lives_has_a_button_too(
    facts: dict[str, Any], option: str
) -> None:
    last = {"reason": KILLED.to_json(), "pid": 5, "at": 8.0, **facts}
    [shown] = exit_views({"exits": [last]}, environment=TRIAL)
    death = death_of_shard({"id": "trial-0-a", "ordinal": 0, "exits": [shown]}, TRIAL)
    assert death is not None
    assert (death["id"], death["at"], death["message"]) == ("trial-0-a:5", 8.0, shown["message"])
    assert death["command"] == f"openenv retry {'a' * 16} {option} 200M"
    assert parses(death["command"])


def test_a_process_of_an_environment_whose_launch_is_not_known_has_no_command() -> None:
    last = {"reason": KILLED.to_json(), "pid": 5, "at": 8.0}
    trial = replace(TRIAL, request_id=None)
    exits = exit_views({"exits": [last]}, environment=trial)
    death = death_of_shard({"id": "trial-0-a", "ordinal": 0, "exits": exits}, trial)
    assert death is not None
    assert death["command"] is None


async def test_a_failed_launch_is_no_fault_once_its_name_was_launched_with_success(
    store: AsyncStore, dispatch: WriteConnection, tmp_path: Path
) -> None:
    faults = Faults(tmp_path / "seen.json")
    dispatcher = SimpleNamespace(claimer=SimpleNamespace(room=lambda _: None))
    source = RequestSource(cast(Any, SimpleNamespace(store=store, dispatcher=dispatcher)), faults)

    async def shown(name: str, state: RequestState) -> set[str]:
        new = records.NewRequest(
            "launch", Schedule.LONG, {"name": name, "source": "x"}, environment=name
        )
        dispatch.write(submitting.submit, new, now=1.0)
        [launch] = dispatch.write(dispatching.claim, Schedule.LONG, 1, 2.0).requests
        why = records.RequestError(ErrorKind.OPERATION_ERROR, "no")
        error = why if state is RequestState.FAILED else None
        outcome = records.Outcome(launch.id, state, 3.0, error=error)
        live, events = LiveState(), dispatch.write(dispatching.record, outcomes=[outcome])
        await source.refresh(live, Turn(4.0, tuple(events)))
        live.flush()
        with live.viewer() as viewer:
            [message] = live.messages_for(viewer)
        found = json.loads(message.raw_data or "")["put"].get("faults", {}).values()
        return {each["environment"] for each in found}

    assert await shown("first", RequestState.FAILED) == {"first"}
    assert await shown("second", RequestState.SUCCEEDED) == {"first"}
    assert await shown("first", RequestState.SUCCEEDED) == set()
    assert await shown("first", RequestState.FAILED) == {"first"}
