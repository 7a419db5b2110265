# SPDX-License-Identifier: Apache-2.0
"""Handles of requests and environments: their data, and the calls that act on them.

The `data` of a handle is the API's JSON, as `docs/api.md` describes it, of the last answer;
`refresh` asks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack, cast

from ..schema.states import FINAL_STATES, RequestState
from ..system.text.json_lines import Json
from . import following
from .api import DaemonClient
from .errors import RequestFailed
from .options import DrainOptions, RequestOptions
from .session import ANSWER_SECONDS, Session

if TYPE_CHECKING:
    from .synchronous import Client

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a request.

    Attributes:
        message: Its present phase or progress, in words.
        data: Everything that was reported; a rollout has its figures under `rollout`.
    """

    message: str
    data: Json


class RequestData(Generic[Result]):
    """A request, as the daemon last described it."""

    def __init__(
        self, client: Client, data: Json, read_result: Callable[[Client, Json], Result]
    ) -> None:
        self.client = client
        self._read_result = read_result
        self.data = data

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self.data['label']}, {self.state}>"

    @property
    def id(self) -> str:
        """The id, by which every command finds it."""
        return str(self.data["id"])

    @property
    def state(self) -> str:
        """`PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `CANCELLED`, as of the last answer."""
        return str(self.data["state"])

    @property
    def is_final(self) -> bool:
        """Return whether it has ended: succeeded, failed or cancelled."""
        return self.state in FINAL_STATES

    def result(self) -> Result:
        """Return its result, if it had ended by the last answer.

        Raises:
            RequestFailed: It failed or was cancelled.
            RuntimeError: It had not ended.
        """
        if not self.is_final:
            raise RuntimeError(f"request {self.id} is {self.state}; wait() waits for its end")
        if self.state != RequestState.SUCCEEDED:
            raise RequestFailed(self.data)
        return self._read_result(self.client, self.data.get("result") or {})

    def follow(
        self, daemon: DaemonClient, reconnect: following.Reconnect | None
    ) -> Iterator[Progress]:
        """Yield its progress until it has ended; `data` then has its final state."""
        for event in following.follow(daemon, self.id, logs=False, reconnect=reconnect):
            if event.name == "state":
                self.data = event.data
            elif event.name == "progress":
                yield Progress(str(event.data.get("message") or ""), event.data)


class Request(RequestData[Result]):
    """A queued operation, which continues whether or not a caller waits for it.

    Iterating it yields its progress until it has ended, and raises when it failed.
    """

    def refresh(self) -> Self:
        """Ask for its present state; waits while the daemon is restarted.

        Raises:
            DaemonUnreachable: There is no daemon; none is started.
        """
        _, self.data = following.look(self.client.find_daemon, self.id)
        return self

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until it has ended, and return its result.

        Args:
            timeout: Seconds to wait, after which the request continues; None: no limit.

        Raises:
            RequestFailed: It failed or was cancelled; the error says why, and what to do.
            TimeoutError: It has not ended in time.
            DaemonUnreachable: The daemon is gone; the request continues with the next one.
        """
        seconds = math.inf if timeout is None else timeout
        self.data = following.wait(self.client.find_daemon, self.id, seconds=seconds)
        if not self.is_final:
            raise TimeoutError(f"request {self.id} has not ended within {timeout:g} s")
        return self.result()

    def __iter__(self) -> Iterator[Progress]:
        yield from self.follow(self.client.daemon(), self.client.find_daemon)
        self.result()

    def logs(self, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Yield what it prints, in pieces as they come.

        Args:
            follow: Continue until it has ended.
            tail: Begin this many lines from the end; None: from the beginning.
        """
        return self.client.daemon().request_log(self.id, follow=follow, tail=tail)

    def cancel(self) -> bool:
        """Cancel it; returns whether that was in time. Its finished work is kept."""
        answer = self.client.daemon().cancel(self.id)
        self.data = answer["request"]
        return bool(answer["cancelled"] or answer["cancelling"])


class EnvironmentData:
    """An environment, as the daemon last described it."""

    def __init__(self, client: Client, data: Json) -> None:
        self.client = client
        self.data = data

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.data["name"])

    @property
    def state(self) -> str:
        """`READY`, `STARTING`, …, as of the last answer; `docs/api.md` lists all states."""
        return str(self.data["state"])

    @property
    def address(self) -> str | None:
        """Its address, without the token; None until it has been served."""
        return cast("str | None", self.data["address"])

    @property
    def replicas(self) -> list[Json]:
        """Its replicas, as of the last answer."""
        return cast("list[Json]", self.data["replicas"])


class Environment(EnvironmentData):
    """An environment of the daemon, by its name."""

    def __repr__(self) -> str:
        return f"<Environment {self.name}: {self.state}, {self.address}>"

    def base_url(self) -> str:
        """Ask for the URL to which clients connect: the address, with the token if there is one.

        Raises:
            ApiRefused: It has no address, or no longer; the error says why.
        """
        return str(self.client.daemon().base_url(self.name)["base_url"])

    def refresh(self) -> Self:
        """Ask for its present state."""
        self.data = self.client.daemon().environment(self.name)
        return self

    def connect(self, timeout: float = ANSWER_SECONDS) -> Session:
        """Return a session to enter with `with`.

        Args:
            timeout: Seconds to wait for each answer; a call without one ends the session.
        """
        return Session(self.base_url(), answer_timeout=timeout, name=self.name)

    def scale(self, replicas: int, **options: Unpack[DrainOptions]) -> Request[Environment]:
        """Set the number of its replicas, at the same address, without ending a session."""
        return self._change("scale", {"replicas": replicas}, options)

    def restart(
        self, replica: int | None = None, **options: Unpack[DrainOptions]
    ) -> Request[Environment]:
        """Replace its replicas, or one of them, without ending a session."""
        payload = {} if replica is None else {"replica": replica}
        return self._change("restart", payload, options)

    def down(self, **options: Unpack[RequestOptions]) -> Request[None]:
        """Take it down, and free its resources."""
        payload = {"name": self.name}
        return self.client.submit("down", payload, options, lambda _client, _result: None)

    def logs(
        self, *, follow: bool = False, tail: int | None = None, replica: str | None = None
    ) -> Iterator[str]:
        """Yield what a replica printed, in pieces as they come.

        Args:
            follow: Continue as it grows.
            tail: Begin this many lines from the end; None: from the beginning.
            replica: The replica's id; None: the youngest.
        """
        daemon = self.client.daemon()
        return daemon.environment_log(self.name, follow=follow, tail=tail, replica=replica)

    def _change(self, operation: str, payload: Json, options: DrainOptions) -> Request[Environment]:
        payload = {"name": self.name, **payload}
        return self.client.submit(operation, payload, options, environment_of)


def environment_of(client: Client, result: Json) -> Environment:
    """Return the environment of a request's result, in its present state."""
    return client.environment(result["environment"]["name"])


def json_of(client: Client, result: Json) -> Json:
    """Return a result as the API's JSON."""
    return result
