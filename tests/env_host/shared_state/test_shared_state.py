# SPDX-License-Identifier: Apache-2.0
"""One state, many shards: real processes, killed and stopped in the middle of calls."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from openenvd.env_host.environment.interfaces import State
from openenvd.env_host.errors import StartError
from openenvd.env_host.shared_state.connection import ProxyFactory, StateLink, StateProxy
from openenvd.env_host.shared_state.frames import (
    BodyTooLarge,
    WorldBusy,
    WorldCallFailed,
    WorldError,
    WorldLost,
    WorldTimeout,
)
from openenvd.env_host.shared_state.process import StateProcess

from ..ledger import LedgerWorld

MEGABYTE = 2**20


@contextmanager
def stopped(state: StateProcess) -> Iterator[None]:
    assert state.pid is not None
    os.kill(state.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(state.pid, signal.SIGCONT)


# What a call carries


async def test_results_and_bodies_of_any_size_return_unchanged(world: StateProxy) -> None:
    assert await world.nothing() is None
    assert await world.echo(a=1, b=[None, "ü", {"c": 0.5}]) == {
        "a": 1,
        "b": [None, "ü", {"c": 0.5}],
    }
    assert await world.echo(b"\0\xff") == b"\0\xff"
    assert await world.echo(b"", a=1) == ({"a": 1}, b"")
    assert await world.echo(memoryview(b"view")) == b"view"
    sizes = [0, 1, 65_535, 65_536, 10 * MEGABYTE, *[3 * MEGABYTE] * 40]
    bodies = [os.urandom(size) for size in sizes]
    assert await asyncio.gather(*(world.echo(body) for body in bodies)) == bodies


def echo_within(world: StateProxy, seconds: float) -> Any:
    return world.within(seconds).echo(a=1)


def call_by_name(world: StateProxy, name: str) -> Any:
    return world.call(name)


FAILING: dict[str, tuple[Callable[[StateProxy], Any], type[Exception], str]] = {
    "an exception": (
        lambda world: world.fail(),
        WorldCallFailed,
        r"^world\.fail: LookupError: there is nothing$",
    ),
    "a message without a UTF-8 form": (
        lambda world: world.fail_in_latin(),
        WorldCallFailed,
        r"OSError: caf\?",
    ),
    "an argument is missing": (lambda world: world.note(), WorldCallFailed, "TypeError"),
    "one is too many": (lambda world: world.nothing(a=1), WorldCallFailed, "TypeError"),
    "a body is too many": (lambda world: world.nothing(b"body"), WorldCallFailed, "TypeError"),
    "a result that is no JSON": (
        lambda world: world.fail_to_say(),
        WorldCallFailed,
        "Unable to serialize",
    ),
    "an argument that is no JSON": (lambda world: world.echo(a=object()), ValueError, "serialize"),
    "an answer that is too large": (
        lambda world: world.zeros(count=257 * MEGABYTE),
        WorldCallFailed,
        "BodyTooLarge",
    ),
    **{
        f"within {seconds} seconds": (
            partial(echo_within, seconds=seconds),
            ValueError,
            "write a number of seconds",
        )
        for seconds in (float("inf"), float("nan"))
    },
    **{
        f"{name}, which is not public": (
            partial(call_by_name, name=name),
            WorldCallFailed,
            "AttributeError",
        )
        for name in ("session_ended", "close", "no_such_thing", "_private")
    },
}


@pytest.mark.parametrize(("call", "error", "text"), FAILING.values(), ids=FAILING)
async def test_a_call_that_fails_does_so_alone(
    world: StateProxy, call: Callable[[StateProxy], Any], error: type[Exception], text: str
) -> None:
    beside = asyncio.ensure_future(world.echo(a=1))
    with pytest.raises(error, match=text):
        await call(world)
    assert await beside == await world.echo(a=1) == {"a": 1}


async def test_a_body_that_is_too_large_is_not_sent(
    world: StateProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.env_host.shared_state.frames.MAX_BODY_BYTES", 1000)
    with pytest.raises(BodyTooLarge):
        await world.length(bytes(1001))
    assert await world.length(bytes(1000)) == 1000


# Whose reply it is


async def test_every_reply_reaches_the_call_that_asked(link: StateLink) -> None:
    worlds = [StateProxy(link) for _ in range(10)]
    calls = [
        worlds[n % 10].within(60).after(turns=(n * 7919) % 50, token=f"{n % 10}/{n}")
        for n in range(2000)
    ]
    assert await asyncio.gather(*calls) == [f"{n % 10}/{n}" for n in range(2000)]


async def test_the_reply_to_an_abandoned_call_reaches_no_other_call(world: StateProxy) -> None:
    given_up = asyncio.ensure_future(world.hold(token="first"))
    await world.held(at_least=1)
    given_up.cancel()
    second = asyncio.ensure_future(world.hold(token="second"))
    await world.held(at_least=2)
    await world.release()
    assert await second == "second"


# Sessions that end


async def test_session_ended_is_called_once_when_a_session_ends(link: StateLink) -> None:
    stays, leaves, never_called = (StateProxy(link) for _ in range(3))
    number = await leaves.who()
    leaves.leave()
    leaves.leave()
    never_called.leave()
    assert await stays.ended(at_least=1) == [number]


async def test_a_session_ends_after_its_last_call(link: StateLink) -> None:
    stays, leaves = StateProxy(link), StateProxy(link)
    held = asyncio.ensure_future(leaves.hold(token=1))
    await stays.held(at_least=1)
    leaves.leave()
    held.cancel()
    assert await stays.ended(at_least=0) == []
    await stays.release()
    assert len(await stays.ended(at_least=1)) == 1


async def test_an_environment_has_its_world_before_its_constructor_runs(link: StateLink) -> None:
    class Room(LedgerWorld):
        world: StateProxy

        def __init__(self) -> None:
            self.seen = self.world
            self.closed = False

        def close(self) -> None:
            self.closed = True

    room = ProxyFactory(Room, link)()
    number = await room.seen.who()
    room.close()
    assert room.closed
    assert await StateProxy(link).ended(at_least=1) == [number]


# The state process dies


async def test_a_connection_that_is_lost_as_soon_as_it_is_welcomed_is_not_kept(
    state: StateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def connect_and_lose(make: Callable[[], Any], **more: Any) -> Any:
        transport, connection = await connect(make, **more)
        await connection.welcomed
        transport.abort()
        await connection.closed.wait()
        return transport, connection

    monkeypatch.setattr(loop, "create_connection", connect_and_lose)
    link = StateLink(state.address)
    with pytest.raises(WorldError, match="cannot be reached"):
        await link.current(time.monotonic() + 0.5)
    await link.close()


def test_a_class_without_create_state_is_refused() -> None:
    with pytest.raises(StartError, match="needs a create_state"):
        StateProcess(State).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_may_not_connect(state: StateProcess, world: StateProxy) -> None:
    code = (
        "import os,sys,socket; os.setuid(65534); s=socket.socket(socket.AF_UNIX); "
        "s.connect(sys.argv[1]); s.settimeout(30); print(s.recv(1))"
    )
    code = code.replace("sys.argv[1]", "sys.argv[1].replace('@', chr(0))")
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, state.address, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await other.communicate()
    assert said == b"b''\n"
    assert await world.echo(a=1) == {"a": 1}


# Deadlines and back-pressure


async def test_a_call_whose_time_was_over_has_no_effect(world: StateProxy) -> None:
    blocking = asyncio.ensure_future(world.block(seconds=0.3))
    await asyncio.sleep(0)
    with pytest.raises(WorldTimeout):
        await world.within(0.05).note(entry="too late")
    await blocking
    assert await world.entries() == []


async def test_an_asynchronous_method_is_ended_with_its_time(world: StateProxy) -> None:
    while not await world.most_held():  # a busy machine may not even begin one in its time
        with pytest.raises(WorldTimeout):
            await world.within(0.05).hold()
    await world.release()
    assert await world.held(at_least=0) == 1  # one that went on would have left


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls of one shard may be in flight, from now on."""
    monkeypatch.setattr("openenvd.env_host.shared_state.connection.MAX_CALLS", 3)
    return 3


