# SPDX-License-Identifier: Apache-2.0
"""How each cost of the daemon grows: with replicas, environments and requests, ten times as many.

    adopt     a daemon starts where replicas run: all in one environment, or one in each
    reserve   the ports of these, a part of that; done again every few minutes
    status    one replica of so many tells how many sessions it has
    event     one environment of so many changes, behind the gateway or in a home without one
    port      a free port is found for one more environment
    failed    `openenv status`, after so many launches that failed under names of their own
    collect   a tenth of all requests is removed: how long another write waits meanwhile

The daemon's own modules on real files and a real database, in this process: the processor time is
theirs alone; of `collect` it is the time that passes. Replicas are stand-ins, in a process of their
own. The law of a cost is the exponent between its last two sizes: 0 does not grow, 1 grows as its
cause does, 2 with its square.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert

from load_tests.shared.homes import add_requests, fill, home, names_of, writing
from load_tests.shared.report import OPENENV, Report, daemon, daemon_pid, parse_arguments, run
from openenvd.environments.engines.local import ports
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.records import Environment, Event
from openenvd.requests_db.sql.rows import ENVIRONMENTS
from openenvd.requests_db.sql.tables import environments
from openenvd.requests_db.transactions import observing
from openenvd.schema.layout import GATEWAY
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import EnvironmentState
from openenvd.server.dispatch.janitor import Janitor
from openenvd.server.dispatch.running import DispatchContext
from openenvd.server.events import EventBus
from openenvd.server.reconcile.reconciler import Reconciler
from openenvd.system.process.proc import raise_fd_limit

SIZES = {"adopt": 1_000, "status": 1_000, "event": 1_000, "port": 1_000, "failed": 5_000}
MAX_REQUESTS = 1_000_000
STATUSES, EVENTS = 500, 20
QUIET_SECONDS = 0.1  # without work, after which nothing more comes


def main() -> None:
    options = parse_arguments(
        "How costs grow.",
        repetitions=1,
        parts={"nargs": "+", "choices": list(PARTS), "default": list(PARTS)},
        most={"type": int, "help": "the largest size (default: that of each part)"},
    )
    raise_fd_limit()
    report = Report("Processor time, by how many there are")
    for part in options.parts:
        most = options.most or SIZES.get(part, MAX_REQUESTS)
        for name, (unit, measure) in PARTS[part].items():
            found: dict[int, list[float]] = {}
            for size in (most // 100, most // 10, most):
                found[size] = [measure(size) for _ in range(options.repetitions)]
                report.add(f"{name} at {size:,}", unit, found[size])
            report.add(f"  {name}: law", "", [exponent(found)])
    report.finish(options.json)


def exponent(found: dict[int, list[float]]) -> float:
    """The power of the size with which a cost grows between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    return math.log(max(min(after), 1e-9) / max(min(before), 1e-9)) / math.log(large / small)


# Replicas


