# SPDX-License-Identifier: Apache-2.0
"""After a call that was given up, no answer is taken for that to another call.

Each way to give up a call, with each session that we have: that of `Client` and of the plug-in of
pytest, of `AsyncClient`, of rollouts, and of `openenv test`. Afterwards a session goes on, with an
answer of its own to each call, or says with each call why it has ended.
"""

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from openenvd.client import Client, Environment, pytest_plugin
from openenvd.client.errors import SessionError
from openenvd.client.session import AsyncSession, Session
from openenvd.rollouts.errors import EpisodeFailed
from openenvd.rollouts.session_pool import EpisodeSession
from openenvd.schema.protocol import HostConfig
from openenvd.server.operations.testing.subject import SessionFailed, TrialSession

from ..env_host.hosts import Host, serving

SLOW = "openenvd.env_host.bundled.benchmark.environment:SyncBenchmarkEnvironment"
ODD = 1  # the number of a call that takes a while
EVEN = (2, 4, 6)
MOMENT_SECONDS = 0.1  # until such a call is under way
ABANDONED = "a step was abandoned before its answer came"
LATE = "not answered within"
Step = Callable[[int], Awaitable[int]]


def action(number: int) -> dict[str, Any]:
    """An action that is answered with its number, at once if that is even."""
    return {"wait_seconds": 0.3 * (number % 2), "payload": "x" * number}


def number_of(observation: Any) -> int:
    return int(observation["payload_bytes"])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    config = HostConfig("slow", env_class=SLOW, shards=1, reset_first=False)
    with serving(config, tmp_path_factory.mktemp("slow")) as found:
        yield found


@pytest.fixture
def address(host: Host) -> Iterator[str]:
    yield f"http://127.0.0.1:{host.port}"
    host.emptied()  # no session is left behind, whatever has become of it


# Sessions for asyncio


@asynccontextmanager
async def of_async_client(address: str, seconds: float) -> AsyncIterator[Step]:
    async with AsyncSession(address, answer_timeout=seconds) as session:

        async def step(number: int) -> int:
            return number_of((await session.step(action(number))).observation)

        yield step


@asynccontextmanager
async def of_rollouts(address: str, seconds: float) -> AsyncIterator[Step]:
    session = await EpisodeSession.open(address)

    async def step(number: int) -> int:
        answer = await session.step(json.dumps(action(number)).encode(), seconds=seconds)
        return number_of(json.loads(bytes(answer.observation_json)))

    yield step
    await session.close()


@asynccontextmanager
async def of_openenv_test(address: str, seconds: float) -> AsyncIterator[Step]:
    async with TrialSession(address, seconds) as session:

        async def step(number: int) -> int:
            return number_of((await session.step(action(number))).data["observation"])

        yield step


FRONT_ENDS = {
    "AsyncClient": of_async_client,
    "rollouts": of_rollouts,
    "openenv test": of_openenv_test,
}
ERRORS = (SessionError, EpisodeFailed, SessionFailed)


async def outcome(call: Awaitable[int]) -> int | str:
    try:
        return await call
    except ERRORS as exc:
        return str(exc)


async def by_a_limit(step: Step) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(step(ODD), MOMENT_SECONDS)


