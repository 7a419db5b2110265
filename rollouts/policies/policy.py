# SPDX-License-Identifier: Apache-2.0
"""Policies: anything that can be called with an observation and returns an action.

    Policy ─memory()─▶ player()─▶ Act, one for each attempt ─▶ act(answer, turn) ─▶ Encoded
      ├── CallablePolicy     here
      ├── RandomPolicy       random_policy.py
      └── ChatPolicy         chat_policy.py

A class is a policy with a memory: each episode gets an instance of its own, and a branch a deep
copy. A policy that takes two arguments also gets the `Turn`. It returns an action, or a `Decision`
with further data.

Coroutine functions run on the loop, all others in `CpuThreads`: two, shared by all episodes.

    run ─▶ wait for one of two places ─▶ a daemon thread ─▶ the function's result
            (its time-out is paused)       └─ cancelled: the thread is abandoned

More threads would compete with the loop for the GIL. A function that hangs cannot be stopped: its
place becomes free, and Python exits without waiting for it. While `MAX_HUNG` functions hang, no
other one is started. `at_most` limits one call of a policy without its wait for a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

import orjson
from anyio import CapacityLimiter

from ..answers import PARSED_APART_BYTES, Answer
from ..episodes import Array, BytesLike, FailureReason
from ..errors import EpisodeFailed, PolicyHangs

_OURS = str(Path(__file__).resolve().parents[1])  # our frames explain no failure of a policy
_LIBRARY = str(Path(inspect.__file__).parent)  # the standard one, and what is installed below it
CPU_THREADS = 2  # 512 threads blocked the loop for 1.5 s, one job for 12 ms
MAX_HUNG = 16

_T = TypeVar("_T")
_Queue = SimpleQueue[Callable[[], Callable[[], None]] | None]
_clock: ContextVar[asyncio.Timeout | None] = ContextVar("call_clock", default=None)


class CpuThreads:
    """Runs at most `CPU_THREADS` functions at once, not counting those that hang."""

    def __init__(
        self, *, max_hung: int = MAX_HUNG, on_hung: Callable[[], None] = lambda: None
    ) -> None:
        self._places = CapacityLimiter(CPU_THREADS)
        self._threads = _DaemonThreads()
        weakref.finalize(self, self._threads.end).atexit = False
        self._max_hung = max_hung
        self._on_hung = on_hung
        self._abandoned: set[Future[Any]] = set()

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call a function off the loop, and return its result; `PolicyHangs` if too many hang."""
        self._abandoned = {call for call in self._abandoned if call.running()}
        if (hung := len(self._abandoned)) >= self._max_hung:
            raise PolicyHangs(f"{hung} abandoned calls of the policy still hang")
        clock = _clock.get()
        go_on = None if clock is None else pause(clock)
        async with self._places:
            if go_on is not None:
                go_on()
            call = self._threads.submit(function)
            try:
                return await asyncio.wrap_future(call)
            except asyncio.CancelledError:
                if call.running():
                    self._abandoned.add(call)
                    self._on_hung()
                raise


