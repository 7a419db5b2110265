# SPDX-License-Identifier: Apache-2.0
"""Environment instances: where one is created (`Factory`), and how it is called (`Calls`).

    the class is synchronous            created on the session's thread, where its calls run
    asynchronous, or not known yet      created on the session's thread, which then ends
    asynchronous, and quick to create   created on the event loop: no thread at all

Whether creation is quick is measured by the thread's own CPU time, since wall time includes waits
for the GIL. Creations that hold the loop for too long, or one that fails there (it may want a loop
of its own), send all later ones back to threads, for good.

How methods are called is found out once for each class (`CallSignature`) and each function, not for
each message.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

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

# How the paths of files begin that are no project's: ours, and the standard library.
_NOT_ITS_OWN = (str(Path(__file__).parents[1]), str(Path(inspect.__file__).parent), "<frozen ")

# By function: whether it takes any keyword; the names that it does not take then, else takes.
_keywords: dict[Any, tuple[bool, frozenset[str]]] = {}
_signatures: dict[type, CallSignature] = {}

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How the environments of one class are called."""

    reset_name: str
    reset_is_async: bool
    step_name: str
    step_is_async: bool
    closes: bool  # its `close` does something
    holds_mcp: bool  # it has an MCP connection to be held while its session lasts

    @property
    def is_async(self) -> bool:
        """Whether the environment needs no thread."""
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

    def read_state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        state = self.env.state
        if hasattr(state, "model_dump"):
            dumped: dict[str, Any] = state.model_dump()
            return dumped
        return dict(state) if state else {}


def call_signature_of(env: Any) -> CallSignature:
    """Find how `env` is called; remembered for its class, unless it has methods of its own."""
    if not _OVERRIDABLE.isdisjoint(getattr(env, "__dict__", ())):
        return _find_signature(env)
    signature = _signatures.get(type(env))
    if signature is None:
        signature = _signatures[type(env)] = _find_signature(env)
    return signature


def may_use_loop(env_class: type) -> bool:
    """Tell whether calls of a class's environments may run on the event loop, tools included."""
    signature = _find_signature(env_class)
    functions = (each for owner in env_class.__mro__ for each in vars(owner).values())
    codes = (each.__code__ for each in functions if inspect.isfunction(each))
    names = {name for code in codes for name in code.co_names}
    return (
        signature.reset_is_async
        or signature.step_is_async
        or signature.holds_mcp
        or not names.isdisjoint(MCP_ATTRIBUTES)
    )


