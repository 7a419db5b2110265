# SPDX-License-Identifier: Apache-2.0
"""`PostedReports`: a job's plan, reports and output, by HTTP, from a node that sees no folder.

    job ─────write─────▶ the last report ─┐
    stdout, stderr ─pipe─▶ what is printed ┼─ thread ──POST──▶ `slurm_reports.py`, at the agent
                                           ┘

Failure cases

    nobody answers       tried again, at most `LONGEST_PAUSE_SECONDS` apart: the job serves on. Of
                         reports the last one counts; of what is printed, `KEPT_BYTES` are kept, and
                         what is left out is said
    an answer is lost    output is sent again from where the agent has it
    another server       that has the port by now: as if nobody answered
    it is refused (401)  before it has begun, the job ends; later it is as if nobody answered
    the job ends         `close` waits `LAST_SECONDS` for the last to be sent, and no longer: Slurm
                         knows how it ended, too

Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ... import __version__
from ...system.access_tokens import bearer_header
from ...system.backoff import backoff_seconds
from ...system.units import MB
from .slurm_files import MOST_OUTPUT_BYTES, VERSION_HEADER, JobReport

ANSWER_SECONDS = 10.0
BEGIN_SECONDS = 600.0  # for the agent to answer at all, when a job begins
LAST_SECONDS = 30.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
TOGETHER_SECONDS = 0.2  # for what is printed to be sent together
KEPT_BYTES = 4 * MB
_READ_BYTES = 64 * 1024
_HOPELESS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.GONE, HTTPStatus.UPGRADE_REQUIRED)
_ANSWERS: dict[str, dict[str, type]] = {
    "": {"plan": dict, "output_bytes": int},
    "/report": {"replaced": bool},
    "/output": {"output_bytes": int},
}

Json = dict[str, Any]


class Refused(Exception):
    """The agent has answered with an error."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class AgentAddress:
    """Where a job reports, and with which token.

    Args:
        url: The agent's, for the replica's jobs.
        token: The replica's.
        job: The job's id.
    """

    def __init__(self, url: str, token: str, job: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "", parts.port
        self._path = f"{parts.path}/{job}"
        self._headers = {**bearer_header(token), VERSION_HEADER: __version__}

    def ask(self, path: str = "", body: bytes | None = None) -> Json:
        """Return what is answered; raises `OSError`, `HTTPException`, `ValueError`, `Refused`."""
        with self.open(path, body) as answer:
            found = json.loads(answer.read())
        wanted = _ANSWERS[path.partition("?")[0]]
        if not isinstance(found, dict) or not all(
            isinstance(found.get(name), kind) for name, kind in wanted.items()
        ):
            raise ValueError(f"{self.url} is no agent of openenvd")
        return found

    @contextmanager
    def open(self, path: str, body: bytes | None = None) -> Iterator[IO[bytes]]:
        """Ask, and yield the answer to be read; raises as `ask`."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, self._path + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise Refused(answer.status, answer.read(MOST_OUTPUT_BYTES).decode("latin-1"))
            yield answer
        finally:
            connection.close()


FAILURES = (OSError, http.client.HTTPException, ValueError, Refused)


class Output:
    """What was printed and not sent yet: at most `KEPT_BYTES`. Shared by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._left_out = 0
        self._at = 0  # of its first byte, in all that is sent

    def begin_at(self, at: int) -> None:
        """Begin behind what an earlier run of this job has sent."""
        self._at = at

    def add(self, data: bytes) -> None:
        """Keep what was printed; beyond the limit, only how much it was."""
        with self._lock:
            if len(self._kept) + len(data) > KEPT_BYTES:
                self._left_out += len(data)
                return
            if self._left_out:
                self._kept += f"\n[{self._left_out} bytes of output were lost here]\n".encode()
                self._left_out = 0
            self._kept += data

    def piece(self) -> tuple[int, bytes]:
        """Return what is to be sent next, and where it belongs."""
        with self._lock:
            return self._at, bytes(self._kept[:MOST_OUTPUT_BYTES])

    def note_sent(self, at: int) -> None:
        """Note how much the agent has; if that is less than it had, it goes on from there."""
        with self._lock:
            if at >= self._at:
                del self._kept[: at - self._at]
            self._at = at


class PostedReports:
    """What `slurm_job.Job` reports to, on a node that sees no folder.

    Args:
        agent: Where.
        folder: A folder of the job's own.

    Attributes:
        plan: The replica's; it is set when the job is ready to serve.
        folder: The same.
    """

    def __init__(self, agent: AgentAddress, folder: Path) -> None:
        self.plan: Json = {}
        self.folder = folder
        self._agent = agent
        self._output = Output()
        self._report: Json | None = None  # not sent yet
        self._is_replaced = False
        self._changed = threading.Condition()
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def begin(self) -> Json:
        """Return the plan, as soon as it is told; from then on, what is printed is sent.

        Raises:
            Refused: It is not told to this job.
            OSError: Nobody answers.
        """
        found = self._first_answer()
        self._output.begin_at(int(found["output_bytes"]))
        reading, writing = os.pipe()
        for fd in (1, 2):
            os.dup2(writing, fd)
        os.close(writing)
        for target, *arguments in ((self._read, reading), (self._send_all,)):
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        return dict(found["plan"])

    def write(self, report: JobReport) -> bool:
        """Have a report sent; whether the replica had another job when the last one was."""
        with self._changed:
            self._report = asdict(report)
            self._changed.notify()
            return self._is_replaced

    def close(self) -> None:
        """Send the last report, and all that was printed."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):  # the pipe ends, unless something that the server has left still has it
            os.dup2(nowhere, fd)
        reader, sender = self._threads
        reader.join(1.0)
        with self._changed:
            self._is_over = True
            self._changed.notify()
        sender.join(LAST_SECONDS)

    def _first_answer(self) -> Json:
        deadline = time.monotonic() + BEGIN_SECONDS
        failures = 0
        while True:
            try:
                return self._agent.ask()
            except FAILURES as exc:
                is_hopeless = isinstance(exc, Refused) and exc.status in _HOPELESS
                if is_hopeless or time.monotonic() > deadline:
                    raise
            failures += 1
            time.sleep(_pause(failures))

    def _read(self, reading: int) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(reading, _READ_BYTES):
                self._output.add(data)
                with self._changed:
                    self._changed.notify()

    def _send_all(self) -> None:
        failures = 0
        while self._wait():
            try:
                self._send()
                failures = 0
            except FAILURES:
                failures += 1
                with self._changed:
                    is_over = self._is_over
                time.sleep(FIRST_PAUSE_SECONDS if is_over else _pause(failures))

    def _wait(self) -> bool:
        """Wait until there is something to send; False: there will be nothing any more."""
        with self._changed:
            while self._report is None and not self._output.piece()[1]:
                if self._is_over:
                    return False
                self._changed.wait()
            self._changed.wait_for(self._is_urgent, TOGETHER_SECONDS)
            return True

    def _is_urgent(self) -> bool:
        is_full = len(self._output.piece()[1]) == MOST_OUTPUT_BYTES
        return is_full or self._report is not None or self._is_over

    def _send(self) -> None:
        with self._changed:
            report = self._report
        if report is not None:
            self._send_report(report)
        at, data = self._output.piece()
        if data:
            told = self._agent.ask(f"/output?{at}", data)
            self._output.note_sent(int(told["output_bytes"]))

    def _send_report(self, report: Json) -> None:
        try:
            is_replaced = bool(self._agent.ask("/report", json.dumps(report).encode())["replaced"])
        except Refused as exc:
            if exc.status != HTTPStatus.GONE:
                raise
            is_replaced = True
        with self._changed:
            self._is_replaced = is_replaced
            if self._report is report:  # none that is newer
                self._report = None


def _pause(failures: int) -> float:
    return backoff_seconds(failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