async def by_cancellation(step: Step) -> None:
    task = asyncio.create_task(outcome(step(ODD)))
    await asyncio.sleep(MOMENT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_a_failed_neighbour(step: Step) -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(outcome(step(ODD)))
            await asyncio.sleep(MOMENT_SECONDS)
            raise RuntimeError

    with pytest.raises(ExceptionGroup):
        await both()


async def by_garbage_collection(step: Step) -> None:
    call: Any = step(ODD)
    call.send(None)  # as far as its wait for the answer
    call.close()


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(
    "give_up", [by_a_limit, by_cancellation, by_a_failed_neighbour, by_garbage_collection]
)
async def test_a_session_says_that_a_call_was_given_up(
    address: str, front_end: str, give_up: Callable[[Step], Awaitable[None]]
) -> None:
    async with FRONT_ENDS[front_end](address, 60.0) as step:
        await give_up(step)
        for number in EVEN:
            assert ABANDONED in str(await outcome(step(number)))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
async def test_calls_at_once_have_each_its_own_answer_in_time(address: str, front_end: str) -> None:
    async with FRONT_ENDS[front_end](address, 60.0) as step:
        assert await asyncio.gather(*map(step, range(5))) == list(range(5))
        waiting = asyncio.create_task(outcome(step(ODD))), asyncio.create_task(outcome(step(2)))
        await asyncio.sleep(MOMENT_SECONDS)
        waiting[1].cancel()  # before its turn: nothing was sent
        assert [await waiting[0], await step(4)] == [ODD, 4]
    async with FRONT_ENDS[front_end](address, MOMENT_SECONDS) as step:
        for number in (ODD, *EVEN):
            assert LATE in str(await outcome(step(number)))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_ctrl_c_in_a_cell_ends_the_session_which_the_next_cell_is_told(
    address: str, front_end: str
) -> None:
    """A notebook runs each cell in the same event loop."""
    with asyncio.Runner() as cells:
        session = FRONT_ENDS[front_end](address, 60.0)
        step = cells.run(session.__aenter__())
        threading.Timer(MOMENT_SECONDS, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            cells.run(outcome(step(ODD)))
        for number in EVEN:
            assert ABANDONED in str(cells.run(outcome(step(number))))
        cells.run(session.__aexit__(None, None, None))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
async def test_another_thread_or_a_forked_process_is_refused_and_the_session_goes_on(
    address: str, front_end: str
) -> None:
    async with FRONT_ENDS[front_end](address, 60.0) as step:
        assert await step(2) == 2

        def run() -> object:
            return asyncio.run(outcome(step(4)))

        told = await asyncio.to_thread(run)
        assert told == "the session was opened in another event loop; open one in this one"
        told = await asyncio.to_thread(in_a_forked_child, run)
        assert told == f"the session was opened by process {os.getpid()}; open one in this process"
        assert await step(6) == 6


@pytest.mark.parametrize(
    "opened",
    [
        lambda address: AsyncSession(address).__aenter__(),
        EpisodeSession.open,
        lambda address: TrialSession(address, 60.0).__aenter__(),
        lambda address: asyncio.to_thread(Session(address).__enter__),
    ],
    ids=["AsyncClient", "rollouts", "openenv test", "Client"],
)
async def test_a_session_that_nobody_has_any_more_is_closed(
    host: Host, address: str, opened: Callable[[str], Awaitable[object]]
) -> None:
    session = await opened(address)
    assert host.http("GET", "/capacity")[1]["sessions"] == 1
    del session
    gc.collect()
    await asyncio.to_thread(host.emptied)


# Sessions for synchronous code: of `Client`, and of the plug-in of pytest, which asks that for one


@pytest.fixture(params=["Client", "pytest"])
def session(request: pytest.FixtureRequest, address: str) -> Iterator[Session]:
    environment = Environment(Client(start=False), {"name": "slow"})
    environment.base_url = lambda: address  # type: ignore[method-assign]  # no daemon is needed
    if request.param == "Client":
        with environment.connect() as found:
            yield found
    else:
        fixture: Any = pytest_plugin.openenv_session
        made = fixture.__wrapped__(environment)
        yield next(made)
        made.close()


def said(session: Session, number: int) -> int | str:
    try:
        return number_of(session.step(action(number)).observation)
    except SessionError as exc:
        return str(exc)


def test_threads_have_each_an_answer_and_an_interrupt_ends_the_session(session: Session) -> None:
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(partial(said, session), range(5))) == list(range(5))

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(said, session, ODD), MOMENT_SECONDS)
        assert [said(session, number) for number in EVEN] == list(EVEN)

    asyncio.run(give_up())
    here = threading.get_ident()
    threading.Timer(MOMENT_SECONDS, signal.pthread_kill, [here, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        session.step(action(ODD))
    for number in EVEN:
        assert ABANDONED in str(said(session, number))


def test_a_forked_process_is_refused_and_may_open_a_session_of_its_own(
    session: Session, address: str
) -> None:
    assert said(session, 2) == 2
    told = in_a_forked_child(lambda: said(session, 4))
    assert told == f"the session was opened by process {os.getpid()}; open one in this process"
    assert in_a_forked_child(session.close) == "None"

    def play() -> object:
        with Session(address) as own:
            return said(own, 4)

    assert in_a_forked_child(play) == "4"
    assert said(session, 6) == 6


def in_a_forked_child(function: Callable[[], object]) -> str:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            os.write(writing, str(function()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told
