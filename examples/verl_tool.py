# SPDX-License-Identifier: Apache-2.0
"""A tool of verl whose state is a session of an environment that openenvd serves.

    openenv launch echo
    python verl_tool.py "$(openenv address echo)"

verl's agent loop makes one tool instance for each trajectory, calls it when the model does, and
releases it at the end. So `create` opens a session, `execute` is a step, and `release` closes it.
In a training run the class and its schema stand in the file that `actor_rollout_ref.rollout.
multi_turn.tool_config_path` names:

    tools:
      - class_name: verl_tool.OpenEnvTool
        config: {type: native, address: "http://127.0.0.1:21000"}
        tool_schema: {type: function, function: {name: echo, …}}

Run as a program, this file makes the calls that the agent loop makes, without a model.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from openenvd.client import AsyncSession

SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Say something, and hear it.",
        "parameters": {
            "type": "object",
            "properties": {"message": {"type": "string", "description": "What to say."}},
            "required": ["message"],
        },
    },
}


class OpenEnvTool(BaseTool):
    """Steps of one environment; `config["address"]` is what `openenv address` prints."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._sessions: dict[str, AsyncSession] = {}
        self._opened: dict[str, AsyncExitStack] = {}  # what closes them
        self._rewards: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, **_kwargs: object
    ) -> tuple[str, ToolResponse]:
        """Open a session, and begin its episode."""
        instance_id = instance_id or str(uuid4())
        async with AsyncExitStack() as opened:  # closes it when the episode cannot begin
            session = await opened.enter_async_context(AsyncSession(self.config["address"]))
            await session.reset()
            self._opened[instance_id] = opened.pop_all()
        self._sessions[instance_id], self._rewards[instance_id] = session, 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Take one step: what the model gave is the action."""
        result = await self._sessions[instance_id].step(parameters)
        reward = float(result.reward or 0.0)
        self._rewards[instance_id] += reward
        return ToolResponse(text=str(result.observation)), reward, {"done": result.done}

    async def calc_reward(self, instance_id: str, **_kwargs: object) -> float:
        """Return what the episode's steps gave together."""
        return self._rewards[instance_id]

    async def release(self, instance_id: str, **_kwargs: object) -> None:
        """Close the session, if `create` has opened it."""
        self._rewards.pop(instance_id, None)
        self._sessions.pop(instance_id, None)
        await self._opened.pop(instance_id, AsyncExitStack()).aclose()


async def play(address: str) -> float:
    """Make the calls of one trajectory."""
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    tool = OpenEnvTool({"type": "native", "address": address}, schema)
    instance, _ = await tool.create()
    for message in ("hello", "hello again"):
        response, reward, _ = await tool.execute(instance, {"message": message})
        print(f"{reward:.1f} {response.text}")
    total = await tool.calc_reward(instance)
    await tool.release(instance)
    return total


if __name__ == "__main__":
    print(f"reward {asyncio.run(play(sys.argv[1])):.1f}")
