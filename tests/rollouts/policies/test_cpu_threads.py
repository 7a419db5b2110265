# SPDX-License-Identifier: Apache-2.0
"""Threads for what is not the loop's work: two at once, and none that hangs holds the others up."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from openenvd.rollouts.errors import EpisodeFailed, PolicyHangs
from openenvd.rollouts.policies.policy import MAX_HUNG, CpuThreads, at_most

HANGS = """
import asyncio, threading
from openenvd.rollouts.policies.policy import CpuThreads

begun = threading.Event()

def hang():
    begun.set()
    threading.Event().wait()

async def main():
    call = asyncio.create_task(CpuThreads().run(hang))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    print(call.cancelled())

asyncio.run(main())
"""


class Hanging:
    """Functions that return when they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self._begun = threading.Semaphore(0)

    def __call__(self) -> str:
        self._begun.release()
        self.let_go.wait()
        return "late"

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.acquire)


@pytest.fixture
def hanging() -> Hanging:
    return Hanging()


@pytest.fixture
def threads(hanging: Hanging, request: pytest.FixtureRequest) -> Iterator[CpuThreads]:
    """What hangs is let go at the end. A parameter is `max_hung`."""
    yield CpuThreads(max_hung=getattr(request, "param", MAX_HUNG))
    hanging.let_go.set()


async def give_up(threads: CpuThreads, function: Hanging) -> None:
    waiting = asyncio.create_task(threads.run(function))
    await function.begun()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def fill(threads: CpuThreads, function: Hanging) -> list[asyncio.Task[str]]:
    """Both threads hang in it, and each is waited for."""
    stuck = [asyncio.create_task(threads.run(function)) for _ in range(2)]
    for _ in stuck:
        await function.begun()
    return stuck


async def test_two_jobs_run_at_once_and_no_more(threads: CpuThreads) -> None:
    together, crowd = threading.Barrier(2), threading.Semaphore(2)

    def job() -> str:
        assert crowd.acquire(blocking=False)
        together.wait()
        crowd.release()
        return threading.current_thread().name

    names = await asyncio.gather(*(threads.run(job) for _ in range(10)))
    assert len(names) == 10


def test_python_exits_while_a_call_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == "True\n"


async def test_a_call_cancelled_in_the_queue_is_never_begun(
    threads: CpuThreads, hanging: Hanging
) -> None:
    stuck = await fill(threads, hanging)
    begun: list[None] = []
    waiting = asyncio.create_task(threads.run(lambda: begun.append(None)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    hanging.let_go.set()
    assert await asyncio.gather(*stuck) == ["late", "late"]
    await threads.run(lambda: None)
    assert begun == []


@pytest.mark.parametrize("threads", [1], indirect=True)
async def test_a_hung_call_that_returns_is_not_counted_any_more(
    threads: CpuThreads, hanging: Hanging
) -> None:
    await give_up(threads, hanging)
    with pytest.raises(PolicyHangs):
        await threads.run(lambda: "done")
    hanging.let_go.set()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(PolicyHangs):
                assert await threads.run(lambda: "done") == "done"
                break
            await asyncio.sleep(0.01)


async def later() -> None:
    """When the time of a call with a hundredth of a second would be up."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, passed.set)
    await passed.wait()


async def test_a_call_does_not_time_out_while_it_waits_for_a_thread(
    threads: CpuThreads, hanging: Hanging
) -> None:
    async def call() -> None:
        async with at_most(0.01):
            await threads.run(hanging)

    stuck = await fill(threads, hanging)
    waiting = asyncio.create_task(call())
    await later()
    assert not waiting.done()
    for task in stuck:  # there is a thread for it now, and it hangs, too
        task.cancel()
    with pytest.raises(EpisodeFailed):
        await waiting


async def test_a_time_out_inside_the_call_is_not_the_clocks() -> None:
    with pytest.raises(TimeoutError):
        async with at_most(60):
            raise TimeoutError
