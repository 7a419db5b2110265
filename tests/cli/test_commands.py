# SPDX-License-Identifier: Apache-2.0
"""Each command against a daemon that answers as scripted, over a real socket."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.cli import exit_codes, options
from openenvd.cli.output.drawing import requests_table

from ..client.fake_daemon import Call, FakeDaemon, new_environment, new_request
from .conftest import PROGRAM, Command

Process = Callable[..., subprocess.Popen[str]]
ID = "7f3a91c2d4e5f607"
READY = new_request(result={"environment": new_environment()})
FAILED = new_request(
    state="FAILED",
    error={
        "kind": "operation_error",
        "message": "trial exited with code 7",
        "hint": "see its log",
        "evidence": None,
        "log_tail": ["cannot go on: no licence"],
    },
)


def daemon_json(fake: FakeDaemon) -> dict[str, Any]:
    return {**fake.identity, "uptime_seconds": 5.0, "requests": {}, "sessions": 3}


@pytest.fixture
def accepts(fake: FakeDaemon) -> Callable[[dict[str, Any]], None]:
    """Makes the daemon accept a launch that ends as given."""

    def end_as(request: dict[str, Any], *log: str) -> None:
        fake.post("/v1/requests", (202, {"request_id": request["id"], "request": request}))
        fake.ends(request, *(log or ("preparing\n", "ready\n")))

    return end_as


@pytest.fixture
def status(fake: FakeDaemon) -> dict[str, Any]:
    answer = {
        "daemon": daemon_json(fake),
        "environments": [new_environment()],
        "requests": [FAILED, new_request("2", state="PENDING", pending_reason="waiting for memory",
                                         started_at=None, finished_at=None)],
    }  # fmt: skip
    fake.get("/v1/status", answer)
    return answer


@pytest.fixture
def shown(command: Command, fake: FakeDaemon) -> Callable[..., str]:
    """What `status` prints of these environments, requests and strays."""

    def show(*environments: Any, requests: Any = (), strays: Any = ()) -> str:
        answer = {"environments": environments, "requests": requests, "strays": strays}
        fake.get("/v1/status", {"daemon": daemon_json(fake), **answer})
        return command("status").out

    return show


# launch


def test_launch_shows_the_log_and_prints_address_and_snippet(
    command: Command, accepts: Callable[..., None]
) -> None:
    accepts(READY)
    answer = command("launch", "echo", "--name", "trial")
    assert answer.code == 0
    assert "preparing\nready\n" in answer.err
    assert "http://127.0.0.1:21000" in answer.out
    assert 'Client().environment("trial").connect()' in answer.out
    assert "preparing" not in answer.out


def test_launch_shows_the_token_in_the_snippet_and_warns_of_a_wide_address(
    command: Command, fake: FakeDaemon, accepts: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token-of-the-tests\n")
    launched = new_environment(has_token=True, is_exposed=True)
    accepts(new_request(result={"environment": launched}))
    base_url = "http://127.0.0.1:21000?token=a-token-of-the-tests"
    fake.get("/v1/environments/trial/base_url", {"base_url": base_url, "is_served": True})
    answer = command("launch", "echo", "--host", "0.0.0.0", "--token", f"@{tmp_path / 'token'}")
    assert "warning: trial can be reached from other machines" in answer.err
    [payload] = [body["payload"] for method, _, body in fake.calls if method == "POST" and body]
    assert (payload["token"], payload["host"]) == ("a-token-of-the-tests", "0.0.0.0")
    found = command("address", "trial")
    assert (found.out, found.err) == (f"{base_url}\n", "")
    fake.get("/v1/environments/trial/base_url", {"base_url": base_url, "is_served": False})
    found = command("address", "trial")
    assert found.out == f"{base_url}\n"
    assert "no replica of trial serves now: nothing may answer at this address" in found.err
    fake.get("/v1/environments/trial/base_url", {"base_url": None, "address": None})
    failed = {"name": "trial", "state": "FAILED", "error": {"message": "no module named trail"}}
    fake.get("/v1/environments/trial", {"environment": failed})
    refused = command("address", "trial")
    assert refused.code == exit_codes.NOT_FOUND
    assert "trial has no address, it is FAILED: no module named trail" in refused.err
    assert command("launch", "echo", "--token", "@/no/such/file").code == exit_codes.USAGE


def test_a_test_launches_with_the_options_that_are_set(
    command: Command, accepts: Callable[..., None], fake: FakeDaemon
) -> None:
    accepts(FAILED)
    rare = ("--set", "serve-as-is=yes", "--set", "ready-timeout=9")
    assert command("test", "echo", "--keep", "-e", "A=1", *rare).code == exit_codes.FAILED
    assert fake.calls[0][2] is not None
    payload = fake.calls[0][2]["payload"]
    assert (payload["serve_as_is"], payload["ready_timeout_seconds"]) == (True, 9.0)
    assert payload["env"] == {"A": "1"}
    assert "shards" not in payload


@pytest.mark.parametrize("words", [("launch",), ("test",), ("image", "build")])
def test_an_empty_source_is_refused_before_anything_is_queued(
    words: tuple[str, ...], command: Command, fake: FakeDaemon
) -> None:
    answer = command(*words, "", "--json")
    assert (answer.code, answer.json["error"]["message"]) == (2, "the source is empty")
    assert "error: the source is empty\n  is a variable unset?" in answer.err
    assert fake.calls == []


def test_status_warns_of_an_environment_that_others_can_reach(shown: Callable[..., str]) -> None:
    environment = new_environment(host="0.0.0.0", is_exposed=True)
    assert "trial: listens on 0.0.0.0: other machines can connect" in shown(environment)


def test_status_says_what_replicas_have_of_gpus(shown: Callable[..., str]) -> None:
    gpus = [{"each": 1.0, "resource": "nvidia.com/mig-1g.5gb"}, {"each": 0.25, "resource": None}]
    environments = [new_environment(f"e{n}", gpus=each) for n, each in enumerate([*gpus, None])]
    told = [line for line in shown(*environments).splitlines() if "for each replica" in line]
    first, second = "1 nvidia.com/mig-1g.5gb", "0.25 GPU"
    assert told == [f"  e0: {first} for each replica", f"  e1: {second} for each replica"]


def test_a_ready_launch_is_announced_once(command: Command, accepts: Callable[..., None]) -> None:
    told = "trial is ready at http://127.0.0.1:21000"
    accepts(READY, "replica 0 (pid 7) is ready (0.2 s)\n", f"{told} (0.3 s)\n")
    answer = command("launch", "echo", "--name", "trial")
    assert answer.out.startswith(f"✓ {told}\n")
    assert answer.err == "replica 0 (pid 7) is ready (0.2 s)\n"


@pytest.mark.parametrize(
    ("route", "told"),
    [
        ("GET /health", "curl -X GET 'http://127.0.0.1:21000/health'"),
        (None, "call it at http://127.0.0.1:21000: the app does not show its routes"),
    ],
)
def test_a_launch_of_an_app_without_sessions_says_how_to_call_it(
    command: Command, accepts: Callable[..., None], route: str | None, told: str
) -> None:
    environment = new_environment(replicas=[{"serving": "http", "route": route}])
    accepts(new_request(result={"environment": environment}))
    assert told in command("launch", "echo", "--name", "trial").out


def test_launch_json_is_alone_on_stdout(command: Command, accepts: Callable[..., None]) -> None:
    accepts(READY)
    answer = command("launch", "echo", "--name", "trial", "--json")
    environment = {"name": "trial", "state": "READY", "address": "http://127.0.0.1:21000"}
    assert answer.json == {"request_id": ID, "environment": environment}
    assert "from openenvd import Client" in answer.err


def test_launch_async_prints_the_id_alone(command: Command, accepts: Callable[..., None]) -> None:
    accepts(READY)
    assert command("launch", "--async", "echo").out == f"{ID}\n"
    assert command("launch", "--async", "echo", "--json").json == {"request_id": ID}


def test_launch_sends_the_given_options_and_no_others(
    command: Command,
    accepts: Callable[..., None],
    fake: FakeDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepts(READY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "x")
    arguments = "launch --async ./my_env --replicas 2 -e A=1 -e TOKEN --memory 2G --set timeout=9"
    arguments += " --shards 3 --no-isolate --set admission-timeout=0 --gpus 1 --session-memory 64M"
    arguments += " --min 2 --max 8 --set scale-down=30"
    command(*arguments.split())
    assert fake.calls[0][2] == {
        "operation": "launch",
        "payload": {
            "name": "my_env",
            "source": str(tmp_path / "my_env"),
            "cwd": str(tmp_path),
            "replicas": 2,
            "env": {"A": "1", "TOKEN": "x"},
            "memory_mb": 2048,
            "shards": 3,
            "isolate": False,
            "admission_timeout_seconds": 0.0,
            "gpus": 1,
            "session_memory_mb": 64,
            "min_replicas": 2,
            "max_replicas": 8,
            "scale_down_seconds": 30.0,
        },
        "timeout_seconds": 9.0,
    }


def test_a_failed_launch_prints_the_reason_on_stderr(
    command: Command, accepts: Callable[..., None]
) -> None:
    accepts(FAILED)
    answer = command("launch", "echo", "--name", "trial", "--json")
    assert answer.code == 1
    assert "trial exited with code 7" in answer.err
    assert "no licence" in answer.err
    assert answer.json["environment"] == {"name": "trial", "state": "FAILED", "address": None}
    assert answer.json["error"]["kind"] == "operation_error"


def test_variables_come_from_files_and_options_win(
    command: Command,
    fake: FakeDaemon,
    accepts: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    (tmp_path / "some.env").write_text("A=1\nB=1\nFROM_HERE\n")
    accepts(READY)
    file = str(tmp_path / "some.env")
    assert command("launch", "echo", "--env-file", file, "-e", "B=2", "-e", "FROM_HERE").code == 0
    sent = next(body for method, _, body in fake.calls if method == "POST")
    assert sent is not None
    assert sent["payload"]["env"] == {"A": "1", "B": "2", "FROM_HERE": "here"}
    assert "env_file" not in sent["payload"]


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m"


def test_escape_sequences_of_failures_are_shown_nowhere(
    command: Command, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, where our own colours are shown."""
    monkeypatch.setattr("openenvd.cli.output.drawing.is_coloured", lambda _: True)
    error = {
        "kind": "operation_error",
        "message": f"it said {ESCAPES}boo",
        "hint": f"see {ESCAPES}there",
        "evidence": {"victim_name": f"py{ESCAPES}thon", "victim_pid": 7},
        "log_tail": [f"the last {ESCAPES}line"],
    }
    failed = {**FAILED, "label": f"launch tri{ESCAPES}al", "error": error}
    replica = {**new_environment()["replicas"][0], "message": f"died {ESCAPES}of", "restarts": 1}
    environment = new_environment(
        state="FAILED", source=f"/ho{ESCAPES}me", error=error, replicas=[replica]
    )
    answer = {"daemon": daemon_json(fake), "environments": [environment], "requests": [failed]}
    fake.get("/v1/status", answer)
    fake.get("/v1/requests", {"requests": [failed]})
    for words in (["status"], ["requests"]):
        shown = command(*words).out
        assert "it said boo" in shown.lower()
        assert "\x1b[31mFAILED" in shown  # ours
        assert "\x1b[2J" not in shown
        assert "owned" not in shown
        assert "\x1b[31mboo" not in shown
    assert "\\u001b[2J" in command("status", "--json").out


