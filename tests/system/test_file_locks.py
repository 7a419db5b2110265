# SPDX-License-Identifier: Apache-2.0
"""Whether a file is locked is told without getting into the way of others that ask."""

from __future__ import annotations

import fcntl
from pathlib import Path

from openenvd.system.process.process_identity import is_locked


def test_a_lock_that_is_held_is_seen_and_one_that_asks_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with path.open("w") as held:
        assert not is_locked(path)
        fcntl.flock(held, fcntl.LOCK_SH)  # as `is_locked` does for a moment
        assert not is_locked(path)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_locked(path)
    assert not is_locked(path)
