# SPDX-License-Identifier: Apache-2.0
"""Processes that the zygote forks for others: they are no workers, and outlive the daemon."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.executor.executor import BurstableExecutor
from openenvd.executor.messages import Died, Succeeded
from openenvd.executor.policy.memory import Timing
from openenvd.executor.spawning.source import Exited

from .executor_bench import Bench, wait_gone
from .test_failure_matrix import LEAVES_A_THREAD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")
ENTRIES = """
import json, os, time
def tell(payload, fds):
    found = {"pid": os.getpid(), "payload": payload, "sid": os.getsid(0)}
    found["fds"] = len(os.listdir("/proc/self/fd")) - 4  # the standard three, and that of listdir
    os.write(fds[0], json.dumps(found).encode() + b"\\n")
    time.sleep(payload.get("seconds", 0))
"""


@pytest.fixture
def bench(
    make_bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    (tmp_path / "entries_for_tests.py").write_text(ENTRIES)
    (tmp_path / "leaves_a_thread.py").write_text(LEAVES_A_THREAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    return make_bench()


def forked(executor: BurstableExecutor, **payload: Any) -> dict[str, Any]:
    reading, writing = os.pipe()
    with open(reading) as found:
        is_forked = executor.fork("entries_for_tests:tell", payload, [writing])
        os.close(writing)
        return json.loads(found.readline()) if is_forked else {}


def starter_of(bench: Bench) -> Any:
    return bench.executor._starter


def observed(read: Callable[[], Any], exits: list[bool]) -> Any:
    events = read()
    exits += [each.was_alone for each in events or () if isinstance(each, Exited)]
    return events


def test_it_has_a_session_and_copies_of_descriptors_and_outlives_the_executor(bench: Bench) -> None:
    found = forked(bench.executor, seconds=3600)
    process = psutil.Process(found.pop("sid"))
    assert found == {"payload": {"seconds": 3600}, "fds": 1, "pid": process.pid}
    bench.executor.stop()
    assert process.status() != psutil.STATUS_ZOMBIE
    assert not forked(bench.executor)
    process.kill()
    wait_gone(process.pid)


def test_it_is_no_worker_and_no_orphan_of_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = psutil.Process(forked(bench.executor, seconds=3600)["pid"])
    exits: list[bool] = []
    source = starter_of(bench)._source
    monkeypatch.setattr(source, "read", partial(observed, source.read, exits))
    task = bench.submit("hang")
    bench.recorder.progress(task)
    os.kill(bench.recorder.started(task).pid, signal.SIGKILL)
    assert isinstance(bench.recorder.outcome(task), Died)
    process.kill()
    wait_gone(process.pid)
    assert isinstance(bench.run("echo", schedule="LONG"), Succeeded)  # what was said is read
    assert exits == [True]


def test_what_cannot_be_imported_is_refused_and_what_leaves_a_thread_ends_forking(
    bench: Bench,
) -> None:
    zygote = starter_of(bench).zygote_pid
    assert not any(bench.executor.fork(each, {}, []) for each in ("no_such_module:f", ":f"))
    assert forked(bench.executor)
    assert starter_of(bench).zygote_pid == zygote
    assert not bench.executor.fork("leaves_a_thread:main", {}, [])
    worker = psutil.Process(bench.run("context", schedule="LONG").result["pid"])
    assert worker.ppid() == os.getpid()  # from now on workers are programs
    assert not forked(bench.executor)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_zygote_that_is_lost_or_hangs_is_replaced_by_one_that_forks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    zygote = starter_of(bench).zygote_pid
    os.kill(zygote, number)
    with monkeypatch.context() as impatient:
        impatient.setattr(starter_of(bench), "_timing", Timing(source_silence=0.2))
        assert not forked(bench.executor)
        wait_gone(zygote)
    assert next(found for found in iter(lambda: forked(bench.executor), None) if found)
