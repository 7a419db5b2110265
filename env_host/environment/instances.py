# SPDX-License-Identifier: Apache-2.0
"""Environment instances: where one is created (`Factory`), and how it is called (`Calls`).

    the class is synchronous            created on the session's thread, where its calls run
    asynchronous, or not known yet      created on the session's thread, which then ends
    asynchronous, and quick to create   created on the event loop: no thread at all

Quick is measured by the thread's own CPU time, too, since wall time includes waits for the GIL.
Creations that hold the loop for too long, or one that fails there (it may want a loop of its own),
send all later ones back to threads, for good.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

from pydantic import BaseModel

from . import interfaces

UPSTREAM_INTERFACES = "openenv.core.env_server.interfaces"
UPSTREAM_MCP_ENVIRONMENT = "openenv.core.env_server.mcp_environment"

QUICK_CPU_SECONDS = 0.002
QUICK_SECONDS = 0.1
STALL_SECONDS = 0.05  # on the loop
MCP_ATTRIBUTES = ("mcp_client", "mcp_server")  # of an environment with tools
MAX_FAILURE_CHARACTERS = 300
MAX_LOGGED = 20  # causes of failures whose tracebacks a process logs
MAX_STALLS = 3  # a machine that is busy elsewhere causes some, too

_OVERRIDABLE = frozenset({"reset", "reset_async", "step", "step_async", "close", "mcp_session"})

_OWN_FOLDERS = ("serving", "sessions", "environment", "shard")
_PYDANTIC = str(Path(inspect.getfile(BaseModel)).parent)
_NOT_THEIRS = ("<", _PYDANTIC, *(str(Path(__file__).parents[1] / name) for name in _OWN_FOLDERS))
_STANDARD_LIBRARY = re.escape(f"{sysconfig.get_path('stdlib')}{os.sep}")
_INSTALLED = re.compile(rf"^{_STANDARD_LIBRARY}|/(site|dist)-packages/")

# By function: whether it takes any keyword, and the names that it excludes then, or else takes.
_keywords: dict[Any, tuple[bool, frozenset[str]]] = {}
_signatures: dict[type, CallSignature] = {}

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The way in which environments of one class are called."""

    reset_name: str
    reset_is_async: bool
    step_name: str
    step_is_async: bool
    closes: bool  # its `close` does something
    holds_mcp: bool  # it has an MCP connection to be held while its session lasts

    @property
    def is_async(self) -> bool:
        """Return whether the environment needs no thread."""
        return self.reset_is_async and self.step_is_async


class Calls:
    """The methods of one environment instance."""

    __slots__ = ("env", "signature")

    def __init__(self, env: Any) -> None:
        self.env = env
        self.signature = call_signature_of(env)

    @property
    def reset(self) -> Callable[..., Any]:
        """`reset_async` where a subclass defines it, otherwise `reset`."""
        method: Callable[..., Any] = getattr(self.env, self.signature.reset_name)
        return method

    @property
    def step(self) -> Callable[..., Any]:
        """`step_async` where a subclass defines it, otherwise `step`."""
        method: Callable[..., Any] = getattr(self.env, self.signature.step_name)
        return method


def plain_state(state: Any) -> dict[str, Any]:
    """Return a state, which is a model, a mapping or nothing, as plain data."""
    plain: Any = state.model_dump() if hasattr(state, "model_dump") else state
    return dict(plain) if plain else {}


def call_signature_of(env: Any) -> CallSignature:
    """Find how `env` is called; remembered for its class, unless it has methods of its own."""
    if not _OVERRIDABLE.isdisjoint(getattr(env, "__dict__", ())):
        return _find_signature(env)
    signature = _signatures.get(type(env))
    if signature is None:
        signature = _signatures[type(env)] = _find_signature(env)
    return signature


def learn_signature(env_class: type) -> None:
    """Cache how environments of a class are called, for the processes that are forked later."""
    signature = _signatures[env_class] = _find_signature(env_class)
    reset = getattr(env_class, signature.reset_name)
    if inspect.isfunction(reset):
        keep_accepted(MethodType(reset, env_class), {"seed": None})


def may_use_loop(env_class: type) -> bool:
    """Return whether calls of a class's environments may run on the event loop, tools included."""
    signature = _find_signature(env_class)
    functions = (each for owner in env_class.__mro__ for each in vars(owner).values())
    codes = (each.__code__ for each in functions if inspect.isfunction(each))
    names = {name for code in codes for name in code.co_names}
    is_async = signature.reset_is_async or signature.step_is_async
    return is_async or signature.holds_mcp or not names.isdisjoint(MCP_ATTRIBUTES)


