# SPDX-License-Identifier: Apache-2.0
"""Each command against a daemon that answers as scripted, over a real socket."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.cli import exit_codes, following, options

from ..client.fake_daemon import Call, new_environment, new_request
from .conftest import PROGRAM, Cli, Terminal, text

Process = Callable[..., subprocess.Popen[str]]
ID = "7f3a91c2d4e5f607"
READY = new_request(result={"environment": new_environment()})
ERROR = {
    "kind": "operation_error",
    "message": "trial exited with code 7",
    "hint": "see its log",
    "evidence": None,
    "log_tail": ["cannot go on: no licence"],
}
FAILED = new_request(state="FAILED", error=ERROR)
PENDING = new_request(
    "2", state="PENDING", pending_reason="waiting for memory", started_at=None, finished_at=None
)
NOT_FOUND = {"kind": "not_found", "message": "no environment is called 'trail'"}


@pytest.fixture
def status(cli: Cli) -> dict[str, Any]:
    return cli.has(new_environment(), requests=[FAILED, PENDING])


# launch


def test_launch_prints_log_address_and_snippet_or_json_alone(cli: Cli) -> None:
    cli.accepts(READY)
    answer = cli("launch", "echo", "--name", "trial")
    assert answer.code == 0
    assert "preparing\nready\n" in answer.err
    assert "http://127.0.0.1:21000" in answer.out
    assert 'Client().environment("trial").connect()' in answer.out
    assert "preparing" not in answer.out
    answer = cli("launch", "echo", "--name", "trial", "--json")
    environment = {"name": "trial", "state": "READY", "address": "http://127.0.0.1:21000"}
    assert answer.json == {"request_id": ID, "environment": environment}
    assert "from openenvd import Client" in answer.err
    assert cli("launch", "--async", "echo").out == f"{ID}\n"
    assert cli("launch", "--async", "echo", "--json").json == {"request_id": ID}
    sentence = "trial is ready at http://127.0.0.1:21000"
    cli.accepts(READY, "replica 0 (pid 7) is ready (0.2 s)\n", f"{sentence} (0.3 s)\n")
    answer = cli("launch", "echo", "--name", "trial")
    assert answer.out.startswith(f"✓ {sentence}\n")
    assert answer.err == "replica 0 (pid 7) is ready (0.2 s)\n"


def test_launch_shows_the_token_in_the_snippet_and_warns_of_a_wide_address(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token-of-the-tests\n")
    launched = new_environment(has_token=True, is_exposed=True)
    cli.accepts(new_request(result={"environment": launched}))
    base_url = "http://127.0.0.1:21000?token=a-token-of-the-tests"
    cli.get("/v1/environments/trial/base_url", {"base_url": base_url, "is_served": True})
    answer = cli("launch", "echo", "--host", "0.0.0.0", "--token", f"@{tmp_path / 'token'}")
    assert "warning: trial can be reached from other machines" in answer.err
    payload = cli.sent()[0]["payload"]
    assert (payload["token"], payload["host"]) == ("a-token-of-the-tests", "0.0.0.0")
    assert cli("launch", "echo", "--token", "@/no/such/file").code == exit_codes.USAGE


def test_an_address_is_printed_and_one_that_serves_nobody_explained(cli: Cli) -> None:
    base_url = "http://127.0.0.1:21000?token=a-token-of-the-tests"
    cli.get("/v1/environments/trial/base_url", {"base_url": base_url, "is_served": True})
    found = cli("address", "trial")
    assert (found.out, found.err) == (f"{base_url}\n", "")
    cli.get("/v1/environments/trial/base_url", {"base_url": base_url, "is_served": False})
    found = cli("address", "trial")
    assert found.out == f"{base_url}\n"
    assert "no replica of trial serves now: nothing may answer at this address" in found.err


def test_a_test_launches_with_the_options_set_and_prints_why_it_failed(cli: Cli) -> None:
    cli.accepts(FAILED)
    rare = ("--set", "serve-as-is=yes", "--set", "ready-timeout=9")
    assert cli("test", "echo", "--keep", "-e", "A=1", *rare).code == exit_codes.FAILED
    payload = cli.sent()[0]["payload"]
    assert (payload["serve_as_is"], payload["ready_timeout_seconds"]) == (True, 9.0)
    assert payload["env"] == {"A": "1"}
    assert "shards" not in payload
    answer = cli("launch", "echo", "--name", "trial", "--json")
    assert answer.code == 1
    assert "trial exited with code 7" in answer.err
    assert "no licence" in answer.err
    assert answer.json["environment"] == {"name": "trial", "state": "FAILED", "address": None}
    assert answer.json["error"]["kind"] == "operation_error"


def test_off_a_terminal_each_check_is_printed_as_it_ends(cli: Cli) -> None:
    check = {"check": "leaks", "outcome": "passed", "summary": "none", "seconds": 1, "findings": []}
    cli.accepts(new_request(result={"passed": True, "checks": [check]}), "✓ leaks none\n")
    answer = cli("test", "echo", "--keep")
    assert answer.err.count("✓ leaks none\n") == 2  # of the launch, and of the test
    assert answer.out.startswith("✓ leaks  none (1.0 s)\n")


@pytest.mark.parametrize("words", [("launch",), ("test",), ("image", "build")])
def test_an_empty_source_is_refused_before_anything_is_queued(
    cli: Cli, words: tuple[str, ...]
) -> None:
    answer = cli(*words, "", "--json")
    assert (answer.code, answer.json["error"]["message"]) == (2, "the source is empty")
    assert "error: the source is empty\n  is a variable unset?" in answer.err
    assert cli.fake.calls == []


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("GET /health", "curl -X GET 'http://127.0.0.1:21000/health'"),
        (None, "call it at http://127.0.0.1:21000: the app does not show its routes"),
    ],
)
def test_a_launch_of_an_app_without_sessions_says_how_to_call_it(
    cli: Cli, route: str | None, expected: str
) -> None:
    environment = new_environment(replicas=[{"serving": "http", "route": route}])
    cli.accepts(new_request(result={"environment": environment}))
    assert expected in cli("launch", "echo", "--name", "trial").out


def test_launch_sends_the_given_options_and_no_others(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.accepts(READY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "x")
    (tmp_path / "some.env").write_text("A=2\nB=3\n")
    arguments = "launch --async ./my_env --replicas 2 -e A=1 -e TOKEN --memory 2G --set timeout=9"
    arguments += " --env-file some.env"
    arguments += " --shards 3 --no-isolate --set admission-timeout=0 --gpus 1 --session-memory 64M"
    arguments += " --min 2 --max 8 --set scale-down=30"
    cli(*arguments.split())
    payload = {
        "name": "my_env",
        "source": str(tmp_path / "my_env"),
        "cwd": str(tmp_path),
        "replicas": 2,
        "env": {"A": "1", "B": "3", "TOKEN": "x"},
        "memory_mb": 2048,
        "shards": 3,
        "isolate": False,
        "admission_timeout_seconds": 0.0,
        "gpus": 1,
        "session_memory_mb": 64,
        "min_replicas": 2,
        "max_replicas": 8,
        "scale_down_seconds": 30.0,
    }
    assert cli.sent() == [{"operation": "launch", "payload": payload, "timeout_seconds": 9.0}]


ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m"


def test_escape_sequences_of_failures_are_shown_nowhere(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, where our own colours are shown."""
    monkeypatch.setattr("openenvd.cli.output.output.is_coloured", lambda _: True)
    error = {
        "kind": "operation_error",
        "message": f"it said {ESCAPES}boo",
        "hint": f"see {ESCAPES}there",
        "evidence": {"victim_name": f"py{ESCAPES}thon", "victim_pid": 7},
        "log_tail": [f"the last {ESCAPES}line"],
    }
    failed = {**FAILED, "label": f"launch tri{ESCAPES}al", "error": error}
    replica = {**new_environment()["replicas"][0], "message": f"died {ESCAPES}of", "restarts": 1}
    source = f"/ho{ESCAPES}me"
    cli.has(
        new_environment(state="FAILED", source=source, error=error, replicas=[replica]),
        requests=[failed],
    )
    cli.get("/v1/requests", {"requests": [failed]})
    for words in (["status"], ["requests"]):
        shown = cli(*words).out
        assert "it said boo" in shown.lower()
        assert "\x1b[31mFAILED" in shown  # ours
        assert not [text for text in ("\x1b[2J", "owned", "\x1b[31mboo") if text in shown]
    assert "\\u001b[2J" in cli("status", "--json").out


