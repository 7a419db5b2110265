# SPDX-License-Identifier: Apache-2.0
"""Steps that are coroutines: tasks, programs, blocking calls, patched loops."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from .habit import BETTER, habit


async def soon(value: Any) -> Any:
    await asyncio.sleep(0.01)
    return value


async def echoed(how: str) -> Any:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("echo", how, stdout=pipe)
    said, _ = await process.communicate()
    return [said.decode(), process.returncode]


class Habits:
    async def gathers(self, how):
        """An asynchronous step that gathers."""
        return await asyncio.gather(soon(1), soon(2))

    @habit(steps=("start", "wait"))
    async def background_task(self, how):
        """A task that runs on between steps."""
        if how == "start":
            self.task = asyncio.create_task(soon("done"))
            return how
        return await self.task

    async def endless_task(self, how):
        """A task that nothing ends."""
        self.task = asyncio.create_task(asyncio.sleep(600))
        return how

    async def task_that_fails(self, how):
        """A task that raises, and is not waited for."""
        self.task = asyncio.create_task(asyncio.to_thread(int, "no number"))
        return await soon(how)

    async def async_deadline(self, how):
        """A step with a deadline by `asyncio.timeout`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(60)
        return how

    async def other_thread(self, how):
        """Blocking work by `asyncio.to_thread` and an executor."""
        loop = asyncio.get_running_loop()
        return [await asyncio.to_thread(str.upper, how), await loop.run_in_executor(None, len, how)]

    async def blocks_loop(self, how):
        """An asynchronous step that blocks for a second."""
        time.sleep(1)
        return how

    async def runs_program(self, how):
        """Programs, one of them killed at its deadline."""
        slow = await asyncio.create_subprocess_shell("exec sleep 60")
        slow.kill()
        return [await echoed(how), await slow.wait()]

    @habit(ours=BETTER + "a forked child ends as its program says", unsteady=True)
    async def forks_child(self, how):
        """A child by `os.fork` that ends by `sys.exit`, in a coroutine."""
        if (pid := os.fork()) == 0:
            sys.exit(6)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async def runs_loop_in_loop(self, how):
        """An asynchronous step that calls `asyncio.run`, which is refused."""
        coroutine = soon(how)
        try:
            return asyncio.run(coroutine)
        finally:
            coroutine.close()

    @habit(ours=BETTER + "the session goes on")
    async def cancels_itself(self, how):
        """A step that cancels its own task."""
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    @habit(steps=("a", "b"), also="reset")
    async def async_generator(self, how):
        """A session as an asynchronous generator that steps on."""
        if how == "reset":
            self.turns = (await soon(number) for number in range(9))
        return await anext(self.turns)

    async def connections(self, how):
        """A server and a client on the loop of the step."""

        async def shout(reader: Any, writer: Any) -> None:
            writer.write((await reader.readline()).upper())
            writer.close()

        server = await asyncio.start_server(shout, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(how.encode() + b"\n")
            said = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return said.decode()

    async def signal_on_loop(self, how):
        """A handler of SIGUSR1 on the loop."""
        rang = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, rang.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(5):
            await rang.wait()
        return how

    @habit(alone=True, at_import="import nest_asyncio; nest_asyncio.apply()")
    async def nest_asyncio(self, how):
        """`nest_asyncio.apply()` at import, and a loop within the loop."""
        return asyncio.run(soon(how))

    @habit(
        at_import="""
            import asyncio
            class Policy(asyncio.DefaultEventLoopPolicy):
                pass
            asyncio.set_event_loop_policy(Policy())
        """,
    )
    async def loop_policy(self, how):
        """A policy of event loops of the project's own, set at import."""
        name = type(asyncio.get_event_loop_policy()).__name__
        return [name, await asyncio.to_thread(asyncio.run, soon(how))]

    async def names_loop(self, how):
        """A step that looks at the class of the loop, as patches do."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, asyncio.BaseEventLoop):
            raise TypeError(f"Can't patch loop of type {type(loop)}")
        return type(loop).__module__