async def test_more_calls_than_may_be_in_flight_wait_until_others_are_answered(
    state: StateProcess, world: StateProxy, few_calls: int
) -> None:
    link = StateLink(state.address)
    held = [asyncio.ensure_future(StateProxy(link).hold(token=n)) for n in range(10)]
    await world.held(at_least=few_calls)
    found: list[Any] = []
    while len(found) < 10:
        await world.release()
        found = [call.result() for call in held if call.done()]
    assert found == list(range(10))
    assert await world.most_held() == few_calls
    await link.close()


async def test_bytes_that_the_state_process_does_not_read_wait_in_their_calls(
    state: StateProcess, link: StateLink
) -> None:
    await StateProxy(link).nothing()
    assert link.connection is not None
    body = bytes(MEGABYTE)
    with stopped(state):
        calls = [asyncio.ensure_future(StateProxy(link).length(body)) for _ in range(20)]
        await asyncio.sleep(0.2)
        assert len(link.connection._sent) <= 3
    assert await asyncio.gather(*calls) == [MEGABYTE] * 20


async def test_the_bodies_that_the_state_process_holds_are_bounded(
    state: StateProcess, world: StateProxy
) -> None:
    others = StateLink(state.address)
    body = bytes(8 * MEGABYTE)
    calls = [asyncio.ensure_future(StateProxy(others).hold(body, token=n)) for n in range(9)]
    await world.held(at_least=4)
    while not all(call.done() for call in calls):
        await world.release()
    assert await world.most_held() == 4
    await others.close()


async def test_calls_that_are_not_answered_in_time_fail_and_keep_others_from_being_sent(
    state: StateProcess, world: StateProxy, few_calls: int
) -> None:
    await world.nothing()
    with stopped(state):
        calls = [world.within(0.05).note(entry=n) for n in range(few_calls + 2)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in found] == [WorldTimeout] * few_calls + [WorldBusy] * 2
    assert "whether it had effects" in str(found[0])
    assert "was not sent in time: 3 calls" in str(found[-1])
    assert await world.echo(a=1) == {"a": 1}


async def test_closing_the_link_fails_waiting_calls(link: StateLink) -> None:
    world = StateProxy(link)
    held = asyncio.ensure_future(world.hold())
    await world.held(at_least=1)
    await link.close()
    with pytest.raises(WorldLost):
        await held