def test_logs_keep_colours_alone_and_become_whole_lines(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.knows(new_environment(), f"one{ESCAPES}red\x1b[0m\n50 %\r100 %\n")
    assert cli("logs", "trial").out == "onered\n50 %\n100 %\n"  # no terminal
    monkeypatch.setattr("openenvd.cli.commands.requests.is_coloured", lambda _: True)
    assert cli("logs", "trial").out == "one\x1b[31mred\x1b[0m\n50 %\n100 %\n"
    assert cli("logs", "trial", "--json").json["lines"][0] == f"one{ESCAPES}red\x1b[0m"
    cli.accepts(READY, "on", "e\ntwo\r\nthr", "ee")
    assert "one\ntwo\nthree\n" in cli("launch", "echo").err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "echo", "--name", "../escape"], "name"),
        (["launch", "echo", "--replicas", "0"], "replicas"),
        (["launch", "echo", "--replicas", "abc"], "'abc' is not a whole number"),
        (["launch", "echo", "--cpus", "abc"], "'abc' is not a number"),
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
        (["bench", "echo", "--requests-grid", ""], "not a list of whole numbers"),
        (["bench", "echo", "--requests-grid", "1.5"], "not a list of whole numbers"),
        (["bench", "echo", "--wait-grid", "soon"], "not a list of durations"),
        (["bench", "echo", "--reps", "0"], "--reps"),
        (["bench", "echo", "--action", "{"], "not JSON"),
        (["bench", "echo", "--action", "[1]"], "JSON object"),
        (["status", "\udcff"], "is not UTF-8 text"),
    ],
)
def test_a_wrong_command_line_is_2_and_reaches_no_daemon(
    cli: Cli, arguments: list[str], words: str
) -> None:
    answer = cli(*arguments)
    assert answer.code == 2
    assert words in answer.err
    assert cli.fake.calls == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0.5", 0.5), ("60s", 60.0), ("5m", 300.0), ("2H", 7200.0), ("1.5h", 5400.0)],
)
def test_a_duration_is_in_seconds_or_has_its_unit(text: str, seconds: float) -> None:
    assert options.seconds(text) == seconds


def test_an_interrupt_during_imports_ends_without_a_traceback(
    process: Process, tmp_path: Path
) -> None:
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    started = process("status", PYTHONPATH=str(tmp_path))
    assert started.communicate() == ("", "\n")
    assert started.returncode == exit_codes.INTERRUPTED


