# SPDX-License-Identifier: Apache-2.0
"""Failures and outcomes as people see them, and their exit codes."""

from __future__ import annotations

from typing import Any

import pytest
from click import unstyle

from openenvd.cli import exit_codes
from openenvd.cli.output import failures, phrases
from openenvd.client.errors import ApiRefused, ConnectionLost, RequestFailed

from ..client.fake_daemon import new_environment, new_request

OOM = {
    "kind": "oom_killed",
    "message": "worker long-3 (pid 41233) was killed for using too much memory at 251 MB",
    "hint": "openenv retry 7f3a91c2b04d5e68 --memory 512M",
    "evidence": {"evidence": "cgroup openenvd/long-3, oom_kill 0→1", "seconds": 12.4},
    "log_tail": ["loading", "weights"],
}


def shown(lines: list[str]) -> list[str]:
    return [unstyle(line) for line in lines]


def test_an_out_of_memory_request_shows_evidence_hint_and_log() -> None:
    lines = shown(failures.request_failure(new_request(state="FAILED", error=OOM)))
    assert lines == [
        "✗ launch trial  FAILED  out of memory",
        "  Worker long-3 (pid 41233) was killed for using too much memory at 251 MB",
        "  Evidence: cgroup openenvd/long-3, oom_kill 0→1.",
        "  It had run for 12 s.",
        "  │ loading",
        "  │ weights",
        "  Try: openenv retry 7f3a91c2b04d5e68 --memory 512M",
        "  Log: openenv logs 7f3a91c2",
    ]


@pytest.mark.parametrize(
    ("message", "hint", "expected"),
    [
        ("trial cannot wait", "launch another", ["  trial cannot wait", "  Launch another"]),
        ("it needs httpx", "pip install x", ["  It needs httpx", "  Try: pip install x"]),
        ("port 80 is in use", None, ["  Port 80 is in use"]),
        ("docker://x/y cannot be launched", None, ["  docker://x/y cannot be launched"]),
        ("my_env.server:App is a class", None, ["  my_env.server:App is a class"]),
        ("/home/me is a file", None, ["  /home/me is a file"]),
    ],
)
def test_only_a_plain_word_gets_a_capital_and_names_and_commands_are_spelled_as_they_are(
    message: str, hint: str | None, expected: list[str]
) -> None:
    error = {"kind": "operation_error", "message": message, "hint": hint}
    lines = shown(failures.request_failure(new_request(state="FAILED", error=error)))
    assert lines[1 : 1 + len(expected)] == expected


def test_a_log_tail_that_was_just_seen_is_not_repeated() -> None:
    request = new_request(state="FAILED", error=OOM)
    lines = failures.request_failure(request, shown=["loading", "\x1b[1mweights"])
    assert not any("weights" in line for line in lines)


def test_a_cancelled_request_shows_only_its_state() -> None:
    lines = shown(failures.request_failure(new_request(state="CANCELLED")))
    assert lines == ["✗ launch trial  CANCELLED"]


def test_a_restarted_replica_shows_how_its_server_exited_and_a_healthy_one_nothing() -> None:
    environment = new_environment()
    assert failures.environment_failure(environment) == []
    environment["replicas"][0].update(restarts=1, message="was killed by SIGKILL")
    assert failures.environment_failure(environment) == ["  trial replica 0: was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        ("SUCCEEDED", None, 0),
        ("FAILED", {"kind": "operation_error"}, 1),
        ("FAILED", {"kind": "worker_lost"}, 1),
        ("FAILED", OOM, 137),
        ("CANCELLED", None, 1),
    ],
)
def test_an_outcome_has_an_exit_code(state: str, error: Any, code: int) -> None:
    request = new_request(state=state, error=error)
    assert exit_codes.of_request(request) == code
    assert exit_codes.of_requests([new_request(), request]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiRefused(404, {"kind": "not_found"}), 4),
        (ApiRefused(422, {"kind": "invalid"}), 2),
        (ApiRefused(409, {"kind": "name_taken"}), 1),
        (ApiRefused(429, {"kind": "queue_full"}), 1),
        (ApiRefused(507, {"kind": "storage"}), 1),
        (ConnectionLost("gone"), 3),
        (RequestFailed(new_request(state="FAILED", error=OOM)), 137),
    ],
)
def test_an_error_has_an_exit_code(error: Any, code: int) -> None:
    assert exit_codes.of_error(error) == code


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (1e6, "11 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert phrases.duration(seconds) == text


def test_json_for_people_knows_short_times_dates_and_names_of_others() -> None:
    value = {"p99_seconds": 0.0042, "launch /home/me/my_env": {"runs": 1}}
    assert phrases.describe_json(value) == [
        "  p99: 4.2 ms",
        "  launch /home/me/my_env:",
        "    runs: 1",
    ]
    assert phrases.describe_json({"started_at": 86400.0 * 366})[0].startswith("  started at: 197")


def test_json_for_people_knows_units() -> None:
    value = {"memory_bytes": 2**31, "grace_seconds": 5.0, "available": False, "why_not": "no v2"}
    assert phrases.describe_json(value) == [
        "  memory: 2.0 GB",
        "  grace: 5.0 s",
        "  available: no",
        "  why not: no v2",
    ]
