# SPDX-License-Identifier: Apache-2.0
"""A session process: one thread that holds one environment, and blocks in `recv` between messages.

    shard (`sessions/remote_session.py`)               session process
    connections, framing, limits, time-outs  ──call──▶ runs it, and answers with a finished frame
                                             ◀─frame──  ─▶ waits again; it can be forked now

A shard's first one is its template: the supervisor forks it with the environment imported
(`supervisor/session_processes.py`), and it has no environment. Sessions begin in copies of the
template, since it does nothing else, and each shares its pages; copies of these are branches and
checkpoints. Where no fork is safe, the supervisor starts a program for each session instead.

A session process leads a process group, adopts orphans, and ends all that the environment has
started with the session.

Asynchronous methods run on one loop for the life of the process. The loop runs between messages
only if there is something on it: tasks, timers, connections. Only then a fork is refused.

A fork makes all copies of one request. They are children of the supervisor, as the process itself.
Each copy has a socket pair to the shard, a process group and a memory cgroup of its own. Before
each fork, `fork_checks.py` looks for what forbids it. What happens when

    the shard closes its end     the process exits; `close` of the environment is called only if
                                 the shard has asked for it
    `close` comes in a call      an asynchronous call is cancelled, another completed first
    the supervisor exits         the kernel kills the process: the pipe that it reads has no writer
    a call never returns         the shard has the supervisor kill the process after a while
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gc
import inspect
import logging
import marshal
import os
import random
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Never

from ...system.memory.cgroups import Cgroup
from ...system.process import forking
from ...system.process.prctl import adopt_orphans, die_with_writer
from ...system.process.proc import kill_descendants
from ...system.text.json_lines import Json
from ..environment.instances import Calls, Factory, keep_accepted, learn_signature
from ..environment.upstream_types import JsonRpcRequest, RpcCode, rpc_error
from ..serving import mcp, messages
from ..sessions import copying
from ..sessions.copying import Reason
from ..sessions.fork_checks import Found, find_obstacles, reopen_files
from ..sessions.remote_session import FRAME, HEAD, LOST, MAX_COPIES, VALUE
from ..sessions.session import HeldContext
from ..sessions.threads import outcome_of
from ..startup import enter_group, pin_gpu, write_stacks_at_signal

if TYPE_CHECKING:
    from ..environment.definition import Definition

log = logging.getLogger("openenvd.env_host")


class SessionProcess:
    """Holds the environment of one session, and answers the requests of the session's shard."""

    def __init__(
        self,
        definition: Definition,
        end: socket.socket,
        life_fd: int | None,
        state_address: str | None,
        gpus: int,
    ) -> None:
        """Prepare to serve.

        Args:
            definition: The environment.
            end: The end of a socket pair to the shard that has the session.
            life_fd: The reading end of a pipe whose writing end the supervisor has; None if this
                process must not be forked.
            state_address: Of the process with the state that sessions share, if they do.
            gpus: How many devices sessions take in turns.
        """
        self.definition = definition
        self.env: Any = None
        self._end = ShardEnd(end)
        self._life_fd = life_fd
        self._own_life_fd: int | None = None  # of a copy
        self._gpus = gpus
        self._own_fds: set[int] = set()
        self._session_id = ""
        self._timers: dict[int, tuple[float, float]] = {}  # that the environment has set
        self._write = messages.ObservationWriter(definition.observation_form).message
        self._context = contextvars.copy_context()
        self._loop: asyncio.SelectorEventLoop | None = None
        self._held: HeldContext | None = None
        self._state_address = state_address
        self._thread: ThreadPoolExecutor | None = None  # of calls that may wait for the state

    def serve(self, imported_fds: Sequence[int]) -> None:
        """Answer requests until the shard closes its end or ends the session.

        `imported_fds` are the descriptors that the environment opened at its import.
        """
        os.setpgid(0, 0)
        self._own_fds = forking.open_fds() - {*imported_fds}
        write_stacks_at_signal()
        if (env_class := self.definition.env_class) is not None:
            learn_signature(env_class)
            messages.writer_of(self.definition.observation_cls)
        self._end.send_value({"pid": os.getpid()})
        self._serve()
        kill_descendants()

    def _serve(self) -> None:
        adopt_orphans()
        while True:
            self._run_loop()
            try:
                kind, data, fds = self._end.receive()
            except (EOFError, OSError):
                return
            match kind:
                case "close":
                    self._close()
                    return
                case "create":
                    self._end.send_value(_outcome(self._create, data))
                case "fork":
                    self._fork(data, fds)
                case "seed":
                    self._end.send_value(_outcome(_seed, self.env, data))
                case _:
                    result, error = outcome_of(self._call, (kind, data))
                    if error is not None:
                        fields = {"session": self._session_id}
                        result = messages.refusal(kind, error, fields, self.env)
                    self._end.send(FRAME, result)

    # Calls

    def _call(self, kind: str, data: Json) -> bytes:
        """Make one call, and return the answer's frame."""
        calls = self.ready_calls
        match kind:
            case "reset":
                reset = calls.reset
                return self._write(self._run(reset, **keep_accepted(reset, data)))
            case "step":
                return self._write(self._run(calls.step, self.definition.parse_action(data)))
            case "state":
                return messages.state_message(self._run(lambda: self.env.state))
        answer: bytes = self._run(_ask_tools, self, JsonRpcRequest(**data))
        return answer

    @property
    def ready_calls(self) -> Calls:
        """Return how to call the environment."""
        return Calls(self.env)

    async def call(self, method: Callable[..., Any], is_async: bool, *args: Any) -> Any:
        """Make one call from a coroutine; a synchronous method may run an event loop of its own."""
        if is_async:
            return await method(*args)
        if self._thread is not None:
            return await self._loop_of_calls.run_in_executor(self._thread, method, *args)
        asyncio.events._set_running_loop(None)  # noqa: SLF001
        try:
            return method(*args)
        finally:
            asyncio.events._set_running_loop(self._loop)  # noqa: SLF001

    def _run(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method, on the loop if it is asynchronous."""
        if self._thread is not None and not inspect.iscoroutinefunction(method):
            blocking = functools.partial(method, *args, **options)
            result: Any = self._loop_of_calls.run_in_executor(self._thread, blocking)
        else:
            result = method(*args, **options)
        if not inspect.isawaitable(result):
            return result
        loop = self._loop_of_calls
        call = loop.create_task(_await(result), context=self._context)

        def cancel() -> None:  # once: the call may await something to clean up
            loop.remove_reader(self._end.socket)
            call.cancel()

        loop.add_reader(self._end.socket, cancel)  # during a call the shard sends `close` alone
        try:
            return loop.run_until_complete(call)
        except asyncio.CancelledError:
            raise RuntimeError("the environment cancelled its own call") from None
        finally:
            loop.remove_reader(self._end.socket)

    @property
    def _loop_of_calls(self) -> asyncio.SelectorEventLoop:
        if self._loop is None:
            self._loop = asyncio.SelectorEventLoop(selectors.DefaultSelector())
        return self._loop

    async def _connect_state(self, address: str) -> None:
        """Connect to the state that sessions share, and run synchronous calls on a thread."""
        from ..shared_state.connection import ProxyFactory, StateLink  # few have one

        link = StateLink(address, lambda lost: self._end.send(LOST, str(lost).encode()))
        factory = ProxyFactory(self.definition.factory, link)
        self.definition = dataclasses.replace(self.definition, factory=factory)
        self._thread = ThreadPoolExecutor(1)

    def _run_loop(self) -> None:
        """Run the event loop until the shard sends a request, if the loop has anything to do."""
        loop = self._loop
        if loop is None or not _on_loop(loop):
            return
        readable = asyncio.Event()
        loop.add_reader(self._end.socket, readable.set)
        loop.run_until_complete(readable.wait())
        loop.remove_reader(self._end.socket)

    # Beginning and ending

    def _create(self, session: tuple[str, int]) -> Json:
        self._session_id, number = session
        pin_gpu(number, self._gpus)
        if self._state_address is not None:
            self._run(self._connect_state, self._state_address)
        factory = Factory(self.definition.factory, may_use_loop=False)
        try:
            self.env = self._run(factory.create)
        except BaseException as exc:
            return {"failure": factory.failure, "text": f"{type(exc).__name__}: {exc}"}
        if self.ready_calls.signature.holds_mcp:
            self._held = self._run(_hold, self.env.mcp_session)
        return {"may_step": not getattr(type(self.env), "RESET_FIRST", True)}

    def _close(self) -> None:
        """Close the environment."""
        try:
            if self._held is not None:
                self._run(self._held.end)
            if self.env is not None and hasattr(self.env, "close"):
                self._run(self.env.close)
        except Exception:
            name = self._session_id
            text = "session %s: closing its environment failed"
            log.warning(text, name, exc_info=True, extra={"session": name})

    # Copies

    def _fork(self, request: Json, fds: list[int]) -> None:
        """Fork a copy for each descriptor, which is one end of a socket pair.

        Answers with the pids of the copies, and with the obstacles to a fork, or a text if a
        process cannot be started.
        """
        ends = [socket.socket(fileno=fd) for fd in fds]
        answer: Json = {"pids": [], "obstacles": []}
        try:
            obstacles = [] if request["is_new"] else self._obstacles(fds)
            answer["obstacles"] = [(str(reason), name) for reason, name in obstacles]
            if not obstacles:
                for pid in self._copies(request["groups"], ends, is_new=request["is_new"]):
                    answer["pids"].append(pid)
        except Exception as exc:
            log.warning("no copy of a session was made", exc_info=exc)
            reason = getattr(exc, "strerror", None) or exc
            answer["text"] = f"no process can be started: {reason}"
        self._end.send_value(answer)
        for end in ends:
            end.close()

    def _obstacles(self, fds: list[int]) -> list[Found]:
        """Return the obstacles to a fork; `fds` belong to the copies, and are no obstacles."""
        if not forking.CAN_FORK_SIBLINGS:
            return [(Reason.PLATFORM, f"{sys.platform} {os.uname().machine}")]
        if self._life_fd is None:
            return [(Reason.THREADS, "the import of the environment starts threads or processes")]
        own = {*self._own_fds, *fds}
        found: list[Found] = []
        if self._loop is not None:
            found = [(Reason.THREADS, name) for name in _on_loop(self._loop)]
            own |= _fds_of(self._loop)
        return found + find_obstacles(self.env, own)

    def _copies(
        self, groups: list[Json | None], ends: list[socket.socket], *, is_new: bool
    ) -> Iterator[int]:
        """Fork the copies and yield their pids; raises `OSError`."""
        life_fd = self._life_fd
        assert life_fd is not None
        state = random.getstate()  # Python seeds its generator in each fork
        self._timers = {timer: signal.getitimer(timer) for timer in range(3)}  # a fork has none
        gc.freeze()
        forking.flush_output()  # once, and not in each copy
        for group, end in zip(groups, ends, strict=True):
            arguments = group, end, ends, life_fd, None if is_new else state
            yield forking.fork_sibling(functools.partial(self._become_copy, *arguments))

    def _become_copy(
        self,
        group: Json | None,
        end: socket.socket,
        ends: list[socket.socket],
        life_fd: int,
        random_state: Any,
    ) -> Never:
        """Serve in a copy, then exit; `random_state` is None in a copy of the template."""
        finish = forking.finish  # as a program: finalizers may be the environment's
        try:
            for timer, seconds in self._timers.items():
                signal.setitimer(timer, *seconds)
            own_life_fd = die_with_writer(life_fd)
            if self._own_life_fd is not None:  # its parent's
                os.close(self._own_life_fd)
            self._own_fds -= {self._own_life_fd, self._end.socket.fileno()}
            self._own_life_fd = own_life_fd
            os.setpgid(0, 0)
            enter_group(None if group is None else Cgroup.from_json(group), os.getpid())
            self._end.socket.close()
            for other in ends:
                if other is not end:
                    other.close()
            self._end = ShardEnd(end)
            self._own_fds |= {end.fileno(), own_life_fd}
            if random_state is None:
                forking.tell_libraries()
            else:
                finish = forking.flush_and_exit  # its finalizers concern its parent's files
                random.setstate(random_state)
                if self._loop is not None:
                    _renew(self._loop)
                    self._own_fds |= _fds_of(self._loop)
                reopen_files(self._own_fds)
            self._serve()
            kill_descendants()
        except BaseException:
            log.exception("the process of a session failed")
            os._exit(1)
        finish(0)


class ShardEnd:
    """The blocking end of the socket pair to the shard."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.settimeout(None)

    def send(self, kind: int, data: bytes) -> None:
        """Send one message."""
        with contextlib.suppress(OSError):  # the shard has ended; the next read says so
            self.socket.sendall(HEAD.pack(len(data), kind) + data)

    def send_value(self, value: Any) -> None:
        """Send plain data, for the shard."""
        self.send(VALUE, marshal.dumps(value))

    def receive(self) -> tuple[str, Any, list[int]]:
        """Return the next request: what to do, with which data, and descriptors.

        Raises `OSError`, `EOFError`: the shard has ended, or needs this process no more.
        """
        end = self.socket
        head, fds, _, _ = socket.recv_fds(end, HEAD.size, MAX_COPIES, socket.MSG_WAITALL | _CLOEXEC)
        if len(head) < HEAD.size:
            raise EOFError
        length, _ = HEAD.unpack(head)
        data = end.recv(length, socket.MSG_WAITALL)
        while len(data) < length:
            if not (more := end.recv(length - len(data))):
                raise EOFError
            data += more
        kind, value = marshal.loads(data)  # noqa: S302  from our shard
        return kind, value, fds


_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def _outcome(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call and return its result, or the text of its error."""
    result, error = outcome_of(call, args)
    if error is None:
        return result
    log.warning("a session could not be prepared", exc_info=error)
    return {"text": messages.text_of(error)}


def _seed(env: Any, seed: int) -> None:
    """Seed the generators of an environment, and those of the process."""
    copying.reseed(copying.examine(env).generators, seed)
    random.seed(seed)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function)(seed % (1 << 32))


async def _ask_tools(process: SessionProcess, request: JsonRpcRequest) -> bytes:
    try:
        result = await mcp.ask_tools(process.definition, process, request)
    except mcp.RpcFailed as exc:
        return messages.encode_error(rpc_error(exc.code, str(exc)))
    except Exception as exc:
        log.warning("MCP %s failed", request.method, exc_info=True)
        return messages.encode_error(rpc_error(RpcCode.INTERNAL_ERROR, str(exc)))
    return mcp.encode_response({"id": request.id, "result": result})


async def _await(result: Any) -> Any:
    while inspect.isawaitable(result):  # a plain function may have returned a coroutine
        result = await result
    return result


async def _hold(factory: Callable[[], Any]) -> HeldContext:
    held = HeldContext(factory)
    await held.begin()
    return held


def _on_loop(loop: Any) -> list[str]:
    """Return the names of tasks, timers and connections that keep a loop busy between calls."""
    tasks = [f"task {task.get_name()}" for task in asyncio.all_tasks(loop)]
    timers = sum(not each.cancelled() for each in loop._scheduled)  # noqa: SLF001
    connections = len(loop._selector.get_map()) - 1  # noqa: SLF001  one is the loop's own
    counts = (("timers", timers), ("connections", connections), ("callbacks", len(loop._ready)))  # noqa: SLF001
    return tasks + [f"{count} {name} of the event loop" for name, count in counts if count]


def _fds_of(loop: Any) -> set[int]:
    """Return the descriptors that a loop uses for itself."""
    return {loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()}  # noqa: SLF001


def _renew(loop: Any) -> None:
    """Replace the selector and the self-pipe of a loop, which a copy shares with its parent."""
    loop._ssock.close()  # noqa: SLF001
    loop._csock.close()  # noqa: SLF001
    loop._selector.close()  # noqa: SLF001
    loop._internal_fds = 0  # noqa: SLF001
    loop._selector = selectors.DefaultSelector()  # noqa: SLF001
    loop._make_self_pipe()  # noqa: SLF001