def holding(release: threading.Event, *events: tuple[str, dict[str, Any]]) -> Any:
    """A stream that sends these events, and then nothing."""

    def stream(call: Call) -> None:
        call.begin_stream()
        for number, (name, data) in enumerate(events):
            call.event(f"1:{number}", name, data)
        release.wait(30)
        call.break_off()

    return stream


def test_a_second_interrupt_cancels(process: Process, cli: Cli) -> None:
    release = threading.Event()
    cli.accepts(READY)
    preparing = ("log", {"text": "preparing\n"})
    cli.get(f"/v1/requests/{ID}/events", holding(release, preparing))
    cancelling = {"request": READY, "cancelled": False, "cancelling": True}
    cli.post(f"/v1/requests/{ID}/cancel", cancelling)
    launch = process("launch", "echo", "--name", "trial")
    assert launch.stderr is not None
    assert launch.stderr.readline() == "preparing\n"
    launch.send_signal(signal.SIGINT)
    while "Ctrl-C again within 2 s cancels it" not in launch.stderr.readline():
        pass
    launch.send_signal(signal.SIGINT)
    _, err = launch.communicate(timeout=30)
    release.set()
    assert launch.returncode == 130
    assert "launch trial is being cancelled" in err
    assert [call for call in cli.fake.calls if call[1].endswith("/cancel")]


