# SPDX-License-Identifier: Apache-2.0
"""`ReportServer`: what jobs on nodes without our folder ask and say over HTTP, as files of theirs.

    job ──GET  /jobs/REPLICA/JOB──────────▶ the replica's plan; how much of its output is here
        ──GET  /jobs/REPLICA/JOB/files────▶ the files of what is launched, as tar
        ──POST /jobs/REPLICA/JOB/report───▶ slurm-JOB.json; whether the replica has another job
        ──POST /jobs/REPLICA/JOB/output?N─▶ slurm-JOB.out, from byte N on

The files are those that a job in the folder would write (`slurm_files.py`): all else is the same.
Every request has `Authorization: Bearer TOKEN`. The token is made of the replica's name and a key
of the home: one token is for one replica, and nothing has to be kept for it. One request a
connection; the connection is not encrypted.

Failure cases

    no token, a wrong one, that of       401, before anything of the request is looked at but its
    another replica                      head; nothing is written
    the folder of the replica is gone    404: the job asks again; it is cancelled by whoever removed
                                         the replica
    the replica has another job          410: the job ends
    the job is not known yet             409: it has begun before `sbatch` has returned here, or the
                                         agent was killed then; the job asks again
    a body is too long, or of unknown    413, 411: the connection is closed, nothing is written
    length
    a report is no report                400, nothing is written
    a request is slow, or never ends     its connection is closed after `REQUEST_SECONDS`; beyond
                                         `MOST_CONNECTIONS`, those without a whole head go first
    nobody reads what a job prints       429 from `MOST_UNREAD_BYTES` on: the job waits, and leaves
                                         out what it cannot keep
    openenvd there is of another version 426 to a job that begins, and a line in its output. Jobs
                                         of an earlier version go on, and report
    a disk is full                       507; the job says it again
    the agent is killed                  the next one listens at the same address and port; jobs try
                                         again until then, and go on serving
    the port is taken then               `EngineGone`, until it is free: jobs know no other address
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ... import __version__
from ...shim.files import read_run_file, write_json
from ...system.access_tokens import bearer, is_token
from ...system.connection_limit import ConnectionLimit, Listener, closing_answer
from ...system.units import MB
from ..layout import Layout, make_private
from .base import EngineGone
from .node_program import http_address
from .slurm_files import (
    MOST_OUTPUT_BYTES,
    OUTPUT_FILE_NAME,
    VERSION_HEADER,
    JobReport,
    read_job,
    report_name,
)

KEY_FILE_NAME = "slurm-report-key"  # in the home
PORT_FILE_NAME = "report-port.json"  # in the agent's folder
REQUEST_SECONDS = 30.0  # for a request to arrive
MOST_CONNECTIONS = 1024
MOST_HEAD_BYTES = 8 * 1024
MOST_REPORT_BYTES = 4 * 1024
MOST_UNREAD_BYTES = 64 * MB  # of one job
FORGOTTEN_BYTES = 8 * MB  # of output that was read, for which the disk has them back
_KEY_BYTES = 32
_BLOCK_BYTES = 512  # of `st_blocks`
_TARGET = re.compile(
    r"/jobs/(\w[\w.-]{0,254})/(\d{1,20})(?:/(files|report|output))?(?:\?(\d{1,18}))?", re.ASCII
)

Json = dict[str, Any]


class _Refused(Exception):
    """A request is answered with an error."""

    def __init__(self, status: HTTPStatus, detail: str | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.detail = detail


class JobFiles:
    """What a request reads and writes: the folders of a home's replicas.

    Args:
        layout: The home's.
        archive_of: Returns the archive of what a plan launches; None: it has none.
    """

    def __init__(self, layout: Layout, archive_of: Callable[[Json], Path | None]) -> None:
        self._layout = layout
        self._archive_of = archive_of
        self._writing = threading.Lock()  # of output: requests, and who forgets what was read

    def plan(self, replica: str, job: str) -> Json:
        """Return what a job has to know when it begins."""
        run_dir = self._run_dir(replica, job)
        plan = self._plan(run_dir)
        output = run_dir / OUTPUT_FILE_NAME.format(job=job)
        output.touch(mode=0o600)  # it has been heard of
        return {"plan": plan, "output_bytes": output.stat().st_size}

    def archive(self, replica: str, job: str) -> Path:
        """Return the files of what is launched."""
        found = self._archive_of(self._plan(self._run_dir(replica, job)))
        if found is None or not found.is_file():
            raise _Refused(HTTPStatus.NOT_FOUND, "the files of this environment are gone")
        return found

    def report(self, replica: str, job: str, body: bytes) -> Json:
        """Write what a job says of itself; return whether its replica has another one by now."""
        run_dir = self._run_dir(replica, job, may_be_replaced=True)
        try:
            report = JobReport.of(json.loads(body), job)
        except (ValueError, RecursionError) as exc:
            raise _Refused(HTTPStatus.BAD_REQUEST, "this is no report of a job") from exc
        report.write(run_dir)
        return {"replaced": read_job(run_dir) not in (None, job)}

    def output(self, replica: str, job: str, at: int, data: bytes) -> Json:
        """Write what a job has printed, which began at a byte of it; return how much is here."""
        run_dir = self._run_dir(replica, job, may_be_replaced=True)
        path = run_dir / OUTPUT_FILE_NAME.format(job=job)
        with self._writing:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                status = os.fstat(descriptor)
                if status.st_blocks * _BLOCK_BYTES >= MOST_UNREAD_BYTES:
                    raise _Refused(HTTPStatus.TOO_MANY_REQUESTS)
                size = status.st_size
                if at <= size < at + len(data):  # some of it may have come already
                    size += os.pwrite(descriptor, data[size - at :], size)
            finally:
                os.close(descriptor)
        return {"output_bytes": size}

    def note(self, replica: str, job: str, text: str) -> None:
        """Add a line of ours to a job's output."""
        path = self._run_dir(replica, job) / OUTPUT_FILE_NAME.format(job=job)
        size = path.stat().st_size if path.exists() else 0
        self.output(replica, job, size, f"{text}\n".encode())

    def forget_read(self, run_dir: Path, job: str, read_bytes: int) -> None:
        """Give the disk back what a job's output takes, once all of it has been read.

        The file keeps its length, which is where the next piece begins.
        """
        path = run_dir / OUTPUT_FILE_NAME.format(job=job)
        with self._writing, contextlib.suppress(OSError):
            status = path.stat()
            if status.st_blocks * _BLOCK_BYTES < FORGOTTEN_BYTES or status.st_size > read_bytes:
                return
            empty = path.with_suffix(".new")
            with empty.open("wb") as file:
                file.truncate(status.st_size)
            empty.replace(path)

    def _run_dir(self, replica: str, job: str, *, may_be_replaced: bool = False) -> Path:
        """Return the folder of a replica that has this job.

        Args:
            replica: Its id; the token was made for it.
            job: The job that asks.
            may_be_replaced: Also one that it had, and whose end somebody waits for.
        """
        run_dir = self._layout.run_dir(replica)
        if not run_dir.is_dir():
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such replica")
        has = read_job(run_dir)
        if has == job or (may_be_replaced and (run_dir / report_name(job)).exists()):
            return run_dir
        if has is None:
            raise _Refused(HTTPStatus.CONFLICT, "this job is not known yet")
        raise _Refused(HTTPStatus.GONE, "the replica has another job")

    def _plan(self, run_dir: Path) -> Json:
        try:
            return dict(read_run_file(str(run_dir))["plan"])
        except (OSError, ValueError, LookupError) as exc:
            raise _Refused(HTTPStatus.NOT_FOUND, "the replica has no plan") from exc


