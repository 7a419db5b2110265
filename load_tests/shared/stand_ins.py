# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for shims: each run file of a home gets a socket that answers with a status.

    python -m load_tests.shared.stand_ins HOME

Prints `ready` when all listen. Each line on its input is a number: so many statuses are sent, one
replica after another, each with other sessions than the last. They use the daemon's own wire, and a
process of their own, so that the daemon's processor time can be told from theirs.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from itertools import cycle, islice
from pathlib import Path

from openenvd.environments import run_files
from openenvd.system.text.json_lines import encode_line

MAX_SESSIONS = 16


async def main() -> None:
    """Listen for all replicas, and send what the input asks for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    writers: dict[str, asyncio.StreamWriter] = {}
    servers = []

    def accept(replica_id: str, writer: asyncio.StreamWriter) -> None:
        writers[replica_id] = writer
        writer.write(_status(0))

    for each in run_files.all_of(Path(sys.argv[1]) / "run"):

        def accept_one(
            _: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = each.replica_id
        ) -> None:
            accept(name, writer)

        servers.append(await asyncio.start_unix_server(accept_one, each.socket_path))
    print("ready", flush=True)
    sent = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        for writer in islice(cycle(list(writers.values())), int(line)):
            sent += 1
            writer.write(_status(sent % MAX_SESSIONS))
            await writer.drain()


def _status(sessions: int) -> bytes:
    return encode_line(
        {
            "event": "status",
            "state": "ready",
            "pid": 1,
            "generation": 1,
            "restarts": 0,
            "sessions": sessions,
            "info": {"max_sessions": MAX_SESSIONS},
        }
    )


if __name__ == "__main__":
    asyncio.run(main())
