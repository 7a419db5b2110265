# SPDX-License-Identifier: Apache-2.0
"""The zygote that is forked before its daemon becomes one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from .executor_bench import wait_gone
from .test_failure_matrix import LEAVES_A_THREAD

DAEMON = """
    import json, os, psutil, signal, sys
    from pathlib import Path
    from openenvd.executor.spawning.zygote import prefork_zygote
    home, then = Path(sys.argv[1]), sys.argv[2]
    zygote = prefork_zygote(["operations_for_tests"], str(home))
    from executor_bench import Bench, make_plan
    bench = Bench(home, make_plan(), preforked_zygote=zygote)
    if then == "fail to start":
        print(json.dumps({"zygote": zygote.pid}), flush=True)
        os._exit(1)
    bench.executor.start()
    if then == "fail later":
        print(json.dumps({"zygote": zygote.pid}), flush=True)
        sys.exit(1)  # waits for no thread of the executor
    def parent() -> int:
        worker = bench.run("context").result["pid"]
        return psutil.Process(worker).ppid()
    told = {"zygote": zygote.pid, "parent": parent(), "shown": bench.executor.status().zygote_pid}
    told["threads"] = bench.run("context").result["threads"]
    if then == "lose it":
        os.kill(zygote.pid, signal.SIGKILL)
        told["next_parent"] = next(pid for pid in iter(parent, None) if pid not in {zygote.pid, 1})
    bench.executor.stop()
    print(json.dumps(told), flush=True)
"""


def run_daemon(home: Path, then: str) -> dict[str, Any]:
    command = [sys.executable, "-c", textwrap.dedent(DAEMON), str(home), then]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        told: dict[str, Any] = json.loads(daemon.stdout.readline())
    return told


def test_workers_come_from_the_first_zygote_or_a_fresh_program(tmp_path: Path) -> None:
    told = run_daemon(tmp_path, "end")
    assert told["parent"] == told["shown"] == told["zygote"]
    assert told["threads"] == "1"
    wait_gone(told["zygote"])
    told = run_daemon(tmp_path, "lose it")
    assert told["next_parent"] != told["zygote"]
    wait_gone(told["next_parent"])


@pytest.mark.parametrize("then", ["fail to start", "fail later"])
def test_a_zygote_exits_with_a_daemon_that_fails(tmp_path: Path, then: str) -> None:
    wait_gone(run_daemon(tmp_path, then)["zygote"])


def test_no_zygote_is_forked_where_there_is_a_thread(tmp_path: Path) -> None:
    (tmp_path / "leaves_a_thread.py").write_text(LEAVES_A_THREAD)
    script = "from openenvd.executor.spawning.zygote import prefork_zygote\n"
    script += "assert prefork_zygote(['leaves_a_thread'], '/') is None"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 0
