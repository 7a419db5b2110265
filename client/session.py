# SPDX-License-Identifier: Apache-2.0
"""One session over OpenEnv's WebSocket protocol: reset, step, state, close.

The methods and results are those of OpenEnv's `GenericEnvClient`. That client mistakes the late
answer to an abandoned call for the answer to the next call; this one does not.

    {"type": "reset", "data": {…}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": action}   the same
    {"type": "state"}                  {"type": "state", "data": {…}}
    any of them                        {"type": "error", "data": {message, code}}: `SessionError`

A session is opened by `with`. Like OpenEnv's client, it uses no proxy. After the end of a session,
every further call raises the reason, with the same message, code and hint. One call is under way at
a time, and others wait; a call that is cancelled or times out ends the session.

A branch is a copy of a session, a checkpoint a point to which it can return. The server makes them
where it can; elsewhere the SDK repeats the last reset and the steps since, which is called replay.

`AsyncSession` is built on `rollouts.session`; `Session` runs an `AsyncSession` on a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial
from typing import Any, Self
from weakref import WeakSet

from ..env_host.errors import WSErrorCode
from ..rollouts.session import branching
from ..rollouts.session import session as sessions
from ..rollouts.session.connection import Message
from ..rollouts.session.loop_thread import LoopThread, loop_thread
from ..rollouts.session.session import CONNECT_SECONDS, SessionEnd, SessionFailed, error_text
from ..system.text.json_lines import Json
from .errors import SessionError

ANSWER_SECONDS = 60.0  # as long as OpenEnv's client waits
SHOWN_BYTES = 200  # of an answer that is no message
PING_SECONDS = 20.0  # keeps idle sessions open behind a proxy

# Errors after which the server closes the session.
_ENDS = frozenset(
    {WSErrorCode.CAPACITY_REACHED, WSErrorCode.FACTORY_ERROR, WSErrorCode.SESSION_ERROR}
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a reset or a step.

    Attributes:
        observation: What the agent sees, as JSON.
        reward: The reward of the step; None if the environment gives none.
        done: Whether the episode has ended.
    """

    observation: Json
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point of a session, for `restore` in it or its branches, until the session ends.

    `by` is its tier, as in `branched_by` of a session.
    """

    by: str | None
    checkpoint_id: str | None = field(repr=False)  # the server's; None: by replay
    journal: branching.Journal = field(repr=False)


@dataclass(eq=False, repr=False)
class _Connecting:
    """The arguments of a session."""

    base_url: str
    connect_timeout: float = CONNECT_SECONDS
    answer_timeout: float = ANSWER_SECONDS
    name: str | None = None

    def __post_init__(self) -> None:
        seconds: object = self.answer_timeout
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"timeout: {seconds!r} is no number of seconds above 0")

    def _lost_hint(self, command: str = "status") -> str | None:
        return None if self.name is None else f"openenv {command} {self.name} tells what happened"


class AsyncSession(_Connecting):
    """A session for asyncio, open inside of `async with`.

    Args:
        base_url: The environment's address, with its token if it wants one.
        connect_timeout: Seconds to wait until it is open.
        answer_timeout: Seconds to wait for each answer.
        name: The environment's name, for the hints of errors.
    """

    branched_by: str | None = None  # the tier of the last branch or checkpoint, or of this branch
    branch_refusal: SessionError | None = None  # the server's, if that was `replay`
    _session: sessions.Session | None = None
    _end: SessionError | None = None  # why the session has ended
    _is_new_branch = False  # open, and not entered yet

    def __post_init__(self) -> None:
        super().__post_init__()
        self._journal = branching.Journal()
        self._branches: WeakSet[AsyncSession] = WeakSet()  # that end with this session

    async def __aenter__(self) -> Self:
        if not self._is_new_branch:
            await self._open(self.base_url)
        self._is_new_branch = False
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode, with a `seed` and the environment's own arguments."""
        return _result(await self._ask("reset", kwargs))

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return _result(await self._ask("step", action))

    async def state(self) -> Json:
        """Return the environment's state."""
        return await self._ask("state", None)

    async def branch(
        self,
        count: int = 1,
        *,
        rng: str = "same",
        seeds: Sequence[int] | None = None,
        ttl: float = 60.0,
        keep: bool = False,
    ) -> list[AsyncSession]:
        """Copy the session as it stands; `branched_by` then has the tier.

        The tiers are `state`, `copy` and `fork`, by the server, and `replay`.

        Args:
            count: Number of branches; all are made, or none.
            rng: `same`: their random numbers continue as the session's. `fresh`: each has others,
                which `replay` cannot give.
            seeds: A seed for each branch's random numbers, as with `fresh`.
            ttl: Seconds that the server keeps a branch to which no client is connected yet.
            keep: Whether they outlive this session.

        Returns:
            Open sessions, to enter with `async with`. Each ends with its block or this session.

        Raises:
            SessionError: Its code is `BRANCH_UNSUPPORTED`, `BRANCH_MEMORY`, `BRANCH_DIVERGED` or
                `CAPACITY_REACHED`. This session is unchanged.
            ValueError: `count` is less than 1.
        """
        if count < 1:
            raise ValueError(f"branch() makes at least one branch, not {count}")
        data: Json = {"count": count, "rng": rng, "ttl_s": ttl}
        answer = await self._copied("branch", {**data, "seeds": seeds} if seeds else data)
        if answer is None and (rng != "same" or seeds):
            message = "a replayed branch has the random numbers of its session, not fresh ones"
            raise SessionError(message, WSErrorCode.BRANCH_UNSUPPORTED)
        ids = [None] * count if answer is None else [each["session_id"] for each in answer]
        made = [AsyncSession(*astuple(self)) for _ in ids]
        beginning = map(partial(AsyncSession._begin_branch, parent=self), made, ids)
        for failure in await asyncio.gather(*beginning, return_exceptions=True):
            if failure is not None:
                await asyncio.gather(*(branch.close() for branch in made))
                raise failure
        if not keep:
            self._branches.update(made)
        return made

    async def checkpoint(self) -> Checkpoint:
        """Keep the present point of the session, for `restore`; `branched_by` has the tier.

        Raises `SessionError`: `BRANCH_UNSUPPORTED` or `BRANCH_MEMORY`; the session is unchanged.
        """
        found = await self._copied("checkpoint", None)
        if found is None and not self._journal.has_reset:
            message = "a session can only be replayed from a reset"
            raise SessionError(message, WSErrorCode.BRANCH_UNSUPPORTED, "reset the session first")
        return Checkpoint(self.branched_by, found, self._journal.copy())

    async def restore(self, node: Checkpoint) -> StepResult:
        """Return to a checkpoint, and return the result of the last reset or step before it.

        Raises:
            SessionError: Its code is `CHECKPOINT_UNKNOWN`, and the session unchanged; or
                `BRANCH_DIVERGED`, and the session must be reset.
            TypeError: `node` is no checkpoint.
        """
        if not isinstance(node, Checkpoint):
            raise TypeError(f"restore() takes what checkpoint() returned, not {node!r}")
        if node.checkpoint_id is None:
            text = await self._repeat(node.journal)
            return _result(self._data_of("restore", text or b"{}"))
        found = await self._ask("restore", {"checkpoint_id": node.checkpoint_id})
        self._journal = node.journal.copy()
        return _result(found)

    async def close(self) -> None:
        """End the session, and its branches."""
        await asyncio.gather(*(branch.close() for branch in self._branches))
        if self._session is not None:
            await self._session.close()

    async def _open(self, address: str) -> None:
        try:
            self._session = await sessions.Session.open(
                address, connect_seconds=self.connect_timeout, ping_seconds=PING_SECONDS
            )
        except (SessionFailed, ValueError) as exc:
            is_full = isinstance(exc, SessionFailed) and exc.reason is SessionEnd.NO_CAPACITY
            code = WSErrorCode.CAPACITY_REACHED if is_full else None
            raise SessionError(
                f"no session could be opened: {exc}", code, self._lost_hint()
            ) from exc
        self._end, self._journal = None, branching.Journal()

    async def _copied(self, kind: str, data: Mapping[str, Any] | None) -> Any:
        """Ask the server for branches or a checkpoint, and return what names them.

        None: the server makes none, and they are replayed.
        """
        self.branch_refusal = None
        try:
            answer = await self._ask(kind, data)
        except SessionError as exc:
            if exc.code not in branching.REPLAYED:
                raise
            self.branched_by, self.branch_refusal = branching.REPLAY, exc
            return None
        self.branched_by = answer["by"]
        return answer["branches"] if kind == "branch" else answer["checkpoint_id"]

    async def _begin_branch(self, session_id: str | None, parent: AsyncSession) -> None:
        self.branched_by, self._is_new_branch = parent.branched_by, True
        if session_id is None:
            await self._open(self.base_url)
            await self._repeat(parent._journal)
        else:
            await self._open(branching.branch_address(self.base_url, session_id))
            self._journal = parent._journal.copy()

    async def _repeat(self, journal: branching.Journal) -> Message | None:
        try:
            text = await journal.repeat(partial(self._exchange, "step"))
        except branching.BranchFailed as exc:
            with suppress(SessionError):
                self._data_of("step", exc.answer)
            if self._end is not None:  # a full server's answer is not a divergence
                raise _again(self._end) from exc
            message = f"the session cannot be replayed: {exc}"
            raise SessionError(message, exc.code, "reset with a seed, if that helps") from exc
        self._journal = journal.copy()
        return text

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Json:
        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        text = await self._exchange(kind, message)
        self._journal.add(kind, message, text)  # a step that fails may also have changed something
        return self._data_of(kind, text)

    async def _exchange(self, kind: str, message: str | bytes) -> Message:
        if self._session is None:
            raise SessionError("the session is not open: with env.connect() as session: …")
        if self._end is not None:
            raise _again(self._end)
        try:
            return await self._session.ask(message, self.answer_timeout, kind)
        except SessionFailed as exc:
            if exc.reason is not SessionEnd.CONNECTION_LOST:
                is_late = exc.reason is SessionEnd.STEP_TIMED_OUT
                raise SessionError(
                    str(exc), hint=self._lost_hint("logs") if is_late else None
                ) from exc
            said = "the connection was lost" if exc.close is None else "closed by the server"
            message = f"the session has ended: {(exc.close and exc.close.reason) or said}"
            raise SessionError(message, hint=self._lost_hint()) from exc

    def _data_of(self, kind: str, text: Message) -> Json:
        try:
            answer = json.loads(text)
            found: Json = answer.get("data") or {}
        except (ValueError, AttributeError):
            shown = text[:SHOWN_BYTES].decode(errors="replace")
            raise SessionError(f"the answer is no message of OpenEnv's protocol: {shown}") from None
        if answer.get("type") != "error":
            return found
        message, code = error_text(found), found.get("code")
        if code not in _ENDS or kind == "branch":
            hint = found.get("hint")
            if hint is None and self.name is not None and found.get("exception"):
                hint = f"openenv logs {self.name} shows the traceback"
            raise SessionError(message, code, hint)
        # The close frame that follows has this message, but may be truncated.
        hint = self._lost_hint("status" if "for memory" in message else "logs")
        hint = hint if code == WSErrorCode.SESSION_ERROR else None
        self._end = SessionError(message, code, hint)
        raise _again(self._end)


