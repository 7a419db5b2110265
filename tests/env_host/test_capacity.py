# SPDX-License-Identifier: Apache-2.0
"""`/capacity` and `/metrics`: what they say of real shards, and the words for how they do."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.request import urlopen

import pytest

from openenvd.env_host.ipc import reports
from openenvd.env_host.ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard
from openenvd.env_host.startup import device_of

from .conftest import StartHost
from .hosts import Host, until

Json = dict[str, Any]
NOW = 100 * MICROSECONDS


@pytest.fixture
def scoreboard() -> Iterator[Scoreboard]:
    made = Scoreboard.create(2)
    yield made
    os.close(made.fd)


def serving(counters: Counters, **words: int) -> Counters:
    fields = {"PID": 7, "GENERATION": 1, "MAX_SESSIONS": 8, "READY": 1}
    fields |= {"HEARTBEAT": NOW} | words
    for name, value in fields.items():
        counters[Field[name]] = value
    return counters


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ({}, "alive"),
        ({"HEARTBEAT": NOW - MICROSECONDS}, "wedged"),
        ({"HEARTBEAT": NOW - MICROSECONDS, "IDLE": 1}, "alive"),
        ({"LAG_P50": MICROSECONDS // 10}, "busy"),
        ({"STOPPING": 1}, "stopping"),
        ({"READY": 0}, "starting"),
        ({"PID": 0}, "absent"),
    ],
)
def test_the_state_of_a_shard_is_one_word(
    scoreboard: Scoreboard, words: dict[str, int], state: str
) -> None:
    assert reports.state_of(serving(scoreboard[0], **words), NOW) == state


def test_how_long_a_shard_was_blocked_and_one_that_awakes_was_not(scoreboard: Scoreboard) -> None:
    counters = serving(scoreboard[0], IDLE=1, HEARTBEAT=NOW - 60 * MICROSECONDS)
    reports.note_awake(counters, NOW)
    assert not counters[Field.IDLE]
    assert reports.state_of(counters, NOW) == "alive"
    assert reports.blocked_seconds(counters, NOW) == 0
    serving(scoreboard[0], HEARTBEAT=NOW - 12 * MICROSECONDS)
    assert reports.blocked_seconds(scoreboard[0], NOW) == 12.0
    serving(scoreboard[0])
    assert reports.blocked_seconds(scoreboard[0], NOW) == 0


def test_totals_are_of_all_shards(scoreboard: Scoreboard) -> None:
    serving(scoreboard[0], SESSIONS=3, WAITING=1)
    serving(scoreboard[1], SESSIONS=4, WAITING=2)
    seen = reports.capacity_of(scoreboard, NOW)
    assert (seen["sessions"], seen["max_sessions"], seen["waiting"]) == (7, 16, 3)


def test_a_summary_is_the_same_as_long_as_nothing_happens(scoreboard: Scoreboard) -> None:
    serving(scoreboard[0], LAG_P99=1000)
    serving(scoreboard[1], STEPS=4)
    before = reports.summary_of(reports.capacity_of(scoreboard, NOW))
    serving(scoreboard[0], LAG_P99=4000)
    assert reports.summary_of(reports.capacity_of(scoreboard, NOW + MICROSECONDS // 2)) == before
    assert before["steps"] == 4
    assert before["shards"] == {"alive": 2}


def test_the_metrics_page_has_every_family_and_escapes_names(scoreboard: Scoreboard) -> None:
    page = reports.render_metrics('a"b', reports.capacity_of(scoreboard, NOW))
    assert '{environment="a\\"b",shard="0"} 0\n' in page
    families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert all(line.startswith(("#", "openenvd_")) for line in page.splitlines())


@pytest.mark.parametrize(
    ("index", "gpus", "visible", "device"),
    [
        (0, 2, None, "0"), (3, 2, None, "1"), (1, 2, "5,7", "7"), (2, 2, "5,7,9", "5"),
        (0, 1, "GPU-8f", "GPU-8f"), (5, 3, "4", "4"),
    ],
)  # fmt: skip
def test_shards_take_devices_in_turn(index: int, gpus: int, visible: str, device: str) -> None:
    assert device_of(index, gpus, visible) == device


def capacity(host: Host) -> Json:
    status, seen = host.http("GET", "/capacity")
    assert status == 200
    return dict(seen)


def test_sessions_and_steps_are_counted_and_a_stopped_shard_is_wedged(serve: StartHost) -> None:
    host = serve(shards=2, max_sessions=6)
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(host.open())
            client.ask("reset")
            client.ask("step", {"what": "pid"})
        until(lambda: capacity(host)["sessions"] == _steps(capacity(host)) == 4)
        seen = capacity(host)
        assert seen["max_sessions"] == 6
        assert [shard["max_sessions"] for shard in seen["shards"]] == [3, 3]
        assert {shard["state"] for shard in seen["shards"]} == {"alive"}
        assert sum(shard["totals"]["sessions"] for shard in seen["shards"]) == 4
    host.emptied()
    with urlopen(f"http://127.0.0.1:{host.port}/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = answer.read().decode()
    assert 'openenvd_shard_max_sessions{environment="sample",shard="1"} 3' in page
    # Another answers for it.
    with host.open(), host.open():
        pid = capacity(host)["shards"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: capacity(host)["shards"][1]["state"] == "wedged")
            assert capacity(host)["shards"][0]["state"] == "alive"
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: capacity(host)["shards"][1]["state"] == "alive")


def _steps(seen: Json) -> int:
    return sum(shard["totals"]["steps"] for shard in seen["shards"])


def test_the_shim_is_notified_of_changes(serve: StartHost) -> None:
    host = serve(shards=2, max_sessions=6)
    while (told := (host.note() or {}).get("capacity")) is None:
        pass
    assert (told["max_sessions"], told["shards"]) == (6, {"alive": 1, "cordoned": 1})
    with host.open() as client:
        client.ask("step", {"what": "pid"})
        while ((host.note() or {}).get("capacity") or {}).get("steps") != 1:
            pass


@pytest.mark.parametrize(("gpus", "seen"), [(2, {"5", "7"}), (1, {"5"}), (0, {"5,7"})])
def test_each_shard_sees_its_own_gpu(serve: StartHost, gpus: int, seen: set[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "5,7"}
    host = serve(gpus=gpus, shards=2, max_sessions=2, env=environ)
    with host.open() as one, host.open() as two:  # a slot each
        answers = [client.ask("step", {"what": "device"}) for client in (one, two)]
        assert {a["data"]["observation"]["text"] for a in answers} == seen


def test_there_is_a_shard_for_each_gpu_by_default(start: StartHost) -> None:
    assert start(gpus=3, shards=None, max_sessions=9).ready()["shards"] == 3


def test_what_the_supervisor_knows_is_read_whole_while_it_is_replaced() -> None:
    board = Scoreboard.create(1)
    assert board.read_news() == ([], [], None)
    same = Scoreboard(board.fd, 1)  # of another process
    for number in range(1, 4):
        news = [{"number": each} for each in range(number)], [{"pid": number}], f"no {number}"
        board.write_news(*news)
        assert same.read_news() == news
    board.write_news([{"number": each, "text": "x" * 3000} for each in range(4)], [])
    assert [one["number"] for one in same.read_news()[0]] == [2, 3]
