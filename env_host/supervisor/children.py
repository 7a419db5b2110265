# SPDX-License-Identifier: Apache-2.0
"""The host's children: what it knows of each, and of all together.

What of their connections it keeps: `held_sockets.py`. How they are made: `starting.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...system.cgroups import Cgroup
from ...system.descriptors import Message

if TYPE_CHECKING:
    from ..ipc.child_config import ChildConfig


@dataclass(slots=True)
class Child:
    """A process that serves sessions."""

    pid: int
    orders: ChildConfig
    link: socket.socket
    started: float  # monotonic
    connection_fd: int | None = None  # an isolated session's, until its session has begun
    group: Cgroup | None = None
    holds_slot: bool = True
    is_ready: bool = False
    failure: Message | None = None
    killed_for: str | None = None  # we did it, and why
    held: dict[int, tuple[int, str]] = field(default_factory=dict)  # by token: descriptor, path

    @property
    def is_isolated(self) -> bool:
        return self.orders.connection_fd is not None

    @property
    def what(self) -> str:
        """For people."""
        kind = "isolated session" if self.is_isolated else f"shard {self.orders.index}"
        return f"{kind} (pid {self.pid})"

    @property
    def where(self) -> str:
        """The same, within a sentence about a session of it."""
        pid = f"pid {self.pid}"
        return pid if self.is_isolated else f"shard {self.orders.index}, {pid}"

    @property
    def fds(self) -> list[int]:
        """What the host has open for its sake."""
        fds = [self.link.fileno(), *(fd for fd, _ in self.held.values())]
        return fds if self.connection_fd is None else [*fds, self.connection_fd]


class Children:
    """Those that live, or have not been buried."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Child] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[Child]:
        return iter(self._by_pid.values())

    @property
    def pids(self) -> list[int]:
        return list(self._by_pid)

    @property
    def are_ready(self) -> bool:
        """Whether all shards are."""
        return all(each.is_ready for each in self if not each.is_isolated)

    @property
    def fds(self) -> list[int]:
        """What the host has open for their sake."""
        return [fd for each in self for fd in each.fds]

    def add(self, new: Child) -> None:
        """It has been born."""
        self._by_pid[new.pid] = new

    def take(self, pid: int) -> Child:
        """It has ended."""
        return self._by_pid.pop(pid)

    def at(self, index: int) -> Child | None:
        """Who has this slot of the board."""
        return next((each for each in self if each.orders.index == index), None)

    def signal(self, number: int) -> None:
        """Send all of them a signal."""
        for pid in self._by_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
