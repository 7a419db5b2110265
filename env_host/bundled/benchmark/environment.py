# SPDX-License-Identifier: Apache-2.0
"""The benchmark on our own base classes."""

from __future__ import annotations

from typing import Any

from ...environment.interfaces import Action, Environment, Observation, State
from .behaviour import SeenFields, WaitFields, Waits, WaitsOnLoop, is_synchronous


class BenchmarkAction(WaitFields, Action):
    """The time to wait."""


class BenchmarkObservation(SeenFields, Observation):
    """The process that waited, and its time."""


class SyncBenchmarkEnvironment(Waits, Environment[BenchmarkAction, BenchmarkObservation, State]):
    """Blocks the session's thread while it waits."""

    observation_cls = BenchmarkObservation
    state_cls = State


class BenchmarkEnvironment(WaitsOnLoop, Environment[BenchmarkAction, BenchmarkObservation, State]):
    """Waits on the event loop."""

    observation_cls = BenchmarkObservation
    state_cls = State


def __getattr__(name: str) -> Any:
    """Choose `ServedEnvironment` when a host asks for it, by the host's environment variables.

    The host may be a fork of a process that imported this module without those variables.
    """
    if name == "ServedEnvironment":
        return SyncBenchmarkEnvironment if is_synchronous() else BenchmarkEnvironment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