def test_a_second_interrupt_while_the_first_is_handled_cancels(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def screen(*_: object) -> Iterator[None]:
        try:
            signal.raise_signal(signal.SIGINT)
            yield
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(following, "_screen", screen)
    cli.accepts(READY)
    cancelling = {"request": READY, "cancelled": False, "cancelling": True}
    cli.post(f"/v1/requests/{ID}/cancel", cancelling)
    answer = cli("launch", "echo", "--name", "trial")
    assert answer.code == exit_codes.INTERRUPTED
    assert "launch trial is being cancelled" in answer.err
    assert "Detached" not in answer.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("words", [["address"], ["play"], ["bench"], ["logs"]])
def test_a_folder_is_no_environments_name(cli: Cli, words: list[str]) -> None:
    answer = cli(*words, "./my_env")
    assert answer.code == exit_codes.NOT_FOUND
    assert "is called './my_env'" in answer.err
    assert "openenv status" in answer.err


def test_an_interrupted_down_names_what_continues(process: Process, cli: Cli) -> None:
    asked, release = threading.Event(), threading.Event()
    stream = holding(release)

    def answer(call: Call) -> None:
        asked.set()
        stream(call)

    cli.accepts(new_request(ID, operation="down", label="down trial"))
    cli.get(f"/v1/requests/{ID}/events", answer)
    down = process("down", "trial")
    assert asked.wait(30)
    down.send_signal(signal.SIGINT)
    _, err = down.communicate(timeout=30)
    release.set()
    assert down.returncode == exit_codes.INTERRUPTED
    assert "Detached: down trial: what has not ended continues" in err


def test_an_interrupted_test_prints_what_it_has_found(
    terminal: Callable[..., Terminal], cli: Cli
) -> None:
    release = threading.Event()
    testing = new_request("e5", operation="test", label="test trial", state="RUNNING")

    def submit(call: Call) -> None:
        assert call.body is not None
        request = testing if call.body["operation"] == "test" else READY
        call.json(202, {"request_id": request["id"], "request": request})

    cli.post("/v1/requests", submit)
    cli.ends(READY)
    found = ("log", {"text": "protocol failed: 5 steps\n  the reward is 'NaN'\n"})
    events = holding(release, found, ("progress", {"message": "leaks"}))
    cli.get("/v1/requests/e5/events", events)
    cli.post("/v1/requests/e5/cancel", {"request": testing, "cancelled": True})
    screen = terminal([*PROGRAM, "test", "echo", "--keep"], **{**os.environ, "TERM": "xterm"})
    assert screen.shows("test trial: leaks")
    screen.process.send_signal(signal.SIGINT)
    assert screen.shows("the reward is 'NaN'")
    assert screen.process.wait(30) == exit_codes.INTERRUPTED
    release.set()


def test_a_request_is_submitted_again_with_the_memory_that_is_given(cli: Cli) -> None:
    cli.post(f"/v1/requests/{ID}/retry", (202, {"request_id": "b1", "request": READY}))
    answer = cli("retry", ID, "--memory", "2G", "--async")
    assert (answer.code, answer.out) == (0, f"{READY['id']}\n")
    assert cli.sent() == [{"memory_mb": 2048}]


@pytest.mark.parametrize("operation", ["launch", "rollout", "down"])
def test_a_request_that_is_submitted_again_is_followed(cli: Cli, operation: str) -> None:
    request = {**FAILED, "operation": operation}
    cli.post(f"/v1/requests/{ID}/retry", (202, {"request_id": ID, "request": request}))
    cli.ends(request)
    answer = cli("retry", ID)
    assert answer.code == 1
    assert "FAILED" in answer.err


@pytest.mark.parametrize("words", [(), ("launch",), ("image", "build")])
def test_help_as_a_word_shows_the_help(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli("help", *words)
    assert (answer.code, answer.out) == (0, cli(*words, "--help").out)
    assert "Usage:" in answer.out


@pytest.mark.parametrize(
    ("final", "code", "expected"),
    [
        (READY, 0, "trial runs: updating it to generation 2\n"),
        (FAILED, 1, "trial continues with generation 1"),
    ],
    ids=["succeeds", "fails"],
)
@pytest.mark.parametrize(
    ("flags", "sent"), [([], None), (["--update"], True), (["--no-update"], False)]
)
def test_launch_of_a_name_that_runs_says_that_it_is_updated_and_what_serves_then(
    cli: Cli, final: dict[str, Any], code: int, expected: str, flags: list[str], sent: bool | None
) -> None:
    cli.accepts({**final, "payload": {"replaces": "a0"}})
    one = {"number": 1, "request_id": "a0", "spec": {"source": "echo"}}
    two = {"number": 2, "request_id": ID, "spec": {"source": "echo"}}
    cli.knows(new_environment(generation=1, generations=[two, one]))
    answer = cli("launch", "echo", "--name", "trial", *flags)
    assert answer.code == code
    assert expected in answer.err
    assert cli.sent()[0]["payload"].get("update") is sent


# status, requests, logs


def test_status_shows_tables_and_failures_and_its_json_is_the_daemons(
    cli: Cli, status: dict[str, Any]
) -> None:
    assert cli("status", "--json").json == status
    out = cli("status").out
    for told in ("trial        READY", "3/64", "waiting for memory"):
        assert told in out
    [failed] = [line for line in out.splitlines() if ID[:8] in line]
    assert re.match(rf"launch trial  {ID[:8]}  .* ago +trial exited with code 7$", failed)
    assert "no licence" not in out
    cli.get(f"/v1/requests/{ID}", {"request": FAILED})
    assert "│ cannot go on: no licence" in cli("status", ID).out
    assert "\x1b" not in out


def with_replica(**changes: Any) -> dict[str, Any]:
    environment = new_environment()
    environment["replicas"][0].update(changes)
    return environment


EXIT = {"at": 1000.0, "message": "shard 2 (pid 7) was killed by SIGKILL"}
GENERATION: dict[str, Any] = {
    "number": 1,
    "request_id": ID,
    "state": "SERVING",
    "spec": {},
    "error": None,
    **dict.fromkeys(("created_at", "served_at", "ended_at"), 1000.0),
}
SERVING = {"sentence": "4 shards", "shards": 4, "held": {"shards": 1, "since": 0.0}}
GPUS = {"each": 1.0, "resource": "nvidia.com/mig-1g.5gb"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            new_environment(host="0.0.0.0", is_exposed=True),
            "trial: listens on 0.0.0.0: other machines can connect",
        ),
        (new_environment(gpus=GPUS), "  trial: 1 nvidia.com/mig-1g.5gb for each replica\n"),
        (
            new_environment(gpus={"each": 0.25, "resource": None}),
            "  trial: 0.25 GPU for each replica\n",
        ),
        (new_environment(serving=SERVING), "trial: 1 of 4 shards blocked for"),
        (with_replica(exits=[EXIT]), f"ago {EXIT['message']}\n"),
        (
            with_replica(exits=[EXIT, EXIT], exit_kinds={"oom_killed": 1, "exited": 2}),
            f"ago {EXIT['message']}; so far 1 killed for memory, 2 exited\n",
        ),
    ],
)
def test_status_says_of_an_environment(
    cli: Cli, environment: dict[str, Any], expected: str
) -> None:
    assert expected in cli.shows(environment)
    assert expected not in cli.shows(new_environment(gpus=None))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (new_environment(serving=SERVING, generations=[]), "trial: 4 shards\n"),
        (
            with_replica(state="FAILED", pid=None) | {"generations": [GENERATION]},
            "REPLICA  STATE   SESSIONS  PID\ntrial-0  FAILED  3         -\n",
        ),
        (
            with_replica(exits=[{**EXIT, "hint": "openenv retry a0 --memory 600M"}]),
            "    Try: openenv retry a0 --memory 600M\n",
        ),
        (
            with_replica(exits=[EXIT], exit_kinds={"oom_killed": 1, "exited": 2}),
            "trial replica 0: so far 1 killed for memory, 2 exited\n",
        ),
    ],
)
def test_status_says_of_an_environment_by_its_name(
    cli: Cli, environment: dict[str, Any], expected: str
) -> None:
    cli.has()
    cli.knows(environment)
    assert expected in cli("status", "trial").out


def test_status_names_steps_that_go_on_and_a_gateways_exit_and_problem(cli: Cli) -> None:
    abandoned = [{"shard": 0, "count": 1, "since": time.time() - 130.0}]
    sentence = "trial replica 0: shard 0: 1 abandoned call, running for 2 min"
    assert sentence in cli.shows(with_replica(abandoned=abandoned))
    told = {"at": 1000.0, "message": "Envoy (pid 7) was killed by SIGKILL"}
    out = cli.shows(gateway={"exits": [told], "problem": "the gateway is full"})
    assert "  gateway: the gateway is full" in out
    shown = r"^  gateway: .* ago Envoy \(pid 7\) was killed by SIGKILL$"
    assert re.search(shown, out, re.MULTILINE)


def failures(count: int) -> list[dict[str, Any]]:
    return [
        {**FAILED, "id": f"{n:016x}", "error": {**ERROR, "message": f"no licence {n}"}}
        for n in range(count)
    ]


