# SPDX-License-Identifier: Apache-2.0
"""Requests that hold memory, in whatever limits this process has; used by `low_resources.py`.

    python -m load_tests.shared.memory_holders FOLDER COUNT MB

The daemon's own queue, plan, dispatcher and executor, without HTTP, with an operation that holds
memory for a while. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from load_tests.peers.seed_arrangements import connect
from load_tests.shared.operations import worker_path
from openenvd.executor.executor import BurstableExecutor
from openenvd.executor.messages import LONG, SHORT
from openenvd.executor.policy.plan import plan_workers
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.migrate import open_database
from openenvd.requests_db.records import NewRequest
from openenvd.requests_db.transactions import submitting
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import Schedule
from openenvd.server.dispatch.dispatcher import Dispatcher
from openenvd.server.dispatch.memory_estimates import (
    DAEMON_BYTES,  # and be as large as it is
    MIN_BYTES,
    Declared,
    MemoryEstimates,
)
from openenvd.server.dispatch.running import DispatchContext
from openenvd.system.memory.limits import read_limits
from openenvd.system.text.units import MB

OVERHEAD_MB = 4  # of a worker's own pages
HOLD_SECONDS = 3.0
PATIENCE_SECONDS = 240.0


def main() -> None:
    folder, count, size_mb = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    worker_path()
    database = folder / "requests.db"
    open_database(database)
    _submit(database, count, size_mb)
    paths = Paths(folder)
    paths.request_logs.mkdir(parents=True, exist_ok=True)
    dispatcher: Dispatcher
    plan = plan_workers(
        read_limits(),
        daemon_bytes=DAEMON_BYTES,
        expected={LONG: (size_mb + OVERHEAD_MB) * MB, SHORT: MIN_BYTES},
    )
    executor = BurstableExecutor(
        plan,
        preload=["load_tests.shared.operations"],
        home=str(folder),
        on_event=lambda event: dispatcher.deliver(event),
    )
    store = WriteConnection(database)
    dispatcher = Dispatcher(
        DispatchContext(
            store,
            executor,
            publish=lambda _events: None,
            operations={"launch": "load_tests.shared.operations:hold"},
            paths=paths,
            settings=Settings(),
            # As learned from earlier runs.
            estimates=MemoryEstimates({"launch": Declared(LONG, (size_mb + OVERHEAD_MB) * MB)}),
            budget_bytes=plan.budget_bytes,
        )
    )
    executor.start()
    dispatcher.start()
    told = _watch(database, count)
    dispatcher.stop()
    executor.stop()
    store.close()
    print(json.dumps(told))


def _submit(database: Path, count: int, size_mb: int) -> None:
    writer = WriteConnection(database)
    with writer.transaction() as connection:
        for _ in range(count):
            new = NewRequest(
                "launch",
                Schedule.LONG,
                {"bytes": size_mb * MB, "seconds": HOLD_SECONDS},
            )
            submitting.submit(connection, new, now=time.time())
    writer.close()


def _watch(database: Path, count: int) -> dict[str, int]:
    at_once, waiting = 0, 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    states: Counter[str] = Counter()
    while sum(states[s] for s in ("SUCCEEDED", "FAILED")) < count and time.monotonic() < deadline:
        connection = connect(database)
        rows = connection.execute("SELECT state, count(*) FROM requests GROUP BY state")
        states = Counter(dict(rows.fetchall()))
        connection.close()
        at_once, waiting = max(at_once, states["RUNNING"]), max(waiting, states["PENDING"])
        time.sleep(0.1)
    return {"at_once": at_once, "waiting": waiting, "succeeded": states["SUCCEEDED"]}


if __name__ == "__main__":
    main()
