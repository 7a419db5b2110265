# SPDX-License-Identifier: Apache-2.0
"""Makes sure that the agent of an engine runs, and sends it questions.

    ensure_agent(layout, at) ──▶ a socket ──{"op": "adopt", …}──▶ the agent
        │ nothing listens                       ◀──{"ok": …} | {"error": …}──
        └─▶ the socket is made here, and passed to an agent that is started

Each agent serves one engine at one address (`EngineAddress`, its argument), and is the shim of all
replicas there (`agent/agent.py`): clients talk to a replica's own socket, which its run file names.
The agent's own socket is for the rest:

    {"op": "adopt", "run_dir"}    serve this replica: its socket listens when the answer comes
    {"op": "list"}                rewrite `strays.json`
    {"op": "stop", "instance", "grace_seconds"}     stop and remove a stray of this home

Each message is a JSON object on one line; each question has one answer. Failure cases:

* No agent runs, or it was killed: whoever needs it next starts another, which finds the run files,
  and on the engine the instances that they describe. Nothing on the engine ends with an agent.
* Two processes start one at the same time: the lock of the engine's folder admits one of them.
* It ends because it had nothing to do: it does so with that lock, so no client connects to it.
* It is killed while it answers: the question is put to the next agent, a few times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema.errors import EngineFailed
from ..schema.layout import Layout, make_private
from ..system.text.json_lines import Json, decode_line, encode_line
from .shim.client import spawn_detached
from .shim.files import CONTROL_FD_VARIABLE, open_control_socket, write_json

if TYPE_CHECKING:
    from filelock import FileLock

LOCK_FILE_NAME = "start.lock"
ANSWER_SECONDS = 60.0  # for an agent to import the engine's library, and to ask the engine
STRAYS_FILE_NAME = "strays.json"
_ATTEMPTS = 10  # to ask an agent that ends each time


def ask_agent(layout: Layout, at: EngineAddress, op: str, **fields: Any) -> Json:
    """Return an agent's answer to one question; the agent is started if none runs. Blocks.

    Raises:
        EngineFailed: As for `ask_connected`; or the agent ends at each attempt.
        OSError: No agent can be started.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(ConnectionError), ensure_agent(layout, at) as agent:
            return ask_connected(agent, at.engine, op, **fields)
    log_path = layout.agent_log(at.key)
    raise EngineFailed(f"the agent of {at} ends each time it is asked", f"see {log_path}")


def ask_connected(agent: socket.socket, engine: str, op: str, **fields: Any) -> Json:
    """Return the answer to one question, over a connection that one thread uses at a time.

    Raises:
        EngineFailed: The engine cannot do it, or there was no answer in time.
        ConnectionError: The agent has ended.
    """
    try:
        agent.sendall(encode_line({"op": op, **fields}))
        with agent.makefile("rb") as lines:
            line = lines.readline()
    except TimeoutError:
        message = f"the agent of {engine} did not answer within {ANSWER_SECONDS:g} s"
        raise EngineFailed(message) from None
    if not line.endswith(b"\n"):
        raise ConnectionResetError(f"the agent of {engine} has ended")
    answer = decode_line(line)
    if error := answer.get("error"):
        raise EngineFailed(error["message"], error.get("hint"))
    return answer


def ensure_agent(layout: Layout, at: EngineAddress) -> socket.socket:
    """Connect to an engine's agent, which is started if none listens; raises `OSError`. Blocks."""
    make_private(layout.sockets)
    make_private(layout.engines)
    path = layout.agent_socket(at.key)
    folder = make_private(layout.engines / at.key)
    with start_lock(folder):
        with contextlib.suppress(OSError):
            return _connect(path)
        write_json(str(folder / ADDRESS_FILE_NAME), at.to_json())
        argv = [sys.executable, "-P", "-m", "openenvd.environments.agent.agent"]
        argv += [str(layout.home), json.dumps(at.to_json())]
        with open_control_socket(str(path)) as control:
            environ = {
                **os.environ,
                **dict(at.variables),  # the engine's, even if its starter has others
                "OPENENV_HOME": str(layout.home),  # by which `ps e` shows whose process it is
                "SPT_NOENV": "1",  # keeps setproctitle from overwriting these variables
                CONTROL_FD_VARIABLE: str(control.fileno()),
            }
            log_path = str(layout.agent_log(at.key))
            spawn_detached(argv, environ, pass_fds=[control.fileno()], log_path=log_path)
    return _connect(path)


def start_lock(folder: Path) -> FileLock:
    """Return the lock that is held while an agent is started, or ends idle."""
    from filelock import FileLock  # here: most processes never ask an engine

    return FileLock(folder / LOCK_FILE_NAME, mode=0o600)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


ADDRESS_FILE_NAME = "address.json"  # in the folder of an agent
_DIGEST_LENGTH = 8
_PLACE = "_HOST"  # the ending of the variable that is shown to people


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine that replicas run on; two addresses of one kind have an agent each.

    Run files have the one that was used at the launch (`engines/registry.py`): the variables of a
    process that starts its agent again (a daemon, a `down`) change nothing.
    """

    engine: str  # its name in `--provider`
    # Names and values, sorted, of the variables by which its library finds it
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, engine: str, variables: Mapping[str, str]) -> EngineAddress:
        """Return the engine of this kind that the variables lead to."""
        return cls(engine, tuple(sorted(variables.items())))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineAddress:
        """Read what `to_json` wrote; raises `LookupError`, `TypeError` or `ValueError`."""
        return cls.of(data["engine"], dict(data["variables"]))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` can read."""
        return {"engine": self.engine, "variables": dict(self.variables)}

    @property
    def key(self) -> str:
        """Return the name of its agent's files."""
        if not self.variables:
            return self.engine
        text = json.dumps(self.variables)
        return f"{self.engine}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]}"

    def __str__(self) -> str:
        """Return it for people: `docker at unix:///run/docker.sock`."""
        where = next(
            (text for name, text in self.variables if text and name.endswith(_PLACE)), None
        )
        return self.engine if where is None else f"{self.engine} at {where}"
