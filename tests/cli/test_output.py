# SPDX-License-Identifier: Apache-2.0
"""Failures and outcomes as people see them, their exit codes, tables and bars."""

import io
import time
from typing import Any

import click
import pytest
from click import unstyle
from rich.cells import cell_len
from rich.console import Console
from rich.spinner import Spinner

from openenvd.cli import exit_codes
from openenvd.cli.following import BAR_WIDTH, Phase, phase_line
from openenvd.cli.output import failures, phrases
from openenvd.cli.output.output import Cell, Output, Table, lines_of
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


def test_a_failure_shows_evidence_hint_and_log_and_a_cancelled_request_its_state() -> None:
    lines = shown(failures.request_failure(new_request(state="FAILED", error=OOM)))
    assert lines == [
        "✗ launch trial  FAILED  out of memory",
        "  Worker long-3 (pid 41233) was killed for using too much memory at 251 MB",
        "  Evidence: cgroup openenvd/long-3, oom_kill 0→1.",
        "  │ loading",
        "  │ weights",
        "  Try: openenv retry 7f3a91c2b04d5e68 --memory 512M",
        "  Log: openenv logs 7f3a91c2",
    ]
    request = new_request(state="FAILED", error=OOM)
    lines = failures.request_failure(request, shown=["loading", "\x1b[1mweights"])
    assert not any("weights" in line for line in lines)
    lines = shown(failures.request_failure(new_request(state="CANCELLED")))
    assert lines == ["✗ launch trial  CANCELLED"]


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


def test_json_for_people_knows_times_dates_units_and_names_of_others() -> None:
    value = {"p99_seconds": 0.0042, "launch /home/me/my_env": {"runs": 1}}
    assert phrases.describe_json(value) == [
        "  p99: 4.2 ms",
        "  launch /home/me/my_env:",
        "    runs: 1",
    ]
    assert phrases.describe_json({"started_at": 86400.0 * 366})[0].startswith("  started at: 197")
    value = {"memory_bytes": 2**31, "grace_seconds": 5.0, "available": False, "why_not": "no v2"}
    assert phrases.describe_json(value) == [
        "  memory: 2.0 GB",
        "  grace: 5.0 s",
        "  available: no",
        "  why not: no v2",
    ]


# Tables and lines; and bars of progress


WIDE = 10_000


def plain_lines(table: Table, columns: int = WIDE) -> list[str]:
    return [click.unstyle(line) for line in table.lines(columns)]


def test_a_table_is_aligned_and_plain_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("NAME", "STATE", "ADDRESS", "")
    table.add_row("echo", Cell("READY", {"fg": "green"}), "http://127.0.0.1:8000", "")
    table.add_row("a-longer-name", Cell("FAILED", {"fg": "red"}), "-", "its port is taken")
    table.add_row("", "", "", "")
    assert "\x1b[32mREADY\x1b[0m " in table.lines(WIDE)[1]
    line = "word " * 100 + "end"
    Output().draw(click.style(line, dim=True), "", table)
    assert capsys.readouterr().out.splitlines() == [
        line,
        "",
        "NAME           STATE   ADDRESS",
        "echo           READY   http://127.0.0.1:8000",
        "a-longer-name  FAILED  -                      its port is taken",
        "",
    ]


def test_a_narrow_terminal_shows_fewer_columns_and_folds_the_remark_alone() -> None:
    table = Table("REQUEST", "ID", "STATE", "WHEN", "")
    when = "in 1.0 s, 1 min ago"
    table.add_row("rollout other_env", "8f3a91c2", "FAILED", when, "killed for its memory")
    table.add_row("launch", "8f3a91c3", "FAILED", when, Cell("no such file: x", {}, is_cut=True))
    assert plain_lines(table, 72) == [
        "REQUEST            ID        STATE   WHEN",
        "rollout other_env  8f3a91c2  FAILED  in 1.0 s, 1 min ago  killed for its",
        " " * 58 + "memory",
        "launch             8f3a91c3  FAILED  in 1.0 s, 1 min ago  no such file:…",
    ]
    assert plain_lines(table, 48) == [
        "REQUEST            ID        STATE",
        "rollout other_env  8f3a91c2  FAILED  killed for",
        " " * 37 + "its memory",
        "launch             8f3a91c3  FAILED  no such…",
    ]


