# SPDX-License-Identifier: Apache-2.0
"""The same for asyncio: `AsyncClient`, `AsyncRequest`, `AsyncEnvironment`.

Calls are short, and made in threads; who waits for a request looks at it again and again, at most
twice a second. A stream has a thread of its own while it is iterated: each item is fetched when it
is asked for. When its consumer stops early or is cancelled, the stream's connection is shut down,
which ends the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Generic, Self, TypeVar, Unpack

from ..system.text.json_lines import Json
from .api import DaemonClient, RequestFilters
from .following import Reconnect
from .handles import Environment, Progress, Request, pauses
from .options import DrainOptions, LaunchOptions, RequestOptions, RolloutOptions
from .session import ANSWER_SECONDS, AsyncSession
from .synchronous import Client, Folder

Result = TypeVar("Result")
Item = TypeVar("Item")
Opening = Callable[[DaemonClient, Reconnect], Iterator[Item]]


class AsyncClient:
    """A client of this user's daemon, for asyncio; each method is described at `Client`."""

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
        return AsyncRequest(request, AsyncEnvironment)

    async def rollout(
        self,
        *environments: AsyncEnvironment | str,
        out: Folder,
        **options: Unpack[RolloutOptions],
    ) -> AsyncRequest[Json]:
        """Play episodes, and write them to a folder."""
        names = [each if isinstance(each, str) else each.name for each in environments]
        request = await asyncio.to_thread(self._client.rollout, *names, out=out, **options)
        return AsyncRequest(request, _as_it_is)

    async def environments(self) -> list[AsyncEnvironment]:
        """List every environment that is wanted, or that failed."""
        return [AsyncEnvironment(e) for e in await asyncio.to_thread(self._client.environments)]

    def environment(self, name: str) -> AsyncEnvironment:
        """Return one environment by its name; `await` it for its present state."""
        return AsyncEnvironment(Environment(self._client, {"name": name}))

    async def requests(self, **filters: Unpack[RequestFilters]) -> list[AsyncRequest[Json]]:
        """List the queue and its history, newest first."""
        found = await asyncio.to_thread(self._client.requests, **filters)
        return [AsyncRequest(each, _as_it_is) for each in found]

    async def request(self, request_id: str) -> AsyncRequest[Json]:
        """Return one request by its id, or the beginning of it."""
        found = await asyncio.to_thread(self._client.request, request_id)
        return AsyncRequest(found, _as_it_is)

    async def status(self) -> Json:
        """Return what `openenv status --json` prints."""
        return await asyncio.to_thread(self._client.status)

    async def info(self) -> Json:
        """Return what `openenv info --json` prints."""
        return await asyncio.to_thread(self._client.info)


