# SPDX-License-Identifier: Apache-2.0
"""The peer on the standard library: requests run the way SkyPilot runs them, without SkyPilot.

    python -m load_tests.peers.pool_server PORT DATABASE

    client --POST /status--> a thread --row PENDING--> SQLite <--RUNNING, SUCCEEDED-- worker
                                 `---id---> ProcessPoolExecutor (spawned, started beforehand) --^
    client --GET /api/get--> a thread --asks SQLite again after 10, 20, 40, 80, 100, 100, … ms

The paths, the header that carries the id and the polling are SkyPilot's (0.14), so that one client
speaks to both. It is kinder than the original: bare SQL, nothing imported, no access log, no check
of who asks. A worker that dies breaks the pool, as it does in every `ProcessPoolExecutor`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import sys
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from load_tests.peers.seed_arrangements import connect

WORKERS = 2 * (os.cpu_count() or 1)
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.01, 0.1
TABLE = "CREATE TABLE requests (id TEXT PRIMARY KEY, state TEXT NOT NULL, result TEXT)"
BACKLOG = 128

_connections = threading.local()


def main() -> None:
    """Serve until killed."""
    port, database = int(sys.argv[1]), Path(sys.argv[2])
    connect(database).execute(TABLE)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        list(pool.map(time.sleep, [0.05] * WORKERS))  # one for each worker: they are all there
        _Server(port, database, pool).serve_forever()


class _Server(ThreadingHTTPServer):
    request_queue_size = BACKLOG

    def __init__(self, port: int, database: Path, pool: ProcessPoolExecutor) -> None:
        self.database = database
        self.pool = pool
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet
    server: _Server

    def do_GET(self) -> None:
        if self.path.startswith("/api/get?request_id="):
            self._answer(_wait(self.server.database, self.path.partition("=")[2]))
        else:
            self._answer({"status": "healthy"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request_id = str(uuid.uuid4())
        values = (request_id, "PENDING")
        link = _link(self.server.database)
        link.execute("INSERT INTO requests (id, state) VALUES (?, ?)", values)
        self.server.pool.submit(run, self.server.database, request_id)
        self._answer({}, {"X-Skypilot-Request-ID": request_id})

    def _answer(self, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the peer is not to be measured writing logs."""


def run(database: Path, request_id: str) -> None:
    """In a worker: what `status` does, which is to look into a table."""
    link = _link(database)
    update = "UPDATE requests SET state = ?, result = ? WHERE id = ?"
    link.execute(update, ("RUNNING", None, request_id))
    [result] = link.execute("SELECT count(*) FROM requests WHERE state = 'LAUNCHED'").fetchall()
    link.execute(update, ("SUCCEEDED", json.dumps(result), request_id))


def _wait(database: Path, request_id: str) -> dict[str, Any]:
    pause = FIRST_LOOK_SECONDS
    query = "SELECT state, result FROM requests WHERE id = ?"
    while True:
        [(state, result)] = _link(database).execute(query, (request_id,)).fetchall()
        if state == "SUCCEEDED":
            return {"request_id": request_id, "status": state, "return_value": result}
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_SECONDS)


def _link(database: Path) -> sqlite3.Connection:
    """A connection for each thread."""
    if not hasattr(_connections, "link"):
        _connections.link = connect(database)
    link: sqlite3.Connection = _connections.link
    return link


if __name__ == "__main__":
    main()
