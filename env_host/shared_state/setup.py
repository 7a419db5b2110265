# SPDX-License-Identifier: Apache-2.0
"""Shared worlds: the sessions of all shards act on one state, which one process holds.

A class that declares `SHARED_STATE = True` has a `create_state()` (see `shared_state_methods.py`
for what its methods may be). The host forks the *state process* before the shards; the environment
of each session, in its shard, calls the state as `await self.world.method(...)`.

    host ──fork──▶ state process ◀── Unix stream sockets ──▶ shard 0..n-1
      │            one StateServer                           one StateLink each
      └ holds the listening socket: it outlives every state process

    session: world.mix ──▶ Pending ──(room?)──▶ CALL ───────────▶ state.mix(...)
             result    ◀── by request id ◀──── REPLY / FAILURE ◀── result / exception

What fails, and how it shows:

    shard killed mid-call        EOF in the state process: the call finishes, its reply goes
                                 nowhere, `session_ended` for each of its sessions. Its successor
                                 has a connection of its own and can receive nothing of this.
    state process dies           EOF in every shard: all that is in flight fails at once with
                                 `WorldLost`, all sessions are ended with it; the host forks the
                                 next epoch, shards connect again (their connects wait in the
                                 listening socket's queue), new sessions live in the new state.
    state process stalls         deadlines: `WorldTimeout`; then nothing more is sent, `WorldBusy`.
    a call takes too long        `WorldTimeout`; its late reply is dropped, by its id.
    a method raises              `WorldCallFailed`, this call only.
    a reply or a call of another that connection is closed: to the shard as if the state process
      epoch, or to nobody; or    had died, to the state process as if the shard had.
      garbage
    the host dies                the state process notices within a second and ends.

    shared_state_wire.py     frames                    shared_state_methods.py  what may be called
    shared_state_server.py   in the state process      shared_state_limits.py   bounds, deadlines
    shared_state_link.py     in a shard                shared_state_process.py  fork, exit, again
    shared_state_connection.py  calls in flight        shared_state_outgoing.py one write a turn
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from .errors import WorldError, WorldLost
from .process import Spawn, StateProcess
from .proxy import World
from .reconnect import StateLink

__all__ = ["WorldFactory", "connect_world", "shares_state", "start_state_process"]


def shares_state(env_class: Any) -> bool:
    """Whether a class asks for a shared state."""
    return bool(getattr(env_class, "SHARED_STATE", False))


def start_state_process(
    env_class: Any,
    fds_to_close: Callable[[], Iterable[int]] = tuple,
    spawn: Spawn | None = None,
) -> StateProcess:
    """Fork the state process; returns when it is ready. In the host, before the shards.

    `fds_to_close`: what the host has open and the state process must not keep. `spawn`: starts
    it as a program of its own, where a fork is not safe.

    Raises:
        StateFailed: there is no `create_state`, or it raised.
    """
    process = StateProcess(env_class, fds_to_close, spawn)
    process.start()
    return process


async def connect_world(
    address: str, shard: str, on_lost: Callable[[WorldLost], None] = lambda lost: None
) -> StateLink:
    """A shard's way to the state process. `on_lost` is called each time that one is lost.

    When there is none just now, it is not waited for long: sessions will wait for it.
    """
    link = StateLink(address, shard, on_lost)
    with suppress(WorldError):
        await link.connect()
    return link


class WorldFactory:
    """Makes environments that have a `world`: it is there before their constructor runs."""

    def __init__(self, factory: Callable[[], Any], link: StateLink) -> None:
        self.func = factory  # as in `functools.partial`: what this wraps
        self._link = link
        functools.update_wrapper(self, factory, updated=())

    def __call__(self) -> Any:
        """A new environment."""
        world = World(self._link)
        factory: Any = self.func
        if inspect.isclass(factory):
            env: Any = factory.__new__(factory)
            env.world = world
            factory.__init__(env)
        else:
            env = factory()
            env.world = world
        env.close = _closing(getattr(env, "close", None), world)
        return env


def _closing(close: Callable[[], Any] | None, world: World) -> Callable[[], Any]:
    """`close`, after which the session has left the world."""

    def close_and_leave() -> Any:
        try:
            return close() if close is not None else None
        finally:
            with suppress(RuntimeError):  # the loop is closed: the connection has ended anyway
                world.leave()

    return close_and_leave
