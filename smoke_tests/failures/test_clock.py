# SPDX-License-Identifier: Apache-2.0
"""The wall clock steps by a day, back and ahead, during launches and sessions, without effect."""

import sqlite3
from pathlib import Path

import psutil
import pytest

from ..conftest import Machine, eventually
from ..test_main_job import SLOW_TO_START

DAY = 86_400.0

# In every Python that the command starts, `time.time()` is shifted by the number in a file.
STEPPED_CLOCK = """
import time

_now, _now_ns = time.time, time.time_ns

def _offset():
    with open({file!r}) as file:
        return float(file.read() or 0)

time.time = lambda: _now() + _offset()
time.time_ns = lambda: _now_ns() + int(_offset() * 1e9)
"""


class Clock:
    """The machine's wall clock."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._file = folder / "offset"
        self.step_to(0.0)
        text = STEPPED_CLOCK.format(file=str(self._file))
        (folder / "sitecustomize.py").write_text(text)

    def step_to(self, offset: float) -> None:
        """Set the clock `offset` seconds ahead of the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(str(offset))
        new.replace(self._file)


@pytest.fixture
def clock(machine: Machine, tmp_path: Path) -> Clock:
    clock = Clock(tmp_path / "clock")
    machine.environ["PYTHONPATH"] = str(clock.folder)
    return clock


def order_of_starts(machine: Machine) -> list[str]:
    with sqlite3.connect(f"file:{machine.home}/requests.db?mode=ro", uri=True) as database:
        query = "SELECT request_id FROM events WHERE data LIKE '%RUNNING%' ORDER BY seq"
        return [request_id for (request_id,) in database.execute(query)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", [-DAY, DAY], ids=["a day back", "a day ahead"])
def test_a_step_of_the_clock_disturbs_nothing(
    machine: Machine, clock: Clock, tmp_path: Path, step: float
) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW_TO_START)
    machine.environ |= {"OPENENV_MAX_LONG_WORKERS": "1", "OPENENV_KEEP_DAYS": "0.5"}
    first = machine.ok("launch", "--json", "echo", "--name", "kept").json
    slow = machine.ok("launch", "--async", "slow_env:Sample", "--name", "slow").out.strip()
    eventually(lambda: machine.request(slow)["state"] == "RUNNING")
    early = machine.ok("launch", "--async", "echo", "--name", "early").out.strip()

    clock.step_to(step)
    late = machine.ok("launch", "--async", "echo", "--name", "late").out.strip()
    machine.ok("cancel", slow)
    for request_id in (early, late):
        machine.ok("wait", request_id)
    assert order_of_starts(machine)[-2:] == [early, late]

    # An environment that was launched before the step is taken down after it, and vice versa.
    machine.ok("down", "early")
    clock.step_to(0.0)
    machine.ok("down", "late")
    listed = {e["name"]: e["state"] for e in machine.status()["environments"]}
    assert "early" not in listed
    assert "late" not in listed

    clock.step_to(step)
    [replica] = machine.environment("kept")["replicas"]
    psutil.Process(replica["pid"]).kill()
    eventually(lambda: machine.replica("kept")["restarts"] == 1)
    eventually(lambda: machine.environment("kept")["state"] == "READY")

    # It also steps between two daemons. A start removes what is half a day old: nothing here is.
    machine.kill_daemon()
    clock.step_to(-step)
    machine.ok("up")
    eventually(lambda: machine.environment("kept")["state"] == "READY")
    assert machine.environment("kept")["address"] == first["environment"]["address"]
    for request_id in (slow, early, late):
        assert machine.request(request_id)["state"] in ("SUCCEEDED", "CANCELLED")
    assert machine.status()["daemon"]["uptime_seconds"] >= 0
    clock.step_to(step)
    machine.ok("down", "kept")
    machine.ok("stop")