def test_status_tells_each_failure_once_and_none_of_what_was_launched_since(cli: Cli) -> None:
    later = new_request("5", label="launch trial again")
    assert "FAILED" not in cli.shows(new_environment(), requests=[later, FAILED])
    assert "FAILED" in cli.shows(new_environment(), requests=[FAILED, later])
    twice = cli.shows(requests=[FAILED, {**FAILED, "id": "8"}])
    assert re.search(rf"^launch trial  {ID[:8]}  .* ago, 2 times  ", twice, re.MULTILINE)
    assert twice.count("launch trial") == 1
    out = cli.shows(requests=failures(5)).lower()
    assert [out.count(f"no licence {n}") for n in range(5)] == [1] * 5
    error = {**ERROR, "message": "replica 0 of trial failed to start: no license"}
    failed = new_environment(state="FAILED", error=error, request_id=ID)
    out = cli.shows(failed, requests=[{**FAILED, "error": error}])
    assert out.count("no license") == 1
    assert re.search("^environment  trial  .* ago  ", out, re.MULTILINE)
    cli.knows(failed, "", {**FAILED, "error": error})
    assert cli("status", "trial").out.count("no license") == 1


def test_thirty_failures_hide_no_environment(cli: Cli, terminal: Callable[..., Terminal]) -> None:
    """Each is one line of a terminal, also where its message is longer than that."""
    long = {**ERROR, "message": "no licence " + "of this machine " * 20}
    many = [{**FAILED, "id": f"{n:016x}"} for n in range(10)]
    requests = [{**r, "error": {**long, "message": f"{r['id']} {long['message']}"}} for r in many]
    running = [new_environment(name=f"env-{n}") for n in range(5)]
    cli.has(*running, requests=requests, failed_launches_left_out=20)
    screen = terminal([*PROGRAM, "status"], **os.environ, NO_COLOR="1")
    assert screen.shows(
        r"env-4 [^\n]*\n\r?\n[^\n]*FAILED[^\n]*\n(launch trial [^\n]*no licence[^\n]*…\s*\n){10}"
        r"[^\n]*openenv status ID explains one; 20 earlier launches failed"
    )


def test_status_counts_the_failures_that_it_leaves_out_and_all_shows_them(cli: Cli) -> None:
    out = cli.shows(requests=failures(5), failed_launches_left_out=4980)
    assert (
        "openenv status ID explains one; 4,980 earlier launches failed: openenv status --all" in out
    )
    out = cli.shows(requests=failures(5), failed_launches_left_out=1)
    assert "; 1 earlier launch failed: openenv status --all" in out
    assert "earlier" not in cli.shows(requests=failures(5), failed_launches_left_out=0)
    asked = [path for _, path, _ in cli.fake.calls]
    assert not any("all_failed" in path for path in asked)
    cli("status", "--all")
    assert "all_failed=true" in cli.fake.calls[-1][1]
    cli.knows(new_environment(), "", *failures(5))
    out = cli("status", "trial").out
    assert out.count("cannot go on: no licence") == 3
    assert "and 2 more: openenv requests --state failed" in out


def test_a_negative_duration_is_refused_as_it_was_typed(cli: Cli) -> None:
    answer = cli("logs", "--since", "-5m", "trial")
    assert answer.code == exit_codes.USAGE
    assert "'-5m' is not a duration; write 90, 60s, 5m or 2h" in answer.err


@pytest.mark.usefixtures("status")
def test_status_of_a_name_has_requests_and_generations_and_an_id_its_request(cli: Cli) -> None:
    cli.get("/v1/requests/7f3a", {"request": FAILED})
    found = cli("status", "7f3a", "--json").json
    assert (found["environments"], found["requests"]) == ([], [FAILED])
    cli.knows(new_environment(), "", READY)
    found = cli("status", "trial", "--json").json
    assert [e["name"] for e in found["environments"]] == ["trial"]
    assert [r["id"] for r in found["requests"]] == [ID]
    now = time.time()
    ends = {"served_at": now - 7200, "ended_at": now - 600, "error": None}
    last = {"number": 2, "request_id": ID, "state": "SERVING", "spec": {"source": "echo"}}
    last |= {"created_at": now, "served_at": now - 600, "ended_at": None, "error": None}
    failed = {**last, "number": 3, "state": "FAILED", "served_at": None, "ended_at": now - 60}
    failed["error"] = "replica 0 exited\nits last lines:"
    history = [failed, last, {**last, "number": 1, "state": "RETIRED", **ends}]
    cli.knows(new_environment(generations=history))
    lines = [" ".join(line.split()) for line in cli("status", "trial").out.splitlines()]
    assert f"3 {ID[:8]} FAILED 1 min ago echo replica 0 exited" in lines
    assert f"2 {ID[:8]} SERVING for 10 min echo" in lines
    assert f"1 {ID[:8]} RETIRED for 1 h, 10 min ago echo" in lines


def test_the_help_page_lists_every_exit_code(cli: Cli) -> None:
    page = " ".join(cli("--help").out.split())
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [code for code in codes if f" {code} " not in page] == []


def test_requests_are_filtered_and_printed(cli: Cli) -> None:
    cli.get("/v1/requests", {"requests": [READY, FAILED]})
    answer = cli("requests", "--state", "failed", "--json")
    assert [r["id"] for r in answer.json["requests"]] == [ID, ID]
    assert "state=FAILED" in cli.fake.calls[0][1]
    assert "launch trial" in cli("requests").out