class AsyncRequest(Generic[Result]):
    """A queued operation; `async for` yields its progress, and raises when it failed."""

    def __init__(self, request: Request[Any], read_result: Callable[[Any], Result]) -> None:
        self._request = request
        self._read_result = read_result

    def __repr__(self) -> str:
        return f"<Async{repr(self._request)[1:]}"

    @property
    def data(self) -> Json:
        """The API's JSON, from when it was last asked for."""
        return self._request.data

    @property
    def id(self) -> str:
        """The id, by which every command finds it."""
        return self._request.id

    @property
    def state(self) -> str:
        """Its state, when it was last asked for."""
        return self._request.state

    async def refresh(self) -> Self:
        """Ask for its present state."""
        await asyncio.to_thread(self._request.refresh)
        return self

    async def wait(self) -> Result:
        """Wait until it has ended, and return its result; `asyncio.timeout` bounds it.

        Raises:
            RequestFailed: It failed or was cancelled; the error says why, and what to do.
        """
        looks = pauses()
        await self.refresh()
        while not self._request.is_final:
            await asyncio.sleep(next(looks))
            await self.refresh()
        return self._read_result(await asyncio.to_thread(self._request.result))

    async def __aiter__(self) -> AsyncIterator[Progress]:
        async for progress in stream(self._request.client, self._request.follow):
            yield progress
        await asyncio.to_thread(self._request.result)

    async def logs(self, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[str]:
        """Yield what it prints, in pieces as they come; described at `Request.logs`."""
        async for text in stream(
            self._request.client,
            lambda daemon, _: daemon.request_log(self.id, follow=follow, tail=tail),
        ):
            yield text

    async def cancel(self) -> bool:
        """Cancel it; whether that was in time."""
        return await asyncio.to_thread(self._request.cancel)


class AsyncEnvironment:
    """An environment of the daemon; each method is described at `Environment`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __repr__(self) -> str:
        return f"<AsyncEnvironment {self.name}>"

    def __await__(self) -> Generator[Any, None, Self]:
        return self.refresh().__await__()

    @property
    def data(self) -> Json:
        """The API's JSON, from when it was last asked for."""
        return self._environment.data

    @property
    def name(self) -> str:
        """Its name."""
        return self._environment.name

    @property
    def state(self) -> str:
        """Its state, when it was last asked for."""
        return self._environment.state

    @property
    def address(self) -> str | None:
        """Return what it answers at, without its token."""
        return self._environment.address

    @property
    def replicas(self) -> list[Json]:
        """Its replicas, when it was last asked for."""
        return self._environment.replicas

    async def base_url(self) -> str:
        """Ask for what clients connect to."""
        return await asyncio.to_thread(self._environment.base_url)

    async def refresh(self) -> Self:
        """Ask for its present state."""
        await asyncio.to_thread(self._environment.refresh)
        return self

    @asynccontextmanager
    async def connect(self, timeout: float = ANSWER_SECONDS) -> AsyncIterator[AsyncSession]:  # noqa: ASYNC109
        """Open a session; described at `Environment.connect`."""
        url, hint = await self.base_url(), self._environment.lost_hint
        async with AsyncSession(url, answer_timeout=timeout, lost_hint=hint) as session:
            yield session

    async def scale(
        self, replicas: int, **options: Unpack[DrainOptions]
    ) -> AsyncRequest[AsyncEnvironment]:
        """Set the number of its replicas, at the same address, without ending a session."""
        request = await asyncio.to_thread(self._environment.scale, replicas, **options)
        return AsyncRequest(request, AsyncEnvironment)

    async def restart(
        self, replica: int | None = None, **options: Unpack[DrainOptions]
    ) -> AsyncRequest[AsyncEnvironment]:
        """Replace its replicas, or one of them, without ending a session."""
        request = await asyncio.to_thread(self._environment.restart, replica, **options)
        return AsyncRequest(request, AsyncEnvironment)

    async def down(
        self, grace_seconds: float | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncRequest[None]:
        """Take it down, and free what it holds."""
        request = await asyncio.to_thread(self._environment.down, grace_seconds, **options)
        return AsyncRequest(request, _as_it_is)

    async def logs(
        self, *, follow: bool = False, tail: int | None = None, replica: str | None = None
    ) -> AsyncIterator[str]:
        """Yield what a replica printed, in pieces as they come."""
        async for text in stream(
            self._environment.client,
            lambda daemon, _: daemon.environment_log(
                self.name, follow=follow, tail=tail, replica=replica
            ),
        ):
            yield text


async def stream(client: Client, opening: Opening[Item]) -> AsyncIterator[Item]:
    """Iterate what `opening` returns in a thread, which ends with the iteration.

    Args:
        client: Whose daemon is asked.
        opening: Called with the daemon, and with what finds it again after a lost connection.
    """
    daemons: list[DaemonClient] = []
    stopped = False

    def find() -> DaemonClient | None:
        if stopped:
            raise _Stopped
        if (found := client.find_daemon()) is not None:
            daemons.append(found)
        if stopped:  # since it was looked for
            raise _Stopped
        return found

    def open_stream() -> Iterator[Item]:
        daemons.append(client.daemon())
        return opening(daemons[0], find)

    loop = asyncio.get_running_loop()
    end = object()
    with _OneThread() as thread:
        try:
            items = await loop.run_in_executor(thread, open_stream)
            while (item := await loop.run_in_executor(thread, next, items, end)) is not end:
                yield item  # type: ignore[misc]  # not the end
        finally:
            stopped = True
            for daemon in daemons:
                daemon.close()


class _Stopped(Exception):
    """End the iteration: the connection is not opened again."""


class _OneThread(ThreadPoolExecutor):
    """A thread that is not waited for: it ends when what it reads does."""

    def __init__(self) -> None:
        super().__init__(1, "openenvd stream")

    def __exit__(self, *_exception: object) -> None:
        self.shutdown(wait=False)


def _as_it_is(result: Any) -> Any:
    return result
