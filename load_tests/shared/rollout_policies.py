# SPDX-License-Identifier: Apache-2.0
"""Policies for `rollouts.py`: `openenv rollout --policy load_tests.shared.rollout_policies:NAME`.

How large an answer and how long a step they ask for is in `ROLLOUT_STEP`: `{"answer_bytes": 100}`.
What a leaking one keeps of each step is in `LEAK_BYTES`.
"""

from __future__ import annotations

import json
import os
from typing import Any

_leaked: list[bytes] = []


def plain(observation: Any) -> dict[str, Any]:
    """The step that was asked for."""
    action: dict[str, Any] = json.loads(os.environ.get("ROLLOUT_STEP", "{}"))
    return action


def leaking(observation: Any) -> dict[str, Any]:
    """The same, and some memory is never given back."""
    _leaked.append(os.urandom(int(os.environ["LEAK_BYTES"])))
    return plain(observation)