def test_logs_end_with_the_reason_are_said_to_be_empty_or_are_the_launchs(cli: Cli) -> None:
    degraded = with_replica(state="BACKING_OFF", message="was killed by SIGKILL")
    cli.knows({**degraded, "state": "DEGRADED"}, "hello\n")
    answer = cli("logs", "trial", "-n", "5")
    assert (answer.code, answer.out) == (0, "hello\n")
    assert "SIGKILL" in answer.err
    cli.knows(new_environment())
    answer = cli("logs", "trial")
    assert (answer.code, answer.out, answer.err) == (0, "", "trial has printed nothing yet\n")
    answer = cli("logs", "trial", "--replica", "r2")
    assert answer.err == "replica r2 of trial has printed nothing yet\n"
    cli.get(f"/v1/requests/{ID}", {"request": READY})
    cli.get(f"/v1/requests/{ID}/logs", text(""))
    assert cli("logs", ID).err == "launch trial has printed nothing yet\n"
    del cli.fake.answers["GET", "/v1/environments/trial/logs"]
    cli.get(f"/v1/requests/{ID}", {"request": FAILED})
    cli.get(f"/v1/requests/{ID}/logs", text("preparing\n"))
    answer = cli("logs", "trial")
    assert answer.out == "preparing\n"
    assert "trial exited with code 7" in answer.err
    assert "openenv logs" not in answer.err  # which has just been shown


def test_logs_of_several_are_named_lines_chosen_and_json_is_lines(cli: Cli) -> None:
    cli.knows(new_environment(), "one\ntwo\nthree")
    cli.get(f"/v1/requests/{ID}", {"request": READY})
    cli.get(f"/v1/requests/{ID}/logs", text("a two\nb"))
    assert cli("logs", "trial", "--grep", "^t").out == "two\nthree\n"
    assert cli("logs", "trial", ID, "--grep", "two").out == f"trial | two\n{ID} | a two\n"
    followed = cli("logs", "-f", ID, ID, "--json").out.splitlines()
    assert sorted(followed) == sorted(
        [f'{{"target": "{ID}", "line": "a two"}}', f'{{"target": "{ID}", "line": "b"}}'] * 2
    )
    assert cli("logs", "trial", "--grep", "(").code == 2
    gone = {"error": {"kind": "not_found", "message": "its log is gone"}}
    cli.get("/v1/requests/2", {"request": new_request("2")})
    cli.get("/v1/requests/2/logs", (404, gone))
    answer = cli("logs", "-f", ID, "2")
    assert (answer.code, answer.err) == (4, "error: its log is gone\n")
    cli.get(f"/v1/requests/{ID}", {"request": READY})
    cli.get(f"/v1/requests/{ID}/logs", text("a\nb"))
    assert cli("logs", ID, "--json").json == {"lines": ["a", "b"]}
    assert cli("logs", ID, "-f", "--json").out == '{"line": "a"}\n{"line": "b"}\n'


# wait, cancel, down, stop, up, info, check


def test_wait_has_the_outcomes_exit_code_and_gives_up_after_its_timeout(cli: Cli) -> None:
    cli.ends(new_request("1"))
    cli.ends(new_request("2", state="FAILED", error={**ERROR, "kind": "oom_killed"}))
    assert cli("wait", "1", "nobody").code == 4
    assert not [call for call in cli.fake.calls if "wait_seconds" in call[1]]
    assert cli("wait", "1").code == 0
    assert cli("wait", "1", "2").code == 137
    assert cli("wait", "1", "--json").json["request"]["id"] == "1"
    assert "SUCCEEDED" in cli("wait", "1").out
    running = new_request("1", state="RUNNING", finished_at=None)
    cli.get("/v1/requests/1", {"request": running})
    answer = cli("wait", "--timeout", "0.3", "1", "--json")
    assert (answer.code, answer.json) == (124, {"requests": [], "timed_out": True})
    assert "1 request not final within 0.3 s" in answer.err
    looks: list[Call] = []

    def ends(call: Call) -> None:
        looks.append(call)
        call.json(200, {"request": running if len(looks) < 3 else new_request("1")})

    for words in ([], ["--timeout", "1m"]):
        looks.clear()
        cli.get("/v1/requests/1", ends)
        assert cli("wait", *words, "1").code == 0
        assert len(looks) == 3


def test_cancel_reports_requests_that_had_ended_already(cli: Cli) -> None:
    cli.get("/v1/requests/1", {"request": READY})
    ended = {"request": READY, "cancelled": False, "cancelling": False}
    cli.post(f"/v1/requests/{ID}/cancel", ended)
    answer = cli("cancel", "1")
    assert answer.code == 0
    assert "has already ended" in answer.out


def test_down_waits_and_continues_after_an_unknown_name(cli: Cli) -> None:
    ended = new_request("9", operation="down", label="down trial")

    def submit(call: Call) -> None:
        assert call.body is not None
        if call.body["payload"]["name"] == "trial":
            call.json(202, {"request_id": "9", "request": ended})
        else:
            call.json(404, {"error": {**NOT_FOUND, "hint": None}})

    cli.post("/v1/requests", submit)
    cli.get("/v1/requests", {"requests": []})
    cli.ends(ended)
    answer = cli("down", "trail", "trial")
    assert answer.code == 4
    assert "trial is down" in answer.out
    assert NOT_FOUND["message"] in answer.err
    told = cli("down", "trail", "trial", "--json").json
    assert [error["message"] for error in told["errors"]] == [NOT_FOUND["message"]]


