# SPDX-License-Identifier: Apache-2.0
"""`EngineReplica`: one replica of an engine, from its run file to its end.

    engine (looks, find) ──┐                      ┌──▶ status file ──▶ the next agent
    /health, /capacity  ───┼──▶ the state machine ┼──▶ status lines ──▶ daemon, launch
    start, stop, drain  ───┘                      └──▶ start, signal, stop, remove ──▶ engine

    from             to        when
    starting         ready     its instance runs, and answers `/health`
    starting, ready  exited    its instance has exited, is gone, or was refused; or nothing is heard
                               of it, and its server does not answer, however often it is asked
    ready            starting  its engine itself begins its instance anew
    ready            draining  its sessions are to end, and none is to begin: SIGUSR1, which a
                               server that is not ours is not sent: it would end at once
    exited           starting  its start is requested: the old instance is removed first
    any              stopping  its stop is requested, or the drain's time is over
    draining         stopping  it has exited, or its engine itself begins it anew
    stopping         stopped   its instance is removed: nothing of it is left

What is about to be done is in the status file before it is done. An agent that is killed at any
line leaves a state from which the next one goes on:

    starting, no instance     `start` is called (again); one that was created is found by its name
    ready, no instance        somebody has removed it: exited, as lost
    stopping, no instance     it was removed, and only not reported: stopped
    stopping, never asked     the engine has nothing of it: stopped, also where it does not answer

The engine may be gone, or refuse, for a while: the state stays, `problem` says why, and whatever
was to be done is tried again. Only the engine's word that there is no such instance makes it lost.
If an engine has never answered this agent, it is refused after some seconds (`EngineWatch.reach`):
it may not be configured, and it has nothing of the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from ...schema.errors import NotAnswering
from ...schema.replica import Process, StatusLine
from ...system.files.log_files import last_lines
from ...system.net.access import with_token
from ...system.process.backoff import backoff_seconds
from ...system.process.process_identity import boot_seconds
from ...system.text.json_lines import Json, encode_line
from .. import run_files
from ..engines import server_answers
from ..engines.base import (
    EngineGone,
    EngineRefused,
    ExitFacts,
    Instance,
    InstanceState,
    NameTaken,
    ReplicaPlan,
)
from ..engines.instance_logs import LogPump
from ..replica_state import LEFT_GRACE_SECONDS
from ..run_files import RunFile, address_of
from ..shim.client import read_status_file
from ..shim.connections import read_operation
from ..shim.files import STATUS_FILE_NAME, write_json
from ..shim.server_exit import exit_without_start
from .engine_watch import EngineWatch, exit_reason
from .replica_status import LONGEST_SECONDS, ReplicaStatus
from .status_server import StatusServer

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
ID_LENGTH = 40  # of an instance's id in messages: engines' own commands take a part of it
FIRST_PROBE_SECONDS = 0.05  # between two questions whether it is ready; grows with the waiting
LONGEST_PROBE_SECONDS = 1.0
CAPACITY_SECONDS = 2.0  # between two questions how full it is
LAST_LINES_SECONDS = 5.0  # for the rest of a log, once its instance has exited
SILENT_TIMEOUT_SECONDS = 5.0  # for the server of a silent instance to answer
SILENT_QUESTIONS = 3  # at least, that it has not answered, when it counts as ended,
SILENT_ASKED_SECONDS = 8.0  # and this long since the first of them
RETRY_SECONDS = 1.0  # after the engine did not answer
DRAIN_SIGNAL = signal.SIGUSR1


class EngineReplica:
    """One replica. `run` is its task, which ends when nothing of the replica is left.

    Attributes:
        run_file: What is wanted of it.
        status: What is known of it.
    """

    def __init__(self, run_file: RunFile, watch: EngineWatch, agent: Process) -> None:
        """Read where an earlier agent stood. `agent` is this process's identity."""
        self.run_file = run_file
        self.plan = plan_of(run_file)
        known = read_status_file(run_file.run_dir)
        self.status = ReplicaStatus() if known is None else ReplicaStatus.from_json(known)
        self._watch = watch
        self._engine = watch.engine
        self._agent = agent
        self._instance: Instance | None = None
        self._pump: LogPump | None = None
        self._due = asyncio.Event()  # something may have changed: go through the loop again
        self._start_is_requested = False
        self._is_seen = False  # whether `_instance` is as the engine has it
        self._has_capacity = True  # until it has answered that it has not
        self._has_signalled = False
        self._probes = 0
        self._unanswered: list[float] = []  # when a silent instance's server did not answer
        self._server = StatusServer(run_file.socket_path, self._line, self._obey)
        if self.status.host is None:
            self.status.host, self.status.port = self.plan.host, self.plan.port

    # What others tell it.

    async def open(self) -> None:
        """Let clients connect, with the status as it is; raises `OSError` when that fails."""
        self._write_status()
        await self._server.open()

    def observe(self, instance: Instance | None) -> None:
        """Take note of what a look has found: it is due when that is something else."""
        if _seen(instance) != _seen(self._instance):
            self._is_seen = False
            self._due.set()

    def note_problem(self, problem: str | None) -> None:
        """Say why the engine cannot be asked; None: it can."""
        self._tell_problem(problem)
        self._is_seen = False
        self._due.set()

    def _obey(self, line: bytes) -> None:
        op, seconds = read_operation(line)
        match op:
            case "start":
                self._start_is_requested = self.status.state == "exited"
            case "stop":
                self._request_stop(seconds)
            case "drain":
                self._request_drain(seconds)
            case _:
                raise ValueError(f"unknown op: {op!r}")
        self._due.set()

    def _request_stop(self, grace_seconds: float) -> None:
        self._end_within(grace_seconds, "stopping")

    def _request_drain(self, timeout_seconds: float) -> None:
        if self.status.state in ("stopping", "stopped"):
            return
        self.status.is_draining = True
        if self.status.state in ("ready", "draining"):
            self._end_within(timeout_seconds, "draining")
        else:  # it has no sessions
            self._request_stop(LEFT_GRACE_SECONDS)

    def _end_within(self, seconds: float, state: str) -> None:
        """Begin to stop or drain it, or hasten that: a later deadline changes nothing."""
        deadline = _in(seconds)
        if self.status.state == state and self.status.deadline is not None:
            deadline = min(deadline, self.status.deadline)
        self._set_state(state, deadline=deadline)

    # Its task.

    async def run(self) -> None:
        """Bring it from what is observed to what is wanted, until it is stopped."""
        while self.status.state != "stopped":
            self._due.clear()
            try:
                seconds = await self._step()
            except EngineGone:
                seconds = RETRY_SECONDS
            except (EngineRefused, NotAnswering) as exc:  # to do anything else than to start it
                self._tell_problem(exc.message)
                seconds = RETRY_SECONDS
            except Exception as exc:  # a defect: no reason to leave what runs to itself
                if self._tell_problem(f"{type(exc).__name__}: {exc}"):
                    log.exception("cannot look after %s", self.run_file.replica_id)
                seconds = RETRY_SECONDS
            else:
                self._tell_problem(self._watch.problem or _hindrance(self._instance))
            await self._wait(seconds)
        await self._server.close()

    async def close(self) -> None:
        """Let go of it: its instance goes on."""
        if self._pump is not None:
            self._pump.stop()
        await self._server.close()

    async def _step(self) -> float | None:
        """Do what is due; return in how many seconds to look again, None: when told."""
        match self.status.state:
            case "starting":
                return await self._bring_up()
            case "ready":
                return await self._look_after()
            case "draining":
                return await self._drain()
            case "exited":
                return await self._await_start()
            case _:
                return await self._stop()

    async def _bring_up(self) -> float | None:
        try:
            if self._instance is None:
                await self._reach()
                self._take(await self._watch.call(self._engine.start, self.plan))
            instance = await self._find()
        except EngineRefused as exc:
            hint = "" if exc.hint is None else f" ({exc.hint})"
            self._note_refusal(f"{exc.message}{hint}")
            return None
        if instance is None or instance.state is InstanceState.EXITED:
            return await self._note_exit(instance)
        if instance.state is InstanceState.STARTING or instance.runs < self.status.runs:
            self._tell_waiting(instance.waiting)
            return LONGEST_PROBE_SECONDS
        self.status.runs = instance.runs
        why = await self._why_not_ready(instance)
        if why is not None and await self._has_ended(instance):
            return await self._note_exit(instance)
        found = await self._read_capacity() if why is None else None
        if why is None and found is None and self._has_capacity and instance.drains:  # ours
            why = f"nothing answers at {self._address}/capacity"
        if why is not None:
            self._tell_waiting(why + self._where_it_listens)
            self._probes += 1
            return backoff_seconds(
                self._probes, first=FIRST_PROBE_SECONDS, longest=LONGEST_PROBE_SECONDS
            )
        info = server_answers.ready_info(found)
        if self.status.state == "starting":  # not to be stopped by now
            self.status.note_ready(info, time.time())
            self._publish()
        return 0.0

    async def _reach(self) -> None:
        """Write down that the engine may be asked to start the replica, as soon as it answers."""
        if not self.status.is_asked:
            await self._watch.reach(self._engine.find, self.plan)
            self.status.is_asked = True
            self._write_status()

    async def _look_after(self) -> float | None:
        instance = await self._find()
        if instance is None or await self._has_ended(instance):
            return await self._note_exit(instance)
        if instance.runs > self.status.runs:
            reason = self._reason(
                ExitFacts(ended_by=instance.waiting or instance.why_anew), stopped_by_us=False
            )
            self.status.note_new_run(reason, instance.runs, time.time())
            self._publish()
            return 0.0
        if not self._unanswered:
            await self._read_capacity()
        return CAPACITY_SECONDS if self._has_capacity or instance.is_silent else None

    async def _has_ended(self, instance: Instance) -> bool:
        """Whether it has exited, or nothing is heard of it for long, also not by its server."""
        if instance.state is InstanceState.EXITED:
            return True
        why = None
        if instance.is_silent:
            why = await self._why_not_ready(instance, SILENT_TIMEOUT_SECONDS)
        if why is None:
            self._unanswered.clear()
            return False
        self._unanswered.append(time.monotonic())
        seconds = self._unanswered[-1] - self._unanswered[0]
        return len(self._unanswered) >= SILENT_QUESTIONS and seconds >= SILENT_ASKED_SECONDS

    async def _drain(self) -> float | None:
        instance = await self._find()
        if instance is None or instance.runs > self.status.runs or await self._has_ended(instance):
            self._request_stop(0.0)
            return 0.0
        left = self.status.seconds_left(boot_seconds())
        if left <= 0.0:
            self._request_stop(LEFT_GRACE_SECONDS)
            return 0.0
        if instance.drains and not self._has_signalled:
            with contextlib.suppress(EngineRefused):  # then it is stopped when the time is over
                await self._watch.call(self._engine.signal, instance, DRAIN_SIGNAL)
            self._has_signalled = True
        await self._read_capacity()
        return min(left, CAPACITY_SECONDS)

    async def _await_start(self) -> float | None:
        if not self._start_is_requested:
            return None
        instance = await self._find()
        if instance is not None:
            await self._watch.call(self._engine.remove, instance)
            self._is_seen = False
        self._start_is_requested = False
        if self.status.state == "exited":  # not to be stopped by now
            self.status.begin_again()
            self.status.host, self.status.port = self.plan.host, self.plan.port
            self._instance = None
            if (now := run_files.read(self.run_file.run_dir)) is not None:
                self.plan = plan_of(now)  # its share may be another
            self._has_capacity, self._probes = True, 0
            self._unanswered.clear()
            self._publish()
        return 0.0

    async def _stop(self) -> float | None:
        instance = await self._find_to_stop()
        if instance is not None:
            instance = await self._ended(instance)
            self._explain(instance, stopped_by_us=True)
            await self._watch.call(self._engine.remove, instance)
        self._set_state("stopped")
        return 0.0

    async def _ended(self, instance: Instance) -> Instance:
        """Stop an instance; return it as it has ended, when all that it printed is in the log."""
        if instance.state is not InstanceState.EXITED:
            await self._end_instance(instance)
            self._is_seen = False
            instance = await self._find() or instance
        await self._finish_log()
        return instance

    async def _find_to_stop(self) -> Instance | None:
        if self._watch.problem is not None and not self.status.is_asked:
            return None
        was_refused = self.status.instance is None and self.status.exit is not None
        try:
            return await self._find()
        except NameTaken:
            return None
        except EngineRefused:
            if was_refused:  # the library is missing, say: it has none
                return None
            raise

    async def _end_instance(self, instance: Instance) -> None:
        """Stop an instance; once more whenever its deadline has come nearer meanwhile."""
        stops: list[asyncio.Task[None]] = []
        nearest = math.inf
        while not any(stop.done() for stop in stops):
            self._due.clear()
            deadline = self.status.deadline or 0.0
            if deadline < nearest:
                nearest, left = deadline, self.status.seconds_left(boot_seconds())
                stopping = self._watch.call_long(self._engine.stop, instance, left)
                stops.append(asyncio.create_task(stopping))
                stops[-1].add_done_callback(self._note_stop)
            await self._due.wait()
        for stop in stops:
            if stop.done():
                stop.result()

    def _note_stop(self, stop: asyncio.Task[None]) -> None:
        if not stop.cancelled():
            stop.exception()  # retrieved: of several stops, one need not be waited for
        self._due.set()

    # The instance.

    async def _find(self) -> Instance | None:
        """Return the instance, asked for only when something has changed."""
        if self._is_seen:
            return self._instance
        self._is_seen = True  # before it is asked: what changes meanwhile is another question
        try:
            instance = await self._watch.call(self._engine.find, self.plan)
        except Exception:  # no answer that says that there is none
            self._is_seen = False
            raise
        if instance is None:
            self._instance = None
        else:
            self._take(instance)
        return instance

    def _take(self, instance: Instance) -> None:
        """Note which instance it is, and follow its log."""
        if self._instance is None or self._instance.id != instance.id:
            self._pump = None
        self._instance = instance
        if self._pump is None and instance.state is not InstanceState.STARTING:
            self._pump = LogPump(
                self._engine,
                instance,
                run_dir=self.run_file.run_dir,
                log_path=self.run_file.log_path,
                max_bytes=self.run_file.data["max_log_bytes"],
            )
        known = replace(self.status)
        self.status.instance = instance.id
        self.status.pid = instance.pid or self.status.pid
        self.status.ends_at, self.status.replace_at = instance.ends_at, instance.replace_at
        if known != self.status:
            self._publish()

    async def _note_exit(self, instance: Instance | None) -> float | None:
        await self._finish_log()
        self._explain(instance, stopped_by_us=False)
        self._publish()
        return None

    def _note_refusal(self, why: str) -> None:
        self.status.failed = why
        self._note_end(exit_without_start(why))
        self._publish()

    def _explain(self, instance: Instance | None, *, stopped_by_us: bool) -> None:
        """Note how the instance has ended, unless a stop finds that it had before."""
        if stopped_by_us and self.status.exit is not None:
            return
        facts = None if instance is None else instance.exit
        if instance is None and self.status.instance is not None:
            what = f"{self._engine.name} has {self.status.instance[:ID_LENGTH]} no more"
            facts = ExitFacts(ended_by=f"{what}: it was removed, and not by openenvd")
        if instance is not None and instance.is_silent:
            facts = ExitFacts(ended_by=instance.waiting)
        self._note_end(self._reason(facts, stopped_by_us=stopped_by_us))

    def _reason(self, facts: ExitFacts | None, *, stopped_by_us: bool) -> Json:
        return exit_reason(
            facts,
            pid=self.status.pid or 0,
            stopped_by_us=stopped_by_us,
            limit_bytes=self.plan.memory_bytes,
            oom_reported_at=self.status.oom_reported_at,
        ).to_json()

    def _note_end(self, reason: Json) -> None:
        state = self.status.state
        self.status.note_exit(reason, self._log_tail(), time.time())
        if state not in ("starting", "ready"):  # more is requested of it, maybe only just now
            self.status.state = state

    async def _finish_log(self) -> None:
        if self._pump is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pump.ended.wait(), LAST_LINES_SECONDS)
            self._pump.stop()

    def _log_tail(self) -> list[str]:
        return last_lines(self.run_file.log_path, LOG_TAIL_LINES)

    # Its server.

    async def _why_not_ready(
        self, instance: Instance, seconds: float = server_answers.TIMEOUT_SECONDS
    ) -> str | None:
        """Ask its server, at an address of its own or its plan's port; note which answers."""
        usual = address_of(self.plan.host, self.plan.port)
        if self.run_file.is_elsewhere and instance.address:
            usual = instance.address

        async def why_not(address: str) -> str | None:
            url = with_token(address, self.run_file.token)
            return await self._watch.ask(server_answers.why_not_healthy, url, seconds)

        own = instance.address or usual
        address, why = await server_answers.where_it_answers(own, usual, why_not)
        if why is None:
            parts = urlsplit(address)
            self.status.host, self.status.port = parts.hostname, parts.port
        return why

    async def _read_capacity(self) -> Json | None:
        """Ask how full it is; a server that is not ours cannot say."""
        if not self._has_capacity:
            return None
        try:
            url = with_token(self._address, self.run_file.token)
            found = await self._watch.ask(server_answers.read_capacity, url)
        except NotAnswering:
            return None
        self._has_capacity = found is not None and "serving" not in found
        if found is None or not self._has_capacity:
            return found
        known = (self.status.sessions, self.status.sessions_fail, self.status.capacity)
        self.status.sessions = int(found["sessions"])
        self.status.sessions_fail = found.get("sessions_fail")
        self.status.capacity = server_answers.summary(found)
        if self.status.note_reported(found.get("exits", []), self.plan.memory_bytes):
            self._publish()
        elif known != (self.status.sessions, self.status.sessions_fail, self.status.capacity):
            self._server.send_status()
        return found

    @property
    def _address(self) -> str:  # not the gateway's
        return address_of(self.status.host or self.plan.host, self.status.port or self.plan.port)

    @property
    def _where_it_listens(self) -> str:
        if not self.plan.image:  # its sockets are opened for it
            return ""
        port = self.plan.container_port
        return f"; its server must listen on 0.0.0.0, port {port} or the one that its image exposes"

    # Reporting.

    async def _wait(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), seconds)

    def _set_state(self, state: str, *, deadline: float | None = None) -> None:
        self.status.state = state
        self.status.deadline = deadline
        self._publish()

    def _tell_problem(self, problem: str | None) -> bool:
        """Say what keeps the engine from doing what is due; whether that is new."""
        is_new = problem != self.status.problem
        self.status.problem = problem
        if is_new:
            self._server.send_status()
        return is_new

    def _tell_waiting(self, why: str | None) -> None:
        if why != self.status.waiting and self.status.state == "starting":
            self.status.waiting = why
            self._server.send_status()

    def _publish(self) -> None:
        """Write the status down, then send it."""
        self._write_status()
        self._server.send_status()

    def _write_status(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: clients are sent it all the same
            write_json(str(self.run_file.run_dir / STATUS_FILE_NAME), self._to_json())

    def _to_json(self) -> StatusLine:
        return {
            "event": "status",
            "replica_id": self.run_file.replica_id,
            "agent": self._agent,
            **self.status.to_json(),
        }

    def _line(self) -> bytes:
        return encode_line(self._to_json())


def _in(seconds: float) -> float:
    """Return a deadline that no step of the clock moves, and that the next agent understands."""
    return boot_seconds() + min(max(0.0, seconds), LONGEST_SECONDS)


def plan_of(run_file: RunFile) -> ReplicaPlan:
    """Return what an engine is to start."""
    plan = ReplicaPlan.from_json(run_file.data["plan"])
    return replace(plan, run_dir=str(run_file.run_dir))


def is_stopped(run_dir: Path) -> bool:
    """Whether nothing of a replica is left but its folder."""
    return (read_status_file(run_dir) or {}).get("state") == "stopped"


def _seen(instance: Instance | None) -> tuple[object, ...] | None:
    """Return what makes an instance worth another question when it is otherwise."""
    if instance is None:
        return None
    facts = instance.waiting, instance.ends_at, instance.runs
    return instance.id, instance.state, instance.is_on_its_way, *facts


def _hindrance(instance: Instance | None) -> str | None:
    """Return what keeps an instance from running, which clients who wait for it are told."""
    return None if instance is None or instance.is_on_its_way else instance.waiting
