# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for replicas: a real server and a shim's socket each, in one process of their own.

    python -m load_tests.shared.stand_ins HOME ADDRESS REPLICAS NAME…

Prints `ready` when all have their run files and listen. Each line on the input is a number: so many
statuses are sent, one replica after another, each with other sessions than its last. A replica that
is drained or stopped reports `stopped`. The daemon's processor time is apart from theirs.
"""

import asyncio
import json
import socket
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from openenvd.environments.engines.local.ports import FIRST_PORT, LAST_PORT
from openenvd.environments.run_files import RUN_FILE_VERSION
from openenvd.environments.shim.files import RUN_FILE_NAME, STATUS_FILE_NAME, write_json
from openenvd.schema.settings import Paths
from openenvd.system.process.proc import raise_fd_limit
from openenvd.system.text.json_lines import encode_line

LAUNCH = "0123456789abcdef"  # the request that has launched all
HOST = "127.0.0.1"
MAX_SESSIONS = 16
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
SPEC = {"source": "echo", "provider": "local", "host": HOST, "gateway": True}
VARIABLES = {f"VARIABLE_{index}": "x" * 40 for index in range(20)}


def replica_ids(names: list[str], replicas: int) -> list[tuple[str, str, int]]:
    """Return id, environment and ordinal of each replica."""
    pairs = [(name, ordinal) for name in names for ordinal in range(replicas)]
    return [(f"{name}-{ordinal}-{LAUNCH}", name, ordinal) for name, ordinal in pairs]


class StandIn:
    """One replica, which is ready until it is to end."""

    def __init__(self, paths: Paths, address: str, replica_id: str, name: str, ordinal: int):
        """Write its folder, with the run file of a replica that was launched behind the gateway."""
        self.run_dir = paths.runs / replica_id
        self.socket_path = str(paths.replica_socket(replica_id))
        self._writer: asyncio.StreamWriter | None = None
        self._servers: list[asyncio.Server] = []
        self._data: dict[str, Any] = {
            "version": RUN_FILE_VERSION,
            "replica_id": replica_id,
            "environment": name,
            "request_id": LAUNCH,
            "ordinal": ordinal,
            "number": ordinal,
            "created_at": 0.0,
            "host": HOST,
            "socket_path": self.socket_path,
            "log_path": str(self.run_dir / "log"),
            "address": f"{address}/envs/{name}",
            "env": VARIABLES,
            "spec": SPEC,
        }

    async def start(self, bound: socket.socket) -> None:
        """Serve HTTP at the port, and the daemon at the shim's socket."""
        self.run_dir.mkdir(mode=0o700)
        port = bound.getsockname()[1]
        write_json(str(self.run_dir / RUN_FILE_NAME), {**self._data, "port": port})
        self._servers.append(await asyncio.start_server(answer, sock=bound))
        self._servers.append(await asyncio.start_unix_server(self._follow, self.socket_path))

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.send("ready", 0)
        async for line in reader:
            if json.loads(line)["op"] in ("drain", "leave", "stop"):
                for server in self._servers:
                    server.close()
                self.send("stopped", 0, is_draining=True)
                break
        self._writer = None
        writer.close()

    def send(self, state: str, sessions: int, **more: Any) -> None:
        """Send a status; nothing while the daemon does not listen."""
        info = {"max_sessions": MAX_SESSIONS, "ready": True}
        status = {"event": "status", "state": state, "generation": 1, "restarts": 0}
        status |= {"sessions": sessions, "info": info, **more}
        if state == "stopped":
            write_json(str(self.run_dir / STATUS_FILE_NAME), status)
        if self._writer is not None:
            self._writer.write(encode_line(status))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request with an empty object."""
    while await reader.readline():
        while (await reader.readline()).strip():
            pass
        writer.write(ANSWER)
    writer.close()


def free_ports(count: int) -> list[socket.socket]:
    """Bind ports as launches would: the first free ones of the range for environments."""
    found: list[socket.socket] = []
    for port in range(FIRST_PORT, LAST_PORT):
        one = socket.socket()
        try:
            one.bind((HOST, port))
        except OSError:
            one.close()
            continue
        found.append(one)
        if len(found) == count:
            break
    return found


async def main() -> None:
    """Listen for all replicas, and send what the input asks for."""
    home, address, replicas, *names = sys.argv[1:]
    raise_fd_limit()
    ids = replica_ids(names, int(replicas))
    stand_ins = [StandIn(Paths(Path(home)), address, *each) for each in ids]
    for each, port in zip(stand_ins, free_ports(len(ids)), strict=True):
        await each.start(port)
    print("ready", flush=True)
    sent = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        for each in islice(cycle(stand_ins), int(line)):
            sent += 1
            each.send("ready", sent % MAX_SESSIONS)
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main())