def test_logs_keep_colours_and_no_other_sequences(command: Command, fake: FakeDaemon) -> None:
    fake.get("/v1/environments/trial", {"environment": new_environment()})
    printed = f"one{ESCAPES}red\x1b[0m\n50 %\r100 %\n"
    fake.get("/v1/environments/trial/logs", _text(printed))
    assert command("logs", "trial").out == "one\x1b[31mred\x1b[0m\n50 %\n100 %\n"
    assert command("logs", "trial", "--plain").out == "onered\n50 %\n100 %\n"
    assert command("logs", "trial", "--json").json["lines"][0] == f"one{ESCAPES}red\x1b[0m"
    assert command("logs", "trial", "--plain", "--json").json["lines"][0] == "onered"


def test_log_pieces_become_whole_lines(command: Command, accepts: Callable[..., None]) -> None:
    accepts(READY, "on", "e\ntwo\r\nthr", "ee")
    assert "one\ntwo\nthree\n" in command("launch", "echo").err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "echo", "--name", "../escape"], "name"),
        (["launch", "echo", "--replicas", "0"], "replicas"),
        (["launch", "echo", "--memory", "lots"], "512M"),
        (["launch", "echo", "--idle-timeout", "soon"], "write 90, 60s, 5m or 2h"),
        (["launch", "echo", "--idle-timeout", "5d"], "write 90, 60s, 5m or 2h"),
        (["launch", "echo", "--idle-timeout", "0m"], "0.0 is not in the range x>0"),
        (["launch", "echo", "--set", "timeout=nan"], "write 90, 60s, 5m or 2h"),
        (["up", "--cancel-grace-seconds", "5 minutes"], "write 90, 60s, 5m or 2h"),
        (["launch", "echo", "--shards", "0"], "auto"),
        (["launch", "echo", "-e", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["launch"], "SOURCE"),
        (["lanuch", "echo"], "launch"),
        (["serve"], "use openenv launch SOURCE"),
        (["ps"], "use openenv status"),
        (["rm", "echo"], "use openenv down NAME"),
        (["stop", "my env"], "Did you mean: openenv down 'my env'"),
        (["requests", "7f3a91c2"], "Did you mean: openenv status 7f3a91c2"),
        (["down"], "--all"),
        (["down", "x", "--all"], "--all"),
        (["down", "x", "--strays"], "--strays"),
        (["requests", "--state", "NOPE"], "pending"),
        (["wait"], "REQUEST_ID"),
        (["up", "--port", "65536"], "from 0 to 65535"),
        (["up", "--keep-days", "nan"], "a number from 0 to 36500"),
        (["up", "--cancel-grace-seconds", "2h"], "a number from 0 to 3600"),
        (["up", "--log-level", "loud"], "one of debug, info"),
        (["up", "--log-format", "xml"], "one of text, json"),
        (["status", "\udcff"], "is not UTF-8 text"),
    ],
)
def test_a_wrong_command_line_is_2_and_reaches_no_daemon(
    command: Command, fake: FakeDaemon, arguments: list[str], words: str
) -> None:
    answer = command(*arguments)
    assert answer.code == 2
    assert words in answer.err
    assert fake.calls == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0.5", 0.5), ("60s", 60.0), ("5m", 300.0), ("2H", 7200.0), ("1.5h", 5400.0)],
)
def test_a_duration_is_in_seconds_or_has_its_unit(text: str, seconds: float) -> None:
    assert options.seconds(text) == seconds


