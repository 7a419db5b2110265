# SPDX-License-Identifier: Apache-2.0
"""Decides how many sessions are served, in how many processes, and whether each has its own.

`plan_of` decides once, when the host starts, from the configuration, what the class allows and what
the machine has. `try_factory` creates one environment in a process of its own, whose end also ends
what the factory leaves behind (threads, connections, a browser).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import select
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Never

from ...schema.protocol import DEFAULT_SESSIONS, HostConfig
from ...system.memory.cgroup_tree import free_memory_bytes
from ...system.process.prctl import die_with_parent
from ...system.process.proc import kill, signal_name
from ...system.text.units import MB
from ..errors import NotConcurrent
from ..startup import fitting_sessions, sessions_of_process, stacks_signal, write_stacks_at_signal
from .definition import Definition
from .instances import failure_of

# What an isolated session is expected to need by default: 1 MB, and an environment.
ISOLATED_SESSION_BYTES = 48 * MB
ISOLATED_PER_CORE = 16  # most, by default
MAX_CORES = 4096
MAX_SHARDS = 256
MEMORY_SHARE = 0.5  # of the free memory, for isolated sessions when their number is not configured
TRIAL_SECONDS = 5.0
SLOW_SECONDS = 10.0  # after which the stack of a factory is logged
NOTE_ON_HOOKS = (
    "this project has start-up or shutdown hooks, which run in one process: it serves all sessions "
    "unless --shards or --isolate adds processes, which do not see what the hooks made"
)
_MAX_BYTES = 4096  # more than any answer has

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores, memory and devices of the machine."""

    cores: int
    fds: int  # each process may have
    memory_bytes: int | None  # None: not known


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """The number of shards and sessions, and how sessions are isolated."""

    shards: int
    max_sessions: int  # all together
    isolates: bool  # a process for each session
    exclusive: bool  # one session at a time in a process
    keeps_one: bool = False  # the first shard stays, whether or not anybody has connected

    def share(self, index: int) -> int:
        """Return how many of the sessions are the shard's."""
        each, left = divmod(self.max_sessions, self.shards)
        return each + (index < left)

    def with_sessions(self, asked: int, fds: int) -> ServingPlan:
        """Return this plan for another number of sessions, in as many processes as before."""
        fds //= 1 + self.isolates
        asked = 1 if self.exclusive else fitting_sessions(asked, fds, self.shards)
        return replace(self, max_sessions=asked)


