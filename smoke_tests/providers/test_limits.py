# SPDX-License-Identifier: Apache-2.0
"""Limits of a replica: memory, CPU, sandbox and sessions."""

from contextlib import ExitStack

from ..conftest import eventually
from .harness import Harness


def test_memory_below_the_limit(harness: Harness) -> None:
    """Memory up to the limit can be used."""
    harness.launched("--memory", "400M")
    assert harness.ask("hold", 200) == 200 << 20
    assert harness.replica()["restarts"] == 0


def test_cpu_limit(harness: Harness) -> None:
    """A replica gets no more CPU than its limit."""
    harness.launched("--cpus", "0.5")
    assert harness.ask("cpus", 2.0) < 0.7


def test_sandbox(harness: Harness) -> None:
    """A sandbox has a read-only root, a writable /tmp, and no capabilities."""
    harness.launched("--sandbox")
    with harness.session() as session:
        assert session.ask("touch", "/touched") == "Read-only file system"
        assert session.ask("touch", "/tmp/touched") == ""
        assert int(session.ask("capabilities"), 16) == 0


def test_max_sessions(harness: Harness) -> None:
    """A session beyond the limit is refused with that reason, and fits when another one ends."""
    harness.launched("--max-sessions", "2", "--set", "admission-timeout=0.2")
    with harness.session():
        with harness.session():
            assert "CAPACITY_REACHED" in (harness.refused() or "")
        eventually(lambda: harness.refused() is None)


def test_capacity(harness: Harness) -> None:
    """Status shows the number of sessions and their limit."""
    harness.launched("--max-sessions", "8", "--replicas", "2")
    assert harness.environment()["max_sessions"] == 8
    with ExitStack() as sessions:
        for _ in range(3):
            sessions.enter_context(harness.session())
        eventually(lambda: harness.environment()["sessions"] == 3)
    eventually(lambda: harness.environment()["sessions"] == 0)