class Session(_Connecting):
    """A session for synchronous code, open inside of `with`; the arguments of `AsyncSession`."""

    _thread: LoopThread | None = None  # of an open session

    @cached_property
    def _session(self) -> AsyncSession:
        return AsyncSession(*astuple(self))

    def __enter__(self) -> Self:
        thread = loop_thread()
        thread.call(self._session.__aenter__())
        self._thread = thread
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode, with a `seed` and the environment's own arguments."""
        return self._thread_here().call(self._session.reset(**kwargs))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return self._thread_here().call(self._session.step(action))

    def state(self) -> Json:
        """Return the environment's state."""
        return self._thread_here().call(self._session.state())

    def branch(
        self,
        count: int = 1,
        *,
        rng: str = "same",
        seeds: Sequence[int] | None = None,
        ttl: float = 60.0,
        keep: bool = False,
    ) -> list[Session]:
        """Copy the session as it stands, as `AsyncSession.branch` does."""
        thread = self._thread_here()
        call = self._session.branch(count, rng=rng, seeds=seeds, ttl=ttl, keep=keep)
        return [Session._around(branch, thread) for branch in thread.call(call)]

    def checkpoint(self) -> Checkpoint:
        """Keep the present point of the session, as `AsyncSession.checkpoint` does."""
        return self._thread_here().call(self._session.checkpoint())

    def restore(self, node: Checkpoint) -> StepResult:
        """Return to a checkpoint, as `AsyncSession.restore` does."""
        return self._thread_here().call(self._session.restore(node))

    @property
    def branched_by(self) -> str | None:
        """The tier of the last branch or checkpoint, or of this branch."""
        return self._session.branched_by

    @property
    def branch_refusal(self) -> SessionError | None:
        """The server's refusal, if that was `replay`."""
        return self._session.branch_refusal

    @classmethod
    def _around(cls, session: AsyncSession, thread: LoopThread) -> Session:
        made = cls(*astuple(session))
        made._session, made._thread = session, thread
        return made

    def close(self) -> None:
        """End the session; when Python ends, its socket is closed with the process."""
        is_here = self._thread is not None and self._thread.pid == os.getpid()
        if self._thread is not None and is_here and not sys.is_finalizing():
            self._thread.call(self._session.close())

    def _thread_here(self) -> LoopThread:
        """Return the session's thread; without a session any thread, on which the call fails."""
        thread = self._thread or loop_thread()
        if thread.pid != os.getpid():
            message = f"the session was opened by process {thread.pid}; open one in this process"
            raise SessionError(message)
        return thread


def _result(data: Json) -> StepResult:
    return StepResult(data.get("observation") or {}, data.get("reward"), bool(data.get("done")))


def _again(error: SessionError) -> SessionError:
    """Return a copy of the error, because each call raises its own."""
    return SessionError(error.message, error.code, error.hint)
