# SPDX-License-Identifier: Apache-2.0
"""The host's children: what it knows of each, how one is started as a program, when it must be."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import last_words
from .handover import Message, close_all
from .protocol import HOST_CONFIG_VARIABLE, ORDERS_VARIABLE, HostConfig
from .session_cgroup import SessionGroup
from .session_memory import cap_sentence, held_bytes
from .shard import Orders

PROGRAM = Path(__file__).resolve().parent / "__main__.py"
MAX_BACK_OFF_SECONDS = 5.0
FIRST_BACK_OFF_SECONDS = 0.1
LOOK_SECONDS = 0.25  # at the memory of isolated sessions, where no cgroup caps them


@dataclass(slots=True)
class Child:
    """A process that serves sessions."""

    pid: int
    orders: Orders
    link: socket.socket
    started: float  # monotonic
    connection_fd: int | None = None  # an isolated session's, until its session has begun
    group: SessionGroup | None = None
    holds_slot: bool = True
    is_ready: bool = False
    failure: Message | None = None
    killed_for: str | None = None  # we did it, and why
    held: dict[int, tuple[int, str]] = field(default_factory=dict)  # by token: descriptor, path
    accepted: dict[int, int] = field(default_factory=dict)  # by token: connections, unanswered
    waiting: dict[int, Message] = field(default_factory=dict)  # by token: connections in it

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


class HeldSockets:
    """Copies of the sockets that have sessions, kept to speak for a child that dies; and of those
    that wait in it, kept for another to go on with."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def hold(self, speaker: Child, begun: Iterable[Any], fds: tuple[int, ...]) -> None:
        """Keep what a child says has begun, as far as there are descriptors for it."""
        is_told = False
        for (token, path), fd in zip(begun, fds, strict=False):
            is_told = True
            if self._count >= self._most:
                os.close(fd)
                continue
            self._count += 1
            speaker.held[token] = fd, path
        if is_told and speaker.connection_fd is not None:
            os.close(speaker.connection_fd)
            speaker.connection_fd = None

    def keep_accepted(self, speaker: Child, message: Message) -> None:
        """Keep what a child has accepted; half of the descriptors are for sessions."""
        for token, fd in zip(message.head["accepted"], message.fds, strict=False):
            if self._count >= self._most // 2:
                os.close(fd)
                continue
            self._count += 1
            speaker.accepted[token] = fd

    def keep(self, speaker: Child, message: Message) -> None:
        """Keep a connection that waits in a child."""
        self.let_go(speaker, message.head["waits"])
        if self._count >= self._most // 2 or not message.fds:
            close_all(message.fds)
            return
        self._count += 1
        speaker.waiting[message.head["waits"]] = message

    def let_go(self, speaker: Child, token: int) -> None:
        """Its session, or its wait, is over: the connection is its shard's alone to end."""
        if token in speaker.held:
            self._count -= 1
            os.close(speaker.held.pop(token)[0])
        elif token in speaker.accepted:
            self._count -= 1
            os.close(speaker.accepted.pop(token))
        elif token in speaker.waiting:
            self._count -= 1
            close_all(speaker.waiting.pop(token).fds)

    def take_waiting(self, dead: Child) -> list[Message]:
        """The connections that waited in it, the oldest first; theirs to close who takes them."""
        waiting = sorted(dead.waiting.values(), key=lambda message: message.head["since"])
        self._count -= len(waiting)
        dead.waiting.clear()
        return waiting

    def take_accepted(self, dead: Child) -> list[int]:
        """The same of those of which it was not told what they want."""
        accepted = list(dead.accepted.values())
        self._count -= len(accepted)
        dead.accepted.clear()
        return accepted

    def speak_for(self, dead: Child, text: str) -> None:
        """Tell all of its clients, and let them go."""
        for fd, path in dead.held.values():
            last_words.say(fd, path, text)
        self._count -= len(dead.held)
        dead.held.clear()
        if dead.connection_fd is not None:
            last_words.say_before_handshake(dead.connection_fd, text)
            dead.connection_fd = None


class MemoryWatch:
    """Looks at isolated sessions that no cgroup caps, and ends those over their cap."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._next_look = 0.0

    def due(self, children: Iterable[Child]) -> float | None:
        """When to look next; None: there is nobody to look at."""
        is_wanted = self._limit is not None and any(_is_uncapped(each) for each in children)
        return self._next_look if is_wanted else None

    def look(self, children: Iterable[Child]) -> None:
        """Look, when it is time."""
        now = time.monotonic()
        if self._limit is None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for each in children:
            if _is_uncapped(each) and held_bytes(each.pid) > self._limit:
                each.killed_for = cap_sentence(self._limit)
                os.kill(each.pid, signal.SIGKILL)


def _is_uncapped(each: Child) -> bool:
    return each.is_isolated and each.group is None


def back_off_seconds(deaths: int) -> float:
    """How long to wait for a successor after so many young deaths in a row; not for the first."""
    if deaths <= 1:
        return 0.0
    return float(min(MAX_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** (deaths - 2)))


def what_forbids_forking() -> str | None:
    """Why this process cannot be forked safely; None when it can.

    Threads of Python may hold its locks. Those that C libraries keep to themselves (BLAS) are
    theirs to deal with, and they do (`pthread_atfork`).
    """
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if threads:
        return f"importing it left threads running ({', '.join(threads)})"
    if (children := _children_of_ours()) > 0:
        return f"importing it left {children} processes running"
    return None


def _children_of_ours() -> int:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return len(file.read().split())
    except OSError:
        return 0


def spawn(config: HostConfig, orders: Orders, head: bytes) -> int:
    """Start the process of these orders as a program of its own."""
    told = orders.to_json() | {"head": base64.b64encode(head).decode()}
    return start_program(config, told, orders.fds)


def start_program(config: HostConfig, told: dict[str, Any], fds: tuple[int, ...]) -> int:
    environ = os.environ | {
        HOST_CONFIG_VARIABLE: json.dumps(config.to_json()),
        ORDERS_VARIABLE: json.dumps(told),
    }
    arguments = [sys.executable, "-P", str(PROGRAM)]
    process = subprocess.Popen(arguments, env=environ, pass_fds=fds)
    process.returncode = 0  # it is `_reap` that waits
    return process.pid


def name_of(orders: Orders, name: str) -> str:
    kind = "session" if orders.connection_fd is not None else f"shard {orders.index}"
    return f"{kind} {name}"
