# SPDX-License-Identifier: Apache-2.0
"""The growth of the daemon's costs with replicas, environments and requests: ten times as many.

    python -m load_tests.growth [--parts replicas environments failed collect] [--json FILE]

replicas      one environment of 10, 100 and 1,000 replicas behind the gateway
environments  10, 100 and 1,000 environments of one replica each behind the gateway; up to 10,000
              with `--most`, where the limit of open files allows it
failed        `openenv status` after so many launches that failed, each under a name of its own
collect       a tenth of all requests is deleted: the time that a submission takes meanwhile

The daemon is real, and so are its database, its gateway with Envoy, and the commands. Replicas are
stand-ins with a real server each (`shared/stand_ins.py`). Processor time is the daemon's own. The
law of a cost is the exponent of its size between the last two sizes: 0 for a cost that does not
grow, 1 for one that grows as its cause, 2 for one that grows with its square.

Aims: no exponent above 1. At 1,000 idle replicas: adopted in 5 s, 150 MB, 1 % of a core with the
sweep, `status` in 0.3 s, a free port in 10 ms. `status` after 5,000 failed launches in 50 ms of the
daemon's time. No write waits more than 50 ms.
"""

import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Connection, insert, text

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import (
    MEGABYTE,
    OPENENV,
    Report,
    daemon,
    daemon_pid,
    parse_arguments,
    run,
)
from load_tests.shared.stand_ins import LAUNCH, SPEC, replica_ids
from openenvd.environments.engines.local.ports import PortOwner, open_listeners
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.records import Environment, Replica
from openenvd.requests_db.sql.rows import ENVIRONMENTS, REPLICAS
from openenvd.requests_db.sql.tables import environments, replicas
from openenvd.schema.settings import Paths
from openenvd.schema.states import EnvironmentState, ReplicaState

MOST = {"replicas": 1_000, "environments": 1_000, "failed": 5_000, "collect": 1_000_000}
STATUSES, CHANGES, COMMANDS = 5_000, 5, 3
LEAST = 10  # replicas, environments or requests
QUIET_SECONDS = 0.5  # without work, after which nothing more is due
SUBMISSIONS = 200  # at least, while requests are deleted
Found = dict[str, tuple[str, float]]  # of each measure: its unit and value
MS, US = 1e3, 1e6