class _Exchange(asyncio.Protocol):
    """One connection: one request, one answer."""

    transport: asyncio.Transport

    def __init__(
        self, limit: ConnectionLimit, key: bytes, files: JobFiles, open_ones: set[_Exchange]
    ) -> None:
        self._limit = limit
        self._open_ones = open_ones
        self._key = key
        self._files = files
        self._data = bytearray()
        self._wanted: int | None = None  # bytes of head and body; None: the head is not whole
        self._is_answered = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._limit.add(self)
        self._open_ones.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(REQUEST_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.remove(self)
        self._open_ones.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._data += data
        try:
            if self._wanted is None and not self._read_head():
                return
            assert self._wanted is not None
            if len(self._data) >= self._wanted:
                self._answer()
        except _Refused as exc:
            self._send(closing_answer(exc.status, exc.detail))
        except OSError as exc:
            self._send(closing_answer(HTTPStatus.INSUFFICIENT_STORAGE, exc.strerror))

    def _read_head(self) -> bool:
        """Read the head, if it is whole: who asks, what for, how long the body is."""
        end = self._data.find(b"\r\n\r\n", 0, MOST_HEAD_BYTES)
        if end < 0:
            if len(self._data) >= MOST_HEAD_BYTES:
                raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False
        self._limit.note_request(self)
        first, *lines = bytes(self._data[:end]).decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._method, self._target = [*first.split(" "), "", ""][:2]
        self._replica, self._job = self._permitted(headers)
        self._wanted = end + 4 + self._body_bytes(headers)
        self._body_at = end + 4
        return True

    def _permitted(self, headers: dict[str, str]) -> tuple[str, str]:
        """Return the replica and the job of a request, if it has the replica's token."""
        found = _TARGET.fullmatch(self._target)
        sent = bearer(headers.get("authorization", "").encode("latin-1"))
        replica = "" if found is None else found[1]
        if not is_token(sent, token_of(self._key, replica)) or found is None:
            raise _Refused(HTTPStatus.UNAUTHORIZED)
        _, job, self._part, at = found.groups()
        self._at = int(at or 0)
        if self._part in (None, "files"):  # what has begun goes on when this agent is upgraded
            self._check_version(replica, job, headers.get(VERSION_HEADER.lower()) or "?")
        return replica, job

    def _check_version(self, replica: str, job: str, theirs: str) -> None:
        if theirs != __version__:
            text = f"this node has openenvd {theirs[:40]}, and the replica's agent {__version__}"
            self._files.note(replica, job, text)
            raise _Refused(HTTPStatus.UPGRADE_REQUIRED, text)

    def _body_bytes(self, headers: dict[str, str]) -> int:
        most = {"report": MOST_REPORT_BYTES, "output": MOST_OUTPUT_BYTES}.get(self._part or "")
        if (self._method == "POST") is not (most is not None):
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        if most is None:
            return 0
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED)
        if len(length) > 9 or int(length) > most:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return int(length)

    def _answer(self) -> None:
        files, replica, job = self._files, self._replica, self._job
        body = bytes(self._data[self._body_at : self._wanted])
        match self._part:
            case None:
                self._send_json(files.plan(replica, job))
            case "files":
                self._send_file(files.archive(replica, job))
            case "report":
                self._send_json(files.report(replica, job, body))
            case _:
                self._send_json(files.output(replica, job, self._at, body))

    def _send_json(self, data: Json) -> None:
        body = json.dumps(data).encode()
        self._send(_head(len(body), "application/json") + body)

    def _send(self, answer: bytes) -> None:
        self._is_answered = True
        self.transport.write(answer)
        self.transport.close()

    def _send_file(self, path: Path) -> None:
        """Send a file, however long that takes."""
        self._is_answered = True
        if self._timer is not None:
            self._timer.cancel()
        file = path.open("rb")
        self.transport.write(_head(os.fstat(file.fileno()).st_size, "application/x-tar"))

        async def send() -> None:
            with file, contextlib.suppress(OSError, RuntimeError):  # the job has left
                await asyncio.get_running_loop().sendfile(self.transport, file)
            self.transport.close()

        self._sending = asyncio.get_running_loop().create_task(send())


