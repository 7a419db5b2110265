# SPDX-License-Identifier: Apache-2.0
"""What was acknowledged survives the death of the process that acknowledged it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.requests_db.sql import queries

from .conftest import Queue

SUBMITTER = """
import asyncio, sys
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.records import NewRequest
from openenvd.schema.states import Schedule
from openenvd.requests_db.transactions import submitting

async def main():
    store = AsyncStore(sys.argv[1])
    while True:
        new = NewRequest("noop", Schedule.SHORT, {})
        result = await store.write(submitting.submit, new, now=1.5)
        print(result.request.id, flush=True)

asyncio.run(main())
"""

GROUPS = """
import asyncio, os, sys
from sqlalchemy import event
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.records import NewRequest
from openenvd.schema.states import Schedule
from openenvd.requests_db.transactions import submitting

async def main():
    store = AsyncStore(sys.argv[1], syncs=sys.argv[2] == "power")
    commits = []
    event.listen(store._connection._engine, "commit", commits.append)
    new = NewRequest("noop", Schedule.SHORT, {})
    for _ in range(5):
        await asyncio.gather(*(store.write(submitting.submit, new, now=1.5) for _ in range(20)))
    print(len(commits), flush=True)
    os._exit(0)  # a database that is closed makes a checkpoint

asyncio.run(main())
"""

HALF_DONE = """
import os, signal, sys
from openenvd.requests_db.transactions import submitting
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.records import NewRequest
from openenvd.schema.states import Schedule

with WriteConnection(sys.argv[1]).transaction() as connection:
    submitting.submit(connection, NewRequest("noop", Schedule.SHORT, {}), now=1.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_acknowledged_requests_survive_kill_9(queue: Queue, path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUBMITTER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(200)]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL
    assert all(queue.get(id_) for id_ in acknowledged)
    # What was written and not yet acknowledged is there as a whole or not at all.
    pending = queue.read(queries.COUNTS)["PENDING"]
    assert pending - len(acknowledged) in (0, 1)
    assert queue.read(queries.LAST_SEQ) == pending
    assert queue.sql("PRAGMA integrity_check") == "ok"


@pytest.mark.parametrize("durability", ["process", "power"])
def test_with_durability_power_each_group_commit_makes_one_fsync_and_otherwise_none(
    path: Path, durability: str
) -> None:
    """As the kernel sees it; a hundred submissions are too few for a checkpoint."""
    trace = path.with_name("trace")
    strace = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", str(trace)]
    try:
        subprocess.run([*strace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no strace here, or it may trace nothing")
    submit = [sys.executable, "-c", GROUPS, str(path), durability]
    done = subprocess.run([*strace, *submit], check=True, capture_output=True, text=True)
    commits = int(done.stdout)
    synced = re.findall(r"sync\(\d+<(.*?)>", trace.read_text())
    assert 5 < commits < 20
    header = 1  # of a log that begins
    assert synced.count(f"{path}-wal") == header + (commits if durability == "power" else 0)


def test_a_transaction_killed_half_way_leaves_nothing(queue: Queue, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HALF_DONE, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert queue.read(queries.list_requests()) == []
    assert queue.read(queries.LAST_SEQ) == 0