def main() -> None:
    options = parse_arguments(
        "Growth of the daemon's costs.",
        repetitions=1,
        parts={"nargs": "+", "choices": list(MOST), "default": list(MOST)},
        most={"type": int, "help": "the largest size (default: that of each part)"},
        seconds={"type": float, "default": 310.0, "help": "of idling, with one sweep in 300 s"},
    )
    report = Report("Costs of the daemon, by size")
    for part in options.parts:
        most = options.most or MOST[part]
        found: dict[tuple[str, str], dict[int, list[float]]] = {}
        for size in sorted({max(LEAST, most // step) for step in (100, 10, 1)}):
            for _ in range(options.repetitions):
                for what, (unit, value) in PARTS[part](size, options.seconds).items():
                    found.setdefault((what, unit), {}).setdefault(size, []).append(value)
        for (what, unit), by_size in found.items():
            for size, values in by_size.items():
                report.add(f"{part} {size:,}: {what}", unit, values)
            report.add(f"  {part}, {what}: exponent", "", [exponent(by_size)])
    report.finish(options.json)


def exponent(found: dict[int, list[float]]) -> float:
    """Return the power of the size with which a cost grows between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    least, most = (max(statistics.median(values), 1e-9) for values in (before, after))
    return math.log(most / least) / math.log(large / small)


@contextmanager
def home() -> Iterator[dict[str, str]]:
    """A home with a database and without a daemon; what runs in it is ended afterwards."""
    with daemon() as environ:
        run([OPENENV, "stop"], environ)
        yield environ


@contextmanager
def database(environ: dict[str, str]) -> Iterator[Connection]:
    store = WriteConnection(paths_of(environ).database)
    try:
        with store.transaction() as connection:
            yield connection
    finally:
        store.close()


def paths_of(environ: dict[str, str]) -> Paths:
    return Paths(Path(environ["OPENENV_HOME"]))


def cpu_of(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def cpu_until_quiet(process: psutil.Process) -> float:
    """Wait until the daemon does nothing more; return its processor seconds since its start."""
    before = -1.0
    while (now := cpu_of(process)) - before > QUIET_SECONDS / 20:
        before = now
        time.sleep(QUIET_SECONDS)
    return now


def of_replicas(size: int, seconds: float) -> Found:
    return adopted(["one"], size, seconds, ["scale", "one"])


def of_environments(size: int, seconds: float) -> Found:
    return adopted([f"env{number}" for number in range(size)], 1, seconds, ["down"])


def adopted(names: list[str], each: int, seconds: float, change: list[str]) -> Found:
    """Measure a daemon that starts where all these replicas run.

    Args:
        names: Names of the environments.
        each: Replicas of each.
        seconds: For which the idle daemon is measured.
        change: `scale NAME`, by one replica less each time; or `down`, of one environment each.
    """
    with home() as environ:
        run([OPENENV, "up"], environ)
        real = openenv(environ, "launch", "echo", "--name", "real", "--gateway")
        run([OPENENV, "stop"], environ)
        address = real["environment"]["address"].removesuffix("/envs/real")
        write_rows(environ, names, each, address)
        command = [sys.executable, "-m", "load_tests.shared.stand_ins", environ["OPENENV_HOME"]]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*command, address, str(each), *names], stdin=pipe, stdout=pipe, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            try:
                return measure(environ, process.stdin, names, each, seconds, change)
            finally:
                command = [OPENENV, "down", "--all"]
                subprocess.run(command, env=environ, check=False, capture_output=True)
                process.terminate()


def write_rows(environ: dict[str, str], names: list[str], each: int, address: str) -> None:
    spec = {**SPEC, "replicas": each}
    ready, runs = EnvironmentState.READY, paths_of(environ).runs
    rows = [
        Environment(name, spec, ready, 0.0, 0.0, LAUNCH, f"{address}/envs/{name}") for name in names
    ]
    started = [
        Replica(one, name, ordinal, "local", ReplicaState.READY, str(runs / one), 0.0, 1)
        for one, name, ordinal in replica_ids(names, each)
    ]
    with database(environ) as connection:
        connection.execute(insert(environments), [ENVIRONMENTS.values(row) for row in rows])
        connection.execute(insert(replicas), [REPLICAS.values(row) for row in started])


def measure(
    environ: dict[str, str], stand_ins: Any, names: list[str], each: int, seconds: float,
    change: list[str],
) -> Found:  # fmt: skip
    found: Found = {"API answers after": ("s", run([OPENENV, "up"], environ).seconds)}
    process = psutil.Process(daemon_pid(environ))
    found["adopted"] = ("s CPU", cpu_until_quiet(process))
    before = cpu_of(process)
    stand_ins.write(f"{STATUSES}\n")
    stand_ins.flush()
    spent = cpu_until_quiet(process) - before
    found["one status of a replica"] = ("us", spent / STATUSES * US)
    for what in (["status"], ["status", names[0]]):
        commands = [run([OPENENV, *what], environ) for _ in range(COMMANDS)]
        found[f"openenv {what[0]}{' NAME' * (len(what) > 1)}"] = (
            "s", statistics.median(one.seconds for one in commands)
        )  # fmt: skip
    began = time.perf_counter()
    for listener in open_listeners("127.0.0.1", None, PortOwner("new", paths_of(environ).runs)):
        listener.close()
    found["a free port"] = ("ms", (time.perf_counter() - began) * MS)
    found["memory (PSS)"] = ("MB", process.memory_full_info().pss / MEGABYTE)
    before, began = cpu_of(process), time.monotonic()
    time.sleep(seconds)
    idle = (cpu_of(process) - before) / (time.monotonic() - began)
    found["idle"] = ("% of a core", 100 * idle)
    before = cpu_of(process)
    for number in range(1, CHANGES + 1):
        what = [str(each - number)] if change[0] == "scale" else [names[-number]]
        run([OPENENV, *change, *what], environ)
    spent = cpu_until_quiet(process) - before
    found[f"one {change[0]}"] = ("ms CPU", spent / CHANGES * MS)
    return found


def add_requests(connection: Connection, count: int, state: str, **values: str) -> None:
    """Write ended requests with three events each; `values`: expressions of the number `n`."""
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


def of_failed(size: int, _: float) -> Found:
    error = {"kind": "operation_error", "message": "there is no such folder", "log_tail": []}
    launch = {"operation": "'launch'", "schedule": "'LONG'", "environment": "'env' || (n - 1)"}
    state = EnvironmentState.FAILED
    rows = [
        Environment(f"env{number}", {"source": "/nowhere"}, state, 0.0, 0.0, f"{number + 1:016x}")
        for number in range(size)
    ]
    with home() as environ:
        with database(environ) as connection:
            add_requests(connection, size, "FAILED", error=f"'{json.dumps(error)}'", **launch)
            connection.execute(insert(environments), [ENVIRONMENTS.values(row) for row in rows])
        run([OPENENV, "up"], environ)
        process = psutil.Process(daemon_pid(environ))
        before = cpu_until_quiet(process)
        commands = [run([OPENENV, "status"], environ) for _ in range(COMMANDS)]
        spent = cpu_of(process) - before
        return {
            "openenv status": ("s", statistics.median(one.seconds for one in commands)),
            "openenv status, the daemon": ("ms CPU", spent / COMMANDS * MS),
            "lines": ("", float(commands[0].output.count("\n"))),
        }


def of_collect(size: int, _: float) -> Found:
    with home() as environ:
        with database(environ) as connection:
            add_requests(connection, size, "SUCCEEDED")
        keep = size - size // 10
        run([OPENENV, "up"], environ | {"OPENENV_KEEP_REQUESTS": str(keep)})
        return asyncio.run(submitted_while_deleted(environ, keep))


async def submitted_while_deleted(environ: dict[str, str], keep: int) -> Found:
    api, waits, began = ApiClient(environ["OPENENV_HOME"]), list[float](), time.monotonic()
    is_over = False
    while not is_over or len(waits) < SUBMISSIONS:
        asked = time.perf_counter()
        await api.submit("probe", {"name": "nothing"})
        waits.append(time.perf_counter() - asked)
        await asyncio.sleep(0.01)
        if not is_over and len(waits) % 20 == 0:
            with database(environ) as connection:
                left = connection.execute(text("SELECT count(*) FROM requests")).scalar_one()
            is_over = left <= keep + len(waits)
            seconds = time.monotonic() - began
    await api.close()
    return {
        "a submission meanwhile, P50": ("ms", statistics.median(waits) * MS),
        "a submission meanwhile, longest": ("ms", max(waits) * MS),
        "all are deleted after": ("s", seconds),
    }


PARTS: dict[str, Callable[[int, float], Found]] = {
    "replicas": of_replicas,
    "environments": of_environments,
    "failed": of_failed,
    "collect": of_collect,
}

if __name__ == "__main__":
    main()
