# SPDX-License-Identifier: Apache-2.0
"""How an environment is said to be served, from its shims' last words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from openenvd.requests_db.records import Environment, Replica
from openenvd.schema.states import EnvironmentState, ReplicaState
from openenvd.server.api.views import (
    environment_view,
    exit_views,
    serving_view,
    sessions_fail,
)
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason
from openenvd.system.text.units import MB


def live(**info: Any) -> dict[str, Any]:
    return {"info": {"ready": True, "serving": "sessions", **info}}


def measured(session_bytes: int | None) -> dict[str, Any]:
    """Of a host that has, or has not, had an isolated session to measure."""
    capacity = {"isolated_session_bytes": session_bytes} if session_bytes else {}
    return {**live(isolate=True), "capacity": capacity}


@pytest.mark.parametrize(
    ("lives", "sentence"),
    [
        ([live(shards=4)], "4 shards"),
        ([live(shards=1), None], "1 shard"),
        ([live(shards=2), live(shards=2)], "4 shards"),
        ([live(shards=1, isolate=True)], "isolated: a process per session"),
        (
            [measured(None), measured(14 << 20), measured(9 << 20), live(isolate=True)],
            "isolated: a process per session, 14 MB each",
        ),
        ([live(serving="as_is")], "as it is: the project's own server"),
    ],
)
def test_the_sentence_counts_the_shards_of_all_replicas(lives: list[Any], sentence: str) -> None:
    view = serving_view(lives)
    assert view is not None
    assert view["sentence"] == sentence


def capacity(*states: str, since: float | None = None) -> dict[str, Any]:
    """Of a host whose shards do so."""
    told: dict[str, Any] = {"shards": dict(Counter(states))}
    return {**live(shards=len(states)), "capacity": told | ({"held_since": since} if since else {})}


def test_shards_with_blocked_loops_are_counted_over_all_replicas() -> None:
    lives = [
        capacity("alive", "wedged", since=20.0),
        capacity("wedged", "wedged", since=10.0),
        capacity("alive", "busy"),
        live(shards=1),
    ]
    view = serving_view(lives)
    assert view is not None
    assert (view["shards"], view["held"]) == (7, {"shards": 3, "since": 10.0})


def test_nothing_is_held_where_all_loops_turn() -> None:
    view = serving_view([capacity("alive", "busy", "absent"), live(shards=1)])
    assert view is not None
    assert view["held"] is None


def test_nothing_is_said_before_a_replica_is_ready() -> None:
    assert serving_view([None, {"info": None}]) is None
    assert exit_views(None) == []
    assert exit_views({"exits": []}) == []


def test_the_exit_of_a_shard_says_how_many_sessions_it_ended() -> None:
    reason = ExitReason(ExitKind.SIGNALED, pid=7, signal_number=9).to_json()
    told = {"shard": 2, "pid": 7, "sessions": 3, "at": 5.0, "reason": reason}
    [view] = exit_views({"exits": [told]})
    assert view["message"] == (
        "shard 2 (pid 7) was killed by SIGKILL; 3 sessions ended with it, and it was replaced"
    )


def test_the_exit_of_a_shard_that_was_killed_for_memory_has_a_command_for_more() -> None:
    reason = ExitReason(ExitKind.OOM_KILLED, pid=7, limit_bytes=300 * MB)
    told = {"shard": 0, "pid": 7, "sessions": 1, "at": 5.0, "reason": reason.to_json()}
    spec = {"source": "hog_env:Hog"}
    environment = Environment("hog", spec, EnvironmentState.READY, 1.0, 1.0, request_id="a0")
    [view] = exit_views({"exits": [told]}, None, environment)
    assert view["hint"] == "openenv retry a0 --memory 600M"


def test_the_exit_of_a_shard_names_the_limit_of_its_whole_replica() -> None:
    reason = ExitReason(
        ExitKind.OOM_KILLED,
        pid=7,
        signal_number=9,
        detector=Detector.CGROUP,
        peak_bytes=160 * MB,
        limit_bytes=300 * MB,
    )
    told = {"shard": 0, "pid": 7, "sessions": 1, "at": 5.0, "reason": reason.to_json()}
    [view] = exit_views({"exits": [told]})
    assert view["message"] == (
        "shard 0 (pid 7) was killed by the kernel at 160 MB: its replica's processes may use "
        "300 MB together; 1 session ended with it, and it was replaced"
    )


def test_the_exit_of_an_isolated_session_names_the_limit_of_its_own() -> None:
    reason = ExitReason(ExitKind.OOM_KILLED, pid=7, limit_bytes=30 * MB).to_json()
    over = {"isolated": True, "out_of_memory": "was killed for memory"}
    [view] = exit_views({"exits": [{"pid": 7, "sessions": 1, "reason": reason, **over}]})
    assert view["message"].endswith("; its limit was 30 MB")


@pytest.mark.parametrize(
    ("facts", "victim", "message"),
    [
        (
            {"programs": 1},
            {"victim_pid": 71, "victim_name": "chrome"},
            (
                "a program that the environment had started (chrome, pid 71) was killed by the "
                "kernel at 290 MB: its replica's processes may use 300 MB together; "
                "the session went on"
            ),
        ),
        (
            {"programs": 3},
            {},
            (
                "3 programs that the environment had started were killed by the kernel at 290 MB: "
                "its replica's processes may use 300 MB together; the session went on"
            ),
        ),
        (
            {"programs": 1, "isolated": True},
            {},
            (
                "a program that an isolated session had started was killed by the kernel at 290 "
                "MB; its limit was 300 MB; the session went on"
            ),
        ),
    ],
)
def test_a_program_that_was_killed_for_memory_is_named_with_limit_and_peak(
    facts: dict[str, Any], victim: dict[str, Any], message: str
) -> None:
    reason = ExitReason(
        ExitKind.OOM_KILLED,
        pid=0,
        signal_number=9,
        detector=Detector.CGROUP,
        peak_bytes=290 * MB,
        limit_bytes=300 * MB,
        **victim,
    )
    [view] = exit_views({"exits": [{"pid": 0, "reason": reason.to_json(), **facts}]})
    assert view["message"] == message


def test_the_exit_of_a_server_is_shown_once() -> None:
    """The last one is the replica's own message; those before it are among its exits."""
    reasons = [ExitReason(ExitKind.EXITED, pid=pid, exit_code=3).to_json() for pid in (7, 8)]
    exits = [{"server": True, "pid": one["pid"], "reason": one, "at": 1.0} for one in reasons]
    [view] = exit_views({"exits": exits}, reasons[1])
    assert view["message"] == "the server (pid 7) exited with code 3"


