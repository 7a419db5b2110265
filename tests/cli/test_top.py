# SPDX-License-Identifier: Apache-2.0
"""What `openenv top` shows, and says where it cannot. Its screen: `smoke_tests/test_top.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openenvd.cli import exit_codes, top_app, top_view
from openenvd.cli.changes import Changes
from openenvd.cli.options import reconnect
from openenvd.system.extras import install_command

from ..client.fake_daemon import FakeDaemon, new_environment, new_request, serving
from .conftest import Command

GB = 2**30
OOM = {"kind": "oom_killed", "message": "killed by the kernel at 120 MB\nmore", "hint": "openenv x"}
INFO: dict[str, Any] = {
    "limits": {"memory_bytes": 16 * GB},
    "plan": {"reserve_bytes": 2 * GB, "worker_bytes": 4 * GB},
    "memory": {"available_bytes": 8 * GB},
    "workers": [
        {"name": "long-1", "schedule": "LONG", "guaranteed": False, "rss_bytes": 3 * GB,
         "label": "launch trial", "task_id": "1"},
    ],
}  # fmt: skip


def test_memory_is_a_bar_that_needs_no_colour() -> None:
    line = top_view.memory_line(INFO, 120)
    bar = line.partition("[")[2].partition("]")[0]
    assert [round(bar.count(mark) * 16 / len(bar)) for mark in "#=.-"] == [3, 3, 8, 2]
    assert line.endswith("of 16.0 GB")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_rows_are_cut_to_the_width_of_the_terminal(columns: int) -> None:
    environment = new_environment("a-name-that-is-longer-than-most" * 2)
    rows = top_view.environment_rows([environment])
    widths, table = top_view.fit(top_view.ENVIRONMENTS, rows, columns)
    assert all(len(cell.text) <= widths[at] for line in table for at, cell in enumerate(line))
    if columns >= 80:
        assert sum(widths) + 2 * len(widths) == columns


def test_a_request_that_waits_says_why() -> None:
    waits = new_request(state="PENDING", pending_reason="waiting for memory",
                        started_at=None, finished_at=None)  # fmt: skip
    [row] = top_view.request_rows([waits], 1007.0)
    assert [cell.text for cell in row.cells][2:] == [
        "PENDING",
        "queued 7.0 s",
        "waiting for memory",
    ]
    assert "waiting for memory" in top_view.details(row)


def test_deaths_for_want_of_memory_come_first_with_their_command() -> None:
    replica = {
        **new_environment()["replicas"][0],
        "exit": {"kind": "signaled"},
        "restarts": 1,
        "message": "its previous server was killed by SIGKILL",
    }
    status = {
        "environments": [new_environment(replicas=[replica])],
        "requests": [new_request(state="FAILED", error=OOM)],
    }
    first, second = top_view.deaths(status, 1010.0)
    assert first.line == (
        "OUT OF MEMORY  launch trial: killed by the kernel at 120 MB  Try: openenv x"
    )
    assert second.line == "DIED  trial replica 0: its previous server was killed by SIGKILL"
    later = 1010.0 + top_view.RECENT_SECONDS
    assert [death.is_oom for death in top_view.deaths(status, later)] == [False]


def test_an_attempt_that_died_for_memory_is_told_though_its_request_goes_on() -> None:
    told = "worker long-1 was killed at 255 MB; it runs again with 512 MB (attempt 2 of 3)"
    retried = {"at": 1000.0, "message": told, "memory_bytes": 512 << 20, "error": None}
    request = new_request(state="RUNNING", error=None, retried=retried)
    [death] = top_view.deaths({"environments": [], "requests": [request]}, 1010.0)
    assert death.line == f"OUT OF MEMORY  launch trial: {told}"
    [row] = top_view.request_rows([request], 1010.0)
    assert row.cells[-1].text == told
    later = 1010.0 + top_view.RECENT_SECONDS
    assert top_view.deaths({"environments": [], "requests": [request]}, later) == []


def test_a_server_that_was_asked_to_stop_has_not_died() -> None:
    replica = {**new_environment()["replicas"][0], "exit": {"kind": "stopped"}}
    status = {"environments": [new_environment(replicas=[replica])], "requests": []}
    assert top_view.deaths(status, 0.0) == []


def test_without_textual_the_command_says_how_to_install_it(
    command: Command, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "openenvd.cli.top_app", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.delitem(sys.modules, name)
    answer = command("top")
    assert answer.code == exit_codes.FAILED
    assert install_command("top") in answer.err
    assert "openenv status --watch" in answer.err


def test_off_a_terminal_the_command_names_the_plain_form(
    command: Command, fake: FakeDaemon
) -> None:
    answer = command("top")
    assert answer.code == exit_codes.USAGE
    assert "openenv status --watch" in answer.err


def test_other_commands_do_not_import_the_screen() -> None:
    program = (
        "import sys; from openenvd.cli.main import run; run(['top', '--help'])\n"
        "import openenvd.cli.status\n"
        "assert not {'textual', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_changes_are_heard_from_a_daemon_that_was_lost_and_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openenvd.server.settings import Paths

    monkeypatch.setenv("OPENENV_HOME", str(tmp_path))
    paths = Paths(tmp_path)
    with serving(paths) as first:
        first.get("/v1/events", lambda call: call.break_off())
        first.get("/v1/health", {"status": "ok"})
        client = reconnect()
        assert client is not None
    changes = Changes(client, is_patient=True)
    changes.start()
    assert changes.happened.wait(20)
    problem = changes.problem
    assert problem is not None
    assert "exited" in problem.message
    with serving(paths) as second:
        ended = []

        def stream(call: Any) -> None:
            call.begin_stream()
            ended.append(call)  # before the event, which is the last thing that happens
            call.event("1:0", "event", {})
            while not changes._stopped.wait(0.05):
                call.chunk(": still here\n\n")

        second.get("/v1/events", stream)
        changes.happened.clear()
        while not ended:
            assert changes.happened.wait(20)
            changes.happened.clear()
        assert changes.problem is None
        changes.stop()


def test_a_log_that_is_left_while_it_connects_closes_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs, closed = top_app.Logs(top_view.Row("request 1", {}, ())), []

    def reconnect() -> object:
        logs.on_unmount()
        return SimpleNamespace(close=lambda: closed.append(True))

    monkeypatch.setattr(top_app, "reconnect", reconnect)
    logs._read()
    assert closed == [True]