def test_a_wrong_command_line_is_json_too(command: Command, fake: FakeDaemon) -> None:
    answer = command("launch", "--json")
    assert answer.code == 2
    assert answer.json["error"]["kind"] == "usage"
    assert "SOURCE" in answer.json["error"]["message"]


def test_an_interrupt_during_imports_ends_without_a_traceback(
    process: Process, tmp_path: Path
) -> None:
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    started = process("status", PYTHONPATH=str(tmp_path))
    assert started.communicate() == ("", "\n")
    assert started.returncode == exit_codes.INTERRUPTED


def test_a_second_interrupt_cancels(
    process: Process, fake: FakeDaemon, accepts: Callable[..., None]
) -> None:
    accepts(READY)
    fake.post(
        f"/v1/requests/{ID}/cancel", {"request": READY, "cancelled": False, "cancelling": True}
    )
    release = _hold_stream(fake)
    launch = process("launch", "echo", "--name", "trial")
    assert launch.stderr is not None
    assert launch.stderr.readline() == "preparing\n"
    launch.send_signal(signal.SIGINT)
    while "Ctrl-C again" not in launch.stderr.readline():
        pass
    launch.send_signal(signal.SIGINT)
    _, err = launch.communicate(timeout=30)
    release.set()
    assert launch.returncode == 130
    assert "launch trial is being cancelled" in err
    assert [call for call in fake.calls if call[1].endswith("/cancel")]


def _hold_stream(fake: FakeDaemon) -> threading.Event:
    """The launch runs, and has printed a line, until the event is set."""
    release = threading.Event()

    def stream(call: Call) -> None:
        call.begin_stream()
        call.event("1:0", "log", {"text": "preparing\n"})
        release.wait(30)
        call.break_off()

    fake.get(f"/v1/requests/{ID}/events", stream)
    return release


def test_a_request_is_submitted_again_with_the_memory_that_is_given(
    command: Command, fake: FakeDaemon
) -> None:
    fake.post(f"/v1/requests/{ID}/retry", (202, {"request_id": "b1", "request": READY}))
    answer = command("retry", ID, "--memory", "2G", "--async")
    assert (answer.code, answer.out) == (0, f"{READY['id']}\n")
    [body] = [body for method, _, body in fake.calls if method == "POST"]
    assert body == {"memory_mb": 2048}


