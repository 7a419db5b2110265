# SPDX-License-Identifier: Apache-2.0
"""What a policy behind a chat endpoint needs of the variables that are set here."""

from __future__ import annotations

import os

CHAT_PREFIX = "openai:"
CHAT_VARIABLES = ("OPENAI_API_KEY", "OPENAI_MODEL")


def variables_of(policy: str | None) -> dict[str, str]:
    """Return what is handed over to a rollout with this policy."""
    if policy is None or not policy.startswith(CHAT_PREFIX):
        return {}
    return {name: os.environ[name] for name in CHAT_VARIABLES if name in os.environ}
