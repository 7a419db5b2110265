# SPDX-License-Identifier: Apache-2.0
"""The keys of a client's frames."""

from __future__ import annotations

from openenvd.rollouts.sessions.outgoing import KEYS_AT_ONCE, Masks
from openenvd.system.websocket import KEY_BYTES


def test_every_mask_is_used_once() -> None:
    masks = Masks()
    keys = [masks.key() for _ in range(2 * KEYS_AT_ONCE + 1)]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys)) >= len(keys) - 2  # two of two thousand may be alike, once in a thousand
