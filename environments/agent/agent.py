# SPDX-License-Identifier: Apache-2.0
"""The agent: the process that holds one engine's library, for all replicas of one home.

`agent_client.py` starts it as `python -m openenvd.environments.agent.agent HOME ADDRESS`.

    daemon, launches ──▶ a socket for each replica ──▶ EngineReplica ─┐
    launches, down   ──▶ its own socket (adopt, list, …) ──▶ Agent    ├──▶ EngineWatch ──▶ engine
                                                              └───────┘
Failure cases

    it is killed              replicas run on. The daemon, which sees its connections end, starts
                              another, which finds run files, and the instances by their names
    the engine is gone        every replica keeps its state, and its status says why
    its library is missing    replicas cannot be started, and their status says so; the agent
                              answers all the same
    two agents                the second waits for the lock of the first. The first ends when it
                              finds that the socket at its path is another's
    a run folder is removed   its instance becomes a stray; nothing is stopped
    a run file is unreadable  its replica is not served, and the agent's log says why
    its home is removed       the agent ends, since its socket is gone
    it has nothing to do      after `IDLE_SECONDS` without a replica it ends, holding the start lock

An instance that carries this home's label and has no run file is a *stray*. The agent lists strays
in `strays.json`, for the daemon to show, and stops none of its own accord.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock
from setproctitle import setproctitle

from ...schema.layout import Layout, make_private
from ...schema.replica import Process
from ...system.process.proc import set_oom_score_adj
from ...system.process.process_identity import ProcessIdentity
from ...system.text.json_lines import Json, decode_line, encode_line
from .. import run_files
from ..agent_client import ADDRESS_FILE_NAME, STRAYS_FILE_NAME, EngineAddress, start_lock
from ..engines.base import Engine, EngineError, EngineRefused, Instance
from ..engines.registry import load
from ..run_files import RunFile
from ..shim.files import CONTROL_FD_VARIABLE, inherited_sockets, write_json
from ..shim.loop import enter_shims_group, leave_shims_group
from .engine_watch import EngineWatch
from .replica import EngineReplica

IDLE_SECONDS = 60.0  # without a replica or a question
POLL_INTERVAL_SECONDS = 1.0  # between two checks of its socket and of run folders
AGENT_LOCK = "agent.lock"  # held by the agent as long as it lives

log = logging.getLogger(__name__)


class UnusableEngine:
    """Stands for an engine whose library is missing: each method raises why. Replicas continue."""

    def __init__(self, why: EngineRefused) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: object) -> NoReturn:
            raise self._why

        return refuse


class Agent:
    """One engine's agent: its replicas, and its own socket."""

    def __init__(
        self,
        layout: Layout,
        at: EngineAddress,
        engine: Engine,
        control: socket.socket,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._layout = layout
        self._at = at
        self._control = control
        self._folder = layout.engines / at.key
        identity = ProcessIdentity.of(os.getpid())
        self._identity: Process = {"pid": identity.pid, "started_at": identity.started_at}
        self._watch = EngineWatch(engine, self._on_look, self._on_problem)
        self._replicas: dict[Path, EngineReplica] = {}  # by run directory
        self._tasks: dict[Path, asyncio.Task[None]] = {}
        self._adopting = asyncio.Lock()
        self._strays: list[Json] | None = None  # as listed last; None: never
        self._idle_seconds = idle_seconds
        self._busy_at = time.monotonic()
        self._inode = layout.agent_socket(at.key).stat().st_ino

    async def run(self) -> None:
        """Serve until there is nothing to do, or another agent has the socket."""
        following = asyncio.create_task(self._watch.run())
        for run_file in await asyncio.to_thread(run_files.all_of, self._layout.runs):
            if self._has(run_file) and not run_files.is_stopped(run_file.run_dir):
                try:
                    await self._adopt(run_file)
                except (OSError, LookupError, TypeError, ValueError):  # the others are served
                    log.exception("cannot serve %s", run_file.replica_id)
        server = await asyncio.start_unix_server(self._serve, sock=self._control)
        while self._has_socket() and not following.done():
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            for run_dir, replica in list(self._replicas.items()):
                if not run_dir.exists():
                    await self._drop(replica)
                    self._watch.look_soon()
            if self._end_if_idle():
                break
        server.close()
        for replica in list(self._replicas.values()):
            await replica.close()
        self._watch.close()
        if not following.cancel():  # it has ended before
            following.result()

    def _has(self, run_file: RunFile) -> bool:
        return run_file.provider == self._at.engine and run_file.engine == self._at

    async def _adopt(self, run_file: RunFile) -> None:
        async with self._adopting:  # a launch and the daemon may both ask for it
            known = self._replicas.get(run_file.run_dir)
            if known is not None and known.run_file.created_at == run_file.created_at:
                return
            if known is not None:  # from an earlier attempt of the same launch
                await self._drop(known)
            replica = EngineReplica(run_file, self._watch, self._identity)
            replica.open()
            self._replicas[run_file.run_dir] = replica
            task = self._tasks[run_file.run_dir] = asyncio.create_task(replica.run())
            task.add_done_callback(lambda _: self._forget(replica))

    async def _drop(self, replica: EngineReplica) -> None:
        self._tasks[replica.run_file.run_dir].cancel()
        await replica.close()
        self._forget(replica)

    def _forget(self, replica: EngineReplica) -> None:
        run_dir = replica.run_file.run_dir
        if self._replicas.get(run_dir) is replica:
            del self._replicas[run_dir], self._tasks[run_dir]
        self._busy_at = time.monotonic()

    def _on_look(self, instances: list[Instance]) -> None:
        found = {each.labels.replica: each for each in instances}
        for replica in self._replicas.values():
            replica.observe(found.get(replica.run_file.replica_id))
        self._write_strays(instances)

    def _on_problem(self, problem: str | None) -> None:
        for replica in self._replicas.values():
            replica.note_problem(problem)

    def _is_stray(self, instance: Instance) -> bool:
        is_ours = instance.labels.home == self._layout.home_label
        return is_ours and run_files.read(self._layout.run_dir(instance.labels.replica)) is None

    def _write_strays(self, instances: list[Instance]) -> None:
        self._strays = strays = [_view(each) for each in instances if self._is_stray(each)]
        with contextlib.suppress(OSError):
            write_json(str(self._folder / STRAYS_FILE_NAME), {"strays": strays})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._busy_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            async for line in reader:
                writer.write(encode_line(await self._answer(line)))
                await writer.drain()
                self._busy_at = time.monotonic()
        writer.close()

    async def _answer(self, line: bytes) -> Json:
        try:
            return {"ok": True, **await self._handle_command(decode_line(line))}
        except EngineError as exc:
            return {"error": {"message": exc.message, "hint": exc.hint}}
        except Exception as exc:  # of an engine's library, too
            log.exception("cannot answer %s", line.decode(errors="replace").strip())
            return {"error": {"message": f"{type(exc).__name__}: {exc}", "hint": None}}

    async def _handle_command(self, message: Json) -> Json:
        engine = self._watch.engine
        match message.get("op"):
            case "adopt":
                run_file = run_files.read(Path(message["run_dir"]))
                if run_file is None or not self._has(run_file):
                    raise LookupError(f"{message['run_dir']} has no replica of {self._at}")
                await self._adopt(run_file)
                return {}
            case "list":
                self._write_strays(list(await self._watch.call(engine.list)))
                return {}
            case "stop":
                await self._stop_stray(message["instance"], float(message["grace_seconds"]))
                return {}
            case op:
                raise ValueError(f"unknown op: {op!r}")

    async def _stop_stray(self, instance_id: str, grace_seconds: float) -> None:
        engine = self._watch.engine
        found = [each for each in await self._watch.call(engine.list) if each.id == instance_id]
        for instance in found:
            if not self._is_stray(instance):
                raise EngineRefused(f"{instance_id} is no stray of this home")
            await self._watch.call_long(engine.stop, instance, grace_seconds)
            if not self._is_stray(instance):  # it was recorded meanwhile
                raise EngineRefused(f"{instance_id} is no stray any more")
            await self._watch.call(engine.remove, instance)
        self._watch.look_soon()

    def _has_socket(self) -> bool:
        try:
            return self._layout.agent_socket(self._at.key).stat().st_ino == self._inode
        except OSError:
            return False

    def _end_if_idle(self) -> bool:
        """Remove the socket, unless there is a replica, a client, or a starter of an agent."""
        if self._replicas or time.monotonic() - self._busy_at < self._idle_seconds:
            return False
        try:
            with start_lock(self._folder).acquire(blocking=False):
                if select.select([self._control], [], [], 0)[0]:
                    return False
                self._layout.agent_socket(self._at.key).unlink(missing_ok=True)
                if self._watch.problem is None and self._strays == []:
                    (self._folder / ADDRESS_FILE_NAME).unlink(missing_ok=True)
                return True
        except OSError:
            return False


def _view(instance: Instance) -> Json:
    return {"id": instance.id, **asdict(instance.labels), "state": instance.state}


async def _run(layout: Layout, at: EngineAddress, control: socket.socket) -> None:
    engine: Any
    try:
        engine = load(at.engine)
    except EngineRefused as exc:
        engine = UnusableEngine(exc)
    await Agent(layout, at, engine, control).run()


def main(home: Path, at: EngineAddress) -> None:
    """Run as the agent of an engine; the process's variables say where the engine is."""
    setproctitle(f"openenvd: agent {at.engine}")
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's
        signal.signal(number, signal.SIG_IGN)
    set_oom_score_adj(os.getpid(), 0)  # a worker's is higher
    layout = Layout(home)
    [control] = inherited_sockets(CONTROL_FD_VARIABLE)
    held = FileLock(make_private(layout.engines / at.key) / AGENT_LOCK, mode=0o600)
    held.acquire()  # until this process ends; waits for an agent that is ending
    entered = enter_shims_group(layout.replica_groups)  # the starter's, a worker's, is capped
    try:
        asyncio.run(_run(layout, at, control))
    finally:
        leave_shims_group(entered)
    # Threads may wait for the engine without end; the next agent does what they would have done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), EngineAddress.from_json(json.loads(sys.argv[2])))
