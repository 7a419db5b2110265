# SPDX-License-Identifier: Apache-2.0
"""Every way a task can end: the right event each time, and the neighbours unharmed."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from openenvd.executor.errors import NoRoom, NotRunning
from openenvd.executor.messages import (
    LONG,
    SHORT,
    Cancelled,
    Died,
    Progressed,
    Raised,
    Started,
    Succeeded,
)
from openenvd.executor.policy.memory import Timing
from openenvd.executor.spawning.source import SubprocessSource
from openenvd.executor.supervisor.memory import sweep_orphans
from openenvd.executor.worker import WORKER_OOM_SCORE_ADJ, arm_parent_death_signal, message_of
from openenvd.system.memory.cgroups import CgroupManager
from openenvd.system.memory.limits import HINT, NO_ROOM
from openenvd.system.process.exit_reason import Detector, ExitKind
from openenvd.system.process.process_identity import ProcessIdentity

from .executor_bench import Bench, make_plan, wait_gone

# Without them, what made a session of its own cannot be told from a shim once its worker is dead.
_MANAGER = CgroupManager(f"test-{os.getpid()}")
HAS_CGROUPS = _MANAGER.available
_MANAGER.remove()
MakeBench = Callable[..., Bench]


@pytest.fixture(params=["zygote", "spawn"])
def either(request: pytest.FixtureRequest, make_bench: MakeBench) -> Bench:
    return make_bench(use_zygote=request.param == "zygote")


# ---------------------------------------------------------------------- it ends by itself


def test_a_result_is_unchanged_and_no_error_ends_a_worker(either: Bench) -> None:
    outcome = either.run("echo", {"deep": [1, None, "ü", {"x": 1.5}]})
    assert isinstance(outcome, Succeeded)
    assert outcome.result == {"deep": [1, None, "ü", {"x": 1.5}]}
    assert outcome.peak_bytes is not None
    assert either.run("inheritable").result == []
    pid = either.run("context").result["pid"]
    assert os.getpgid(pid) == os.getsid(pid) == pid  # a signal to its group reaches it alone
    outcome = either.run("fail")
    assert isinstance(outcome, Raised)
    assert (outcome.error.type, outcome.error.message) == ("ValueError", "no such thing")
    assert "operations_for_tests.py" in outcome.error.traceback
    assert "ValueError: no such thing" in either.log(outcome.task_id)
    assert either.run("context").result["pid"] == pid
    outcome = either.run("terminate_a_child")
    assert outcome.result == -signal.SIGTERM
    assert not (either.home / f"{outcome.task_id}.log").exists()  # it would have a traceback
    outcome = either.run("hang", timeout_seconds=0.05)
    assert isinstance(outcome, Died)
    assert outcome.exit.kind is ExitKind.TIMED_OUT


def test_started_names_the_worker_before_progress_and_outcome(bench: Bench) -> None:
    outcome = bench.run("context")
    assert outcome.result["request_id"] == outcome.task_id
    assert outcome.result["home"] == str(bench.home)
    started = bench.recorder.started(outcome.task_id)
    assert started.pid == outcome.result["pid"]
    assert started.worker.startswith("short-")
    assert bench.recorder.events.index(started) < bench.recorder.events.index(outcome)
    events = bench.recorder.of((Started, Progressed, Succeeded), bench.run("report").task_id)
    assert [type(event) for event in events] == [Started, *[Progressed] * 3, Succeeded]
    assert [event.data for event in events[1:4]] == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    ("operation", "field", "value"),
    [
        ("refuse", "kind", "invalid"),  # an exception may carry a kind and a hint
        ("refuse", "hint", "ask for something else"),
        ("sys_exit", "type", "SystemExit"),
        ("is_not_there", "kind", "operation_error"),
        ("not_json", "message", "set"),  # its type
    ],
)
def test_what_an_operation_cannot_do_is_an_error_of_it(
    bench: Bench, operation: str, field: str, value: str
) -> None:
    outcome = bench.run(operation)
    assert isinstance(outcome, Raised)
    found = getattr(outcome.error, field)
    assert found == value or (field == "message" and value in found)


def test_no_huge_payload_or_time_out_or_absent_log_fails_a_task(bench: Bench) -> None:
    payload = {"text": "y" * (10 * 2**20)}
    assert bench.run("echo", payload).result == payload
    assert isinstance(bench.run("context", timeout_seconds=365 * 86_400.0), Succeeded)
    assert isinstance(bench.run("context"), Succeeded)
    (bench.home / "task-3.log").mkdir()
    assert isinstance(bench.run("print_lines"), Succeeded)


@pytest.mark.parametrize(
    "operation", ["close_stdout", "close_stderr", "close_python_stdout", "flood"]
)
def test_an_operation_that_closes_or_floods_its_output_harms_no_later_task(
    bench: Bench, operation: str
) -> None:
    assert bench.run(operation).result == "done"
    for _ in range(4):
        task_id = bench.run("print_lines").task_id
        assert "from python" in bench.log(task_id)
        assert "to stderr" in bench.log(task_id)


# ---------------------------------------------------------------------- its worker exits


@pytest.mark.parametrize("schedule", [LONG, SHORT])
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("exit", None),
        ("segfault", signal.SIGSEGV),
        ("SIGKILL", signal.SIGKILL),
        ("SIGABRT", signal.SIGABRT),
        ("SIGTERM", signal.SIGTERM),
    ],
)
def test_a_workers_exit_is_explained_and_harms_no_other_worker(
    either: Bench, how: str, number: int | None, schedule: str
) -> None:
    """SkyPilot #6256: a killed worker broke the whole pool."""
    neighbour = either.submit("hang", schedule=schedule)
    pid = either.recorder.progress(neighbour)["pid"]
    outcome = either.run("die", {"how": how}, schedule=schedule)
    assert isinstance(outcome, Died)
    kind = ExitKind.EXITED if how == "exit" else ExitKind.SIGNALED
    assert (outcome.exit.kind, outcome.exit.signal_number) == (kind, number)
    assert outcome.exit.exit_code == (7 if how == "exit" else None)
    assert "last words" in outcome.log_tail
    assert outcome.exit.pid == either.recorder.started(outcome.task_id).pid
    assert isinstance(either.run("echo", schedule=schedule), Succeeded)
    os.kill(pid, 0)
    assert not either.recorder.of((Died, Raised), neighbour)
    assert either.executor.cancel(neighbour)
    assert isinstance(either.recorder.outcome(neighbour), Cancelled)


