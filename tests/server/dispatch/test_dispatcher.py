# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher claims when memory is short, and what it makes of a kill for memory."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from openenvd.executor.errors import NoRoom
from openenvd.executor.executor import BurstableExecutor
from openenvd.executor.messages import Died, Raised, Started, Succeeded, Task, TaskError
from openenvd.executor.policy.memory import FreeMemory
from openenvd.requests_db import records
from openenvd.requests_db.connections import WriteConnection, open_database
from openenvd.requests_db.errors import DatabaseFull
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, retention, submitting
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import EnvironmentState, RequestState, Schedule
from openenvd.server.dispatch.claimer import Claimer
from openenvd.server.dispatch.dispatcher import Dispatcher
from openenvd.server.dispatch.janitor import Janitor
from openenvd.server.dispatch.memory_estimates import MemoryEstimates
from openenvd.server.dispatch.request_traces import RequestTraces
from openenvd.server.dispatch.running import DaemonTasks, DispatchContext, Timing
from openenvd.server.operations.base import Operation

from ...disks import fill_disk
from ..conftest import oom_killed
from ..tracing.conftest import KeptSpans, ids_of

MB = 2**20
DECLARED = {
    name: type(name, (Operation,), {"schedule": schedule, "expected_bytes": size * MB})
    for name, schedule, size in (("launch", "LONG", 150), ("check", "SHORT", 30))
}
PATIENCE_SECONDS = 10.0
KILLED = oom_killed(7, 255 * MB, 256 * MB, seconds=1.0)


class Executor:
    """Takes what it is given, and has as much memory as the test says."""

    def __init__(self, free_mb: int) -> None:
        self.free_mb = free_mb
        self.most = 8
        self.tasks: list[Task] = []

    def room(self, schedule: str) -> int:
        return self.most

    def free_memory(self, schedule: str) -> FreeMemory:
        free = self.free_mb * MB - sum(task.expected_bytes for task in self.tasks)
        return FreeMemory(schedule, free, 2**40, is_alone=not self.tasks)

    def submit(self, task: Task) -> Started:
        self.tasks.append(task)
        return Started(task.id, "long-7", 4711, 1.5, time.time())

    def cancel(self, task_id: str) -> bool:
        return False


def _schedule_of(operation: str) -> Schedule:
    return Schedule.LONG if operation in ("launch", "scale") else Schedule.SHORT


class Bench:
    def __init__(
        self,
        home: Path,
        settings: Settings | None = None,
        timing: Timing | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self.paths = Paths(home)
        self.paths.request_logs.mkdir(parents=True)
        open_database(self.paths.database)
        self.writer = WriteConnection(self.paths.database)
        self.store = WriteConnection(self.paths.database)
        self.executor = Executor(free_mb=320)
        self.events: list[records.Event] = []
        self.dispatcher = Dispatcher(
            DispatchContext(
                self.store,
                cast("BurstableExecutor", self.executor),
                publish=self.events.extend,
                operations={"launch": "module:launch", "check": "module:check", "scale": ""},
                paths=self.paths,
                settings=settings or Settings(),
                estimates=MemoryEstimates(DECLARED),
                budget_bytes=1024 * MB,
                timing=timing or Timing(),
                traces=traces or RequestTraces(),
            )
        )

    def submit(self, operation: str = "launch", **fields: Any) -> str:
        request_id = self.write(operation, **fields)
        self.dispatcher.submitted(_schedule_of(operation))
        return request_id

    def write(self, operation: str, **fields: Any) -> str:
        payload = fields.pop("payload", {"source": "echo"})
        new = records.NewRequest(
            operation, _schedule_of(operation), payload, max_attempts=3, **fields
        )
        result = self.writer.write(submitting.submit, new, now=time.time())
        assert isinstance(result, records.Submitted)
        return result.request.id

    def read(self, request_id: str) -> records.Request:
        found = self.writer.read(queries.get(request_id))
        assert isinstance(found, records.Request)
        return found

    def submitted(self) -> list[str]:
        return [task.id for task in self.executor.tasks]

    def is_submitted(self, request_id: str) -> bool:
        return request_id in self.submitted()

    def running(self, operation: str = "launch", **fields: Any) -> str:
        """A request that the executor has, as the first of all."""
        request_id = self.submit(operation, **fields)
        self.dispatcher.start()
        self.has_submitted(request_id)
        return request_id

    def has_submitted(self, *request_ids: str) -> None:
        self.eventually(lambda: self.submitted() == list(request_ids))

    def ended(
        self, request_id: str, state: RequestState = RequestState.SUCCEEDED
    ) -> records.Request:
        self.eventually(lambda: self.read(request_id).state is state)
        return self.read(request_id)

    def error_of(self, request_id: str) -> records.RequestError:
        error = self.ended(request_id, RequestState.FAILED).error
        assert error is not None
        return error

    def end(self, event: Any) -> None:
        # In place: the dispatcher's thread appends to it.
        self.executor.tasks.remove(next(t for t in self.executor.tasks if t.id == event.task_id))
        self.dispatcher.deliver(event)

    def eventually(self, fact: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not fact():
            assert time.monotonic() < deadline, (
                self.submitted(),
                self.dispatcher.claimer.shortages,
            )
            time.sleep(0.005)

    def give_tasks(self, loop: asyncio.AbstractEventLoop) -> Claimer:
        """Let the claimer give requests to the daemon, whose loop does not run."""
        claimer = self.dispatcher.claimer
        tasks = DaemonTasks(loop, self.paths, lambda _: None, cast(Any, None))
        claimer._context = replace(claimer._context, tasks=tasks)
        return claimer

    def close(self) -> None:
        self.dispatcher.stop()
        self.store.close()
        self.writer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path)) as made:
        yield made


