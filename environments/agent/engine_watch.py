# SPDX-License-Identifier: Apache-2.0
"""`EngineWatch` lists an engine's instances when they change; `exit_reason` explains their exits.

    thread: engine.changes() ──"look"──▶ loop: engine.list(), once for all ──▶ on_look(instances)
                └─ EngineGone ──▶ again after a pause; meanwhile, it is the `problem`

After a change that is reported while the instances are listed, they are listed again; and once more
a second after the last change, because Docker lists a container as running for a moment after it
has reported its death. All calls that block run in threads: the engine's methods (`call`), and
stops, which take as long as their grace (`call_long`).

`exit_reason` returns, from an engine's facts, the same value as a shim does for a local replica.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...system.process.backoff import backoff_seconds
from ...system.process.exit_reason import Detector, ExitKind, ExitReason
from ..engines.base import Engine, EngineError, EngineGone, EngineRefused, ExitFacts, Instance

_SIGNALED = 128  # added to a signal's number, by the convention of shells
_LAST_SIGNAL = 64
SAME_SECONDS = 1.0  # between the engine's report of a kill and the server's count of the same


def exit_reason(
    facts: ExitFacts | None,
    *,
    pid: int,
    stopped_by_us: bool,
    limit_bytes: int | None,
    oom_reported_at: float | None = None,
) -> ExitReason:
    """Explain how an instance ended.

    An engine's report about memory (`OOMKilled`, `OUT_OF_MEMORY`) covers every process that was
    ever killed in the instance. It explains this exit only if the server, which reports kills of
    processes below it, has reported none, or if the engine reports a kill after the last of these.

    Args:
        facts: What the engine knows; None: it has no such instance any more.
        pid: The instance's first process; 0: unknown.
        stopped_by_us: Whether its stop had been requested.
        limit_bytes: The instance's memory limit.
        oom_reported_at: When the server last reported a kill below it, in seconds since the epoch.
    """
    if facts is None:
        return ExitReason(ExitKind.STOPPED if stopped_by_us else ExitKind.LOST, pid=pid)
    if facts.error is not None:
        return ExitReason(ExitKind.EXITED, pid=0, exit_code=127, evidence=facts.error)
    if facts.ended_by is not None and not stopped_by_us:
        return ExitReason(
            ExitKind.TIMED_OUT if facts.is_time_over else ExitKind.LOST,
            pid=pid,
            detector=Detector.ENGINE,
            seconds=facts.seconds,
            evidence=facts.ended_by,
        )
    if facts.reason is not None and not stopped_by_us:
        return ExitReason.from_json(facts.reason)
    code, number = facts.exit_code, None
    if code is not None and _SIGNALED < code <= _SIGNALED + _LAST_SIGNAL:
        number, code = code - _SIGNALED, None
    # Whether the engine reports a kill that the server has not reported.
    is_oom = facts.is_oom and (
        oom_reported_at is None
        or (facts.oom_at is not None and facts.oom_at > oom_reported_at + SAME_SECONDS)
    )
    if is_oom:
        kind = ExitKind.OOM_KILLED
    elif stopped_by_us:
        kind = ExitKind.STOPPED
    elif number is not None:
        kind = ExitKind.SIGNALED
    else:
        kind = ExitKind.LOST if code is None else ExitKind.EXITED
    return ExitReason(
        kind,
        pid=pid,
        exit_code=code,
        signal_number=number,
        detector=facts.detector if is_oom else None,
        limit_bytes=limit_bytes,
        peak_bytes=facts.peak_bytes,
        seconds=facts.seconds,
        evidence=facts.evidence if is_oom or not facts.is_oom else None,
    )


log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MIN_PAUSE_SECONDS = 0.05  # between two lists, however much changes
SETTLE_SECONDS = 1.0  # after a change, until the engine's list is certainly up to date
REACH_SECONDS = 4.0  # for an engine to answer at all, from the first call
THREADS = 32  # most calls of the engine at a time; others wait

T = TypeVar("T")


class EngineWatch:
    """Asks one engine, and follows its changes.

    Args:
        engine: The engine.
        on_look: Called with the engine's instances after each list.
        on_problem: Called with why the engine does not answer, and with None once it does again.

    Attributes:
        problem: Why the engine does not answer, in a sentence; None: it does, as far as is known.
    """

    def __init__(
        self,
        engine: Engine,
        on_look: Callable[[list[Instance]], None],
        on_problem: Callable[[str | None], None],
    ) -> None:
        self.problem: str | None = None
        self._has_answered = False  # ever, to this process
        self._reach_by: float | None = None
        self.engine = engine
        self._on_look = on_look
        self._on_problem = on_problem
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine")
        self._loop = asyncio.get_running_loop()
        self._look_is_due = asyncio.Event()
        self._has_changed = False  # since the last list
        self._is_closed = False

    async def call(
        self, function: Callable[..., T], *args: object, threads: ThreadPoolExecutor | None = None
    ) -> T:
        """Call one of the engine's methods in a thread; raises `EngineGone` or `EngineRefused`.

        The reason of an `EngineGone` is the `problem` until a list succeeds.
        """
        try:
            answer = await self._loop.run_in_executor(threads or self._threads, function, *args)
        except EngineGone as exc:
            self._note(exc.message)
            raise
        self._has_answered = True
        return answer

    async def call_long(self, function: Callable[..., T], *args: object) -> T:
        """Call a method that may take minutes, in a thread of its own; raises as `call`."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="stop")
        try:
            return await self.call(function, *args, threads=thread)
        finally:
            thread.shutdown(wait=False)

    async def reach(self, function: Callable[..., object], *args: object) -> None:
        """Call a method, as `call` does, unless the engine has answered this process before.

        `EngineRefused`: it has not answered for `REACH_SECONDS`, so it may not be configured.
        """
        if self._has_answered:
            return
        now = self._loop.time()
        self._reach_by = self._reach_by or now + REACH_SECONDS
        try:
            await self.call(function, *args)
        except EngineGone as exc:
            if now < self._reach_by:
                raise
            raise EngineRefused(exc.message, exc.hint) from exc

    def look_soon(self) -> None:
        """List all instances again."""
        self._look_is_due.set()

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        threading.Thread(target=self._follow_changes, name="changes", daemon=True).start()
        failures = 0
        while True:
            await self._look_is_due.wait()
            self._look_is_due.clear()
            try:
                instances = list(await self.call(self.engine.list))
                self._on_look(instances)
                self._note(None)
            except Exception as exc:  # no answer, or a defect, which is logged once
                text = str(exc) if isinstance(exc, EngineError) else f"{type(exc).__name__}: {exc}"
                if not isinstance(exc, EngineError) and text != self.problem:
                    log.exception("cannot list the engine's instances")
                self._note(text)
                failures += 1
                self._look_is_due.set()
                await asyncio.sleep(_pause(failures))
                continue
            failures = 0
            if self._has_changed:
                self._has_changed = False
                self._loop.call_later(SETTLE_SECONDS, self._look_is_due.set)
            await asyncio.sleep(MIN_PAUSE_SECONDS)

    def close(self) -> None:
        """End the thread that follows the engine, with the engine's next answer."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)

    def _follow_changes(self) -> None:
        failures = 0
        while not self._is_closed:
            try:
                for _ in self.engine.changes():
                    failures = 0
                    self._report_change()
            except EngineError:
                pass
            except Exception:  # a defect: without this thread, nothing would be seen any more
                log.exception("cannot follow the engine's changes")
            failures += 1
            self._report_change()  # the next list finds out whether the engine is gone
            time.sleep(_pause(failures))

    def _report_change(self) -> None:
        if not (self._is_closed or self._loop.is_closed()):
            self._loop.call_soon_threadsafe(self._on_change)

    def _on_change(self) -> None:
        self._has_changed = True
        self._look_is_due.set()


def _pause(failures: int) -> float:
    return backoff_seconds(failures, first=FIRST_PAUSE_SECONDS, longest=MAX_PAUSE_SECONDS)
