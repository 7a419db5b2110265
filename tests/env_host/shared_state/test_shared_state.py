# SPDX-License-Identifier: Apache-2.0
"""One state, many shards: real processes, killed and stopped in the middle of calls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest

from openenvd.env_host.environment.interfaces import State
from openenvd.env_host.errors import StartError
from openenvd.env_host.shared_state.connection import (
    ProxyFactory,
    StateLink,
    StateProxy,
    socket_name,
)
from openenvd.env_host.shared_state.frames import (
    BodyTooLarge,
    WorldBusy,
    WorldCallFailed,
    WorldError,
    WorldLost,
    WorldTimeout,
)
from openenvd.env_host.shared_state.process import StateProcess

from ..ledger import ROOT, LedgerWorld, ShardProcess

MEGABYTE = 2**20
Connect = Callable[..., Any]


@pytest.fixture
def state() -> Iterator[StateProcess]:
    """A state process of a `Ledger`."""
    process = StateProcess(LedgerWorld)
    process.start()
    yield process
    process.stop()
    assert process.pid is None
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(OSError, match="refused"):
        late.connect(socket_name(process.address))


@pytest.fixture
async def link(state: StateProcess) -> AsyncIterator[StateLink]:
    """This process as a shard."""
    link = StateLink(state.address)
    await link.current(time.monotonic() + 30)
    yield link
    await link.close()


@pytest.fixture
def world(link: StateLink) -> StateProxy:
    """One session."""
    return StateProxy(link)


@pytest.fixture
def shard(state: StateProcess) -> Iterator[Callable[[], ShardProcess]]:
    """Starts shards that are processes of their own."""
    started: list[ShardProcess] = []

    def start() -> ShardProcess:
        started.append(ShardProcess(state.address))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.kill()


def kill(state: StateProcess) -> dict[str, Any]:
    assert state.pid is not None
    os.kill(state.pid, signal.SIGKILL)
    while (exited := state.reap()) is None:
        time.sleep(0.001)
    return exited


# What a call carries


async def test_a_call_returns_the_methods_result(world: StateProxy) -> None:
    assert await world.nothing() is None
    assert await world.echo(a=1, b=[None, "ü", {"c": 0.5}]) == {
        "a": 1,
        "b": [None, "ü", {"c": 0.5}],
    }
    assert await world.echo(b"\0\xff") == b"\0\xff"
    assert await world.echo(b"", a=1) == ({"a": 1}, b"")
    assert await world.echo(memoryview(b"view")) == b"view"


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 10 * MEGABYTE])
async def test_a_body_of_any_size_comes_back_unchanged(world: StateProxy, size: int) -> None:
    body = os.urandom(size)
    assert await world.echo(body) == body


async def test_many_large_bodies_at_once_come_back(world: StateProxy) -> None:
    bodies = [os.urandom(3 * MEGABYTE) + bytes([n]) for n in range(40)]
    assert await asyncio.gather(*(world.echo(body) for body in bodies)) == bodies


async def test_a_body_that_is_too_large_is_not_sent(
    world: StateProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.env_host.shared_state.frames.MAX_BODY_BYTES", 1000)
    with pytest.raises(BodyTooLarge):
        await world.length(bytes(1001))
    assert await world.length(bytes(1000)) == 1000


async def test_an_answer_that_is_too_large_fails_its_own_call(world: StateProxy) -> None:
    with pytest.raises(WorldCallFailed, match="BodyTooLarge"):
        await world.zeros(count=257 * MEGABYTE)
    assert await world.echo(a=1) == {"a": 1}


async def test_an_exception_of_a_method_reaches_its_caller_alone(world: StateProxy) -> None:
    calls: list[Any] = [world.fail(), world.echo(a=1)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert str(found[0]) == "world.fail: LookupError: there is nothing"
    assert found[1] == {"a": 1}


async def test_a_message_without_a_utf8_form_fails_its_own_call(world: StateProxy) -> None:
    with pytest.raises(WorldCallFailed, match=r"OSError: caf\?"):
        await world.fail_in_latin()
    assert await world.echo(a=1) == {"a": 1}


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
async def test_a_deadline_that_is_no_number_fails_its_own_call(
    world: StateProxy, seconds: float
) -> None:
    with pytest.raises(ValueError, match="write a number of seconds"):
        await world.within(seconds).echo(a=1)
    assert await world.echo(a=1) == {"a": 1}


@pytest.mark.parametrize("name", ["session_ended", "close", "no_such_thing"])
async def test_only_public_methods_may_be_called(world: StateProxy, name: str) -> None:
    with pytest.raises(WorldCallFailed, match="AttributeError"):
        await world.call(name)
    with pytest.raises(WorldCallFailed, match="AttributeError"):
        await world.call("_private")


async def test_wrong_arguments_and_results_fail_their_call(world: StateProxy) -> None:
    for call in (world.note(), world.nothing(a=1), world.nothing(b"body")):
        with pytest.raises(WorldCallFailed, match="TypeError"):
            await call
    with pytest.raises(WorldCallFailed, match="Unable to serialize"):
        await world.fail_to_say()
    with pytest.raises(ValueError, match="serialize"):
        await world.echo(a=object())
    assert await world.note(entry="fine") == 1


async def test_a_synchronous_environment_calls_from_its_thread(world: StateProxy) -> None:
    found = await asyncio.to_thread(lambda: world.blocking.echo(b"x", a=1))
    assert found == ({"a": 1}, b"x")


# Whose reply it is


async def test_every_reply_reaches_the_call_that_asked(link: StateLink) -> None:
    worlds = [StateProxy(link) for _ in range(10)]
    calls = [
        worlds[n % 10].within(60).after(turns=(n * 7919) % 50, token=f"{n % 10}/{n}")
        for n in range(2000)
    ]
    assert await asyncio.gather(*calls) == [f"{n % 10}/{n}" for n in range(2000)]


async def test_no_two_sessions_have_the_same_number(state: StateProcess) -> None:
    links = [StateLink(state.address) for _ in range(3)]
    numbers = [await StateProxy(link).who() for link in links for _ in range(3)]
    assert len(set(numbers)) == 9
    for link in links:
        await link.close()


async def test_the_reply_to_an_abandoned_call_reaches_no_other_call(
    world: StateProxy,
) -> None:
    given_up = asyncio.ensure_future(world.hold(token="first"))
    await world.held(at_least=1)
    given_up.cancel()
    second = asyncio.ensure_future(world.hold(token="second"))
    await world.held(at_least=2)
    await world.release()
    assert await second == "second"


async def test_the_next_process_of_a_killed_shard_gets_none_of_its_replies(
    shard: Callable[[], ShardProcess], world: StateProxy
) -> None:
    victim = shard()
    victim.order("hold", *({"token": f"victim {n}"} for n in range(50)))
    await world.held(at_least=50)
    victim.kill()
    successor = await asyncio.to_thread(shard)
    calls = [{"token": f"successor {n}"} for n in range(50)]
    successor.order("hold", *calls)
    await world.held(at_least=100)
    await world.release()
    found = await asyncio.to_thread(successor.said, "found")
    assert found == [call["token"] for call in calls]


# Sessions that end


async def test_session_ended_is_called_once_when_a_session_ends(link: StateLink) -> None:
    stays, leaves, never_called = (
        StateProxy(link),
        StateProxy(link),
        StateProxy(link),
    )
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


async def test_the_sessions_of_a_killed_shard_end(
    shard: Callable[[], ShardProcess], world: StateProxy
) -> None:
    victim = shard()
    [number] = await asyncio.to_thread(victim.ask, "who", {})
    victim.kill()
    assert await world.ended(at_least=1) == [number]


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


async def test_all_calls_in_flight_fail_at_once_when_the_state_process_exits(
    state: StateProcess, link: StateLink
) -> None:
    world = StateProxy(link)
    calls = [asyncio.ensure_future(world.within(3600).hold(token=n)) for n in range(100)]
    await world.held(at_least=100)
    kill(state)
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in found} == {WorldLost}
    assert "epoch 1" in str(found[0])


async def test_the_next_epoch_serves_new_sessions_and_none_of_the_old(state: StateProcess) -> None:
    lost = asyncio.Event()
    link = StateLink(state.address, lambda _: lost.set())
    old = StateProxy(link)
    assert await old.note(entry="of the first epoch") == 1
    kill(state)
    await lost.wait()
    waiting = asyncio.ensure_future(StateProxy(link).entries())  # waits for the next epoch
    state.start(wait=False)
    assert await waiting == []
    new = StateProxy(link)
    assert await new.note(entry="of the second") == 1
    with pytest.raises(WorldLost):
        await old.entries()
    await link.close()


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


def test_the_exit_of_the_state_process_is_described(state: StateProcess) -> None:
    pid = state.pid
    found = kill(state)
    assert (found["pid"], found["generation"], found["wait_status"]) == (pid, 1, signal.SIGKILL)


async def test_a_call_without_a_state_process_fails_with_a_reason(
    state: StateProcess, link: StateLink
) -> None:
    kill(state)
    while link.connection is not None:
        await asyncio.sleep(0)
    with pytest.raises(WorldError, match="cannot be reached"):
        await StateProxy(link).within(0.05).nothing()


def test_a_class_without_create_state_is_refused() -> None:
    with pytest.raises(StartError, match="needs a create_state"):
        StateProcess(State).start()


_HOST = """
import os, sys
from openenvd.env_host.shared_state.process import StateProcess
from tests.env_host.ledger import LedgerWorld
process = StateProcess(LedgerWorld)
process.start()
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_the_state_process_ends_with_its_host() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with host:
        assert host.stdout is not None
        orphan = psutil.Process(int(host.stdout.readline()))
        host.kill()
    orphan.wait(30)
    assert not orphan.is_running()


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