def test_a_request_that_does_not_fit_waits_with_its_shortage_until_another_has_ended(
    bench: Bench,
) -> None:
    ids = [bench.submit() for _ in range(3)]
    bench.dispatcher.start()
    bench.has_submitted(*ids[:2])
    bench.eventually(lambda: bench.dispatcher.claimer.shortages)
    told = bench.dispatcher.claimer.shortages[ids[2]].sentence()
    assert told == "waiting for memory: needs 150 MB, 20 MB free"
    assert bench.read(ids[2]).state is RequestState.PENDING
    bench.end(Succeeded(ids[0], None, None, time.time()))
    bench.has_submitted(*ids[1:])
    bench.eventually(lambda: bench.dispatcher.claimer.shortages == {})


def test_a_scale_waits_only_for_the_memory_of_replicas_that_it_adds(bench: Bench) -> None:
    for name in ("shrinks", "grows"):
        row = records.Environment(name, {"replicas": 3}, EnvironmentState.READY, 0.0, 0.0)
        bench.writer.write(submitting.adopt, row)
    bench.running()
    bench.executor.free_mb = 100  # less than the launch takes already
    grows = bench.submit("scale", environment="grows", payload={"replicas": 4})
    shrinks = bench.submit("scale", environment="shrinks", payload={"replicas": 2})
    bench.ended(shrinks, RequestState.RUNNING)
    told = bench.dispatcher.claimer.shortages[grows].sentence()
    assert told == "waiting for memory: needs 8 MB, 0 MB free"


def test_replicas_on_other_machines_need_no_memory_here(bench: Bench) -> None:
    learned = records.MemoryEstimate("launch", "echo", (records.PeakSample(0.0, 100 * MB),), 0.0)
    bench.dispatcher.claimer._estimates.accept([learned])
    spec = {"provider": "slurm", "replicas": 3}
    row = records.Environment("grows", spec, EnvironmentState.READY, 0.0, 0.0)
    bench.writer.write(submitting.adopt, row)
    launch = {"source": "echo", "replicas": 100}
    bench.running(payload=launch | {"provider": "slurm"})
    assert bench.executor.tasks[0].expected_bytes == int(100 * MB * 1.15)  # its worker's
    uninstalled = bench.submit(payload=launch | {"provider": "uninstalled"})
    grows = bench.submit("scale", environment="grows", payload={"replicas": 1000})
    bench.ended(grows, RequestState.RUNNING)
    bench.eventually(lambda: uninstalled in bench.dispatcher.claimer.shortages)


def test_a_waiting_request_starts_when_another_process_frees_memory(bench: Bench) -> None:
    ids = [bench.submit() for _ in range(3)]
    bench.dispatcher.start()
    bench.has_submitted(*ids[:2])
    bench.executor.free_mb = 1000
    bench.has_submitted(*ids)


def test_a_short_request_does_not_wait_with_long_ones(bench: Bench) -> None:
    for _ in range(4):
        bench.submit()
    bench.executor.free_mb = 349  # two launches, and a check
    bench.dispatcher.start()
    bench.eventually(lambda: len(bench.submitted()) == 2)
    check = bench.submit("check", payload={})
    bench.eventually(partial(bench.is_submitted, check))