@pytest.mark.parametrize("operation", ["launch", "rollout", "down"])
def test_a_request_that_is_submitted_again_is_followed(
    command: Command, fake: FakeDaemon, operation: str
) -> None:
    request = {**FAILED, "operation": operation}
    fake.post(f"/v1/requests/{ID}/retry", (202, {"request_id": ID, "request": request}))
    fake.ends(request)
    answer = command("retry", ID)
    assert answer.code == 1
    assert "FAILED" in answer.err


@pytest.mark.parametrize("words", [(), ("launch",), ("image", "build")])
def test_help_as_a_word_shows_the_help(command: Command, words: tuple[str, ...]) -> None:
    answer = command("help", *words)
    assert (answer.code, answer.out) == (0, command(*words, "--help").out)
    assert "Usage:" in answer.out


# status, requests, logs


def updated(fake: FakeDaemon, final: dict[str, Any]) -> None:
    """A launch of a name that runs is submitted, and ends so."""
    request = {**final, "payload": {"replaces": "a0"}}
    fake.post("/v1/requests", (202, {"request_id": ID, "request": request}))
    fake.ends(request)
    one = {"number": 1, "request_id": "a0", "spec": {"source": "echo"}}
    two = {"number": 2, "request_id": ID, "spec": {"source": "echo"}}
    environment = {**new_environment(), "generation": 1, "generations": [two, one]}
    fake.get("/v1/environments/trial", {"environment": environment})


def test_launch_of_a_name_that_runs_says_that_it_is_updated(
    command: Command, fake: FakeDaemon
) -> None:
    updated(fake, READY)
    answer = command("launch", "echo", "--name", "trial")
    assert answer.code == 0
    assert "trial runs: updating it to generation 2\n" in answer.err


def test_an_update_that_fails_says_what_serves(command: Command, fake: FakeDaemon) -> None:
    updated(fake, FAILED)
    answer = command("launch", "echo", "--name", "trial")
    assert answer.code == 1
    assert "trial goes on with generation 1" in answer.err


@pytest.mark.parametrize(
    ("flags", "sent"), [([], None), (["--update"], True), (["--no-update"], False)]
)
def test_update_is_sent_only_if_it_was_said(
    command: Command, fake: FakeDaemon, flags: list[str], sent: bool | None
) -> None:
    updated(fake, READY)
    command("launch", "echo", "--name", "trial", *flags)
    [body] = [body for method, _, body in fake.calls if method == "POST"]
    assert body is not None
    assert body["payload"].get("update") is sent


def test_status_json_is_the_daemons_json(command: Command, status: dict[str, Any]) -> None:
    assert command("status", "--json").json == status


def test_status_shows_tables_and_failures(command: Command, status: dict[str, Any]) -> None:
    out = command("status").out
    assert "trial        READY" in out
    assert "3/64" in out
    assert "waiting for memory" in out
    assert "✗ launch trial  FAILED" in out
    assert "│ cannot go on: no licence" in out
    assert "\x1b" not in out


def test_status_shows_no_failed_launch_of_what_was_launched_since(
    shown: Callable[..., str],
) -> None:
    later = new_request("5", label="launch trial again")
    assert "✗" not in shown(new_environment(), requests=[later, FAILED])
    assert "✗ launch trial  FAILED" in shown(new_environment(), requests=[FAILED, later])


def test_status_shows_how_an_environment_is_served_and_its_last_shard_exit(
    shown: Callable[..., str],
) -> None:
    serving = {"sentence": "4 shards", "shards": 4, "held": {"shards": 1, "since": 0.0}}
    environment = new_environment(serving=serving)
    told = {"at": 1000.0, "message": "shard 2 (pid 7) was killed by SIGKILL"}
    told["hint"] = "openenv retry a0 --memory 600M"
    environment["replicas"][0] |= {"exits": [told], "exit_kinds": {"oom_killed": 1, "exited": 2}}
    out = shown(environment)
    assert "trial: 4 shards, 3/64 sessions" in out
    assert "trial: 1 of 4 shards is blocked for" in out
    assert "ago shard 2 (pid 7) was killed by SIGKILL\n" in out
    assert "trial replica 0: so far 1 killed for memory, 2 exited\n" in out
    assert "    Try: openenv retry a0 --memory 600M\n" in out