def test_a_spoiled_worker_is_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    outcome = bench.run("memory_error")
    assert isinstance(outcome, Died)
    assert outcome.exit.is_oom
    assert outcome.exit.detector is Detector.MEMORY_ERROR
    assert isinstance(bench.run("echo"), Succeeded)
    assert "invalid frame" not in caplog.text
    assert isinstance(bench.run("close_everything"), Died)
    assert isinstance(bench.run("echo"), Succeeded)
    pid = bench.run("context").result["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    for _ in range(4):
        assert isinstance(bench.run("echo"), Succeeded | Died)
    assert bench.run("context").result["pid"] != pid
    task_id = bench.run("leave_thread").task_id
    used = bench.recorder.started(task_id).pid
    assert bench.run("context").result["pid"] != used
    wait_gone(used)


# ---------------------------------------------------------------------- it is cancelled


def test_a_running_task_is_cancelled_and_may_clean_up(either: Bench) -> None:
    note = either.home / "note"
    task_id = either.submit("hang_and_clean_up", {"path": str(note)})
    either.recorder.progress(task_id)
    assert either.executor.cancel(task_id)
    assert isinstance(either.recorder.outcome(task_id), Cancelled)
    assert note.read_text() == "cleaned up"


def test_cancelling_twice_makes_one_event_and_that_of_a_finished_or_unknown_task_none(
    bench: Bench,
) -> None:
    task_id = bench.submit("hang")
    assert bench.executor.room(SHORT) == 3  # from its submission to its outcome
    bench.recorder.progress(task_id)
    assert bench.executor.cancel(task_id)
    bench.executor.cancel(task_id)
    bench.recorder.outcome(task_id)
    assert bench.executor.room(SHORT) == 4
    assert not bench.executor.cancel(bench.run("echo").task_id)
    assert not bench.executor.cancel("never heard of")
    assert len(bench.recorder.of(Cancelled, task_id)) == 1


def test_a_task_cancelled_at_any_moment_has_exactly_one_outcome(bench: Bench) -> None:
    for turn in range(150):
        task_id = bench.submit("huge", {"size": 2**turn if turn < 20 else 1000})
        if turn % 3 == 1:
            bench.recorder.started(task_id)
        bench.executor.cancel(task_id)
        assert isinstance(bench.recorder.outcome(task_id), Cancelled | Succeeded)
    for _ in range(20):
        assert isinstance(bench.run("echo"), Succeeded)
    finals = [e.task_id for e in bench.recorder.events if isinstance(e, Cancelled | Succeeded)]
    assert len(finals) == len(set(finals)) == 170


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(make_bench: MakeBench) -> None:
    bench = make_bench(cancel_grace_seconds=0.05)
    task_id = bench.submit("ignore_terminate")
    pid = bench.recorder.progress(task_id)["pid"]
    assert bench.executor.cancel(task_id)
    assert isinstance(bench.recorder.outcome(task_id), Cancelled)
    wait_gone(pid)
    outcome = bench.run("ignore_terminate", timeout_seconds=0.3)
    assert outcome.exit.kind is ExitKind.TIMED_OUT


# ---------------------------------------------------------------------- its descendants


def test_the_descendants_of_a_cancelled_task_are_killed(make_bench: MakeBench) -> None:
    bench = make_bench(cancel_grace_seconds=0.2)
    task_id = bench.submit("hang_with_family")
    family = bench.recorder.progress(task_id)["family"]
    assert bench.executor.cancel(task_id)
    assert isinstance(bench.recorder.outcome(task_id), Cancelled)
    for pid in family:
        wait_gone(pid)


@pytest.mark.parametrize("then", ["die", "return"])
def test_processes_that_a_task_leaves_running_are_killed(bench: Bench, then: str) -> None:
    task_id = bench.submit(
        "hang_with_family", {"then": then, "stranger": then == "return" or HAS_CGROUPS}
    )
    family = bench.recorder.progress(task_id)["family"]
    expected = Died if then == "die" else Succeeded
    assert isinstance(bench.recorder.outcome(task_id), expected)
    for pid in family:
        wait_gone(pid)


# ---------------------------------------------------------------------- many, and more than fit


def test_thousands_of_quick_tasks_are_all_answered(bench: Bench) -> None:
    submitted: set[str] = set()
    while len(submitted) < 3_000:
        room = bench.recorder.wait_for(lambda: bench.executor.room(SHORT))
        submitted |= {bench.submit("echo") for _ in range(min(room, 3_000 - len(submitted)))}
    bench.recorder.wait_for(lambda: bench.recorder.outcomes >= 3_000)
    done = [e.task_id for e in bench.recorder.events if isinstance(e, Succeeded)]
    assert len(done) == 3_000
    assert set(done) == submitted


def test_idle_burst_workers_leave_and_guaranteed_ones_are_replaced(make_bench: MakeBench) -> None:
    bench = make_bench(timing=Timing(burst_idle=0.05))
    gate = bench.home / "gate"
    running = [bench.submit("wait_for", {"path": str(gate)}, schedule=LONG) for _ in range(4)]
    for task_id in running:
        bench.recorder.started(task_id)
    burst = [w.pid for w in bench.executor.status().workers if not w.guaranteed]
    assert len(burst) == 2
    gate.touch()
    for task_id in running:
        assert isinstance(bench.recorder.outcome(task_id), Succeeded)
    for pid in burst:
        wait_gone(pid)
    # SkyPilot kept 3 GB after a burst: a worker that has worked has pages of its own.
    worked = bench.run("context").result["pid"]
    wait_gone(worked)
    fresh = bench.run("context").result["pid"]
    assert fresh != worked


def test_a_worker_that_has_grown_is_recycled_and_the_kernel_picks_it_first(bench: Bench) -> None:
    """SkyPilot #9964, #9032: guaranteed workers only ever grew."""
    pids = {bench.run("keep", {"size": size}).result for size in (0, 150 * 2**20)}
    assert len(pids) == 1
    [pid] = pids
    wait_gone(pid)
    assert bench.run("context").result["pid"] != pid
    pid = bench.run("context").result["pid"]
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == WORKER_OOM_SCORE_ADJ
    zygote = psutil.Process(pid).ppid()
    assert int(Path(f"/proc/{zygote}/oom_score_adj").read_text()) < WORKER_OOM_SCORE_ADJ


def test_short_tasks_keep_their_workers_when_all_long_ones_are_busy(bench: Bench) -> None:
    """SkyPilot #4968, #10195: long requests blocked short ones for hours."""
    running = [bench.submit("hang", schedule=LONG) for _ in range(4)]
    assert bench.executor.room(LONG) == 0
    with pytest.raises(NoRoom):
        bench.submit("echo", schedule=LONG)
    assert isinstance(bench.run("echo"), Succeeded)
    for task_id in running:
        bench.recorder.progress(task_id)


def test_forty_long_tasks_run_in_forty_threads(make_bench: MakeBench) -> None:
    bench = make_bench(plan=make_plan(burst_long=38))
    for task_id in [bench.submit("hang", schedule=LONG) for _ in range(40)]:
        bench.recorder.progress(task_id)
    workers = [psutil.Process(worker.pid) for worker in bench.executor.status().workers]
    assert [worker.num_threads() for worker in workers] == [1] * 40
    # For libraries that would start a thread for each core.
    assert bench.run("environment", {"name": "OMP_NUM_THREADS"}).result == "1"


class WithoutMessageError(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


def test_an_error_whose_message_cannot_be_made_is_named_by_its_class() -> None:
    told = f"{__name__}.WithoutMessageError (its message raised KeyError)"
    assert message_of(WithoutMessageError()) == told


# ---------------------------------------------------------------------- the zygote, the daemon


def zygote_of(bench: Bench) -> int:
    pid = bench.run("context").result["pid"]
    parent = psutil.Process(pid).ppid()
    assert parent != os.getpid()
    return parent


def test_running_tasks_survive_a_killed_zygote_which_is_replaced(bench: Bench) -> None:
    note = bench.home / "note"
    running = bench.submit("hang_and_clean_up", {"path": str(note)})
    bench.recorder.progress(running)
    zygote = zygote_of(bench)
    os.kill(zygote, signal.SIGKILL)
    wait_gone(zygote)
    tasks = [bench.submit("context", schedule=LONG) for _ in range(3)]
    outcomes = [bench.recorder.outcome(task_id) for task_id in tasks]
    assert all(isinstance(outcome, Succeeded) for outcome in outcomes)
    assert not bench.recorder.of((Died, Raised, Cancelled), running)
    bench.executor.cancel(running)
    assert isinstance(bench.recorder.outcome(running), Cancelled)
    assert note.read_text() == "cleaned up"
    assert zygote_of(bench) != zygote


def test_a_zygote_that_hangs_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    zygote = zygote_of(bench)
    os.kill(zygote, signal.SIGSTOP)
    starter = bench.executor._starter
    assert starter.deadline(0.0) == math.inf  # it owes no answer
    with monkeypatch.context() as impatient:  # not with the zygote after it
        impatient.setattr(starter, "_timing", Timing(source_silence=0.2))
        task_id = bench.submit("echo", schedule=LONG)
        wait_gone(zygote)
    assert isinstance(bench.recorder.outcome(task_id), Succeeded)


def test_an_operation_that_cannot_start_a_process_names_the_limit(
    pids_group: Path, bench: Bench
) -> None:
    outcome = bench.run("start_without_room", {"group": str(pids_group)})
    assert isinstance(outcome, Raised)
    assert NO_ROOM in outcome.error.message
    assert f"pids.max at /{pids_group.name}" in outcome.error.message
    assert outcome.error.hint == HINT


def test_a_task_without_a_worker_for_lack_of_pids_names_the_limit(
    pids_group: Path, bench: Bench
) -> None:
    (pids_group / "cgroup.procs").write_text(str(zygote_of(bench)))
    (pids_group / "pids.max").write_text("1")
    outcome = bench.run("echo", schedule=LONG)  # nobody has worked on one yet
    assert isinstance(outcome, Died)
    assert f"pids.max at /{pids_group.name}" in (outcome.exit.evidence or "")
    (pids_group / "pids.max").write_text("max")
    assert isinstance(bench.run("echo", schedule=LONG), Succeeded)


LEAVES_A_THREAD = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
)


@pytest.mark.parametrize("code", [LEAVES_A_THREAD, "import os\nos._exit(1)\n"])
def test_workers_start_without_a_preload_that_ends_the_zygote_or_leaves_threads_in_it(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """A tracer or a numeric library may start one in every Python, unasked."""
    (tmp_path / "bad_preload.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    bench = make_bench(start=False)
    bench.executor._preload = ["bad_preload"]
    bench.executor.start()
    worker = psutil.Process(bench.run("context").result["pid"])
    is_spawned = worker.ppid() == os.getpid()
    assert is_spawned or code != LEAVES_A_THREAD


DAEMON = """
    import sys, threading
    from pathlib import Path
    from executor_bench import Bench, make_plan
    bench = Bench(Path(sys.argv[1]), make_plan())
    bench.executor.start()
    pids = [bench.run("context").result["pid"]]
    for operation in ("ignore_terminate", "hang", "hang_with_family"):
        task = bench.submit(operation, {"stranger": False}, schedule="LONG")
        seen = bench.recorder.progress(task)
        pids += [seen["pid"], *seen.get("family", [])]
    import psutil
    pids.append(psutil.Process(pids[0]).ppid())
    print(*pids, flush=True)
    threading.Event().wait()
"""


def test_a_killed_daemon_leaves_nothing_behind(tmp_path: Path) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with daemon:
        assert daemon.stdout is not None
        pids = [int(word) for word in daemon.stdout.readline().split()]
        assert len(pids) == 7
        daemon.kill()
    for pid in pids:
        wait_gone(pid)


def test_a_worker_ends_with_its_daemon_and_a_source_closes_its_descriptors(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    group = os.fork()
    if not group:
        os.setpgid(0, 0)
        arm_parent_death_signal(reading)
        os._exit(0)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(group, 0)[1]) == -signal.SIGKILL
    # An executor that stops while a worker starts: its pipe and sentinel are closed, too.
    reading, writing = os.pipe()
    spawner = SubprocessSource(death_pipe=reading, home=str(tmp_path))
    spawner.request("short-1")
    spawner.close(grace_seconds=0.0)
    os.close(reading)
    os.close(writing)


def test_sweep_ends_an_orphaned_worker_and_spares_a_reused_pid() -> None:
    """SkyPilot #9742: a cancel signalled whoever had the pid by then."""
    left = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    spared = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    started_at = ProcessIdentity.of(left.pid).started_at
    try:
        assert sweep_orphans([(left.pid, started_at), (spared.pid, started_at - 1000)]) == [
            left.pid
        ]
        assert left.wait() == -signal.SIGKILL
        assert spared.poll() is None
    finally:
        for process in (left, spared):
            process.kill()
            process.wait()


# ---------------------------------------------------------------------- starting and stopping


def test_stop_may_be_called_before_start_and_twice(make_bench: MakeBench) -> None:
    bench = make_bench(start=False)
    bench.executor.stop()
    bench.executor.start()
    bench.executor.stop()
    bench.executor.stop()
    assert bench.executor.room(SHORT) == 0
    with pytest.raises(NotRunning):
        bench.submit("echo")


def test_stop_reports_running_tasks_as_stopped(make_bench: MakeBench) -> None:
    bench = make_bench(make_plan(burst_short=0))
    note = bench.home / "note"
    running = bench.submit("hang_and_clean_up", {"path": str(note)})
    stubborn = bench.submit("ignore_terminate", schedule=LONG)
    for task_id in (running, stubborn):
        bench.recorder.progress(task_id)
    bench.executor.stop(grace_seconds=0.5)
    for task_id in (running, stubborn):
        assert bench.recorder.outcome(task_id).exit.kind is ExitKind.STOPPED
    assert note.read_text() == "cleaned up"


def test_a_waiting_task_is_cancelled_or_stopped_at_the_start(make_bench: MakeBench) -> None:
    bench = make_bench()
    task_id = bench.submit("echo")
    bench.executor.stop(grace_seconds=5.0)
    assert isinstance(bench.recorder.outcome(task_id), Died | Succeeded)
    bench = make_bench()
    task_id = bench.submit("echo")  # the zygote is still preloading
    assert bench.executor.cancel(task_id)
    assert isinstance(bench.recorder.outcome(task_id), Cancelled)
    assert not bench.recorder.of((Started, Succeeded), task_id)


def test_status_and_process_titles_show_workers_and_what_they_run(bench: Bench) -> None:
    task_id = bench.submit("hang", label="launch trial")
    pid = bench.recorder.progress(task_id)["pid"]
    status = bench.executor.status()
    (worker,) = [worker for worker in status.workers if worker.task_id == task_id]
    assert (worker.label, worker.schedule, worker.guaranteed) == ("launch trial", SHORT, True)
    assert worker.rss_bytes
    assert status.plan["guaranteed_long"] == 2
    name = bench.recorder.started(task_id).worker
    assert psutil.Process(pid).cmdline()[0] == f"openenvd: worker {name} (launch trial)"
