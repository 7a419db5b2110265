# SPDX-License-Identifier: Apache-2.0
"""Homes of a daemon with as many environments, replicas and requests as wanted, in which none runs.

They are written as launches would have left them: rows, run files, reservations of ports.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, text

from openenvd.environments.engines.local import ports
from openenvd.environments.run_files import RUN_FILE_VERSION
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.migrate import open_database
from openenvd.requests_db.records import Environment, Replica
from openenvd.requests_db.sql.rows import ENVIRONMENTS, REPLICAS
from openenvd.requests_db.sql.tables import environments, replicas
from openenvd.schema.settings import Paths
from openenvd.schema.states import EnvironmentState, ReplicaState

LAUNCH = "0123456789abcdef"
READY = EnvironmentState.READY


@contextmanager
def home() -> Iterator[Paths]:
    """A daemon's home with an empty database, and reservations of its own."""
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        paths = Paths(Path(folder))
        for each in (paths.runs, paths.sockets, paths.request_logs, paths.environment_logs):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        open_database(paths.database)
        before, ports.RESERVATIONS = ports.RESERVATIONS, paths.home / "ports"
        try:
            yield paths
        finally:
            ports.RESERVATIONS = before


def fill(paths: Paths, names: list[str], each: int = 1, **spec: Any) -> None:
    """Write environments, with the rows and the run files of their replicas."""
    spec = {"source": "echo", "provider": "local", "host": "127.0.0.1", **spec}
    rows = [
        Environment(name, spec, READY, 0.0, 0.0, LAUNCH, "http://127.0.0.1:21000") for name in names
    ]
    started = []
    for number in range(len(names) * each):
        name, ordinal = names[number // each], number % each
        replica_id = f"{name}-{ordinal}-{LAUNCH}"
        run_dir = paths.runs / replica_id
        run_dir.mkdir(mode=0o700)
        (run_dir / "replica.json").write_text(
            json.dumps(
                run_file(paths, replica_id, name, number)
                | {"ordinal": ordinal, "spec": spec, "address": spec.get("address")}
            )
        )
        ready = ReplicaState.READY
        started.append(Replica(replica_id, name, ordinal, "local", ready, str(run_dir), 0.0, 1))
    with writing(paths) as connection:
        connection.execute(insert(environments), [ENVIRONMENTS.values(row) for row in rows])
        connection.execute(insert(replicas), [REPLICAS.values(row) for row in started])


def run_file(paths: Paths, replica_id: str, name: str, number: int) -> dict[str, Any]:
    """What a launch writes, as far as the daemon reads it; with variables, as most have some."""
    return {
        "version": RUN_FILE_VERSION,
        "replica_id": replica_id,
        "environment": name,
        "number": number,
        "request_id": LAUNCH,
        "socket_path": str(paths.replica_socket(replica_id)),
        "log_path": "",
        "host": "127.0.0.1",
        "port": ports.FIRST_PORT + number,
        "created_at": 0.0,
        "env": {f"VARIABLE_{index}": "x" * 40 for index in range(20)},
    }


@contextmanager
def writing(paths: Paths) -> Iterator[Connection]:
    store = WriteConnection(paths.database)
    try:
        with store.transaction() as connection:
            yield connection
    finally:
        store.close()


def names_of(count: int) -> list[str]:
    return [f"env{number}" for number in range(count)]


def add_requests(connection: Connection, count: int, state: str, **values: str) -> None:
    """Write so many ended requests, with three events each; `values`: expressions of number `n`."""
    numbers = f"WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < {count})"
    row = {
        "seq": "n", "id": "printf('%016x', n)", "operation": "'probe'", "schedule": "'SHORT'",
        "payload": "'{\"name\": \"echo\"}'", "state": f"'{state}'", "priority": "0",
        **dict.fromkeys(("attempts", "max_attempts"), "1"),
        **dict.fromkeys(("created_at", "started_at", "finished_at"), "n"), **values,
    }  # fmt: skip
    columns, expressions = ", ".join(row), ", ".join(row.values())
    connection.execute(
        text(f"INSERT INTO requests ({columns}) {numbers} SELECT {expressions} FROM t")
    )
    connection.execute(
        text(
            f"INSERT INTO events {numbers}, k(k) AS (VALUES (0), (1), (2)) SELECT 3 * n + k, n,"
            " 'request.state', printf('%016x', n), n, NULL, '{}' FROM t, k ORDER BY n, k"
        )
    )
    tally = f"UPDATE tally SET {state.lower()} = {count}, last_event = {3 * count + 3}"
    connection.execute(text(tally))