def test_a_small_request_passes_one_that_does_not_fit(bench: Bench) -> None:
    bench.submit()
    big, small = bench.submit(), bench.submit(payload={"source": "echo", "memory_mb": 20})
    bench.executor.free_mb = 200
    bench.dispatcher.start()
    bench.eventually(lambda: small in bench.submitted())
    assert big not in bench.submitted()


def test_the_worker_is_written_while_the_request_runs_and_told_with_its_outcome(
    bench: Bench,
) -> None:
    request_id = bench.running()
    bench.eventually(lambda: bench.read(request_id).worker == "long-7")
    assert bench.read(request_id).worker_pid == 4711
    assert bench.read(request_id).state is RequestState.RUNNING
    bench.end(Succeeded(request_id, {"answer": 42}, 5, 9.5))
    ended = bench.ended(request_id)
    assert bench.events[-1].request == ended
    assert (ended.worker, ended.result, ended.finished_at) == ("long-7", {"answer": 42}, 9.5)


def test_an_outcome_that_cannot_be_written_fails_its_own_request_alone(bench: Bench) -> None:
    odd, good = bench.submit("check", payload={}), bench.submit("check", payload={})
    bench.dispatcher.start()
    bench.eventually(lambda: len(bench.submitted()) == 2)
    bench.dispatcher.deliver(Succeeded(odd, {1: object()}, None, time.time()))
    bench.dispatcher.deliver(Succeeded(good, {"fine": True}, None, time.time()))
    bench.ended(good)
    assert "cannot be written" in bench.error_of(odd).message


def test_a_request_of_another_version_fails_alone(bench: Bench) -> None:
    odd, good = bench.submit("fly", payload={}), bench.submit("check", payload={})
    bench.dispatcher.start()
    bench.has_submitted(good)
    error = bench.error_of(odd)
    assert (error.kind, error.message) == ("invalid", "this openenvd has no operation 'fly'")


