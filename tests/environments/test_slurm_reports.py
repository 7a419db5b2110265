# SPDX-License-Identifier: Apache-2.0
"""What jobs without a shared folder say over HTTP: the real listener, and clients of all kinds."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from openenvd import __version__
from openenvd.environments.engines import slurm_reports
from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.slurm_address import report_address, slurm_address
from openenvd.environments.engines.slurm_files import (
    MOST_OUTPUT_BYTES,
    NO_JOB,
    JobReport,
    leave_job,
    read_report,
    write_job,
)
from openenvd.environments.engines.slurm_posting import AgentAddress, Refused
from openenvd.environments.engines.slurm_reports import JobFiles, ReportServer
from openenvd.environments.errors import EngineFailed
from openenvd.environments.layout import Layout

REPLICA, OTHER = "echo-0-abc", "echo-1-abc"
SECONDS = 20.0
JOB = """
import os, sys
from pathlib import Path
from openenvd.environments.engines.slurm_files import JobReport
from openenvd.environments.engines.slurm_posting import AgentAddress, PostedReports
reports = PostedReports(AgentAddress(sys.argv[1], sys.argv[2], "7"), Path("."))
print(reports.begin()["port"], flush=True)
is_replaced = reports.write(JobReport(job="7", node="n1", host="127.0.0.1", port=5, beats=1))
sys.stdin.readline()
os.system("echo from a child")
print(reports.write(JobReport(job="7", node="n1", host="127.0.0.1", port=5, exit_code=3)))
sys.stdout.flush()
reports.close()
"""
PRINTER = """
import os, sys, time
from pathlib import Path
from openenvd.environments.engines import slurm_posting
from openenvd.environments.engines.slurm_posting import AgentAddress, PostedReports
slurm_posting.TOGETHER_SECONDS = 10.0
class Counting(AgentAddress):
    pieces = []
    def ask(self, path="", body=None):
        if body is not None:
            self.pieces.append(len(body))
        return super().ask(path, body)
told = os.dup(1)
reports = PostedReports(Counting(sys.argv[1], sys.argv[2], "7"), Path("."))
reports.begin()
for text in eval(sys.argv[3]):
    os.write(1, text)
    time.sleep(0.02)