def plan_of(
    config: HostConfig,
    machine: Machine,
    *,
    is_concurrent: bool,
    class_name: str,
    has_own_hooks: bool = False,
) -> ServingPlan:
    """Decide the plan.

    A project's start-up hooks run in one process. Its environments may use what the hooks make, so
    one process serves them all, as upstream's does, unless several are requested. Raises
    `NotConcurrent`: several sessions in one process were requested for a class that allows one.
    """
    asked = config.max_sessions
    isolates = not is_concurrent and asked != 1 and not (has_own_hooks and asked is None)
    if isolates if config.wants_isolation is None else config.wants_isolation:
        most = asked or machine.cores * ISOLATED_PER_CORE
        if asked is None and machine.memory_bytes is not None:
            each = config.session_memory_bytes or ISOLATED_SESSION_BYTES
            most = max(1, min(most, int(machine.memory_bytes * MEMORY_SHARE) // each))
        shards = min(most, config.shards or 1)  # one: a branch takes a slot of its session's shard
        fitting = fitting_sessions(most, machine.fds // 2, shards)
        return ServingPlan(shards, fitting, isolates=True, exclusive=False, keeps_one=True)
    if not is_concurrent:
        if asked is not None and asked > 1:
            raise NotConcurrent(class_name, asked)
        return ServingPlan(1, 1, isolates=False, exclusive=True, keeps_one=has_own_hooks)
    most = asked or DEFAULT_SESSIONS
    shards = config.shards or config.gpus or (1 if has_own_hooks else machine.cores)
    if asked is not None and config.shards is None and machine.fds != resource.RLIM_INFINITY:
        with_fds = -(-asked // sessions_of_process(machine.fds))  # have enough descriptors
        shards = max(shards, min(MAX_SHARDS, with_fds))
    shards = min(shards, most)
    fitting = fitting_sessions(most, machine.fds, shards)
    return ServingPlan(shards, fitting, isolates=False, exclusive=False, keeps_one=has_own_hooks)


def this_machine(config: HostConfig, fds: int) -> Machine:
    """Find what this process may use, where the configuration does not say."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(cores or 1, config.cores or MAX_CORES)
    return Machine(cores, fds, config.memory_bytes or free_memory_bytes())


def supports_concurrency(
    definition: Definition,
    sessions_fail: Callable[[str], None],
    seconds: float | None = TRIAL_SECONDS,
    *,
    tries_class: bool = False,
    differs: Callable[[str], None] = lambda _: None,
) -> tuple[bool, str]:
    """Return whether sessions may run side by side, and the name of the class that says so.

    A factory that is not a class is tried once, for a limited time unless `seconds` is None: a
    launch is not ready before a session can begin. When it fails, `sessions_fail` is called with
    the cause; when it was not ready in time, its code may name the class. A class needs no trial
    for its answer: `tries_class` tries it for `sessions_fail` only. `differs` is called with a
    sentence if the factory gives all sessions the same environment.
    """
    if definition.env_class is None or tries_class:
        trial = try_factory(definition, seconds)
        if trial.failure is not None:
            sessions_fail(trial.failure)
        if trial.is_shared:
            differs(
                f"{definition.factory_name} returns the same environment to each session, which "
                "only sessions of the same process share; --shards 1 serves all sessions in one "
                "process"
            )
        if trial.marking is not None:
            return trial.marking
    if (made_class := definition.made_class) is not None:
        return marking_of(made_class)
    return False, definition.factory_name


class Trial(NamedTuple):
    """The result of a trial: the marking of the class, or a failure, or neither in time."""

    marking: tuple[bool, str] | None = None  # as `marking_of` returns it
    failure: str | None = None
    is_shared: bool = False  # the factory returns an object that was there before, or keeps it


def try_factory(definition: Definition, seconds: float | None = TRIAL_SECONDS) -> Trial:
    """Create an environment and close it again; waits at most `seconds`."""
    reading, writing = os.pipe()
    parent = os.getpid()
    with open(reading, "rb", buffering=0) as answer:
        try:
            pid = os.fork()
        except OSError as exc:
            os.close(writing)
            return Trial(failure=f"it could not be tried: {exc}")
        if pid == 0:
            _answer(definition, writing, parent)
        os.close(writing)
        limit = SLOW_SECONDS if seconds is None else seconds
        is_answered = bool(select.select([answer], [], [], limit)[0])
        if seconds is None and not is_answered:
            name = definition.factory_name
            log.warning("%s has created no environment for %g s; it is here:", name, limit)
            os.kill(pid, stacks_signal())
            is_answered = bool(select.select([answer], [], [])[0])
        text = answer.read(_MAX_BYTES) if is_answered else b""
    kill(pid, group=True)  # with what it has started itself
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not is_answered:
        log.warning("%s created no environment in %g s", definition.factory_name, seconds)
        return Trial()
    if not text:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return Trial(failure=f"the process that created an environment {how}")
    marking, failure, is_shared = json.loads(text)
    return Trial(marking and tuple(marking), failure, is_shared)


def marking_of(env_class: type) -> tuple[bool, str]:
    """Return whether a class supports concurrent sessions, and the name of the class."""
    return bool(getattr(env_class, "SUPPORTS_CONCURRENT_SESSIONS", False)), env_class.__name__


def _answer(definition: Definition, writing: int, parent: int) -> Never:
    """In the child: create an environment, answer, close it, and exit."""
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        write_stacks_at_signal()
        gc.unfreeze()
        existing = gc.get_objects()
        env: Any = None
        try:
            env = definition.factory()
            is_shared = hasattr(definition.factory, "cache_info")  # of `functools.lru_cache`
            is_shared |= any(each is env for each in existing)
            trial = Trial(marking_of(type(env)), is_shared=is_shared)
        except BaseException as exc:  # each session will report it
            text = "%s could not create an environment to inspect"
            log.warning(text, definition.factory_name, exc_info=True)
            trial = Trial(failure=failure_of(exc))
        os.write(writing, json.dumps(trial).encode())
        with contextlib.suppress(BaseException):
            env.close()
    finally:
        os._exit(0)