def refuse_once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let one transaction of this function fail, as on a full disk."""
    refused, works = [name], getattr(dispatching, name)

    def refuse(*args: Any) -> Any:
        if refused:
            refused.pop()
            raise DatabaseFull("the disk is full")
        return works(*args)

    monkeypatch.setattr(dispatching, name, refuse)
    return refused


def test_a_request_that_was_pending_when_the_disk_was_full_starts_when_there_is_room_again(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timing = Timing(retry_seconds=0.01)
    with closing(Bench(small_disk / "home", timing=timing)) as bench:
        bench.dispatcher.start()
        first = bench.submit("check", payload={})
        bench.eventually(lambda: bench.read(first).worker)  # it has written all, and sleeps
        for operation, payload in (("launch", {"source": "echo"}), ("check", {})):
            request_id = bench.write(operation, payload=payload)
            ballast = fill_disk(small_disk)
            caplog.clear()
            bench.dispatcher.submitted(_schedule_of(operation))
            bench.eventually(lambda: "no space left on the disk" in caplog.text)
            assert bench.read(request_id).state is RequestState.PENDING
            ballast.unlink()
            bench.eventually(partial(bench.is_submitted, request_id))


def test_a_request_whose_release_could_not_be_written_is_released_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Bench(tmp_path, timing=Timing(retry_seconds=0.01))) as bench:
        refused = refuse_once(monkeypatch, "release")
        submit, has_room = bench.executor.submit, [False]

        def submit_where_there_is_room(task: Task) -> Started:
            if not has_room[0]:
                has_room[0] = True
                raise NoRoom("8 tasks are under way already")
            return submit(task)

        monkeypatch.setattr(bench.executor, "submit", submit_where_there_is_room)
        bench.running("check", payload={})
        assert refused == []


def test_old_requests_are_deleted_in_steps_between_which_others_are_dispatched(
    tmp_path: Path,
) -> None:
    with closing(Bench(tmp_path, Settings(keep_requests=0))) as bench:
        for _ in range(2 * retention.BATCH):
            bench.writer.write(submitting.cancel, bench.write("check", payload={}), time.time())
        janitor = Janitor(bench.dispatcher.claimer._context)
        left: list[int] = []
        while not left or left[-1]:
            janitor._collect_at = 0.0  # as after the pause
            janitor.tidy()
            left.append(len(bench.writer.read(queries.list_requests(limit=1000))))
        assert left == [retention.BATCH, 0]


def test_the_cap_asked_for_reaches_the_worker(bench: Bench) -> None:
    bench.running(payload={"source": "echo", "memory_mb": 300})
    [task] = bench.executor.tasks
    assert (task.memory_bytes, task.expected_bytes) == (300 * MB, 150 * MB)


def test_estimates_are_written_together(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, timing=Timing(learned_seconds=3600.0))) as bench:

        def succeed(peak_bytes: int) -> list[Any]:
            request_id = bench.submit()
            bench.eventually(lambda: bench.is_submitted(request_id))
            bench.end(Succeeded(request_id, None, peak_bytes, time.time()))
            bench.eventually(lambda: bench.read(request_id).state is RequestState.SUCCEEDED)
            return bench.store.read(queries.memory_estimates(10))

        bench.dispatcher.start()
        first = succeed(100 * MB)
        assert succeed(200 * MB) == first


def test_a_request_that_raised_leaves_the_estimate_unchanged(bench: Bench) -> None:
    first = bench.running()
    bench.end(Raised(first, TaskError("ValueError", "no"), MB, time.time()))
    bench.submit()
    bench.eventually(lambda: bench.executor.tasks)
    assert bench.executor.tasks[0].expected_bytes == 150 * MB


def test_a_kill_for_memory_is_explained_in_the_log_and_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    request_id = bench.running()
    bench.end(Died(request_id, "long-1", KILLED, (), 255 * MB, time.time()))
    error = bench.error_of(request_id)
    assert "It was running `launch` for 1.0 s." in error.message
    assert error.hint == f"openenv retry {request_id} --memory 512M"
    last = bench.paths.request_log(request_id).read_text().splitlines()[-1]
    assert "worker long-1 (pid 7) was killed by the kernel for memory at 255 MB" in last
    bench.eventually(lambda: bench.dispatcher.recorder.kills)  # counted once that is written
    [line] = [line for line in caplog.records if "failed (oom_killed)" in line.message]
    assert (vars(line)["worker"], vars(line)["pid"]) == ("long-1", 7)
    assert dict(bench.dispatcher.recorder.kills) == {("launch", "cgroup"): 1}
    assert bench.dispatcher.recorder.estimates.of(bench.read(request_id)) > 400 * MB


def test_with_retry_oom_a_killed_request_runs_again_with_more_memory(bench: Bench) -> None:
    bench.executor.free_mb = 1000
    payload = {"source": "echo", "env": {"API_KEY": "sesame-street"}}
    request_id = bench.running(payload=payload, retry_oom=True)
    tail = ("its key is sesame-street", "no answer of https://me:hunter2@host/")
    bench.end(Died(request_id, "long-1", KILLED, tail, 255 * MB, time.time()))
    bench.has_submitted(request_id)
    [task] = bench.executor.tasks
    assert (task.memory_bytes, task.expected_bytes) == (512 * MB, 512 * MB)
    assert bench.read(request_id).attempts == 2
    [data] = [e.data for e in bench.events if e.data.get("phase") == "retrying"]
    assert data["message"].endswith("it runs again with 512 MB (attempt 2 of 3)")
    error = data["error"]
    assert (error["kind"], error["evidence"]) == ("oom_killed", KILLED.to_json())
    assert error["log_tail"] == ["its key is ***", "no answer of https://***@host/"]
    assert dict(bench.dispatcher.recorder.retries) == {"launch": 1}


def test_what_is_told_of_an_attempt_has_no_credentials(bench: Bench) -> None:
    bench.executor.free_mb = 1000
    request_id = bench.running(retry_oom=True)
    text = "replica 0 of https://me:hunter2@host/ was killed"
    error = TaskError("ReplicaFailed", text, text, "oom_killed", evidence=KILLED.to_json())
    bench.end(Raised(request_id, error, None, time.time()))
    bench.has_submitted(request_id)
    [data] = [e.data for e in bench.events if e.data.get("phase") == "retrying"]
    assert "hunter2" not in str(data)
    assert data["message"].startswith("replica 0 of https://***@host/ was killed; it runs again")
    assert data["error"]["message"] == "replica 0 of https://***@host/ was killed"


def test_logs_are_removed_with_their_requests(tmp_path: Path) -> None:
    """SkyPilot #10023: logs filled the disk."""
    with closing(Bench(tmp_path, Settings(keep_days=0))) as bench:
        request_id = bench.submit()
        bench.store.write(dispatching.claim, Schedule.LONG, 1, time.time())
        outcome = records.Outcome(request_id, RequestState.SUCCEEDED, time.time())
        bench.store.write(dispatching.record, outcomes=[outcome])
        log = bench.paths.request_log(request_id)
        log.write_text("done\n")
        times = log.with_name(f"{log.name}.times")
        times.touch()
        bench.dispatcher.start()
        bench.eventually(lambda: not log.exists() and not times.exists())