reports.close()
os.write(told, repr(Counting.pieces).encode())
"""


@pytest.fixture
def run_dir(layout: Layout) -> Path:
    """The folders of two replicas, of which the first has job 7, and the second job 8."""
    for replica, job in ((REPLICA, "7"), (OTHER, "8")):
        folder = layout.run_dir(replica)
        folder.mkdir(parents=True)
        (folder / "replica.json").write_text(json.dumps({"plan": {"port": 1234, "source": {}}}))
        write_job(folder, job)
    return layout.run_dir(REPLICA)


@pytest.fixture
def start(layout: Layout) -> Iterator[Callable[[int], ReportServer]]:
    """Starts listeners, as agents do one after the other."""
    started: list[ReportServer] = []

    def start_one(port: int = 0) -> ReportServer:
        files = JobFiles(layout, lambda plan: Path(plan["archive"]) if "archive" in plan else None)
        server = ReportServer(layout, layout.engines / "slurm", "127.0.0.1", port, files)
        started.append(server)
        server.url()
        return server

    yield start_one
    for server in started:
        server.close()


@pytest.fixture
def server(start: Callable[..., ReportServer], run_dir: Path) -> ReportServer:
    return start()


def agent_of(server: ReportServer, job: str = "7", token: str | None = None) -> AgentAddress:
    url = f"{server.url()}/jobs/{REPLICA}"
    return AgentAddress(url, token or server.token(REPLICA), job)


def report_of(job: str = "7", **more: object) -> bytes:
    known = {"job": job, "node": "n1", "host": "10.0.0.1", "port": 80, "pid": 5, "beats": 1}
    return json.dumps(known | {"exit_code": None, "runs": 0} | more).encode()


def status_of(agent: AgentAddress, path: str = "", body: bytes | None = None) -> int:
    with pytest.raises(Refused) as raised:
        agent.ask(path, body)
    return raised.value.status


def raw(server: ReportServer, text: bytes) -> bytes:
    """Send bytes, and return what is answered until the connection ends."""
    parts = urlsplit(server.url())
    with socket.create_connection((parts.hostname, parts.port), SECONDS) as connection:
        connection.sendall(text)
        answer = b""
        while data := connection.recv(4096):
            answer += data
        return answer


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_job_is_told_its_plan_and_how_much_of_its_output_is_there(
    server: ReportServer, run_dir: Path
) -> None:
    (run_dir / "slurm-7.out").write_text("earlier")
    assert agent_of(server).ask() == {"plan": {"port": 1234, "source": {}}, "output_bytes": 7}


def test_a_report_becomes_the_file_that_a_shared_folder_would_have(
    server: ReportServer, run_dir: Path
) -> None:
    assert agent_of(server).ask("/report", report_of()) == {"replaced": False}
    known = read_report(run_dir, "7")
    assert known == JobReport(job="7", node="n1", host="10.0.0.1", port=80, pid=5, beats=1)
    assert stat.S_IMODE((run_dir / "slurm-7.json").stat().st_mode) == 0o600


def test_output_is_written_once_however_often_it_comes(server: ReportServer, run_dir: Path) -> None:
    agent = agent_of(server)
    for at, text, has in ((0, b"one ", 4), (0, b"one two ", 8), (2, b"e", 8), (99, b"far", 8)):
        assert agent.ask(f"/output?{at}", text) == {"output_bytes": has}
    assert (run_dir / "slurm-7.out").read_bytes() == b"one two "


def test_files_are_sent_as_they_are(server: ReportServer, run_dir: Path, tmp_path: Path) -> None:
    archive = tmp_path / "files.tar"
    archive.write_bytes(os.urandom(3_000_000))
    plan = {"port": 1, "archive": str(archive)}
    (run_dir / "replica.json").write_text(json.dumps({"plan": plan}))
    with agent_of(server).open("/files") as answer:
        assert answer.read() == archive.read_bytes()
    archive.unlink()
    assert status_of(agent_of(server), "/files") == 404


@pytest.mark.parametrize("path", ["", "/files", "/report", "/output?0", "/report/../../x", "/?x"])
@pytest.mark.parametrize("whose", ["nobody", "another replica", "a part of it"])
def test_without_the_replicas_token_nothing_is_told_or_written(
    server: ReportServer, run_dir: Path, path: str, whose: str
) -> None:
    tokens = {"nobody": "x" * 64, "another replica": server.token(OTHER)}
    token = tokens.get(whose, server.token(REPLICA)[:-1])
    before = files_in(run_dir)
    body = report_of() if "report" in path or "output" in path else None
    assert status_of(agent_of(server, token=token), path, body) == 401
    assert files_in(run_dir) == before


def test_a_token_is_read_from_its_header_alone(server: ReportServer) -> None:
    token = server.token(REPLICA)
    for head in (
        f"GET /jobs/{REPLICA}/7?token={token} HTTP/1.1\r\n\r\n",
        "\r\n\r\n",
        "GET\r\n\r\n",
    ):
        assert b" 401 " in raw(server, head.encode())


@pytest.mark.parametrize("replica", ["../echo-0-abc", "..", "%2e%2e", "", "echo-0-abc/../x"])
def test_a_path_leads_nowhere_else(server: ReportServer, replica: str) -> None:
    token = server.token(replica)
    head = f"GET /jobs/{replica}/7 HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n"
    answer = raw(server, head.encode())
    assert any(code in answer for code in (b" 401 ", b" 404 ", b" 426 ")), answer
    assert b"plan" not in answer


def test_a_job_of_which_nobody_knows_yet_asks_again(server: ReportServer, run_dir: Path) -> None:
    (run_dir / "slurm.json").unlink()
    agent = agent_of(server)
    assert [status_of(agent), status_of(agent, "/report", report_of())] == [409, 409]
    assert not (run_dir / "slurm-7.json").exists()


def test_a_job_whose_replica_has_another_is_told_so(server: ReportServer, run_dir: Path) -> None:
    agent = agent_of(server)
    agent.ask("/report", report_of())
    leave_job(run_dir, "7")
    assert agent.ask("/report", report_of(exit_code=0)) == {"replaced": True}
    write_job(run_dir, "9")
    (run_dir / "slurm-7.json").unlink()
    assert [status_of(agent), status_of(agent, "/report", report_of())] == [410, 410]
    assert not (run_dir / "slurm-7.json").exists()


def test_how_a_job_ended_that_slurm_has_lost_is_taken(server: ReportServer, run_dir: Path) -> None:
    agent = agent_of(server)
    agent.ask("/report", report_of())
    write_job(run_dir, NO_JOB)
    assert agent.ask("/report", report_of(exit_code=3)) == {"replaced": True}
    known = read_report(run_dir, "7")
    assert known is not None
    assert known.exit_code == 3


def test_a_replica_without_a_folder_is_none(server: ReportServer) -> None:
    agent = AgentAddress(f"{server.url()}/jobs/gone-0-a", server.token("gone-0-a"), "7")
    assert status_of(agent) == 404


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xff", b"[]", b"7", b"[" * 4000, b"{}", report_of("8")),
        *(report_of(port=port) for port in (0, 65536, "80", True, 1.5)),
        *(report_of(host=host) for host in ("", "a b", "x/../y", "evil?", "u@h", None, 7)),
        *(report_of(beats=-1), report_of(pid=2**70), report_of(more=1), report_of(node="a\nb")),
    ],
)
def test_what_is_no_report_changes_nothing(
    server: ReportServer, run_dir: Path, body: bytes
) -> None:
    agent = agent_of(server)
    agent.ask("/report", report_of())
    before = (run_dir / "slurm-7.json").read_bytes()
    assert status_of(agent, "/report", body) == 400
    assert (run_dir / "slurm-7.json").read_bytes() == before


def head_of(server: ReportServer, path: str, *lines: str, method: str = "POST") -> bytes:
    known = [f"Authorization: Bearer {server.token(REPLICA)}", f"OpenEnvd-Version: {__version__}"]
    head = [f"{method} /jobs/{REPLICA}/7{path} HTTP/1.1", *known, *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    ("path", "line", "status"),
    [
        ("/report", "Content-Length: 4097", 413),
        ("/output?0", f"Content-Length: {MOST_OUTPUT_BYTES + 1}", 413),
        ("/output?0", f"Content-Length: {10**30}", 413),
        ("/report", "Content-Length: -5", 411),
        ("/report", "Content-Length: 5x", 411),
        ("/report", "Content-Length: ²", 411),
        ("/report", "Transfer-Encoding: chunked", 411),
        ("", "Content-Length: 5", 405),
    ],
)
def test_a_body_is_refused_by_its_length_before_it_comes(
    server: ReportServer, run_dir: Path, path: str, line: str, status: int
) -> None:
    before = files_in(run_dir)
    assert f" {status} ".encode() in raw(server, head_of(server, path, line))
    assert files_in(run_dir) == before


def test_a_head_has_a_limit(server: ReportServer) -> None:
    parts = urlsplit(server.url())
    with socket.create_connection((parts.hostname, parts.port), SECONDS) as connection:
        connection.sendall(b"GET /" + b"x" * slurm_reports.MOST_HEAD_BYTES)
        assert b" 431 " in connection.recv(4096)


def test_a_request_that_does_not_end_is_cut(
    start: Callable[..., ReportServer], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_reports, "REQUEST_SECONDS", 0.2)
    server = start()
    for text in (b"", b"GET /", head_of(server, "/report", "Content-Length: 9") + b"half"):
        assert raw(server, text) == b""


def test_silent_connections_keep_nobody_out(
    start: Callable[..., ReportServer], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_reports, "MOST_CONNECTIONS", 4)
    server = start()
    parts = urlsplit(server.url())
    silent = [socket.create_connection((parts.hostname, parts.port)) for _ in range(9)]
    wait_for(lambda: is_answered(agent_of(server)))  # they have to be there before they can go
    for each in silent:
        each.close()


def is_answered(agent: AgentAddress) -> bool:
    try:
        return bool(agent.ask()["output_bytes"] == 0)
    except Refused as exc:
        if exc.status != 503:
            raise
        return False


def test_another_version_is_refused_and_the_log_says_so(
    server: ReportServer, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_of(server)
    monkeypatch.setattr(slurm_reports, "__version__", "9.9")
    assert status_of(agent) == 426
    assert "and the replica's agent 9.9" in (run_dir / "slurm-7.out").read_text()


def test_a_job_goes_on_reporting_when_the_agent_is_upgraded(
    server: ReportServer, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_of(server)
    monkeypatch.setattr(slurm_reports, "__version__", "9.9")
    oldest = {"job": "7", "node": "n1", "host": "10.0.0.1", "port": 80}
    assert agent.ask("/report", json.dumps(oldest).encode()) == {"replaced": False}
    assert agent.ask("/output?0", b"one ") == {"output_bytes": 4}
    assert (run_dir / "slurm-7.out").read_text() == "one "


def test_output_that_nobody_reads_is_taken_up_to_a_limit(
    server: ReportServer, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_reports, "MOST_UNREAD_BYTES", 8192)
    agent = agent_of(server)
    agent.ask("/output?0", b"x" * 8192)
    assert status_of(agent, "/output?8192", b"more") == 429


def test_output_that_was_read_takes_no_room_and_goes_on_where_it_was(
    layout: Layout, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_reports, "FORGOTTEN_BYTES", 8192)
    files = JobFiles(layout, lambda plan: None)
    path = run_dir / "slurm-7.out"
    files.output(REPLICA, "7", 0, b"x" * 100_000)
    files.forget_read(run_dir, "7", 50_000)  # not all of it
    assert path.stat().st_blocks > 0
    files.forget_read(run_dir, "7", 100_000)
    assert path.stat().st_blocks == 0
    assert files.output(REPLICA, "7", 100_000, b"more") == {"output_bytes": 100_004}
    assert path.read_bytes()[100_000:] == b"more"


def test_the_next_agent_listens_at_the_same_port_with_the_same_tokens(
    start: Callable[..., ReportServer], run_dir: Path, layout: Layout
) -> None:
    first = start()
    agent = agent_of(first)
    first.close()
    with pytest.raises(ConnectionRefusedError):
        agent.ask()
    start()
    assert agent.ask()["output_bytes"] == 0
    assert stat.S_IMODE((layout.home / "slurm-report-key").stat().st_mode) == 0o600


def test_a_port_that_is_taken_is_told_until_it_is_free(
    start: Callable[..., ReportServer], run_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineGone, match=f"cannot report to 127.0.0.1:{port}"):
            start(port)
    assert start(port).url() == f"http://127.0.0.1:{port}"


def test_a_job_reports_and_its_output_arrives_though_the_agent_was_away(
    start: Callable[..., ReportServer], run_dir: Path
) -> None:
    server = start()
    url, token = f"{server.url()}/jobs/{REPLICA}", server.token(REPLICA)
    with subprocess.Popen([sys.executable, "-c", JOB, url, token], stdin=subprocess.PIPE) as job:
        output = run_dir / "slurm-7.out"
        wait_for(lambda: output.exists() and output.read_bytes() == b"1234\n")
        wait_for(lambda: read_report(run_dir, "7") is not None)
        server.close()
        write_job(run_dir, NO_JOB)
        assert job.stdin is not None
        job.stdin.write(b"\n")
        job.stdin.flush()
        time.sleep(0.5)
        start()
        assert job.wait(SECONDS) == 0
    assert output.read_bytes() == b"1234\nfrom a child\nFalse\n"
    found = read_report(run_dir, "7")
    assert found is not None
    assert found.exit_code == 3


@pytest.mark.parametrize(
    ("printed", "pieces"),
    [
        ("[b'line'] * 20", [80]),
        (f"[b'x' * {MOST_OUTPUT_BYTES}] * 2", [MOST_OUTPUT_BYTES, MOST_OUTPUT_BYTES]),
    ],
)
def test_what_a_job_prints_is_gathered(
    server: ReportServer, run_dir: Path, printed: str, pieces: list[int]
) -> None:
    url = f"{server.url()}/jobs/{REPLICA}"
    command = [sys.executable, "-c", PRINTER, url, server.token(REPLICA), printed]
    told = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    assert json.loads(told.stdout) == pieces


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"output_bytes": null}'])
def test_what_another_server_answers_is_no_answer(answer: bytes) -> None:
    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        agent = AgentAddress(f"http://127.0.0.1:{listening.getsockname()[1]}", "token", "7")
        with pytest.raises(ValueError, match="no agent of openenvd"):
            agent.ask("/output?0")
        thread.join(SECONDS)


def wait_for(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "found"),
    [("10.0.0.5", ("10.0.0.5", 0)), ("login:7443", ("login", 7443)), ("[::1]:5", ("::1", 5))],
)
def test_an_address_is_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert report_address(text) == found


@pytest.mark.parametrize("text", ["0.0.0.0", "::", ":80", "a:99999", "http://a", "u@a", "a/b"])
def test_what_names_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no address"):
        report_address(text)
    with pytest.raises(EngineFailed, match="no address of this machine"):
        slurm_address({"OPENENV_SLURM_REPORT": text})


def test_jobs_cannot_report_here_when_slurm_is_behind_ssh() -> None:
    with pytest.raises(EngineFailed, match="exclude each other"):
        slurm_address({"OPENENV_SLURM_REPORT": "10.0.0.5", "OPENENV_SLURM_SSH": "login"})
