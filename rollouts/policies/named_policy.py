# SPDX-License-Identifier: Apache-2.0
"""What `--policy` names: `package.module:function`, `openai:URL`, or `random`."""

from __future__ import annotations

import asyncio

from .chat_policy import ChatPolicy
from .named_function import function_named
from .policy import CallablePolicy, Policy
from .random_policy import RandomPolicy, action_schema

CHAT_HINT = (
    "see that the policy's endpoint answers, and what OPENAI_API_KEY and OPENAI_MODEL say; the "
    "request's log says of each episode why it failed"
)
RANDOM = "random"
CHAT_PREFIX = "openai:"


async def policy_named(name: str, address: str) -> Policy:
    """The policy; `address` is asked what an action is.

    Raises:
        PolicyNotFound, NoEnvironment
    """
    if name == RANDOM:
        return await RandomPolicy.of(address)
    if name.startswith(CHAT_PREFIX):
        schema = await asyncio.to_thread(action_schema, address)
        return ChatPolicy(name.removeprefix(CHAT_PREFIX), schema)
    return CallablePolicy(await asyncio.to_thread(function_named, name))


def hint_of(name: str) -> str | None:
    """What to look at when a policy of this name fails; None: nothing in particular."""
    return CHAT_HINT if name.startswith(CHAT_PREFIX) else None