def test_the_exit_of_an_isolated_session_is_named_as_such() -> None:
    told = {"shard": 9, "pid": 7, "sessions": 1, "isolated": True}
    [view] = exit_views({"exits": [told]})
    assert view["message"] == "an isolated session (pid 7) exited"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (EnvironmentState.READY, "FAILING"),
        (EnvironmentState.DEGRADED, "DEGRADED"),
        (EnvironmentState.STOPPING, "STOPPING"),
    ],
)
def test_an_environment_that_is_ready_and_whose_sessions_fail_is_failing(
    state: EnvironmentState, shown: str
) -> None:
    environment = Environment("trial", {}, state, 1.0, 1.0, request_id="a0")
    replica = Replica("trial-0", "trial", 0, "local", ReplicaState.READY, "", 1.0)
    failing = {**live(shards=1), "sessions_fail": "OSError: no licence"}
    view = environment_view(environment, [replica], {"trial-0": failing})
    assert (view["state"], view["sessions_fail"]) == (shown, "OSError: no licence")
    failing["sessions_fail"] = None
    assert environment_view(environment, [replica], {"trial-0": failing})["state"] == state


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1", "0.0.0.0", "10.0.0.1"])
@pytest.mark.parametrize("token", [None, "***"])
def test_that_clients_need_a_token_is_told(host: str | None, token: str | None) -> None:
    spec = {"host": host, "token": token}
    environment = Environment("trial", spec, EnvironmentState.READY, 1.0, 1.0)
    view = environment_view(environment, [], {})
    is_local = host in (None, "127.0.0.1", "::1")
    assert view["has_token"] is (token is not None or not is_local)


def test_a_replica_whose_sessions_fail_is_told_with_the_environment() -> None:
    failing = {**live(shards=1), "sessions_fail": "OSError: no licence"}
    assert sessions_fail([live(shards=1), None, failing]) == "OSError: no licence"
    assert sessions_fail([{**live(shards=1), "sessions_fail": None}]) is None
