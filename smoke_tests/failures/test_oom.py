# SPDX-License-Identifier: Apache-2.0
"""An environment whose preparation exceeds its memory limit, as its user sees it.

The tests cover `status`, `logs`, the exit code of the waiting command, the other environments,
which notice nothing, and a retry with more memory.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.system.memory.cgroups import CgroupManager

from ..conftest import Machine, eventually
from ..test_main_job import say_hello

OUT_OF_MEMORY = 137


@pytest.fixture
def hungry(tmp_path: Path) -> Path:
    """A project with a dependency whose build takes more memory than the launch may use."""
    folder = shutil.copytree(Path(__file__).with_name("hungry"), tmp_path / "hungry")
    packaging = folder / "pyproject.toml"
    packaging.write_text(packaging.read_text().replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(autouse=True)
def with_cgroups() -> None:
    manager = CgroupManager("smoke-test")
    available, why_not = manager.available, manager.why_not
    manager.remove()
    if not available:
        pytest.skip(f"no cgroups: {why_not}")


def test_out_of_memory_is_reported_by_every_command(machine: Machine, hungry: Path) -> None:
    machine.ok("launch", "echo", "--name", "neighbour")
    before = machine.environment("neighbour")
    workers = _workers(machine)

    launch = ("launch", str(hungry), "--memory", "200M")
    request_id = machine.ok(*launch, "--async").out.strip()
    waited = machine.run("wait", request_id)
    assert waited.code == OUT_OF_MEMORY, waited.text

    request = machine.request(request_id)
    error = request["error"]
    assert (request["state"], error["kind"]) == ("FAILED", "oom_killed")
    assert error["evidence"]["detector"] == "cgroup"
    assert error["evidence"]["limit_bytes"] == 200 << 20
    told = re.compile(
        r"✗ (launch )?hungry  FAILED  out of memory\n"
        r"  Worker long-\d+ \(pid \d+\) ran out of memory; its limit was 200 MB "
        r"\(.*oom_kill \d→\d\)\.\n"
        r"  It was running `launch hungry` for [\d.]+ s\."
    )
    assert told.search(machine.ok("status", request_id).out)
    assert told.search(waited.err), waited.text
    logs = machine.ok("logs", request_id).text
    for text in (waited.err, machine.ok("status", request_id).out, logs):
        assert f"Try: openenv retry {request_id} --memory 400M" in text
        names_log = re.search(rf"Log: openenv logs (hungry|{request_id[:8]})", text)
        assert bool(names_log) is (text is not logs)
    log = machine.ok("logs", request_id).out.splitlines()
    assert re.match(r"openenvd: worker long-\d+ \(pid \d+\) ", log[-1]), log

    # If the machine itself ran out of memory, workers would be killed first, the daemon last.
    daemon, replica = machine.daemon_pid, before["replicas"][0]["pid"]
    worker = _workers(machine)[-1]["pid"]
    in_order = [daemon, psutil.Process(replica).ppid(), replica, worker]
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in in_order]
    assert scores == sorted(scores), scores
    assert scores[1] < scores[2] < scores[3]

    # The other environments have noticed nothing, and a new worker has started.
    after = machine.environment("neighbour")
    assert (after["state"], after["replicas"]) == ("READY", before["replicas"])
    say_hello(after["address"])
    eventually(lambda: len(_workers(machine)) >= len(workers))
    machine.ok("launch", "echo", "--name", "later")


def _workers(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = machine.ok("info", "--json").json["workers"]
    return found