def test_all_logs_together_are_kept_bounded(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, Settings(max_logs_mb=1))) as bench:
        bench.paths.runs.mkdir()
        log = bench.paths.request_log("0" * 16)
        log.write_bytes(b"x" * 2 * MB)
        bench.dispatcher.start()
        bench.eventually(lambda: not log.exists())


def test_a_hundred_launches_start_as_many_as_memory_suffices_for(bench: Bench) -> None:
    """SkyPilot #6642, #5017: a hundred launches froze an 8 GB laptop, hundreds crashed it."""
    bench.executor.free_mb = 6000  # of 8 GB
    bench.executor.most = 1000  # workers are not what is short
    ids = [bench.submit() for _ in range(100)]
    bench.dispatcher.start()
    bench.eventually(lambda: len(bench.submitted()) == 6000 // 150)
    for request_id in ids:
        bench.eventually(partial(bench.is_submitted, request_id))
        assert len(bench.submitted()) <= 6000 // 150
        bench.end(Succeeded(request_id, None, None, time.time()))
    for request_id in ids:
        bench.ended(request_id)


def test_the_log_of_a_long_request_is_kept_bounded(tmp_path: Path) -> None:
    settings, timing = Settings(max_log_mb=1), Timing(bound_logs_seconds=0.05)
    with closing(Bench(tmp_path, settings, timing)) as bench:
        log = bench.paths.request_log(bench.running())
        log.write_bytes(b"a line of the log\n" * 200_000)
        bench.eventually(lambda: log.stat().st_size < MB)
        assert log.read_bytes().endswith(b"a line of the log\n")
        assert log.with_name(f"{log.name}.times").exists()  # for `openenv logs --since`


def test_short_requests_are_logged_at_debug_level_only(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "openenvd.server.dispatch")
    request_id = bench.running("check", payload={})
    bench.end(Succeeded(request_id, None, 5, 9.5))
    bench.ended(request_id)
    assert caplog.records == []


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_cancellation_that_comes_before_the_worker_has_the_request_is_kept(
    tmp_path: Path,
) -> None:
    with closing(Bench(tmp_path)) as bench, closing(asyncio.new_event_loop()) as loop:
        claimer = bench.give_tasks(loop)
        claimer.cancel("claimed")
        assert claimer._cancelled == {"claimed"}


def test_only_the_long_requests_that_the_daemon_carries_out_take_room_from_the_executor(
    tmp_path: Path,
) -> None:
    with closing(Bench(tmp_path)) as bench, closing(asyncio.new_event_loop()) as loop:
        bench.give_tasks(loop)
        bench.executor.most, bench.executor.free_mb = 1, 1000  # beside what its workers run
        ids = [bench.running(), bench.submit()]
        bench.has_submitted(*ids)
        scale = bench.submit("scale", environment="trial", payload={"replicas": 2})
        bench.ended(scale, RequestState.RUNNING)
        waits = bench.submit()
        later = bench.submit("check", payload={})
        bench.eventually(partial(bench.is_submitted, later))
        assert bench.read(waits).state is RequestState.PENDING


def test_the_worker_is_given_the_span_that_it_runs_in(tmp_path: Path, kept: KeptSpans) -> None:
    with closing(Bench(tmp_path, traces=RequestTraces(kept.provider))) as bench:
        traced = bench.submit(traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
        untraced = bench.submit()
        bench.dispatcher.start()
        bench.eventually(lambda: bench.is_submitted(untraced))
        given = {task.id: task.traceparent for task in bench.executor.tasks}
        for request_id in (traced, untraced):
            bench.end(Succeeded(request_id, None, None, time.time()))
        bench.ended(untraced)
    trace_id, span_id, _ = ids_of(kept.one("process launch"))
    assert str(given[traced]).split("-")[1:3] == [trace_id, span_id]
    assert (trace_id, given[untraced]) == (TRACE, None)
