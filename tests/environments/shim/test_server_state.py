# SPDX-License-Identifier: Apache-2.0
"""What a shim knows of its server after its messages."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.environments.shim.server_state import ServerStatus

NOW = 1.7e9
EXIT = {"kind": "exited", "pid": 7, "exit_code": 1}


def ready() -> ServerStatus:
    """Of a server with sessions."""
    status = ServerStatus()
    status.begin()
    status.note_message({"ready": True, "max_sessions": 4}, NOW)
    status.note_message({"sessions": 3, "capacity": {"max_sessions": 4}}, NOW + 1)
    return status


def found(status: ServerStatus, *names: str) -> tuple[Any, ...]:
    told: Any = status.to_json()
    return tuple(told[name] for name in names)


def test_a_server_is_ready_when_it_reports_so() -> None:
    status = ready()
    assert found(status, "state", "ready_at", "sessions") == ("ready", NOW, 3)
    assert found(status, "info") == ({"ready": True, "max_sessions": 4},)


def test_a_server_that_is_stopping_does_not_become_ready() -> None:
    status = ServerStatus()
    status.begin()
    status.state = "stopping"
    status.note_message({"ready": True}, NOW)
    assert found(status, "state", "ready_at") == ("stopping", NOW)


def test_sessions_and_capacity_go_with_their_server() -> None:
    status = ready()
    status.end(EXIT, ["the last line"])
    assert found(status, "state", "sessions", "capacity") == ("exited", 0, None)
    assert found(status, "exit", "last_exit", "log_tail") == (EXIT, EXIT, ["the last line"])


def test_the_next_generation_keeps_the_last_exit_alone() -> None:
    status = ready()
    status.note_message({"failed": "ImportError"}, NOW)
    status.end(EXIT, [])
    status.begin()
    assert found(status, "state", "generation", "restarts") == ("starting", 2, 1)
    assert found(status, "exit", "last_exit", "failed", "info") == (None, EXIT, None, None)
    assert "log_tail" not in status.to_json()


@pytest.mark.parametrize("pid", [7, None])
def test_a_shim_continues_what_a_killed_one_knew_of_exits(pid: int | None) -> None:
    """Whose server, if it had one, has ended with it; a kill for memory before that stays first."""
    before = ServerStatus()
    before.begin()
    before.note_child_exit({"shard": 1, "at": 1.0, "reason": {"kind": "oom_killed"}})
    status = ServerStatus({"shim": {"pid": 5, "started_at": 0.0}, "pid": pid, **before.to_json()})
    kinds = ["oom_killed"] if pid is None else ["oom_killed", "lost"]
    assert [one["reason"]["kind"] for one in status.to_json()["exits"]] == kinds
    assert found(status, "exit_kinds", "shard_exits") == (dict.fromkeys(kinds, 1), 1)


def test_lost_shards_are_counted_through_generations() -> None:
    status = ready()
    status.note_child_exit({"shard": 1, "at": 1.0})
    status.end(EXIT, [])
    status.begin()
    status.note_child_exit({"shard": 2, "at": 2.0})
    assert found(status, "shard_exits") == (2,)
    assert [one["shard"] for one in status.to_json()["exits"] if "shard" in one] == [2, 1]
