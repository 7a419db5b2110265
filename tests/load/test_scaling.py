# SPDX-License-Identifier: Apache-2.0
"""`load_tests/scaling.py`: a small measurement against a real server, and what it refuses."""

import csv
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.rollouts.bench.generator import Batch
from openenvd.rollouts.bench.results import read_drops
from openenvd.rollouts.bench.sweep import Crew, GeneratorLost, shares_of
from openenvd.system.text.json_lines import Json

# The seed's own fields, in its order: burtenshaw/openenv-scaling, tests/test_scaling.py.
RAW_FIELDS = """request_id mode timestamp wait_requested batch_size hardware connect_latency
    reset_latency step_latency total_latency waited_seconds pid session_hash host_url success
    error_type error_message"""
SUMMARY_FIELDS = """mode url num_requests batch_size wait_seconds repetition timestamp hardware
    successful failed error_rate total_wall_time connect_p50 connect_p95 connect_p99 reset_p50
    reset_p95 reset_p99 step_p50 step_p95 step_p99 total_min total_max total_avg total_p50 total_p90
    total_p95 total_p99 requests_per_second effective_concurrency unique_pids unique_sessions
    unique_hosts"""
PNG = b"\x89PNG\r\n\x1a\n"

# Answers whatever a test wants to see answered, on one connection after the other.
CLUMSY_SERVER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
answers = {answers!r}
while True:
    client, _ = listener.accept()
    head = client.recv(65536)
    if b"GET /health" in head:
        client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}")
    else:
        for answer in answers:
            client.sendall(answer)
            client.recv(65536)
    client.close()
"""
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"


def outcomes_of(reports: list[Json]) -> list[Json]:
    return [outcome for report in reports for outcome in report["outcomes"]]


@pytest.fixture
def limit() -> Iterator[Any]:
    pytest.importorskip("picows")
    from load_tests.peers.scaling_servers import limit as bare

    before = set(psutil.Process().children(recursive=True))
    with bare() as started:
        yield started
    assert set(psutil.Process().children(recursive=True)) - before == set()


def measure(*arguments: str) -> int:
    from load_tests.scaling import main

    return main(arguments)


def begins(row: dict[str, Any], fields: str) -> bool:
    """Whether its first fields are these, in this order."""
    return " ".join(row).startswith(" ".join(fields.split()))


def test_the_files_begin_with_the_seeds_fields(limit: Any, tmp_path: Path) -> None:
    grids = ("--requests-grid", "3,40", "--wait-grid", "0.01,0.02", "--reps", "2")
    assert measure("--url", limit.target.url, *grids, "--output-dir", str(tmp_path)) == 0
    rows = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert len(rows) == (3 + 40) * 2 * 2
    assert begins(rows[0], RAW_FIELDS)
    phases = ("connect_latency", "reset_latency", "step_latency")
    for row in rows:
        assert row["success"]
        assert 0 < sum(row[phase] for phase in phases) <= row["total_latency"]
    with (tmp_path / "summary.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert begins(table[0], SUMMARY_FIELDS)
    assert {row["unique_sessions"] for row in table} == {"3", "40"}
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([], "connection_lost"),
        ([b"HTTP/1.1 403 Forbidden\r\n\r\n"], "refused"),
        ([SWITCHING], "connection_lost"),
        ([SWITCHING, b"\x88\x02\x03\xf3"], "closed"),
        ([SWITCHING, b"\x81\x02hi"], "not_openenv"),
        ([SWITCHING, b'\x81\x10{"type":"error"}'], "error"),
    ],
)
def test_every_way_to_fail_has_a_name(answers: list[bytes], kind: str) -> None:
    code = CLUMSY_SERVER.format(answers=answers)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            with Crew(1) as crew:
                reports = crew.run(Batch("127.0.0.1", port, "", 1, {}, 30.0, 8))
        finally:
            server.kill()
    assert [outcome["error_kind"] for outcome in outcomes_of(reports)] == [kind]


def test_a_generator_that_exits_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Crew(2) as crew:

        def kill_one() -> None:
            listener.accept()[0].close()  # the batch has begun
            children = psutil.Process().children()
            next(c for c in children if "openenvd.rollouts.bench.generator" in c.cmdline()).kill()

        batch = Batch("127.0.0.1", listener.getsockname()[1], "", 4, {}, 60.0, 8)
        with ThreadPoolExecutor(1) as thread:
            killed = thread.submit(kill_one)
            with pytest.raises(GeneratorLost, match="ended with exit code -9"):
                crew.run(batch)
        killed.result()


def test_all_sessions_connect_before_any_is_answered(tmp_path: Path) -> None:
    """Without a window: a server that never accepts has all of them in its queue."""
    sessions = 300
    with socket.create_server(("127.0.0.1", 0), backlog=sessions) as listener:
        port = listener.getsockname()[1]
        batch = Batch("127.0.0.1", port, "", sessions, {}, 60.0, 0, handshake_seconds=1.0)
        with Crew(2) as crew:
            reports = crew.run(batch)
        listener.setblocking(False)
        for _ in range(sessions):
            listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    kinds = {outcome["error_kind"] for outcome in outcomes_of(reports)}
    assert kinds == {"handshake_timeout"}
    assert all(outcome["total_seconds"] >= 1.0 for outcome in outcomes_of(reports))


def test_a_window_bounds_the_handshakes_under_way() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        batch = Batch("127.0.0.1", port, "", 12, {}, 60.0, 8, handshake_seconds=1.0)
        with Crew(2) as crew:
            reports = crew.run(batch)
    late = [outcome for outcome in outcomes_of(reports) if outcome["total_seconds"] > 1.8]
    assert len(late) == 12 - 8  # they waited for the first ones to give up


def test_what_the_kernel_dropped_is_counted(tmp_path: Path) -> None:
    if (before := read_drops()) is None:
        pytest.skip("this system has no such counters")
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        clients = [socket.socket() for _ in range(8)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        after = read_drops()
        for client in clients:
            client.close()
    assert after is not None
    assert after > before


def test_shares_of_a_batch_add_up_and_take_the_servers_addresses_in_turn() -> None:
    batch = Batch("127.0.0.1", 80, "", 7, {}, 1.0, 4, others=(("10.0.0.2", 81),))
    shares = shares_of(batch, 3)
    reached = [(share.host, share.port) for share in shares]
    assert reached == [("127.0.0.1", 80), ("10.0.0.2", 81), ("127.0.0.1", 80)]
    assert [share.count for share in shares] == [3, 2, 2]
    assert shares[1].sources == ()
    sources = [
        source for share in shares_of(replace(batch, others=()), 3) for source in share.sources
    ]
    assert len(sources) == len(set(sources)) > 0