def test_status_shows_how_the_gateway_exited(
    command: Command, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    told = {"at": 1000.0, "message": "Envoy (pid 7) was killed by SIGKILL"}
    fake.get("/v1/status", status | {"gateway": {"exits": [told]}})
    out = command("status").out
    assert re.search(
        r"^  gateway: .* ago Envoy \(pid 7\) was killed by SIGKILL$", out, re.MULTILINE
    )


def test_status_names_steps_that_go_on(shown: Callable[..., str]) -> None:
    environment = new_environment()
    since = time.time() - 130.0
    environment["replicas"][0]["abandoned"] = [{"shard": 0, "count": 1, "since": since}]
    told = "trial replica 0: shard 0: 1 abandoned step has run for 2 min"
    assert told in shown(environment)


def test_status_of_a_name_shows_the_latest_failures_and_counts_the_others(
    command: Command, fake: FakeDaemon
) -> None:
    failed = [
        {**FAILED, "id": f"{number:016x}", "label": f"rollout {number}"} for number in range(5)
    ]
    fake.get("/v1/environments/trial", {"environment": new_environment()})
    fake.get("/v1/requests", {"requests": failed})
    fake.get("/v1/status", {"daemon": daemon_json(fake), "environments": [], "requests": []})
    out = command("status", "trial").out
    assert out.count("cannot go on: no licence") == 3
    assert "and 2 more: openenv requests --state failed" in out


def test_status_tells_each_failure_once(shown: Callable[..., str]) -> None:
    failed = [
        {**FAILED, "id": f"{n:016x}", "error": {**FAILED["error"], "message": f"no licence {n}"}}
        for n in range(5)
    ]
    out = shown(requests=failed).lower()
    assert [out.count(f"no licence {n}") for n in range(5)] == [1] * 5


def test_status_tells_the_failure_of_an_environment_once(shown: Callable[..., str]) -> None:
    error = {**FAILED["error"], "message": "no licence"}
    environment = {**new_environment(), "state": "FAILED", "error": error, "request_id": ID}
    out = shown(environment, requests=[{**FAILED, "id": ID, "error": error}])
    assert out.count("no licence") == 1


def test_an_empty_status_suggests_a_command(shown: Callable[..., str]) -> None:
    assert "openenv launch echo" in shown()


def test_status_of_a_name_has_its_requests(
    command: Command, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    fake.get("/v1/environments/trial", {"environment": new_environment()})
    fake.get("/v1/requests", {"requests": [READY]})
    found = command("status", "trial", "--json").json
    assert [e["name"] for e in found["environments"]] == ["trial"]
    assert [r["id"] for r in found["requests"]] == [ID]


def test_status_of_a_name_shows_its_generations(
    command: Command, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    now = time.time()
    ends = {"served_at": now - 7200, "ended_at": now - 600, "error": None}
    last = {"number": 2, "request_id": ID, "state": "SERVING", "spec": {"source": "echo"}}
    last |= {"created_at": now, "served_at": now - 600, "ended_at": None, "error": None}
    failed = {**last, "number": 3, "state": "FAILED", "served_at": None, "ended_at": now - 60}
    failed["error"] = "replica 0 exited\nits last lines:"
    history = [failed, last, {**last, "number": 1, "state": "RETIRED", **ends}]
    environment = {**new_environment(), "generations": history}
    fake.get("/v1/environments/trial", {"environment": environment})
    fake.get("/v1/requests", {"requests": []})
    lines = [" ".join(line.split()) for line in command("status", "trial").out.splitlines()]
    launch = ID[:8]
    assert f"3 {launch} FAILED 1 min ago echo replica 0 exited" in lines
    assert f"2 {launch} SERVING for 10 min echo" in lines
    assert f"1 {launch} RETIRED for 1 h, 10 min ago echo" in lines


def test_status_of_an_id_has_that_request(
    command: Command, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    fake.get("/v1/requests/7f3a", {"request": FAILED})
    found = command("status", "7f3a", "--json").json
    assert (found["environments"], found["requests"]) == ([], [FAILED])


def test_the_help_page_lists_every_exit_code(command: Command) -> None:
    text = command("--help").out
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [code for code in codes if f" {code} " not in " ".join(text.split())] == []


@pytest.mark.parametrize("arguments", [["status", "trail"], ["logs", "trail"], ["down", "trail"]])
def test_a_misspelled_name_is_4_with_near_matches(
    command: Command, fake: FakeDaemon, status: dict[str, Any], arguments: list[str]
) -> None:
    error = {"kind": "not_found", "message": "no environment is called 'trail'",
             "hint": "did you mean trial?", "near": ["trial"]}  # fmt: skip
    fake.get("/v1/environments/trail", (404, {"error": error}))
    fake.post("/v1/requests", (404, {"error": error}))
    answer = command(*arguments)
    assert answer.code == 4
    assert "trail" in answer.err
    assert "did you mean trial?" in answer.err


def test_status_watch_prints_every_change_as_json_lines(
    process: Process, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    more, done = threading.Event(), threading.Event()

    def stream(call: Call) -> None:
        call.begin_stream()
        more.wait(30)
        call.event("5:0", "change", {"seq": 5})
        done.wait(30)
        call.break_off()

    fake.get("/v1/events", stream)
    watch = process("status", "--watch", "--json")
    assert watch.stdout is not None
    assert '"READY"' in watch.stdout.readline()
    status["environments"][0]["state"] = "DEGRADED"
    more.set()
    assert '"DEGRADED"' in watch.stdout.readline()
    watch.send_signal(signal.SIGINT)
    watch.communicate(timeout=30)
    done.set()
    assert watch.returncode == 130


def test_requests_are_filtered_and_printed(command: Command, fake: FakeDaemon) -> None:
    fake.get("/v1/requests", {"requests": [READY, FAILED]})
    answer = command("requests", "--state", "failed", "--json")
    assert [r["id"] for r in answer.json["requests"]] == [ID, ID]
    assert "state=FAILED" in fake.calls[0][1]
    assert "launch trial" in command("requests").out


def test_logs_of_a_degraded_environment_end_with_the_reason(
    command: Command, fake: FakeDaemon
) -> None:
    environment = new_environment(state="DEGRADED")
    environment["replicas"][0].update(state="BACKING_OFF", message="was killed by SIGKILL")
    fake.get("/v1/environments/trial", {"environment": environment})
    fake.get("/v1/environments/trial/logs", _text("hello\n"))
    answer = command("logs", "trial", "-n", "5")
    assert (answer.code, answer.out) == (0, "hello\n")
    assert "SIGKILL" in answer.err


def test_an_empty_log_is_said_to_be_empty(command: Command, fake: FakeDaemon) -> None:
    fake.get("/v1/environments/trial", {"environment": new_environment()})
    fake.get("/v1/environments/trial/logs", _text(""))
    answer = command("logs", "trial")
    assert (answer.code, answer.out, answer.err) == (0, "", "trial has printed nothing yet\n")
    answer = command("logs", "trial", "--replica", "r2")
    assert answer.err == "replica r2 of trial has printed nothing yet\n"


def test_an_environment_without_a_log_shows_its_launchs_log(
    command: Command, fake: FakeDaemon
) -> None:
    fake.get("/v1/environments/trial", {"environment": new_environment()})
    fake.get(f"/v1/requests/{ID}", {"request": FAILED})
    fake.get(f"/v1/requests/{ID}/logs", _text("preparing\n"))
    answer = command("logs", "trial")
    assert answer.out == "preparing\n"
    assert "trial exited with code 7" in answer.err


def test_logs_json_is_lines(command: Command, fake: FakeDaemon) -> None:
    fake.get(f"/v1/requests/{ID}", {"request": READY})
    fake.get(f"/v1/requests/{ID}/logs", _text("a\nb"))
    assert command("logs", ID, "--json").json == {"lines": ["a", "b"]}
    assert command("logs", ID, "-f", "--json").out == '{"line": "a"}\n{"line": "b"}\n'


def _text(text: str) -> Callable[[Call], None]:
    def stream(call: Call) -> None:
        call.begin_stream("text/plain")
        call.chunk(text)
        call.end_stream()

    return stream


# wait, cancel, down, stop, up, info, check


def test_wait_has_the_outcomes_exit_code(command: Command, fake: FakeDaemon) -> None:
    oom = {**FAILED["error"], "kind": "oom_killed"}
    for request_id, state, error in (("1", "SUCCEEDED", None), ("2", "FAILED", oom)):
        fake.ends(new_request(request_id, state=state, error=error))
    assert command("wait", "1").code == 0
    assert command("wait", "1", "2").code == 137
    assert command("wait", "1", "--json").json["request"]["id"] == "1"


def test_wait_follows_a_request_that_runs(command: Command, fake: FakeDaemon) -> None:
    fake.ends(new_request("1"))
    fake.get("/v1/requests/1", {"request": new_request("1", state="RUNNING", finished_at=None)})
    answer = command("wait", "1")
    assert answer.code == 0
    assert "SUCCEEDED" in answer.out


def test_an_unknown_id_is_reported_before_any_wait(command: Command, fake: FakeDaemon) -> None:
    fake.ends(new_request("1"))
    assert command("wait", "1", "nobody").code == 4
    assert not [call for call in fake.calls if "events" in call[1]]


def test_cancel_reports_requests_that_had_ended_already(command: Command, fake: FakeDaemon) -> None:
    fake.get("/v1/requests/1", {"request": READY})
    fake.post(
        f"/v1/requests/{ID}/cancel", {"request": READY, "cancelled": False, "cancelling": False}
    )
    answer = command("cancel", "1")
    assert answer.code == 0
    assert "has already ended" in answer.out


def test_down_waits_and_continues_after_an_unknown_name(command: Command, fake: FakeDaemon) -> None:
    ended = new_request("9", operation="down", label="down trial")

    def submit(call: Call) -> None:
        assert call.body is not None
        if call.body["payload"]["name"] == "trial":
            call.json(202, {"request_id": "9", "request": ended})
        else:
            call.json(404, {"error": {"kind": "not_found", "message": "no nobody", "hint": None}})

    fake.post("/v1/requests", submit)
    fake.get("/v1/requests", {"requests": []})
    fake.ends(ended)
    answer = command("down", "nobody", "trial")
    assert answer.code == 4
    assert "trial is down" in answer.out
    assert "no nobody" in answer.err
    told = command("down", "nobody", "trial", "--json").json
    assert [error["message"] for error in told["errors"]] == ["no nobody"]


LAUNCHED: dict[str, Any] = {"state": "SUCCEEDED"}
CALLED_OFF: dict[str, Any] = {"state": "CANCELLED", "cancel_requested_at": 1000.0}


@pytest.mark.parametrize(
    ("down", "launch", "told"),
    [
        ({"result": {"stopped": ["trial-0"]}}, LAUNCHED, ""),
        ({"result": {"stopped": []}}, LAUNCHED, " (nothing of it was running)"),
        ({"result": {"stopped": []}}, CALLED_OFF, " (its launch was cancelled)"),
        ({"result": {"stopped": ["trial-0"]}}, CALLED_OFF, " (its launch was cancelled)"),
        # Cancelled before, by somebody else.
        (
            {"result": {"stopped": []}},
            {**CALLED_OFF, "cancel_requested_at": 900.0},
            " (nothing of it was running)",
        ),
        # An attempt before this one may have stopped all.
        ({"result": {"stopped": []}, "attempts": 2}, LAUNCHED, ""),
        ({"result": {"stopped": []}, "lost_daemons": 1}, LAUNCHED, ""),
    ],
)
def test_down_says_whether_anything_was_running_and_was_called_off(
    command: Command, fake: FakeDaemon, down: dict[str, Any], launch: dict[str, Any], told: str
) -> None:
    ended = new_request("9", operation="down", label="down trial", **down)
    fake.post("/v1/requests", {"request_id": "9", "request": ended})
    fake.get("/v1/requests", {"requests": [new_request("8", **launch)]})
    fake.ends(ended)
    answer = command("down", "trial")
    assert answer.code == 0
    assert f"trial is down{told}\n" in answer.out


def test_down_all_of_nothing_is_fine(command: Command, fake: FakeDaemon) -> None:
    fake.get("/v1/environments", {"environments": []})
    assert command("down", "--all").code == 0


STRAY = {"provider": "docker", "id": "3f2a", "environment": "gone", "replica": "gone-0-1"}


def test_down_strays_names_what_status_shows(
    command: Command, fake: FakeDaemon, shown: Callable[..., str]
) -> None:
    out = shown(strays=[STRAY])
    assert "1 stray that nobody has written down; openenv down --strays stops them:" in out
    assert "  gone-0-1 (docker)" in out
    ended = new_request("9", operation="down_strays", result={"stopped": ["3f2a"]})

    def submit(call: Call) -> None:
        assert call.body is not None
        assert call.body["payload"] == {"strays": [{"provider": "docker", "id": "3f2a"}]}
        call.json(202, {"request_id": "9", "request": ended})

    fake.post("/v1/requests", submit)
    fake.ends(ended)
    assert "stopped 1 stray" in command("down", "--strays").out


def test_down_strays_of_nothing_is_fine(command: Command, shown: Callable[..., str]) -> None:
    shown()
    assert command("down", "--strays").out == "no strays\n"


def test_check_prints_the_operations_result(command: Command, accepts: Callable[..., None]) -> None:
    done = new_request("3", operation="check", result={"python": "3.11", "uv": None})
    accepts(done)
    assert command("check").out == "python: 3.11\nuv: -\n"
    assert command("check", "--json").json == {"python": "3.11", "uv": None}


def test_check_says_of_each_provider_and_the_gateway_in_a_line_what_is_missing(
    command: Command, accepts: Callable[..., None]
) -> None:
    works = {"version": "29.1", "problem": None, "remedy": None, "notes": ["no GPU runtime"]}
    missing = {"version": None, "problem": "no swarm here", "remedy": "docker swarm init"}
    providers = {"docker": works, "swarm": {**missing, "notes": []}}
    gateway = {**works, "version": "1.40.0", "notes": []}
    result = {"uv": None, "providers": providers, "gateway": gateway}
    done = new_request("3", operation="check", result=result)
    accepts(done)
    assert command("check").out.splitlines()[1:] == [
        "providers:",
        "  ✓ docker  works, version 29.1 · no GPU runtime",
        "  ✗ swarm   no swarm here · docker swarm init",
        "gateway:",
        "  ✓ envoy  works, version 1.40.0",
    ]
    assert command("check", "--json").json["providers"] == providers


def test_a_daemon_that_goes_in_a_trial_is_told_in_its_one_document(
    command: Command, fake: FakeDaemon
) -> None:
    works: Any = {"version": "1", "problem": None, "remedy": None, "notes": []}
    providers = {"local": works}
    looked = new_request("3", operation="check", result={"providers": providers})
    down = new_request("4", operation="down", result={})
    fake.ends(looked)
    fake.ends(down)

    def submitted(call: Call) -> None:
        operation = (call.body or {})["operation"]
        if operation == "launch":
            call.break_off()
            return
        request = looked if operation == "check" else down
        call.json(202, {"request_id": request["id"], "request": request})

    fake.post("/v1/requests", submitted)
    answer = command("check", "--provider", "local", "--json")
    assert answer.code == 3
    assert [step["step"] for step in answer.json["steps"]] == ["engine", "down"]
    assert answer.json["error"]["kind"] == "unreachable"
    assert answer.json["error"]["message"] in answer.err


def test_a_trial_leaves_a_signal_ignored_that_is(command: Command, fake: FakeDaemon) -> None:
    """As `nohup` has it."""
    found: list[object] = []

    def submitted(call: Call) -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        found.append(signal.getsignal(signal.SIGTERM))
        call.json(400, {"error": {"kind": "invalid", "message": "no"}})

    fake.post("/v1/requests", submitted)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command("check", "--provider", "local")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN, signal.default_int_handler]


def test_prune_reports_the_space_it_freed(command: Command, accepts: Callable[..., None]) -> None:
    removed = [
        {"path": "/venvs/a", "project": "/home/me/my_env", "freed_bytes": 400 * 2**20},
        {"path": "/venvs/b", "project": None, "freed_bytes": 67 * 2**20},
    ]
    result = {"removed": removed, "images": ["openenvd/echo:1f"], "freed_bytes": 467 * 2**20}
    done = new_request("3", operation="prune", result=result)
    accepts(done)
    told = command("prune").out
    assert "removed 400 MB of /home/me/my_env" in told
    assert "removed the image openenvd/echo:1f" in told
    assert told.splitlines()[-1] == "freed 467 MB"
    assert command("prune", "--json").json == result


def test_prune_of_nothing_says_so(command: Command, accepts: Callable[..., None]) -> None:
    nothing = {"removed": [], "images": [], "freed_bytes": 0}
    accepts(new_request("3", operation="prune", result=nothing))
    assert command("prune").out.startswith("nothing to remove")


def test_up_prints_address_limits_and_plan(command: Command, fake: FakeDaemon) -> None:
    taken = "not 8585: pid 7 (nc) listens there"
    info = {
        "daemon": {**daemon_json(fake), "passed_over": taken},
        "limits": {"cpus": 4.0, "memory_bytes": 2**34, "sources": {"memory_bytes": "machine"}},
        "plan": {"guaranteed_long": 4, "guaranteed_short": 2, "burst_long": 8,
                 "burst_short": 0, "budget_bytes": 2**33},
        "workers": [],
        "settings": {"port": 8585},
    }  # fmt: skip
    fake.get("/v1/info", info)
    answer = command("up", "--port", "9000")
    assert answer.code == 0
    assert "http://127.0.0.1:8585" in answer.out
    assert f"port     {taken}" in answer.out
    assert "4 CPUs, 16.0 GB (machine)" in answer.out
    assert "4 long and 2 short, bursting to 12 and 2, within 8.0 GB" in answer.out
    assert "without --port 9000 (it has 8585)" in answer.err
    assert command("up", "--json").json == info
    assert command("info", "--json").json == info
    assert "pid_started_at" in info["daemon"]
    assert "pid started at" not in command("info").out


def test_up_in_the_foreground_beside_another_daemon_is_refused(
    command: Command, fake: FakeDaemon
) -> None:
    answer = command("up", "--foreground")
    assert answer.code == 3
    assert "already running" in answer.err


def test_stop_where_nothing_runs_is_fine(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path / "none"))
    assert command("stop", "--json").json == {"stopped": False, "pid": None}


def test_a_daemon_of_another_version_is_3(command: Command, fake: FakeDaemon) -> None:
    fake.write_identity(version="0.0.1")
    answer = command("status", "--json")
    assert answer.code == 3
    assert "0.0.1" in answer.err
    assert answer.json["error"]["kind"] == "unreachable"


# the process itself


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--help"]])
def test_a_reader_that_left_causes_no_traceback(
    fake: FakeDaemon, status: dict[str, Any], arguments: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_unicode_is_no_reason_to_fail(
    process: Process, fake: FakeDaemon, status: dict[str, Any]
) -> None:
    fake.get("/v1/status", {**status, "requests": [new_request("7", label="launch ü")]})
    plain = process("status", PYTHONIOENCODING="ascii")
    out, err = plain.communicate(timeout=30)
    assert (plain.returncode, err) == (0, "")
    assert "launch ?" in out
    as_json = process("status", "--json", PYTHONIOENCODING="ascii")
    out, _ = as_json.communicate(timeout=30)
    assert json.loads(out)["requests"][0]["label"] == "launch ü"


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_for_terminals_and_can_be_refused(
    fake: FakeDaemon, status: dict[str, Any], environ: dict[str, str], coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    subprocess.run(
        [*PROGRAM, "status"], stdout=theirs, env={**kept, "TERM": "xterm", **environ}, check=True
    )
    os.close(theirs)
    shown = b""
    while b"openenv logs" not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    assert (b"\x1b[3" in shown) is coloured


def test_nothing_heavy_is_imported_for_status(fake: FakeDaemon, status: dict[str, Any]) -> None:
    heavy = ["fastapi", "pydantic", "sqlalchemy", "httpx", "rich", "psutil", "asyncio",
             "filelock", "subprocess"]  # fmt: skip
    program = (
        "import sys\nfrom openenvd.cli.main import run\n"
        "run(['status', '--json'])\n"
        f"sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    )
    done = subprocess.run(
        [*PROGRAM[:-1], program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "[]\n"


def test_a_narrow_terminal_folds_no_id_and_no_state() -> None:
    from rich.console import Console

    error = {"kind": "invalid", "message": "a word " * 20}
    cancelled = new_request(state="CANCELLED", error=error)
    console = Console(width=50)
    with console.capture() as drawn:
        console.print(requests_table([cancelled], time.time()))
    assert cancelled["id"][:8] in drawn.get()
    assert "CANCELLED" in drawn.get()


# scale, restart


@pytest.mark.parametrize(
    ("words", "result", "sent", "told"),
    [
        (
            ("scale", "2", "--drain-timeout", "60"),
            {"replicas": 2, "draining": ["a", "b"]},
            {"replicas": 2, "drain_timeout_seconds": 60.0},
            "trial has 2 replicas, and 2 more until their sessions end",
        ),
        (
            ("scale", "2"),
            {"replicas": 2, "draining": ["a"], "sessions": 0},
            {"replicas": 2},
            "trial has 2 replicas",
        ),
        (
            ("restart", "--replica", "1"),
            {"restarted": [{"old": "trial-1-a", "new": "trial-2-a"}]},
            {"replica": 1},
            "restarted 1 replica of trial in 12 s",
        ),
    ],
)
def test_scale_and_restart_say_what_they_have_changed(
    command: Command,
    accepts: Callable[..., None],
    fake: FakeDaemon,
    words: tuple[str, ...],
    result: dict[str, Any],
    sent: dict[str, Any],
    told: str,
) -> None:
    result = {"environment": {"name": "trial"}, **result}
    accepts(new_request(result=result, started_at=5.0, finished_at=17.0))
    operation, *more = words
    answer = command(operation, "trial", *more)
    assert (answer.code, answer.out) == (0, f"✓ {told}\n")
    assert fake.calls[0][2] == {"operation": operation, "payload": {"name": "trial", **sent}}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [(["config"], 0), (["--help"], 0), (["nonsense"], 2)])
def test_closed_standard_streams_change_no_exit_code(
    tmp_path: Path, closed: str, words: list[str], code: int
) -> None:
    done = _run_redirected(tmp_path, closed, words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert bool(done.stdout) == (code == 0 and " >&-" not in f" {closed}")


@pytest.mark.parametrize("words", [["config"], ["--help"], ["config", "--json"]])
@pytest.mark.parametrize(
    ("stdout", "why"),
    [(">/dev/full", "No space left on device"), ("1</dev/null", "Bad file descriptor")],
)
def test_a_stdout_that_cannot_be_written_is_named(
    tmp_path: Path, words: list[str], stdout: str, why: str
) -> None:
    done = _run_redirected(tmp_path, stdout, words)
    assert done.returncode == 1
    assert done.stderr == f"error: the output cannot be written: {why}\n"


@pytest.mark.parametrize(("words", "code"), [(["nonsense"], 1), (["config"], 0)])
def test_a_full_disk_behind_stderr_stops_what_is_written_there_alone(
    tmp_path: Path, words: list[str], code: int
) -> None:
    done = _run_redirected(tmp_path, "2>/dev/full", words)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)


def _run_redirected(
    home: Path, redirection: str, words: list[str]
) -> subprocess.CompletedProcess[str]:
    program = "from openenvd.cli.entry import main; main()"
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program]
    return subprocess.run(
        [*shell, *words],
        env={**os.environ, "OPENENV_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
