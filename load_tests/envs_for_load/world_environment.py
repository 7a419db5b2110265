# SPDX-License-Identifier: Apache-2.0
"""An environment whose observations name its launch, its world and the world's number of steps."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

TAKE_BYTES = 10_000_000


def replica_mark(pid: int) -> str:
    """Return the mark of the replica whose server has this process id on this machine."""
    process = Path(f"/proc/{pid}")
    texts = (text.partition("=") for text in (process / "environ").read_text().split("\0"))
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return _mark({name: value for name, _, value in texts}, int(fields["NSpid"].split()[-1]))


def _mark(environ: Mapping[str, str], pid: int) -> str:
    """Return a server's Slurm job, its container, or `pid`, its process id in its namespace."""
    return environ.get("SLURM_JOB_ID") or (environ["HOSTNAME"] if pid == 1 else str(pid))


class WorldObservation(Observation):
    """The launch that serves (its variable `WHOSE`), the world, and the episode's steps so far."""

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
        """Count the step, or allocate memory until this process is killed."""
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
