# SPDX-License-Identifier: Apache-2.0
"""Children that are programs of their own: why they must be, and how they are started.

Where a fork is not safe, each process that serves imports the environment for itself. What it does
then: `main.py`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol import CHILD_CONFIG_VARIABLE, HOST_CONFIG_VARIABLE, HostConfig

if TYPE_CHECKING:
    from ..ipc.child_config import ChildConfig

PROGRAM = Path(__file__).resolve().parent.parent / "__main__.py"


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


def spawn(config: HostConfig, orders: ChildConfig, head: bytes) -> int:
    """Start the process of these orders as a program of its own."""
    told = orders.to_json() | {"head": base64.b64encode(head).decode()}
    return start_program(config, told, orders.fds)


def start_program(config: HostConfig, told: dict[str, Any], fds: tuple[int, ...]) -> int:
    environ = os.environ | {
        HOST_CONFIG_VARIABLE: json.dumps(config.to_json()),
        CHILD_CONFIG_VARIABLE: json.dumps(told),
    }
    arguments = [sys.executable, "-P", str(PROGRAM)]
    process = subprocess.Popen(arguments, env=environ, pass_fds=fds)
    process.returncode = 0  # it is the host that waits
    return process.pid