class _DaemonThreads:
    """A thread for each function that runs. Python does not wait for them at its exit.

    Python would wait for the threads of anyio or an executor, and never exit if one hangs. Threads
    are reused, since a policy's libraries may keep state for each thread.
    """

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        self._idle = Semaphore(0)

    def end(self) -> None:
        """Make each thread end when it is idle."""
        self._queue.put(None)

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Call a function on an idle thread, or on a new one."""
        call: Future[_T] = Future()
        if not self._idle.acquire(blocking=False):
            threads = (self._queue, self._idle)
            Thread(target=_work_off, args=threads, name="policy", daemon=True).start()
        self._queue.put(partial(_outcome_of, call, partial(copy_context().run, function)))
        return call


def _work_off(queue: _Queue, idle: Semaphore) -> None:
    while work := queue.get():
        report = work()
        idle.release()  # before the report, so that the loop's next call finds it
        report()
        del work, report  # the result may be large
    queue.put(None)  # for the other threads


def _outcome_of(call: Future[_T], function: Callable[[], _T]) -> Callable[[], None]:
    """Call a function unless it was cancelled; return a function that reports the outcome."""
    if not call.set_running_or_notify_cancel():
        return lambda: None
    try:
        return partial(call.set_result, function())
    except (SystemExit, KeyboardInterrupt, StopIteration) as exc:  # they would end the loop
        error = RuntimeError(f"{type(exc).__name__} was raised")
        error.__cause__ = exc
        return partial(call.set_exception, error)
    except BaseException as exc:
        return partial(call.set_exception, exc)


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """Limit one call of a policy, which is awaited in the block, by `EpisodeFailed`."""
    timeout = asyncio.timeout(seconds)
    token = _clock.set(timeout)
    try:
        async with timeout:
            yield
    except TimeoutError as exc:
        if not timeout.expired():
            raise
        message = f"the policy took more than {seconds:g} s"
        raise EpisodeFailed(FailureReason.POLICY_TIMED_OUT, message) from exc
    finally:
        _clock.reset(token)


def pause(timeout: asyncio.Timeout) -> Callable[[], None] | None:
    """Suspend a time-out until the returned function is called. None: there is no limit."""
    when = timeout.when()
    if when is None:
        return None
    now = asyncio.get_running_loop().time
    left = when - now()
    timeout.reschedule(None)
    return lambda: timeout.reschedule(now() + left)


@dataclass(frozen=True, slots=True)
class Turn:
    """The inputs of a policy beside the observation."""

    episode_id: str
    number: int  # of the step it decides on, from 0
    seed: int | None
    reward: float | None  # of the step before
    branch: int = 0  # the number of the branch if this is its first step, from 1


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, with `info` and `arrays` that are written with the step.

    With `branch=4` the session is copied before this action: the episode takes it, and the policy
    decides again in three branches. 1 prevents a branching. Without it, `--tree` says where.
    """

    action: Any
    info: Mapping[str, Any] = field(default_factory=dict)  # log-probabilities, token ids, …
    arrays: Mapping[str, Array] = field(default_factory=dict)
    branch: int | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A decision in the form that is sent and written."""

    action_json: bytes
    info_json: bytes
    arrays: Mapping[str, Array]
    branch: int | None = None


Act = Callable[[Answer, Turn], Awaitable[Encoded]]  # decides on the next action of one episode


@runtime_checkable
class Policy(Protocol):
    """Decides on actions; each attempt at an episode has an `Act` of its own."""

    def memory(self) -> Any:
        """Return the state of an attempt that a branch has a deep copy of, or None."""
        return None

    def player(self, threads: CpuThreads, memory: Any) -> Act:
        """Begin an attempt or a branch; the returned `Act` may compute in `threads`."""
        ...

    async def close(self) -> None:
        """Close connections of the policy, if it has any; called when a collection ends."""
        return


@dataclass(frozen=True, slots=True)
class CallablePolicy(Policy):
    """A function, coroutine function, or class of which each episode gets an instance."""

    function: Any

    def memory(self) -> Any:
        """Return a new instance if the policy is a class."""
        return self.function() if inspect.isclass(self.function) else None

    def player(self, threads: CpuThreads, memory: Any) -> Act:
        """Begin an attempt or a branch, with its instance."""
        function: Any = self.function if memory is None else memory
        wants_turn, is_coroutine = takes_turn(function), is_async(function)

        def call(observation: Any, turn: Turn) -> Any:
            return function(observation, turn) if wants_turn else function(observation)

        def decide(answer: Answer, turn: Turn) -> Encoded | Awaitable[Any]:
            # An awaitable (of `lambda seen: client.act(seen)`) is awaited on the loop.
            decided = call(answer.observation, turn)
            return decided if inspect.isawaitable(decided) else encoded(decided)

        async def act(answer: Answer, turn: Turn) -> Encoded:
            if not is_coroutine:
                decided = await threads.run(partial(decide, answer, turn))
                return decided if isinstance(decided, Encoded) else encoded(await decided)
            is_large = len(answer.observation_json) > PARSED_APART_BYTES
            read = lambda: answer.observation  # noqa: E731  # parsed where it is called
            observation = await threads.run(read) if is_large else answer.observation
            return encoded(await call(observation, turn))

        return act


def encoded(decided: Any) -> Encoded:
    """Encode an action or a `Decision` as JSON.

    Raises `TypeError`, `ValueError`: it has no JSON form, or `arrays` has a value of another type.
    """
    if not isinstance(decided, Decision):
        decided = Decision(decided)
    action = decided.action
    action = action.model_dump() if hasattr(action, "model_dump") else action
    options = orjson.OPT_SERIALIZE_NUMPY
    return Encoded(
        orjson.dumps(action, option=options),
        orjson.dumps(dict(decided.info), option=options) if decided.info else b"{}",
        {name: _checked(name, array) for name, array in decided.arrays.items()},
        decided.branch,
    )


def _checked(name: str, array: Any) -> Array:
    """Check that an array can be written as it is, and return it."""
    if not isinstance(array, Array):
        raise TypeError(f"the array {name!r} is of type {type(array).__name__}, not an Array")
    data: Any = array.data  # a policy may pass any value
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"the data of the array {name!r} is not contiguous")
    if isinstance(data, BytesLike):
        return array
    return Array(view.cast("B"), array.dtype, array.shape)


def is_async(function: Any) -> bool:
    """Return whether a call of it returns an awaitable."""
    call = getattr(function, "__call__", None)  # noqa: B004  # an instance with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def takes_turn(function: Any) -> bool:
    """Return whether it accepts a second positional argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in by_position if p.default is p.empty]
    is_open = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len(required) >= 2 or is_open or any(p.name == "turn" for p in by_position[1:])


def policy_failed(exc: BaseException) -> EpisodeFailed:
    """Return the failure of an episode whose policy raised `exc`, with place and traceback."""
    frame = exc.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OURS):
        frame = frame.tb_next
    message = f"{type(exc).__name__}: {exc}"
    if frame is None:
        return EpisodeFailed(FailureReason.POLICY_ERROR, message)
    places = traceback.extract_tb(frame)
    last = ([each for each in places if _LIBRARY not in each.filename] or places)[-1]
    lines = "".join(traceback.format_exception(type(exc), exc, frame))
    message += f" ({last.filename}, line {last.lineno})"
    return EpisodeFailed(FailureReason.POLICY_ERROR, message, lines)
