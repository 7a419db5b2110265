# SPDX-License-Identifier: Apache-2.0
"""Whether a session holds its environment's MCP connection, which belongs to one event loop."""

import pytest

from ..conftest import StartHost

# `MCPEnvironment` as upstream has it: its `step` asks for the tools on a loop in another thread,
# and since 0.2.3 its `step_async` asks on the session's own.
PROJECT = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import ModuleType
from plain import Bare, Seen

class MCPEnvironment(Bare):
    holders, loop, opened = 0, None, 0

    @asynccontextmanager
    async def mcp_session(self):
        if not self.holders:
            self.loop, self.opened = asyncio.get_running_loop(), self.opened + 1
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1

    async def ask(self):
        async with self.mcp_session():
            answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
            await asyncio.wrap_future(answer)
            return Seen(metadata={"opened": self.opened})

    def step(self, action, timeout_s=None):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.ask()).result()

module = ModuleType("openenv.core.env_server.mcp_environment")
module.MCPEnvironment = MCPEnvironment
sys.modules[module.__name__] = module

class Sync(MCPEnvironment):
    pass

class AsyncInName(MCPEnvironment):
    async def step_async(self, action, timeout_s=None):
        return await super().step_async(action, timeout_s=timeout_s)
"""

NEWER = """
async def step_async(self, action, timeout_s=None):
    return await self.ask()
MCPEnvironment.step_async = step_async
"""


@pytest.mark.parametrize(
    ("newer", "name", "opened"),
    [(False, "Sync", [1, 2]), (False, "AsyncInName", [1, 2]), (True, "AsyncInName", [1, 1])],
)
def test_an_mcp_connection_is_held_only_where_steps_use_it_on_the_same_loop(
    serve: StartHost, newer: bool, name: str, opened: list[int]
) -> None:
    with serve(f"tools:{name}", files={"tools.py": PROJECT + NEWER * newer}).open() as client:
        client.ask("reset")
        steps = [client.ask("step", {}) for _ in opened]
    assert [step["data"]["metadata"]["opened"] for step in steps] == opened
