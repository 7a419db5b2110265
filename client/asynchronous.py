# SPDX-License-Identifier: Apache-2.0
"""The SDK for asyncio: `AsyncClient`, `AsyncRequest`, `AsyncEnvironment`.

Short calls run in threads; one that waits for a request takes half a second at most. A stream has a
thread of its own while it is iterated, which fetches each item on demand. When its consumer stops
early or is cancelled, the stream's connection is shut down, which ends the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, Unpack

from ..system.text.json_lines import Json
from . import handles
from .api import DaemonClient, RequestFilters
from .following import Reconnect, look
from .options import DrainOptions, LaunchOptions, RequestOptions, RolloutOptions
from .session import ANSWER_SECONDS, AsyncSession
from .synchronous import Client, Folder

WAIT_SECONDS = 0.5  # of one call that waits for a request: a cancelled one ends by itself soon
Result = TypeVar("Result")
Item = TypeVar("Item")
Opening = Callable[[DaemonClient, Reconnect], Iterator[Item]]


class AsyncClient:
    """A client of this user's daemon, for asyncio; `Client` documents each method."""

    def __init__(self, *, home: Folder | None = None, start: bool = True) -> None:
        self._client = Client(home=home, start=start)

    def __repr__(self) -> str:
        return f"Async{self._client!r}"

    async def launch(
        self,
        source: Folder,
        *,
        name: str | None = None,
        update: bool | None = None,
        **options: Unpack[LaunchOptions],
    ) -> AsyncRequest[AsyncEnvironment]:
        """Start an environment, or update the one of this name."""
        launch = self._client.launch
        request = await asyncio.to_thread(launch, source, name=name, update=update, **options)
        return _with_environment(request)

    async def rollout(
        self, *environments: AsyncEnvironment | str, out: Folder, **options: Unpack[RolloutOptions]
    ) -> AsyncRequest[Json]:
        """Play episodes, and write them to a folder."""
        names = [each if isinstance(each, str) else each.name for each in environments]
        request = await asyncio.to_thread(self._client.rollout, *names, out=out, **options)
        return AsyncRequest(request.client, request.data, handles.json_of)

    async def environments(self) -> list[AsyncEnvironment]:
        """List every environment that is wanted, or that failed."""
        found = await asyncio.to_thread(self._client.environments)
        return [AsyncEnvironment(each.client, each.data) for each in found]

    def environment(self, name: str) -> AsyncEnvironment:
        """Return one environment by its name; `await` it for its present state."""
        return AsyncEnvironment(self._client, {"name": name})

    async def requests(self, **filters: Unpack[RequestFilters]) -> list[AsyncRequest[Json]]:
        """List the queue and its history, newest first."""
        found = await asyncio.to_thread(self._client.requests, **filters)
        return [AsyncRequest(each.client, each.data, handles.json_of) for each in found]

    async def request(self, request_id: str) -> AsyncRequest[Json]:
        """Return one request by its id, or the beginning of it."""
        found = await asyncio.to_thread(self._client.request, request_id)
        return AsyncRequest(found.client, found.data, handles.json_of)

    async def status(self) -> Json:
        """Return what `openenv status --json` prints."""
        return await asyncio.to_thread(self._client.status)

    async def info(self) -> Json:
        """Return what `openenv info --json` prints."""
        return await asyncio.to_thread(self._client.info)


