# SPDX-License-Identifier: Apache-2.0
"""The open sessions of a rollout, and the episodes that wait for one.

A session that played an episode to its end serves the next one, which saves a connection and an
environment. One in which an episode failed is closed.

A server that our own sessions fill is not a failure: a waiting episode gets the next session that
is given back. Nor is a server that has stopped answering: a replica that exited is replaced within
seconds, in which an episode would use up all of its attempts.

The server that then answers must be of the same environment and launch; another one that got the
port counts as no answer. An environment of the daemon is followed (`Followed`): episodes wait for
it while it may come back.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import orjson

from ..system.net.access import without_token
from .answers import Answer, answer_of
from .episodes import FailureReason
from .errors import EpisodeFailed, NoEnvironment
from .session.branching import BranchFailed, Journal
from .session.connection import Message
from .session.session import CONNECT_SECONDS, Server, Session, SessionFailed, session_url

CLOSED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class SessionTiming:
    """The times that sessions wait."""

    connect_seconds: float = CONNECT_SECONDS
    pause_seconds: float = 1.0  # before another attempt at a server that is full or does not answer
    reconnect_seconds: float = 30.0  # in total, for a server that has answered before
    close_seconds: float = 1.0  # for a server to read the close message, at the end


DEFAULT_TIMING = SessionTiming()


class Followed(Protocol):
    """One launch of an environment, through its restarts."""

    server: Server

    def is_starting(self) -> bool:
        """Return whether it is down for now and will come back; blocks.

        Raises `Exception`: It was taken down, or has failed, so that waiting is useless.
        """


Point = tuple[str | None, Journal]  # to which a session can return; its id on the server, if any


class EpisodeSession(Session):
    """A session as episodes use it: its calls, and its errors as failures of an episode."""

    journal: Journal | None = None  # in a tree

    async def reset(self, arguments: Mapping[str, Any], *, seconds: float | None) -> Answer:
        """Begin an episode.

        Raises `EpisodeFailed`: the environment answered with an error, or the session has ended.
        """
        text = orjson.dumps({"type": "reset", "data": arguments})
        return await self._answered(text, seconds, "reset")

    async def step(self, action_json: bytes, *, seconds: float | None) -> Answer:
        """Take a step; it fails as a reset does."""
        return await self._answered(b'{"type":"step","data":%b}' % action_json, seconds, "step")

    async def _answered(self, text: bytes, seconds: float | None, what: str) -> Answer:
        answer = await self._asked(text, seconds, what)
        if self.journal is not None:
            self.journal.add(what, text, answer)
        return answer_of(answer)

    async def checkpoint(self, *, seconds: float | None) -> Point:
        """Keep the present point: on the server if it copies the session, and as a journal.

        Raises `EpisodeFailed`: the session has ended.
        """
        assert self.journal is not None
        answer = orjson.loads(await self._asked(b'{"type":"checkpoint"}', seconds, "checkpoint"))
        return (answer.get("data") or {}).get("checkpoint_id"), self.journal.copy()

    async def restore(self, point: Point, *, seconds: float | None) -> None:
        """Return to a point; by replay if the server has no copy, or dropped it.

        Raises `EpisodeFailed`: a repeated step was answered otherwise, or the session has ended.
        """
        checkpoint_id, journal = point
        text = orjson.dumps({"type": "restore", "data": {"checkpoint_id": checkpoint_id}})
        restored = checkpoint_id and orjson.loads(await self._asked(text, seconds, "restore"))
        try:
            if not restored or restored["type"] != "observation":
                await journal.repeat(partial(self._asked, seconds=seconds, what="step"))
        except BranchFailed as exc:
            raise EpisodeFailed(FailureReason.BRANCH_FAILED, str(exc)) from exc
        self.journal = journal.copy()

    async def _asked(self, text: str | bytes, seconds: float | None, what: str) -> Message:
        try:
            return await self.ask(text, seconds, what)
        except SessionFailed as exc:
            raise _failure(exc) from exc


class SessionPool:
    """Keeps at most `most` sessions, by address."""

    def __init__(
        self,
        most: int,
        *,
        timing: SessionTiming = DEFAULT_TIMING,
        followed: Mapping[str, Followed] | None = None,
    ) -> None:
        self._followed = followed or {}
        self._servers = {address: each.server for address, each in self._followed.items()}
        self._most = most
        self._timing = timing
        self._tls: asyncio.Future[ssl.SSLContext] | None = None
        self._answered: set[str] = set()
        self._lost_since: dict[str, float] = {}
        self._idle: dict[str, list[EpisodeSession]] = defaultdict(list)
        self._in_use: dict[str, set[EpisodeSession]] = defaultdict(set)
        self._closing: dict[asyncio.Task[None], EpisodeSession] = {}
        self._returned: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))

    async def take(self, address: str, *, fresh: bool = False) -> tuple[EpisodeSession, bool]:
        """Return a session, and whether it has served an episode before."""
        idle = self._idle[address]
        while idle and not fresh:
            session = idle.pop()
            if session.is_open:
                self._in_use[address].add(session)
                return session, True
            session.abort()
        in_use = sum(map(len, self._in_use.values()))
        number_idle = sum(map(len, self._idle.values()))
        if number_idle and number_idle + in_use >= self._most:  # makes room for one
            self._close(max(self._idle.values(), key=len).pop())
        session = await self._open(address)
        # The environment that answers may differ from the earlier or the wanted one.
        expected = self._servers.setdefault(address, session.server)
        if session.server != expected:
            session.abort()
            mismatch = f"{_named(session.server)} answers, not {_named(expected)}"
            text = f"{without_token(address)[0]} is another's: {mismatch}"
            raise EpisodeFailed(FailureReason.NOT_CONNECTED, text)
        self._answered.add(address)
        self._lost_since.pop(address, None)
        self._in_use[address].add(session)
        return session, False

    def give_back(self, address: str, session: EpisodeSession) -> None:
        """Take a session back after an episode that did not fail."""
        self._in_use[address].discard(session)
        if session.is_open:
            self._idle[address].append(session)
        else:
            self._close(session)
        self._wake(address)

    def drop(self, address: str, session: EpisodeSession) -> None:
        """Close a session in which an episode failed."""
        self._in_use[address].discard(session)
        session.abort()
        self._wake(address)

    async def wait_for(self, address: str, failure: EpisodeFailed) -> bool:
        """Wait for a server that is full or does not answer; False: another try is useless.

        A full one has room when a session of ours there is given back. One that does not answer may
        come back if it has answered before; a followed environment, until it is gone for good,
        which raises.
        """
        if failure.reason is FailureReason.NO_CAPACITY:
            if self._idle[address]:
                return True
            if self._in_use[address]:
                return await self._returned[address].acquire()
            await asyncio.sleep(self._timing.pause_seconds)
            return False
        if failure.reason is not FailureReason.NOT_CONNECTED:
            return False
        followed = self._followed.get(address)
        if followed is None or not await asyncio.to_thread(followed.is_starting):
            now = time.monotonic()
            away_seconds = now - self._lost_since.setdefault(address, now)
            if address not in self._answered or away_seconds >= self._timing.reconnect_seconds:
                return False
        await asyncio.sleep(self._timing.pause_seconds)
        return True

    async def close(self) -> None:
        """Close all sessions, even if this is cancelled."""
        _abort(itertools.chain(*self._in_use.values()))
        try:
            for number in itertools.count(1):
                if not (sessions := next(filter(None, self._idle.values()), None)):
                    break
                self._close(sessions.pop())
                if number % CLOSED_AT_ONCE == 0:  # closing all 256 in one iteration took 13 ms
                    await asyncio.sleep(0)
            if self._closing:
                await asyncio.wait(self._closing, timeout=self._timing.close_seconds)
        finally:
            _abort(itertools.chain(*self._idle.values(), self._closing.values()))
            if self._closing:
                await asyncio.wait(self._closing)

    async def _open(self, address: str) -> EpisodeSession:
        tls = None
        if environment_url(address).startswith("wss:"):
            if self._tls is None:  # takes 23 ms, and so runs on a thread
                self._tls = asyncio.ensure_future(asyncio.to_thread(ssl.create_default_context))
            tls = await asyncio.shield(self._tls)
        try:
            return await EpisodeSession.open(
                address,
                connect_seconds=self._timing.connect_seconds,
                close_seconds=self._timing.close_seconds,
                tls=tls,
            )
        except ValueError as exc:  # raised by the library
            raise NoEnvironment(str(exc)) from exc
        except SessionFailed as exc:
            raise _failure(exc) from exc

    def _close(self, session: EpisodeSession) -> None:
        closing = asyncio.create_task(session.close(), name="closing a session")
        self._closing[closing] = session
        closing.add_done_callback(self._closing.pop)

    def _wake(self, address: str) -> None:
        """Let the first waiting episode continue; without one, the next that waits."""
        if (returned := self._returned[address]).locked():  # no permit is left from before
            returned.release()


def _named(server: Server) -> str:
    environment, launch = server
    return "a server without a name" if environment is None else f"{environment} ({launch})"


def _abort(sessions: Iterable[EpisodeSession]) -> None:
    for session in list(sessions):
        session.abort()


def environment_url(address: str) -> str:
    """Return the WebSocket URL at which a server begins sessions; raises `NoEnvironment`."""
    try:
        return session_url(address)
    except ValueError as exc:
        raise NoEnvironment(str(exc)) from exc


def _failure(exc: SessionFailed) -> EpisodeFailed:
    try:
        reason = FailureReason(exc.reason.value)
    except ValueError:  # this side has ended it
        reason = FailureReason.CONNECTION_LOST
    return EpisodeFailed(reason, str(exc))