STRAY = {"provider": "docker", "id": "3f2a", "environment": "gone", "replica": "gone-0-1"}


def test_down_strays_names_what_status_shows(cli: Cli) -> None:
    out = cli.shows(strays=[STRAY])
    assert "1 stray without a record; openenv down --strays stops them:" in out
    assert "  gone-0-1 (docker)" in out
    cli.accepts(new_request("9", operation="down_strays", result={"stopped": ["3f2a"]}))
    assert "stopped 1 stray" in cli("down", "--strays").out
    assert cli.sent()[0]["payload"] == {"strays": [{"provider": "docker", "id": "3f2a"}]}


def test_down_of_nothing_is_fine(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.get("/v1/environments", {"environments": []})
    assert cli("down", "--all").code == 0
    cli.has(strays=[])
    assert cli("down", "--strays").out == "no strays\n"
    assert "openenv launch echo" in cli.shows()
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path / "none"))
    assert cli("stop", "--json").json == {"stopped": False, "pid": None}


WORKS: dict[str, Any] = {"version": "29.1", "problem": None, "remedy": None, "notes": []}


def test_check_says_of_each_provider_and_the_gateway_in_a_line_what_is_missing(cli: Cli) -> None:
    missing = {"version": None, "problem": "no swarm here", "remedy": "docker swarm init"}
    docker = {**WORKS, "notes": ["no GPU runtime"]}
    providers = {"docker": docker, "swarm": {**missing, "notes": []}}
    result = {"uv": None, "providers": providers, "gateway": {**WORKS, "version": "1.40.0"}}
    cli.accepts(new_request("3", operation="check", result=result))
    assert cli("check").out.splitlines() == [
        "uv: -",
        "providers:",
        "  ✓ docker  works, version 29.1 · no GPU runtime",
        "  - swarm   no swarm here · docker swarm init",
        "gateway:",
        "  ✓ envoy  works, version 1.40.0",
        "",
        "local: all good; optional, not working here: swarm",
    ]
    assert cli("check", "--json").json == {**result, "is_good": True}
    used = {**result, "used_providers": ["swarm"]}
    cli.accepts(new_request("3", operation="check", result=used))
    answer = cli("check")
    assert answer.code == exit_codes.FAILED
    *_, mark, _, _, _, verdict = answer.out.splitlines()
    assert mark.startswith("  ✗ swarm")
    assert verdict == "not all good: see the lines with ✗"


def test_a_daemon_that_goes_in_a_trial_is_told_in_its_one_document(cli: Cli) -> None:
    looked = new_request("3", operation="check", result={"providers": {"local": WORKS}})
    down = new_request("4", operation="down", result={})
    cli.ends(looked)
    cli.ends(down)

    def submitted(call: Call) -> None:
        operation = (call.body or {})["operation"]
        if operation == "launch":
            call.break_off()
            return
        request = looked if operation == "check" else down
        call.json(202, {"request_id": request["id"], "request": request})

    cli.post("/v1/requests", submitted)
    answer = cli("check", "--provider", "local", "--json")
    assert answer.code == 3
    assert [step["step"] for step in answer.json["steps"]] == ["engine", "down"]
    assert answer.json["error"]["kind"] == "unreachable"
    assert answer.json["error"]["message"] in answer.err


def test_a_trial_leaves_a_signal_ignored_that_is(cli: Cli) -> None:
    found: list[object] = []

    def submitted(call: Call) -> None:
        found.extend(signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM))
        call.json(400, {"error": {"kind": "invalid", "message": "no"}})

    cli.post("/v1/requests", submitted)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        cli("check", "--provider", "local")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN, signal.default_int_handler]


def test_prune_reports_the_space_it_freed(cli: Cli) -> None:
    removed = [
        {"path": "/venvs/a", "project": "/home/me/my_env", "freed_bytes": 400 * 2**20},
        {"path": "/venvs/b", "project": None, "freed_bytes": 67 * 2**20},
    ]
    result = {"removed": removed, "images": ["openenvd/echo:1f"], "freed_bytes": 467 * 2**20}
    cli.accepts(new_request("3", operation="prune", result=result))
    told = cli("prune").out
    assert "removed 400 MB of /home/me/my_env" in told
    assert "removed the image openenvd/echo:1f" in told
    assert told.splitlines()[-1] == "freed 467 MB"
    assert cli("prune", "--json").json == result
    nothing = {"removed": [], "images": [], "freed_bytes": 0}
    cli.accepts(new_request("3", operation="prune", result=nothing))
    assert cli("prune").out.startswith("nothing to remove")


def test_up_prints_address_limits_and_plan(cli: Cli) -> None:
    plan = {"guaranteed_long": 4, "guaranteed_short": 2, "burst_long": 8, "burst_short": 0}
    info = {
        "daemon": cli.has()["daemon"],
        "limits": {"cpus": 4.0, "memory_bytes": 2**34, "sources": {"memory_bytes": "machine"}},
        "plan": {**plan, "budget_bytes": 2**33},
        "workers": [],
        "settings": {"port": 8585},
    }
    cli.get("/v1/info", info)
    answer = cli("up", "--port", "9000")
    assert answer.code == 0
    assert "http://127.0.0.1:8585" in answer.out
    assert "4 CPUs, 16.0 GB (machine)" in answer.out
    assert "4 long and 2 short, bursting to 12 and 2, within 8.0 GB" in answer.out
    assert "without --port 9000 (it has 8585)" in answer.err
    assert cli("up", "--json").json == cli("info", "--json").json == info
    assert "pid_started_at" in info["daemon"]
    assert "pid started at" not in cli("info").out