@contextmanager
def stand_ins(paths: Paths) -> Iterator[subprocess.Popen[str]]:
    """What answers for all replicas of a home; a number on its input has it send statuses."""
    command = [sys.executable, "-m", "load_tests.shared.stand_ins", str(paths.home)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.terminate()


@asynccontextmanager
async def reconciler(paths: Paths) -> AsyncIterator[tuple[Reconciler, EventBus]]:
    store, bus = AsyncStore(paths.database), EventBus(asyncio.get_running_loop())
    made = Reconciler(store, bus, paths)
    try:
        yield made, bus
    finally:
        await made.stop()
        await store.close()


async def cpu_until_quiet(began: float) -> float:
    """Wait until nothing more happens; the processor seconds since `began`."""
    before = -1.0
    while (now := time.process_time()) - before > QUIET_SECONDS / 20:
        before = now
        await asyncio.sleep(QUIET_SECONDS)
    return now - began


def adopt(size: int, *, is_one: bool) -> float:
    """Seconds, from the start of a daemon until it follows all replicas."""

    async def measure(paths: Paths) -> float:
        async with reconciler(paths) as (made, _):
            began = time.process_time()
            await made.start()
            return await cpu_until_quiet(began)

    with home() as paths:
        fill(paths, ["env"] if is_one else names_of(size), size if is_one else 1)
        ports.renew_reservations(paths.runs)
        with stand_ins(paths):
            return asyncio.run(measure(paths))


def reserve(size: int, *, is_one: bool) -> float:
    with home() as paths:
        fill(paths, ["env"] if is_one else names_of(size), size if is_one else 1)
        ports.renew_reservations(paths.runs)  # so that they are there
        began = time.process_time()
        ports.renew_reservations(paths.runs)
        return time.process_time() - began


def status(size: int) -> float:
    """Microseconds for each status, of one environment that is scaled, behind a gateway."""

    async def measure(paths: Paths, process: subprocess.Popen[str]) -> float:
        async with reconciler(paths) as (made, _):
            note, come = made.replicas.on_status, asyncio.Semaphore(0)

            def count(about: Any) -> None:
                note(about)
                come.release()

            made.replicas.on_status = count
            await made.start()
            for _ in range(size):
                await come.acquire()
            await cpu_until_quiet(0.0)
            began = time.process_time()
            assert process.stdin is not None
            process.stdin.write(f"{STATUSES}\n")
            process.stdin.flush()
            for _ in range(STATUSES):
                await come.acquire()
            return (time.process_time() - began) / STATUSES * 1e6

    with home() as paths:
        address = "http://127.0.0.1:24999/envs/env"
        fill(paths, ["env"], size, max_replicas=size, gateway=True, address=address)
        (paths.runs / GATEWAY).mkdir()
        with stand_ins(paths) as process:
            return asyncio.run(measure(paths, process))


def event(size: int, *, has_gateway: bool) -> float:
    """Milliseconds for each event that names an environment."""

    async def measure(paths: Paths) -> float:
        async with reconciler(paths) as (made, bus):
            await made.start()
            await cpu_until_quiet(0.0)
            spent = 0.0
            for number in range(EVENTS):
                began, name = time.process_time(), f"env{number % size}"
                bus.publish([Event(number, 0.0, "environment.state", None, name, {}, None)])
                spent += await cpu_until_quiet(began)
            return spent / EVENTS * 1e3

    with home() as paths:
        fill(paths, names_of(size), gateway=has_gateway)
        if has_gateway:
            (paths.runs / GATEWAY).mkdir()
        with stand_ins(paths):
            return asyncio.run(measure(paths))


def port(size: int) -> float:
    """Milliseconds until a port is found, where so many environments have one each."""
    with home() as paths:
        fill(paths, names_of(size))
        ports.renew_reservations(paths.runs)
        began = time.process_time()
        opened = ports.open_listeners("127.0.0.1", None, ports.PortOwner("new", paths.runs))
        spent = time.process_time() - began
        for each in opened:
            each.close()
        return spent * 1e3


# The tables


def failed(size: int) -> float:
    """Milliseconds of the command and the daemon together."""
    error = {"kind": "operation_error", "message": "there is no such folder", "log_tail": []}
    launch = {"operation": "'launch'", "schedule": "'LONG'", "environment": "'env' || (n - 1)"}
    state = EnvironmentState.FAILED
    rows = [
        Environment(name, {"source": "/nowhere"}, state, 0.0, 0.0, f"{number:016x}")
        for number, name in enumerate(names_of(size), 1)
    ]
    with daemon() as environ:
        with writing(Paths(Path(environ["OPENENV_HOME"]))) as connection:
            add_requests(connection, size, "FAILED", error=f"'{json.dumps(error)}'", **launch)
            connection.execute(insert(environments), [ENVIRONMENTS.values(row) for row in rows])
        process = psutil.Process(daemon_pid(environ))
        run([OPENENV, "status"], environ)
        before = sum(process.cpu_times()[:2])
        spent = sum(run([OPENENV, "status"], environ).cpu_seconds for _ in range(5))
        return (spent + sum(process.cpu_times()[:2]) - before) / 5 * 1e3


def collect(size: int) -> float:
    """Milliseconds that one of many small writes waits at most, while requests are removed."""
    waits = [0.0]
    with home() as paths:
        fill(paths, ["env"])
        with writing(paths) as connection:
            add_requests(connection, size, "SUCCEEDED")
        is_over, store = threading.Event(), WriteConnection(paths.database)
        settings = Settings(keep_requests=size - size // 10)
        others: Any = (None, lambda _: None, {}, paths, settings)
        removing = WriteConnection(paths.database)
        janitor = Janitor(DispatchContext(removing, *others))

        def write() -> None:
            while not is_over.is_set():
                began = time.monotonic()
                store.write(observing.set_replicas, "env", len(waits), now=0.0)
                waits.append(time.monotonic() - began)
                is_over.wait(0.002)

        writing_thread = threading.Thread(target=write)
        writing_thread.start()
        while (left := janitor.due_at() - time.monotonic()) < 60:
            time.sleep(max(0.0, left))
            janitor.tidy()
        is_over.set()
        writing_thread.join()
        store.close()
        removing.close()
    return max(waits) * 1e3


PARTS: dict[str, dict[str, tuple[str, Callable[[int], float]]]] = {
    "adopt": {
        "adopt, one environment (aim: 5 at 1,000)": ("s", lambda n: adopt(n, is_one=True)),
        "adopt, one replica each": ("s", lambda n: adopt(n, is_one=False)),
        "reserve, one environment (aim: 0.2)": ("s", lambda n: reserve(n, is_one=True)),
        "reserve, one replica each": ("s", lambda n: reserve(n, is_one=False)),
    },
    "status": {"status of one replica": ("us", status)},
    "event": {
        "event, gateway (aim: 5)": ("ms", lambda n: event(n, has_gateway=True)),
        "event, no gateway": ("ms", lambda n: event(n, has_gateway=False)),
    },
    "port": {"a free port (aim: 10)": ("ms", port)},
    "failed": {"status, failed launches": ("ms", failed)},
    "collect": {"collect, longest wait of a write (aim: 50)": ("ms", collect)},
}

if __name__ == "__main__":
    main()