class AsyncRequest(handles.RequestData[Result]):
    """A queued operation; `async for` yields its progress, and raises when it failed."""

    async def refresh(self) -> Self:
        """Ask for its present state."""
        _, self.data = await asyncio.to_thread(look, self.client.find_daemon, self.id)
        return self

    async def wait(self) -> Result:
        """Wait until it has ended, and return its result; `asyncio.timeout` bounds it.

        Raises:
            RequestFailed: It failed or was cancelled; the error says why, and what to do.
        """
        find = self.client.find_daemon
        while True:
            _, self.data = await asyncio.to_thread(look, find, self.id, wait_seconds=WAIT_SECONDS)
            if self.is_final:
                return await asyncio.to_thread(self.result)

    async def __aiter__(self) -> AsyncIterator[handles.Progress]:
        async for progress in stream(self.client, self.follow):
            yield progress
        await asyncio.to_thread(self.result)

    async def logs(self, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[str]:
        """Yield what it prints, in pieces as they come; `Request.logs` has the arguments."""
        log = stream(self.client, lambda d, _: d.request_log(self.id, follow=follow, tail=tail))
        async for text in log:
            yield text

    async def cancel(self) -> bool:
        """Cancel it; returns whether that was in time."""
        request = handles.Request(self.client, self.data, self._read_result)
        was_in_time = await asyncio.to_thread(request.cancel)
        self.data = request.data
        return was_in_time


class AsyncEnvironment(handles.EnvironmentData):
    """An environment of the daemon; `Environment` documents each method."""

    def __repr__(self) -> str:
        return f"<AsyncEnvironment {self.name}>"

    def __await__(self) -> Generator[Any, None, Self]:
        return self.refresh().__await__()

    @property
    def _synchronous(self) -> handles.Environment:
        return handles.Environment(self.client, self.data)

    async def base_url(self) -> str:
        """Ask for the URL to which clients connect."""
        return await asyncio.to_thread(self._synchronous.base_url)

    async def refresh(self) -> Self:
        """Ask for its present state."""
        self.data = (await asyncio.to_thread(self._synchronous.refresh)).data
        return self

    @asynccontextmanager
    async def connect(self, timeout: float = ANSWER_SECONDS) -> AsyncIterator[AsyncSession]:  # noqa: ASYNC109
        """Open a session within `async with`; see `Environment.connect`."""
        url = await self.base_url()
        async with AsyncSession(url, answer_timeout=timeout, name=self.name) as session:
            yield session

    async def scale(
        self, replicas: int, **options: Unpack[DrainOptions]
    ) -> AsyncRequest[AsyncEnvironment]:
        """Set the number of its replicas, at the same address, without ending a session."""
        request = await asyncio.to_thread(self._synchronous.scale, replicas, **options)
        return _with_environment(request)

    async def restart(
        self, replica: int | None = None, **options: Unpack[DrainOptions]
    ) -> AsyncRequest[AsyncEnvironment]:
        """Replace its replicas, or one of them, without ending a session."""
        request = await asyncio.to_thread(self._synchronous.restart, replica, **options)
        return _with_environment(request)

    async def down(self, **options: Unpack[RequestOptions]) -> AsyncRequest[None]:
        """Take it down, and free what it holds."""
        request = await asyncio.to_thread(self._synchronous.down, **options)
        return AsyncRequest(request.client, request.data, lambda _client, _result: None)

    async def logs(
        self, *, follow: bool = False, tail: int | None = None, replica: str | None = None
    ) -> AsyncIterator[str]:
        """Yield what a replica printed, in pieces as they come."""
        asked: Json = {"follow": follow, "tail": tail, "replica": replica}
        log = stream(self.client, lambda daemon, _: daemon.environment_log(self.name, **asked))
        async for text in log:
            yield text


async def stream(client: Client, opening: Opening[Item]) -> AsyncIterator[Item]:
    """Iterate over the result of `opening` in a thread, which ends with the iteration.

    `opening` gets the daemon, and a function that finds it again after a lost connection.
    """
    daemons: list[DaemonClient] = []
    stopped = False

    def find() -> DaemonClient | None:
        if stopped:
            raise _Stopped
        if (found := client.find_daemon()) is not None:
            daemons.append(found)
        if stopped:  # during the search
            raise _Stopped
        return found

    loop = asyncio.get_running_loop()
    end = object()
    thread = ThreadPoolExecutor(1, "openenvd stream")
    try:
        daemons.append(await loop.run_in_executor(thread, client.daemon))
        items = opening(daemons[0], find)
        while (item := await loop.run_in_executor(thread, next, items, end)) is not end:
            yield item  # type: ignore[misc]  # not the end
    finally:
        stopped = True
        for daemon in daemons:
            daemon.close()
        thread.shutdown(wait=False)  # the thread ends with its stream


class _Stopped(Exception):
    """Ends the iteration: the connection is not opened again."""


def _with_environment(
    request: handles.Request[handles.Environment],
) -> AsyncRequest[AsyncEnvironment]:
    def read(client: Client, result: Json) -> AsyncEnvironment:
        return AsyncEnvironment(client, handles.environment_of(client, result).data)

    return AsyncRequest(request.client, request.data, read)
