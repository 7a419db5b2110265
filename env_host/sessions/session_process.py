# SPDX-License-Identifier: Apache-2.0
"""A bare session process: one thread without an event loop, which holds one environment.

    holder                                        session process
    (`IsolatedSession`: connections, framing,     blocked in `recv`; runs a call, answers, waits
     limits, time-outs, all sessions)             again; so it can be forked at any time
        │  a session's thread ──request──▶ socket pair ──▶ `_serve`
        │                     ◀──outcome──             ◀──
        └── session 2 ── its own pair ── a copy, made by `fork` for a branch
            checkpoint ── its own pair ── a copy that is not called until a session returns to it

An isolated session becomes bare at its first branch or checkpoint (`detach`): the thread that has
made its calls forks, and is the only thread of the copy. The holder keeps its connections, and runs
no code of the environment any more. Before each fork, `fork_checks.py` looks for what forbids it.

An asynchronous method runs on a loop that is made for the call. In the copy, descriptors of the
holder become the null device: its sockets and its epoll would otherwise be shared.

Who dies when                        What happens
    a session process                the calls of its session fail, and the session ends; parent,
                                     branches and checkpoints have processes of their own
    the parent of a branch           its copies continue; the holder adopts and reaps them
    the holder                       the kernel kills its session processes: a pipe that each reads
                                     has no writer any more; the supervisor tells the clients
    a call that never returns        its process is killed with its session
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import pickle
import random
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Never

from ...system.memory.cgroups import Cgroup
from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ...system.process import forking
from ...system.process.prctl import die_with_writer
from ...system.process.proc import kill
from ...system.text.json_lines import Json
from ..environment.instances import Calls, keep_accepted
from ..errors import PLACE_ATTRIBUTE, SessionEnded
from ..startup import cap_sentence
from . import copying
from .copying import unsupported
from .fork_checks import Found, find_obstacles, reopen_files
from .threads import outcome_of

_LENGTH = struct.Struct("!Q")
_PID = struct.Struct("!I")


class SessionProcess:
    """The holder's end of a session process; called on one thread at a time."""

    def __init__(self, pid: int, end: socket.socket, group: Cgroup | None = None) -> None:
        self.pid = pid
        self.killed_for = ""  # by us
        self._end = end
        self._group = group  # its own, or that of the process that it was forked from
        self._forking = threading.Lock()  # sessions may return to one checkpoint at once

    def ask(self, what: str, *args: Any) -> Any:
        """Make a call of the environment and return its result; raises what it has raised.

        Raises `SessionEnded`: the process has ended.
        """
        try:
            _send(self._end, (what, args))
            result, error = _receive(self._end)
        except (EOFError, OSError) as exc:
            raise self._lost() from exc
        if error is not None:
            raise error
        return result

    def fork(self, count: int, groups: Sequence[Cgroup] = ()) -> list[SessionProcess]:
        """Make copies of the process, which move into the groups, if any.

        Raises `BranchRefused`: something forbids it.
        """
        places: list[Cgroup | None] = [*groups] or [None] * count
        with self._forking:
            refuse_if(self.ask("fork", [each and each.to_json() for each in places]))
            return [self._receive_copy(each) for each in places]

    def _receive_copy(self, group: Cgroup | None) -> SessionProcess:
        data, fds, _, _ = socket.recv_fds(self._end, _PID.size, 1)
        if not fds:
            raise self._lost()
        end = socket.socket(fileno=fds[0])
        return SessionProcess(_PID.unpack(data)[0], end, group or self._group)

    def _lost(self) -> SessionEnded:
        why, group = self.killed_for or "has ended", self._group
        if group is not None and group.oom_kills() and (limit := group.limit_bytes()):
            why = cap_sentence(limit)
        text = f"The process of this session (pid {self.pid}) {why}."
        return SessionEnded(text, INTERNAL_ERROR_CLOSE)

    def discard(self) -> None:
        """Let the process exit: it reads the end of its socket pair."""
        self._end.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have exited by now
                pass


class RemoteEnvironment:
    """An environment in a session process, as a session calls it."""

    def __init__(self, process: SessionProcess) -> None:
        self.process = process

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode."""
        return self.process.ask("reset", arguments)

    def step(self, action: Any) -> Any:
        """Act once."""
        return self.process.ask("step", action)

    @property
    def state(self) -> Any:
        """The state of the episode."""
        return self.process.ask("state")

    def close(self) -> None:
        """Close the environment; its process exits."""
        with contextlib.suppress(SessionEnded):
            self.process.ask("close")
        self.process.discard()

    def kill(self) -> None:
        """End a process whose call does not return."""
        kill(self.process.pid)


def refuse_if(found: list[Found]) -> None:
    """Raise `BranchRefused` if a look has found anything."""
    if found:
        reason = found[0][0]
        raise unsupported(reason, [name for each, name in found if each is reason])


def detach(
    env: Any, own_fds: Collection[int], life_fd: int, groups: Sequence[Cgroup] = ()
) -> SessionProcess:
    """Fork a process that has this environment from now on; call it where `env` is called.

    `own_fds` are the holder's; `life_fd` is a pipe whose other end is closed when the holder exits,
    and then the process is killed. Raises `BranchRefused`: something forbids it.
    """
    known = {os.getpid(), threading.get_native_id()}
    refuse_if([*_pending_tasks(), *find_obstacles(env, own_fds, known, ())])
    ours, theirs = socket.socketpair()
    group = groups[0] if groups else None
    place = None if group is None else group.to_json()
    foreign = {*own_fds, ours.fileno()}
    pid = _fork(functools.partial(_begin, env, theirs, foreign, life_fd, place))
    theirs.close()
    return SessionProcess(pid, ours, group)


def _pending_tasks() -> list[Found]:
    """Return the environment's own tasks on the running loop, if any: a copy would lack them."""
    if not asyncio.events._get_running_loop():  # noqa: SLF001  a session's thread has none
        return []
    codes = ((task, getattr(task.get_coro(), "cr_code", None)) for task in asyncio.all_tasks())
    own = ("/env_host/", "/uvicorn/")
    names = ("wait-for-signal",)  # ours, of the standard library's code
    return [
        (copying.Reason.THREADS, f"task {task.get_name()}")
        for task, code in codes
        if code is not None
        and task.get_name() not in names
        and not any(each in code.co_filename for each in own)
    ]