async def test_a_call_that_is_not_answered_in_time_fails(
    world: StateProxy, state: StateProcess
) -> None:
    await world.nothing()
    assert state.pid is not None
    os.kill(state.pid, signal.SIGSTOP)
    with pytest.raises(WorldTimeout, match="whether it had effects"):
        await world.within(0.05).echo(a="late")
    os.kill(state.pid, signal.SIGCONT)
    assert await world.echo(a="next") == {"a": "next"}


async def test_a_call_whose_time_was_over_has_no_effect(world: StateProxy) -> None:
    blocking = asyncio.ensure_future(world.block(seconds=0.3))
    await asyncio.sleep(0)
    with pytest.raises(WorldTimeout):
        await world.within(0.05).note(entry="too late")
    await blocking
    assert await world.entries() == []


async def test_an_asynchronous_method_is_ended_with_its_time(world: StateProxy) -> None:
    with pytest.raises(WorldTimeout):
        await world.within(0.05).hold()
    await world.release()
    assert await world.most_held() == 1


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
    assert state.pid is not None
    assert link.connection is not None
    os.kill(state.pid, signal.SIGSTOP)
    body = bytes(MEGABYTE)
    calls = [asyncio.ensure_future(StateProxy(link).length(body)) for _ in range(20)]
    await asyncio.sleep(0.2)
    assert len(link.connection._sent) <= 3
    os.kill(state.pid, signal.SIGCONT)
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


async def test_calls_that_are_not_answered_in_time_keep_others_from_being_sent(
    state: StateProcess, world: StateProxy, few_calls: int
) -> None:
    await world.nothing()
    assert state.pid is not None
    os.kill(state.pid, signal.SIGSTOP)
    calls = [world.within(0.05).note(entry=n) for n in range(few_calls + 2)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in found] == [WorldTimeout] * few_calls + [WorldBusy] * 2
    assert "was not sent in time: 3 calls" in str(found[-1])
    os.kill(state.pid, signal.SIGCONT)
    assert await world.echo(a=1) == {"a": 1}


async def test_closing_the_link_fails_waiting_calls(link: StateLink) -> None:
    world = StateProxy(link)
    held = asyncio.ensure_future(world.hold())
    await world.held(at_least=1)
    await link.close()
    with pytest.raises(WorldLost):
        await held


def test_no_thread_and_no_child_is_left() -> None:
    before = threading.active_count()
    process = StateProcess(LedgerWorld)
    process.start()
    process.stop()
    assert threading.active_count() == before
    assert not [c for c in psutil.Process().children() if "openenvd: state" in c.name()]
