# SPDX-License-Identifier: Apache-2.0
"""An environment that says whose it is, which world this is, and how many steps that has had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

TAKE_BYTES = 10_000_000


def replica_mark(pid: int) -> str:
    """Return what tells a replica's server from others, by its process id on this machine."""
    process = Path(f"/proc/{pid}")
    texts = (text.partition("=") for text in (process / "environ").read_text().split("\0"))
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return _mark({name: value for name, _, value in texts}, int(fields["NSpid"].split()[-1]))


def _mark(environ: Mapping[str, str], pid: int) -> str:
    """Return its job, its container, or its process id: `pid` is as the process sees it."""
    return environ.get("SLURM_JOB_ID") or (environ["HOSTNAME"] if pid == 1 else str(pid))


class WorldObservation(Observation):
    """Whose it is, as the launch has named it, and where the episode stands."""

    whose: str
    world: str
    steps: int
    replica: str  # see `replica_mark`


class WorldEnvironment(Environment[Action, WorldObservation, State]):
    """A world of its own for each session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._world = uuid4().hex
        self._steps = 0
        self._taken: list[bytes] = []

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> WorldObservation:
        self._world = uuid4().hex
        self._steps = 0
        return self._seen()

    def step(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> WorldObservation:
        """Count, or take memory until this process is killed."""
        while action.metadata.get("take_memory"):
            self._taken.append(b"m" * TAKE_BYTES)
        self._steps += 1
        return self._seen()

    @property
    def state(self) -> State:
        return State(episode_id=self._world, step_count=self._steps)

    def _seen(self) -> WorldObservation:
        return WorldObservation(
            whose=os.environ["WHOSE"],
            world=self._world,
            steps=self._steps,
            replica=_mark(os.environ, os.getppid()),
        )