def test_a_sentence_is_folded_between_words_and_keeps_its_indent() -> None:
    text = "  echo replica 0: 1.0 s ago it was killed by the kernel for memory"
    folded = ["  echo replica 0: 1.0 s ago it was", "  killed by the kernel for memory"]
    assert lines_of([text, "short"], 36) == [*folded, "short"]
    assert lines_of([text], 100) == [text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("é", "é "), ("日本", "日本 "), ("two\nlines", "two lines "), ("tab\tbed", "tab bed ")],
)
def test_a_column_is_as_wide_as_its_characters_and_a_cell_one_line(text: str, shown: str) -> None:
    table = Table("", "")
    table.add_row(text, "x")
    table.add_row("a" * cell_len(shown.rstrip()), "x")
    assert plain_lines(table)[1:] == [f"{shown} x", "a" * cell_len(shown.rstrip()) + "  x"]


def drawn(progress: dict[str, Any]) -> str:
    """What a terminal without colours shows of a launch that is so far."""
    stream = io.StringIO()
    console = Console(file=stream, width=100, no_color=True, force_terminal=False)
    request = {"label": "launch [red]trial", "state": "RUNNING"}
    console.print(Phase(request, progress, time.monotonic()))
    return stream.getvalue().removeprefix("0 s ")


@pytest.mark.parametrize(
    ("progress", "filled", "words"),
    [
        ({"done": 0, "total": 4}, 0, "0 %"),
        ({"done": 1, "total": 4}, BAR_WIDTH // 4, "25 %"),
        ({"done": 9, "total": 4}, BAR_WIDTH, "100 %"),
    ],
)
def test_the_bar_is_as_long_as_the_work_is_done(
    progress: dict[str, float], filled: int, words: str
) -> None:
    assert drawn(progress).count("━") == filled
    assert f" {words} launch [red]trial: running" in drawn(progress)


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        ({"message": "at it"}, "launch trial: at it"),
        ({"message": "at it", "eta_seconds": 90.0}, "launch trial: at it, about 1 min left"),
    ],
)
def test_an_estimate_is_shown_where_there_is_one(progress: dict[str, Any], shown: str) -> None:
    assert phase_line({"label": "launch trial", "state": "RUNNING"}, progress) == shown


@pytest.mark.parametrize("counts", [{}, {"done": 0, "total": 1}])
def test_a_long_line_of_the_environment_leaves_time_and_phase_at_80_columns(
    counts: dict[str, int],
) -> None:
    progress = {**counts, "message": f"0 of 1 replica ready: {'loading ' * 30}"}
    request = {"label": "launch trial", "state": "RUNNING"}
    stream = io.StringIO()
    console = Console(file=stream, width=80, no_color=True, force_terminal=False)
    console.print(Spinner("dots", Phase(request, progress, time.monotonic() - 12_345)))
    [line] = stream.getvalue().splitlines()
    assert " 12345 s " in line
    assert "launch trial: 0 of 1 " in line


@pytest.mark.parametrize("progress", [{}, {"done": 1}, {"done": 0, "total": 0}, {"done": "x"}])
def test_there_is_no_bar_without_a_total(progress: dict[str, float]) -> None:
    assert drawn(progress) == "launch [red]trial: running\n"


def test_kills_for_memory_hide_no_later_exits_of_other_kinds() -> None:
    kinds = ["oom_killed"] * 4 + ["signaled", "exited", "exited"]
    exits = [
        {"reason": {"kind": kind}, "message": f"{kind} {n}", "at": 1.0}
        for n, kind in enumerate(kinds)
    ]
    replica = {"exits": exits, "exit_kinds": {"oom_killed": 4, "signaled": 1, "exited": 2}}
    found = [line.partition(" ago ")[2] for line in failures.exit_lines("r:", replica, 3.0)]
    assert found == ["oom_killed 0", "oom_killed 1", "signaled 4", "exited 5", ""]