def _fork(in_child: Callable[[], Never]) -> int:
    """Fork; the random numbers of the child continue as its parent's, unlike after `os.fork`."""
    state = random.getstate()
    gc.freeze()
    if (pid := os.fork()) == 0:
        try:
            random.setstate(state)
            in_child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _begin(
    env: Any,
    end: socket.socket,
    foreign_fds: Collection[int],
    life_fd: int,
    place: Json | None,
    own_fds: Collection[int] = (),
) -> Never:
    """In a copy: replace the holder's descriptors, and those of its parent; serve."""
    life_fd = die_with_writer(life_fd)
    if place is not None:
        with contextlib.suppress(OSError):  # it has ended by now, or the group may not be entered
            Cgroup.from_json(place).add(os.getpid())
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in foreign_fds:
        if fd not in (0, 1, 2, end.fileno(), life_fd):
            os.dup2(null, fd, inheritable=False)
    asyncio.events._set_running_loop(None)  # noqa: SLF001  if the loop's own thread forked
    known = {*own_fds, *foreign_fds, null, end.fileno(), life_fd}
    reopen_files(known)
    _serve(env, end, known, life_fd)


def _serve(env: Any, end: socket.socket, own_fds: set[int], life_fd: int) -> Never:
    """Answer the holder's requests until it closes its end."""
    calls, forked = Calls(env), list[int]()
    while True:
        try:
            what, args = _receive(end)
        except (EOFError, OSError):
            os._exit(0)
        forked = [pid for pid in forked if not _has_exited(pid)]
        if what == "fork":
            known = {os.getpid(), threading.get_native_id()}
            found = find_obstacles(env, own_fds, known, forked)
            _send(end, (found, None))
            if not found:
                forked += _fork_copies(env, end, own_fds, life_fd, *args)
            continue
        result, error = outcome_of(_call, (calls, what, *args))
        _send(end, (result, _with_place(error)))
        if what == "close":
            forking._flush_and_exit(0)  # noqa: SLF001


def _has_exited(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # the environment has waited for its children
        return True


def _fork_copies(
    env: Any, end: socket.socket, own_fds: set[int], life_fd: int, places: list[Json | None]
) -> Iterator[int]:
    """Fork, and send the holder pid and socket of each copy as soon as it is made."""
    for place in places:
        held, theirs = socket.socketpair()
        foreign = {end.fileno(), held.fileno()}
        pid = _fork(functools.partial(_begin, env, theirs, foreign, life_fd, place, own_fds))
        theirs.close()
        socket.send_fds(end, [_PID.pack(pid)], [held.fileno()])
        held.close()
        yield pid


def _call(calls: Calls, what: str, *args: Any) -> Any:
    """Make one call of the environment."""
    if what == "state":
        return calls.env.state
    if what == "seed":
        return _seed(calls.env, *args)
    if what == "close":
        result = calls.env.close() if hasattr(calls.env, "close") else None
    elif what == "reset":
        result = calls.reset(**keep_accepted(calls.reset, args[0]))
    else:
        result = calls.step(*args)
    if inspect.isawaitable(result):
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            return runner.run(_await(result))
    return result


def _with_place(error: Exception | None) -> Exception | None:
    """Note in an error the line that raised it: its traceback stays in this process."""
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    for frame, line in frames[-1:]:
        code = frame.f_code
        with contextlib.suppress(AttributeError):  # it takes no attribute
            setattr(error, PLACE_ATTRIBUTE, f"{code.co_filename}:{line}, in {code.co_name}")
    return error


async def _await(result: Any) -> Any:
    return await result


def _seed(env: Any, seed: int) -> None:
    """Seed the generators of the environment, and those of the process."""
    copying.reseed(copying.examine(env).generators, seed)
    random.seed(seed)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function)(seed % (1 << 32))


def _send(end: socket.socket, value: Any) -> None:
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if isinstance(value[1], Exception):
            pickle.loads(data)  # noqa: S301  some cannot be made again from their arguments
    except Exception as exc:  # a result, or an error, that has no form outside of its process
        text = f"the answer cannot leave its process: {type(exc).__name__}: {exc}"
        cause = f": {value[1]}" if isinstance(value[1], Exception) else ""
        data = pickle.dumps((None, RuntimeError(text + cause)), pickle.HIGHEST_PROTOCOL)
    end.sendall(_LENGTH.pack(len(data)) + data)


def _receive(end: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    return pickle.loads(_read(end, length))  # noqa: S301  from a process of this session


def _read(end: socket.socket, length: int) -> bytes:
    data = end.recv(length, socket.MSG_WAITALL)
    while len(data) < length:
        if not (more := end.recv(length - len(data))):
            raise EOFError
        data += more
    return data