def test_a_daemon_in_the_foreground_beside_another_or_of_another_version_is_3(cli: Cli) -> None:
    answer = cli("up", "--foreground")
    assert answer.code == 3
    assert "already running" in answer.err
    cli.fake.write_identity(version="0.0.1")
    answer = cli("status", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (3, "unreachable")
    assert "0.0.1" in answer.err


# the process itself


@pytest.mark.usefixtures("status")
@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--help"]])
def test_a_reader_that_left_causes_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [*PROGRAM, *arguments]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_without_unicode_is_no_reason_to_fail(process: Process, cli: Cli) -> None:
    cli.has(requests=[new_request("7", label="launch ü")])
    plain = process("status", PYTHONIOENCODING="ascii")
    out, err = plain.communicate(timeout=30)
    assert (plain.returncode, err) == (0, "")
    assert "launch ?" in out
    out, _ = process("status", "--json", PYTHONIOENCODING="ascii").communicate(timeout=30)
    assert json.loads(out)["requests"][0]["label"] == "launch ü"


@pytest.mark.usefixtures("status")
@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_for_terminals_and_can_be_refused(
    environ: dict[str, str], coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environ = {**kept, "TERM": "xterm", **environ}
    subprocess.run([*PROGRAM, "status"], stdout=theirs, env=environ, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # at its end
        while True:
            shown += os.read(ours, 65536)
    os.close(ours)
    assert b"trial" in shown
    assert (b"\x1b[3" in shown) is coloured


@pytest.mark.usefixtures("status")
def test_nothing_heavy_is_imported_for_status() -> None:
    heavy = ["fastapi", "pydantic", "sqlalchemy", "httpx", "rich", "psutil", "asyncio", "filelock"]
    heavy.append("subprocess")
    program = (
        "import sys\nfrom openenvd.cli.main import run\n"
        "run(['status', '--json']), run(['status'])\n"
        f"sys.exit(str([m for m in {heavy} if m in sys.modules]))"
    )
    words = [*PROGRAM[:-1], program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "result", "sent", "expected"),
    [
        (
            "scale trial 2 --drain-timeout 60",
            {"replicas": 2, "draining": ["a", "b"]},
            {"replicas": 2, "drain_timeout_seconds": 60.0},
            "trial has 2 replicas, and 2 more until their sessions end",
        ),
        (
            "scale trial 2",
            {"replicas": 2, "draining": ["a"], "sessions": 0},
            {"replicas": 2},
            "trial has 2 replicas",
        ),
        (
            "restart trial --replica 1",
            {"restarted": [{"old": "trial-1-a", "new": "trial-2-a"}]},
            {"replica": 1},
            "restarted 1 replica of trial in 12 s",
        ),
    ],
)
def test_scale_and_restart_say_what_they_have_changed(
    cli: Cli, words: str, result: dict[str, Any], sent: dict[str, Any], expected: str
) -> None:
    result = {"environment": {"name": "trial"}, **result}
    cli.accepts(new_request(result=result, started_at=5.0, finished_at=17.0))
    answer = cli(*words.split())
    assert (answer.code, answer.out) == (0, f"✓ {expected}\n")
    operation = words.partition(" ")[0]
    assert cli.sent() == [{"operation": operation, "payload": {"name": "trial", **sent}}]


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"]
UNWRITTEN = "error: the output cannot be written"
FULL, READ_ONLY = f"{UNWRITTEN}: No space left on device\n", f"{UNWRITTEN}: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("redirection", "words", "code", "is_printed", "expected"),
    [
        *((each, "config", 0, " >&-" not in f" {each}", None) for each in CLOSED),
        *((each, "--help", 0, " >&-" not in f" {each}", None) for each in CLOSED),
        *((each, "nonsense", 2, False, None) for each in CLOSED),
        *((">/dev/full", words, 1, False, FULL) for words in ("config", "--help", "config --json")),
        *(("1</dev/null", w, 1, False, READ_ONLY) for w in ("config", "--help", "config --json")),
        ("2>/dev/full", "nonsense", 2, False, ""),  # what is written there is stopped alone
        ("2>/dev/full", "config", 0, True, ""),
    ],
)
def test_closed_standard_streams_change_no_exit_code_and_one_that_cannot_be_written_is_named(
    tmp_path: Path, redirection: str, words: str, code: int, is_printed: bool, expected: str | None
) -> None:
    program = "from openenvd.cli.entry import main; main()"
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program]
    environ = {**os.environ, "OPENENV_HOME": str(tmp_path)}
    done = subprocess.run(
        [*shell, *words.split()], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, bool(done.stdout)) == (code, is_printed), done.stderr
    assert "Traceback" not in done.stderr
    assert expected is None or done.stderr == expected


@pytest.mark.usefixtures("status")
@pytest.mark.parametrize("word", ["status", "logs", "down"])
def test_a_misspelled_name_is_4_with_near_matches(cli: Cli, word: str) -> None:
    error = {**NOT_FOUND, "hint": "did you mean trial?", "near": ["trial"]}
    cli.get("/v1/environments/trail", (404, {"error": error}))
    cli.post("/v1/requests", (404, {"error": error}))
    answer = cli(word, "trail")
    assert answer.code == 4
    assert "trail" in answer.err
    assert "did you mean trial?" in answer.err
