# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server, of whose frames nothing is hidden.

    {"type": "reset", "data": {…}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": action}   the same
    {"type": "state"}                  {"type": "state", "data": {…}}
    any of them                        {"type": "error", "data": {message, code}}

The sessions of `rollouts` and of `client` turn answers into results; a test has to see what was
sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ....rollouts.session import session as sessions
from ....rollouts.session.session import SessionEnd
from ....system.text.json_lines import Json

CONNECT_SECONDS = 60.0  # of an environment that loads a model for its first session


class SessionFailed(Exception):
    """The session is of no more use: it was refused, silent or lost, or its answer is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One answer, and how long it took."""

    kind: str
    data: Json
    seconds: float

    @property
    def error(self) -> str | None:
        """What an error frame says; None of another."""
        if self.kind != "error":
            return None
        return f"{self.data.get('code')}: {self.data.get('message')}"


class TrialSession:
    """A session, open inside of `async with`.

    Args:
        base_url: The environment's address, with its token if it wants one.
        answer_seconds: Until each answer must be there.
    """

    def __init__(self, base_url: str, answer_seconds: float) -> None:
        self._base_url = base_url
        self._seconds = answer_seconds
        self._session: sessions.Session | None = None

    async def __aenter__(self) -> Self:
        try:
            self._session = await sessions.Session.open(
                self._base_url, connect_seconds=CONNECT_SECONDS, close_seconds=self._seconds
            )
        except (sessions.SessionFailed, ValueError) as exc:
            raise SessionFailed(f"no session could be opened: {exc}") from exc
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def reset(self, **arguments: Any) -> Frame:
        """Begin an episode."""
        return await self.ask({"type": "reset", "data": arguments})

    async def step(self, action: Mapping[str, Any]) -> Frame:
        """Take a step."""
        return await self.ask({"type": "step", "data": action})

    async def state(self) -> Frame:
        """Ask for the state."""
        return await self.ask({"type": "state"})

    async def ask(self, message: Json | str) -> Frame:
        """Send a message, or text that is none, and return the answer.

        Raises:
            SessionFailed
        """
        assert self._session is not None
        what = message["type"] if isinstance(message, dict) else "text"
        started = time.monotonic()
        data = message if isinstance(message, str) else json.dumps(message)
        try:
            text = await self._session.ask(data, self._seconds, what)
        except sessions.SessionFailed as exc:
            if exc.reason is not SessionEnd.CONNECTION_LOST:
                raise SessionFailed(str(exc)) from exc
            closed = f"closed with {exc.close_code} {exc.close_reason}".rstrip()
            why = "the connection was lost" if exc.close_code is None else closed
            raise SessionFailed(f"a {what} ended the session: {why}") from exc
        seconds = time.monotonic() - started
        try:
            frame = json.loads(text)
            return Frame(frame["type"], dict(frame.get("data") or {}), seconds)
        except (ValueError, KeyError, TypeError) as exc:
            raise SessionFailed(f"a {what} was answered by no frame: {text[:200]!r}") from exc

    async def end(self) -> bool:
        """Send the close message; whether the server closes the connection."""
        assert self._session is not None
        return await self._session.end(self._seconds)