def keep_accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that `function` takes; OpenEnv drops the others silently."""
    if not arguments:
        return arguments
    key = getattr(function, "__func__", function)
    if key not in _keywords:
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # A bound method has its `self` already.
        taken = frozenset(inspect.signature(key).parameters) - frozenset(parameters)
        _keywords[key] = takes_any, taken if takes_any else frozenset(parameters)
    takes_any, names = _keywords[key]
    return {name: value for name, value in arguments.items() if (name in names) is not takes_any}


def failure_of(exc: BaseException) -> str:
    """Return in one line why an environment could not be created: class, text, file and line."""
    try:
        lines = str(exc).splitlines() or [""]
    except Exception:  # it cannot describe itself
        lines = [""]
    where = shown_place(traceback.walk_tb(exc.__traceback__))
    return f"{type(exc).__name__}: {lines[0]}"[: MAX_FAILURE_CHARACTERS - len(where)] + where


class Factory:
    """Creates environments, and learns from each creation."""

    def __init__(self, function: Callable[[], Any], *, may_use_loop: bool) -> None:
        self._function = function
        self._may_use_loop = may_use_loop
        self._stalls = 0
        self.uses_loop = False  # for the next creation
        self.failure: str | None = None  # of the last creation; empty when it succeeded
        self._threads: dict[int, float] = {}  # that create environments, and since when
        self._logged: set[tuple[type[BaseException], str]] = set()  # causes of failures

    def create_on_loop(self) -> Any:
        """Create an environment here and now; None if it has to be created on a thread."""
        if not self.uses_loop:
            return None
        started = time.monotonic()
        try:
            env = self._function()
        except Exception:
            log.info("creating an environment on the loop failed; using a thread", exc_info=True)
            self._leave_loop()
            return None
        self.failure = ""
        seconds = time.monotonic() - started
        self._stalls += seconds >= STALL_SECONDS
        if self._stalls >= MAX_STALLS or not call_signature_of(env).is_async:
            text = "creating an environment blocked the event loop for %.3f s; using threads"
            log.warning(text, seconds)
            self._leave_loop()
        return env

    def create(self) -> Any:
        """Create an environment, on any thread; raises whatever the factory raises."""
        started, cpu = time.monotonic(), time.thread_time()
        self._threads[threading.get_ident()] = started
        try:
            env = self._function()
        except BaseException as exc:
            self.failure = failure_of(exc)
            cause = (type(exc), place_of(traceback.walk_tb(exc.__traceback__)))
            if cause not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(cause)
                log.warning("an environment could not be created", exc_info=exc)
            raise
        finally:
            del self._threads[threading.get_ident()]
        self.failure = ""
        if self._may_use_loop and call_signature_of(env).is_async:
            seconds, cpu_seconds = time.monotonic() - started, time.thread_time() - cpu
            self.uses_loop |= seconds < QUICK_SECONDS and cpu_seconds < QUICK_CPU_SECONDS
        return env

    def note_slow(self, seconds: float) -> None:
        """Record as a failure the creation that has run for longest, which is `seconds`."""
        thread = min(list(self._threads.items()), key=itemgetter(1), default=(0, 0.0))[0]
        if at := stack_of(thread):
            self.failure = f"the constructor has not returned for {seconds:.0f} s{shown_place(at)}"

    def _leave_loop(self) -> None:
        """Create all further environments on threads."""
        self._may_use_loop = self.uses_loop = False


def place_of(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return file, line and function of the environment, from frames and lines, outermost first.

    It is the innermost frame outside of the env host and of installed packages, or else the
    innermost outside of the env host; empty without any.
    """
    codes = [(frame.f_code, line) for frame, line in stack]
    theirs = [each for each in codes if not each[0].co_filename.startswith(_NOT_THEIRS)]
    inside = [each for each in theirs if not _INSTALLED.search(each[0].co_filename)]
    for code, line in (inside or theirs)[-1:]:
        # A project may be imported through a link in the folder of its run, which goes with it.
        return f"{os.path.realpath(code.co_filename)}:{line}, in {code.co_name}"
    return ""


def shown_place(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return `place_of` in brackets, or nothing."""
    place = place_of(stack)
    return f" ({place})" if place else ""


def stack_of(thread: int) -> list[tuple[FrameType, int]]:
    """Return the frames and lines of a thread, by its ident, outermost first."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    return [] if frame is None else [*traceback.walk_stack(frame)][::-1]


def _find_signature(env: Any) -> CallSignature:
    bases: list[Any] = [interfaces.Environment]
    if (upstream := sys.modules.get(UPSTREAM_INTERFACES)) is not None:
        bases.append(upstream.Environment)
    inherited = frozenset(m for base in bases for m in (base.reset_async, base.step_async))
    reset_name, reset_is_async = _pick(env, "reset", inherited)
    step_name, step_is_async = _pick(env, "step", inherited)
    close = getattr(env, "close", None)
    does_nothing = frozenset(base.close for base in bases)
    return CallSignature(
        reset_name=reset_name,
        reset_is_async=reset_is_async,
        step_name=step_name,
        step_is_async=step_is_async,
        closes=close is not None and getattr(close, "__func__", close) not in does_nothing,
        holds_mcp=_holds_mcp(env, inherited),
    )


def _holds_mcp(env: Any, inherited: frozenset[Any]) -> bool:
    """Return whether the environment's MCP connection can be held on the session's loop.

    `MCPEnvironment` before 0.2.3 has no `step_async`: its `step` waits for its tools on a loop in
    another thread. A connection that is held here never answers on that loop, and the whole shard
    blocks if a subclass's `step_async` calls that `step`. So each call opens its own connection.
    """
    if not callable(getattr(env, "mcp_session", None)):
        return False
    upstream: Any = sys.modules.get(UPSTREAM_MCP_ENVIRONMENT)
    env_class = env if isinstance(env, type) else type(env)
    if upstream is None or not issubclass(env_class, upstream.MCPEnvironment):
        return True
    return upstream.MCPEnvironment.step_async not in inherited


def _pick(env: Any, name: str, inherited: frozenset[Any]) -> tuple[str, bool]:
    """Pick the async method where a subclass defines it, otherwise the plain one (maybe async)."""
    method = getattr(env, f"{name}_async", None)
    if method is not None and getattr(method, "__func__", method) not in inherited:
        return f"{name}_async", True
    return name, inspect.iscoroutinefunction(getattr(env, name))
