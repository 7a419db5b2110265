# SPDX-License-Identifier: Apache-2.0
"""What is known of a replica after the messages of its server, and after its exits."""

from typing import Any

import pytest

from openenvd.environments.replica_state import KEPT_EXITS, Event, ExitHistory, ReplicaStatus
from openenvd.schema.replica import StatusLine

NOW = 1.7e9
EXIT = {"kind": "exited", "pid": 7, "exit_code": 1}


def ready() -> ReplicaStatus:
    status = ReplicaStatus()
    status.note_ready({"ready": True, "max_sessions": 4})
    status.advance(Event.READY, NOW)
    assert status.note_served({"sessions": 3, "capacity": {"max_sessions": 4}})
    return status


def exited() -> ReplicaStatus:
    status = ready()
    status.failed = "ImportError"
    status.note_exit(EXIT, ["the last line"], NOW)
    status.advance(Event.EXITED, NOW)
    return status


def found(status: ReplicaStatus, *names: str) -> tuple[Any, ...]:
    told: Any = status.to_json()
    return tuple(told[name] for name in names)


def test_sessions_go_with_their_server_and_lost_shards_are_counted_on() -> None:
    status = ready()
    assert found(status, "state", "sessions") == ("ready", 3)
    assert found(status, "info") == ({"ready": True, "max_sessions": 4},)
    status = exited()
    assert found(status, "state", "sessions", "capacity") == ("exited", 0, None)
    assert found(status, "exit", "last_exit", "log_tail") == (EXIT, EXIT, ["the last line"])
    status.advance(Event.START, NOW)
    assert found(status, "state", "generation", "restarts") == ("starting", 2, 1)
    assert found(status, "exit", "last_exit", "failed", "info") == (None, EXIT, None, None)
    assert "log_tail" not in status.to_json()
    status = ready()
    status.exits.add({"shard": 1, "at": 1.0})
    status.note_exit(EXIT, [], NOW)
    status.advance(Event.EXITED, NOW)
    status.advance(Event.START, NOW)
    status.exits.add({"shard": 2, "at": 2.0})
    assert found(status, "shard_exits") == (2,)
    assert [one["shard"] for one in status.to_json()["exits"] if "shard" in one] == [2, 1]


@pytest.mark.parametrize("status", [ReplicaStatus(), ready(), exited()])
def test_a_status_is_read_as_it_was_written(status: ReplicaStatus) -> None:
    assert ReplicaStatus(status.to_json()).to_json() == status.to_json()


@pytest.mark.parametrize("pid", [7, None])
def test_a_shim_continues_what_a_killed_one_knew_of_exits(pid: int | None) -> None:
    """Whose server, if it had one, has ended with it; a kill for memory before that stays first."""
    before = ready()
    before.exits.add({"shard": 1, "at": 1.0, "reason": {"kind": "oom_killed"}})
    earlier: StatusLine = {
        "shim": {"pid": 5, "started_at": 0.0},
        "pid": pid,
        **before.to_json(),
    }
    status = ReplicaStatus.after_shim(earlier, NOW)
    kinds = ["oom_killed"] if pid is None else ["oom_killed", "lost"]
    assert [one["reason"]["kind"] for one in status.to_json()["exits"]] == kinds
    assert found(status, "exit_kinds", "shard_exits") == (dict.fromkeys(kinds, 1), 1)
    assert found(status, "state", "sessions", "info") == ("starting", 0, None)


def an_exit(kind: str, at: float, **facts: Any) -> dict[str, Any]:
    return {"reason": {"kind": kind, "pid": 1}, "at": at, **facts}


def test_no_exit_hides_a_kill_for_memory_and_own_exits_are_counted_apart() -> None:
    history = ExitHistory()
    for at in range(KEPT_EXITS + 1):
        history.add(an_exit("oom_killed", at / 10))
    for number in range(2 * KEPT_EXITS):
        history.add(an_exit("exited", 1.15 + number))
    told = history.to_json()
    kept = [(one["reason"]["kind"], one["at"]) for one in told["exits"]]
    for_memory = [("oom_killed", at / 10) for at in reversed(range(1, KEPT_EXITS + 1))]
    latest = [("exited", 1.15 + n) for n in reversed(range(KEPT_EXITS, 2 * KEPT_EXITS))]
    assert kept == [*for_memory, *latest]
    assert told["exit_kinds"] == {"oom_killed": KEPT_EXITS + 1, "exited": 2 * KEPT_EXITS}
    assert told["shard_exits"] == 3 * KEPT_EXITS + 1
    history = ExitHistory()
    history.add_server({"kind": "exited", "pid": 7, "exit_code": 3}, 1.0)
    history.add_server({"kind": "stopped", "pid": 8}, 2.0)
    history = ExitHistory(history.to_json())
    history.add(an_exit("oom_killed", 3.0, programs=2))
    told = history.to_json()
    assert (told["exit_kinds"], told["shard_exits"]) == ({"exited": 1, "oom_killed": 2}, 0)