def keep_accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that `function` takes; OpenEnv drops the others silently."""
    if not arguments:
        return arguments
    takes_any, names = _keywords_of(function)
    return {name: value for name, value in arguments.items() if (name in names) is not takes_any}


def failure_of(exc: BaseException) -> str:
    """Return in one line why an environment could not be created: class, text, file and line."""
    try:
        lines = str(exc).splitlines() or [""]
    except Exception:  # it cannot describe itself
        lines = [""]
    path, line = _place(exc)
    where = f" ({path}, line {line})" if line else ""
    return f"{type(exc).__name__}: {lines[0]}"[: MAX_FAILURE_CHARACTERS - len(where)] + where


class Place(Enum):
    """Where the next environment is created."""

    THREAD = auto()
    LOOP = auto()


@dataclass(frozen=True, slots=True)
class Creation:
    """How long one environment took to create, and where."""

    is_async: bool
    place: Place
    seconds: float
    cpu_seconds: float


def next_place(before: Place, seen: Creation, stalls: int) -> Place | None:
    """Decide where the next environment is created; None: on threads from now on, for good."""
    if not seen.is_async:
        return None if before is Place.LOOP else Place.THREAD
    if seen.place is Place.LOOP:
        return None if stalls >= MAX_STALLS else Place.LOOP
    is_quick = seen.seconds < QUICK_SECONDS and seen.cpu_seconds < QUICK_CPU_SECONDS
    return Place.LOOP if is_quick else before


class Factory:
    """Creates environments, and learns from each creation."""

    def __init__(self, function: Callable[[], Any], *, may_use_loop: bool) -> None:
        self._function = function
        self._is_settled = not may_use_loop
        self._stalls = 0
        self.place = Place.THREAD
        self.failure: str | None = None  # of the last creation; empty when it succeeded
        self._logged: set[tuple[type[BaseException], tuple[str, int]]] = set()  # causes of failures

    def create_on_loop(self) -> Any:
        """Create an environment here and now; None if it has to be created on a thread."""
        if self.place is not Place.LOOP:
            return None
        try:
            return self._create(Place.LOOP)
        except Exception:
            log.info("creating an environment on the loop failed; using a thread", exc_info=True)
            self._settle()
            return None

    def create(self) -> Any:
        """Create an environment, on any thread; raises whatever the factory raises."""
        return self._create(Place.THREAD)

    def _create(self, place: Place) -> Any:
        started, cpu = time.monotonic(), time.thread_time()
        try:
            env = self._function()
        except BaseException as exc:
            if place is Place.THREAD:  # on the loop: it is tried again
                self._note(exc)
            raise
        self.failure = ""
        if not self._is_settled:
            seconds, cpu_seconds = time.monotonic() - started, time.thread_time() - cpu
            self._learn(Creation(call_signature_of(env).is_async, place, seconds, cpu_seconds))
        return env

    def _note(self, exc: BaseException) -> None:
        """Keep why an environment could not be created, and log the traceback of another cause."""
        self.failure = failure_of(exc)
        cause = (type(exc), _place(exc))
        if cause not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(cause)
            log.warning("an environment could not be created", exc_info=exc)

    def _learn(self, seen: Creation) -> None:
        self._stalls += seen.place is Place.LOOP and seen.seconds >= STALL_SECONDS
        place = next_place(self.place, seen, self._stalls)
        if place is None:
            text = "creating an environment blocked the event loop for %.3f s; using threads"
            log.warning(text, seen.seconds)
            self._settle()
        else:
            self.place = place

    def _settle(self) -> None:
        self._is_settled = True
        self.place = Place.THREAD


def _place(exc: BaseException) -> tuple[str, int]:
    """Return the last file and line of the project's on the way to an exception, else the last."""
    walked = traceback.walk_tb(exc.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in walked]
    own = [(path, line) for path, line in places if not path.startswith(_NOT_ITS_OWN)]
    own = [(path, line) for path, line in own if "/site-packages/" not in path]
    return (own or places or [("", 0)])[-1]


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
    """Tell whether the environment's MCP connection can be held on the session's loop.

    `MCPEnvironment` before 0.2.3 has no `step_async`: its `step` waits for its tools on a loop in
    another thread. A connection that is held here never answers there, and where a subclass's
    `step_async` calls that `step`, the whole shard stands still. Each of its calls opens its own.
    """
    if not callable(getattr(env, "mcp_session", None)):
        return False
    upstream: Any = sys.modules.get(UPSTREAM_MCP_ENVIRONMENT)
    return (
        upstream is None
        or not isinstance(env, upstream.MCPEnvironment)
        or upstream.MCPEnvironment.step_async not in inherited
    )


def _pick(env: Any, name: str, inherited: frozenset[Any]) -> tuple[str, bool]:
    """Pick the async method where a subclass defines it, otherwise the plain one (maybe async)."""
    method = getattr(env, f"{name}_async", None)
    if method is not None and getattr(method, "__func__", method) not in inherited:
        return f"{name}_async", True
    return name, inspect.iscoroutinefunction(getattr(env, name))


def _keywords_of(function: Callable[..., Any]) -> tuple[bool, frozenset[str]]:
    key = getattr(function, "__func__", function)
    if key not in _keywords:
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # That of the instance, `self`, is taken already.
        taken = frozenset(inspect.signature(key).parameters) - frozenset(parameters)
        _keywords[key] = takes_any, taken if takes_any else frozenset(parameters)
    return _keywords[key]
