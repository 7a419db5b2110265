# SPDX-License-Identifier: Apache-2.0
"""Calls of many sessions on one thread, until one of them blocks: real threads, a real loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from openenvd.env_host.sessions import threads
from openenvd.env_host.sessions.threads import CallSharing, SharingRunner, waited_seconds

BLOCKED_SECONDS = 0.005
WAIT_SECONDS = 30.0


def runners(number: int) -> list[SharingRunner]:
    sharing = CallSharing()
    return [SharingRunner(sharing) for _ in range(number)]


async def run_all(each: list[SharingRunner], call: Callable[[], Any]) -> list[Any]:
    """Make one call of each session at once; returns the results."""
    return await asyncio.gather(*(runner.run(call) for runner in each))


async def test_a_call_that_blocks_does_not_keep_the_outcomes_of_those_before_it() -> None:
    before, blocked, behind = runners(3)
    is_let_go = threading.Event()
    done = before.run(lambda: 1)
    waiting = blocked.run(is_let_go.wait)
    assert (await done, await behind.run(lambda: 2)) == (1, 2)
    assert not waiting.done()
    is_let_go.set()
    assert await waiting


async def test_a_call_for_which_no_thread_can_be_started_fails_and_later_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_none(work: Any) -> None:
        raise RuntimeError("can't start new thread")

    [session] = runners(1)
    session._sharing._apart_until = asyncio.get_running_loop().time() + WAIT_SECONDS
    with monkeypatch.context() as patched:
        patched.setattr(threads, "start_thread", start_none)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await session.run(lambda: 1)
    assert await session.run(lambda: 2) == 2
    session.stop()


async def test_calls_of_a_session_run_one_after_the_other_without_the_cancelled() -> None:
    blocked, other = runners(2)
    is_let_go = threading.Event()
    ran: list[int] = []
    first = blocked.run(is_let_go.wait)
    later = [blocked.run(ran.append, number) for number in range(3)]
    await other.run(lambda: None)  # has moved to another thread
    last = blocked.run(ran.append, 3)
    assert ran == []
    is_let_go.set()
    await asyncio.gather(first, *later, last)
    assert ran == [0, 1, 2, 3]
    blocked, other = runners(2)
    ran.clear()
    is_let_go = threading.Event()
    waiting = blocked.run(is_let_go.wait)
    skipped = blocked.run(ran.append, 1)
    skipped.cancel()
    is_let_go.set()
    await waiting
    await other.run(lambda: None)
    assert ran == []


async def test_sessions_whose_calls_wait_get_threads_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "openenvd.env_host")
    sessions = runners(100)

    def wait() -> None:
        time.sleep(BLOCKED_SECONDS)

    await run_all(sessions, wait)
    assert "each session has its own thread" in caplog.text
    used = await run_all(sessions, threading.get_ident)
    assert len(set(used)) == len(sessions)
    for session in sessions:
        session.stop()


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "waited"),
    [(0.002, 0.002, 0.0), (0.01, 0.005, 0.0), (0.01, 0.019, 0.0), (0.01, 0.001, 0.01)],
)
def test_a_call_that_computes_does_not_wait(
    seconds: float, cpu_seconds: float, waited: float
) -> None:
    assert waited_seconds(seconds, cpu_seconds) == waited