def _head(length: int, kind: str) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()


def token_of(key: bytes, replica: str) -> str:
    """Return the token of a replica's jobs."""
    return hmac.new(key, replica.encode(), hashlib.sha256).hexdigest()


def _key_of(home: Path) -> bytes:
    """Return the key of a home, which is made when it is first asked for."""
    path = home / KEY_FILE_NAME
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:  # whoever made it was killed
        path.unlink()
        raise EngineGone(f"{path} was not whole, and is made again")
    return key


class ReportServer:
    """Listens for jobs, in a thread of its own, from the first call of `url` on.

    Args:
        layout: The home's.
        folder: The agent's: the port stands there, for the next one.
        host: The address that it listens at, as jobs know it.
        port: The port; 0: a free one, always the same from then on.
        files: What requests read and write.
    """

    def __init__(self, layout: Layout, folder: Path, host: str, port: int, files: JobFiles) -> None:
        self._home = layout.home
        self._port_path = folder / PORT_FILE_NAME
        self._host, self._port = host, port
        self._files = files
        self._lock = threading.Lock()
        self._listening: socket.socket | None = None
        self._key = b""
        self._is_serving = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def url(self) -> str:
        """Return the address that jobs report to, where somebody listens by now.

        Raises:
            EngineGone: Nobody can listen there.
        """
        with self._lock:
            if self._listening is None:
                try:
                    self._listen()
                except OSError as exc:
                    raise self._failure(exc) from exc
            assert self._listening is not None
            return http_address(self._host, int(self._listening.getsockname()[1]))

    def token(self, replica: str) -> str:
        """Return the token of a replica's jobs; `url` was called before."""
        return token_of(self._key, replica)

    def close(self) -> None:
        """Listen no more."""
        with self._lock:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            if self._listening is not None:
                self._listening.close()
            self._listening = self._loop = self._thread = None

    def _listen(self) -> None:
        self._key = _key_of(make_private(self._home))
        known = self._port or self._known_port()
        family, *_, address = socket.getaddrinfo(self._host, known, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        try:
            if not known:
                make_private(self._port_path.parent)
                data = {"host": self._host, "port": listening.getsockname()[1]}
                write_json(str(self._port_path), data, sync=True)
        except OSError:
            listening.close()
            raise
        self._listening, self._loop = listening, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="job reports", daemon=True)
        self._thread.start()
        self._is_serving.wait()

    def _serve(self) -> None:
        loop, listening = self._loop, self._listening
        assert loop is not None
        assert listening is not None

        open_ones: set[_Exchange] = set()

        def exchange(limit: ConnectionLimit) -> _Exchange:
            return _Exchange(limit, self._key, self._files, open_ones)

        async def start() -> Listener:
            listener = Listener(listening, MOST_CONNECTIONS, exchange)
            listener.start()
            return listener

        async def end() -> None:
            while open_ones:
                for each in open_ones:
                    each.transport.abort()
                await asyncio.sleep(0)

        listener = loop.run_until_complete(start())
        self._is_serving.set()
        loop.run_forever()
        listener.close()
        loop.run_until_complete(end())
        loop.close()

    def _known_port(self) -> int:
        try:
            known = json.loads(self._port_path.read_bytes())
            return int(known["port"]) if known["host"] == self._host else 0
        except (OSError, ValueError, LookupError, TypeError):
            return 0

    def _failure(self, exc: OSError) -> EngineGone:
        where = f"{self._host}:{self._port or self._known_port() or 'any port'}"
        text = f"jobs cannot report to {where}: {exc.strerror or exc}"
        return EngineGone(text, "slurm_report names a free port of an address of this machine")
