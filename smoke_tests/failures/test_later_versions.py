# SPDX-License-Identifier: Apache-2.0
"""A later version continues what an earlier one has started, from 0.2.0 on.

`home_of_0_2_0/` has the files that 0.2.0 wrote for `openenv launch echo`. They never change.
"""

import os
import signal
import sqlite3
import subprocess
from pathlib import Path

from openenvd.client import Session
from openenvd.schema.layout import Layout, make_private

from ..conftest import PYTHON, Machine, copy_package, eventually, free_port
from ..test_main_job import say_hello

HOME_OF_0_2_0 = Path(__file__).with_name("home_of_0_2_0")
REPLICA = "echo-0-0121c147f874477e"
LATER = "99.0.0"


def test_an_upgrade_in_place_keeps_sessions_and_restarts_replicas(
    machine: Machine, tmp_path: Path
) -> None:
    copy_package(tmp_path / "lib")
    machine.environ["PYTHONPATH"] = str(tmp_path / "lib")
    machine.ok("launch", "echo", "--shards", "1")
    before = machine.environment("echo")
    with Session(before["address"]) as session:
        session.reset()
        copy_package(tmp_path / "lib", LATER)
        assert machine.ok("info", "--json").json["daemon"]["version"] == LATER
        session.step({"message": "still here"})
    after = machine.environment("echo")
    assert (after["state"], after["address"]) == ("READY", before["address"])
    assert after["replicas"][0]["pid"] == before["replicas"][0]["pid"]
    os.kill(after["replicas"][0]["pid"], signal.SIGKILL)
    eventually(lambda: machine.replica()["restarts"] == 1)
    eventually(lambda: machine.environment("echo")["state"] == "READY")
    say_hello(before["address"])


def test_a_home_of_0_2_0_is_continued(machine: Machine) -> None:
    """As after a reboot: its requests are kept, and its environment serves at its address."""
    code = "import openenvd; print(*openenvd.__path__)"
    package = subprocess.check_output([PYTHON, "-P", "-c", code], text=True).strip()
    port, layout = free_port(), Layout(machine.home)
    values = {
        "@HOME@/sockets": layout.sockets,  # outside the home, whose path is too long
        "@HOME@": machine.home,
        "@PORT@": port,
        "@PYTHON@": PYTHON,
        "@PACKAGE@": package,
    }

    def read(name: str) -> str:
        text = (HOME_OF_0_2_0 / name).read_text()
        for mark, value in values.items():
            text = text.replace(mark, str(value))
        return text

    run_dir = layout.run_dir(REPLICA)
    for folder in (machine.home, layout.sockets, run_dir):
        make_private(folder)
    for name in ("replica.json", "status.json"):
        (run_dir / name).write_text(read(name))
    database = sqlite3.connect(machine.home / "requests.db")
    database.executescript(read("requests.sql"))
    database.close()

    eventually(lambda: machine.environment("echo")["max_sessions"])  # which its server reports
    environment = machine.environment("echo")
    assert environment["state"] == "READY"
    assert environment["address"] == f"http://127.0.0.1:{port}"
    assert [each["id"] for each in environment["replicas"]] == [REPLICA]
    say_hello(environment["address"])
    [request] = machine.ok("requests", "--json").json["requests"]
    assert (request["operation"], request["state"]) == ("launch", "SUCCEEDED")
    machine.ok("scale", "echo", "2")
    machine.ok("down", "echo")
