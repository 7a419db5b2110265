# SPDX-License-Identifier: Apache-2.0
"""A replica's status file and control socket: the protocol of a shim, on the agent's loop.

Each client is sent the status when it connects and whenever it has changed. A status is whole in
itself: a client that reads slowly is sent the newest one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from ...schema.replica import Process, StatusLine
from ...system.text.json_lines import encode_line
from ..replica_state import State
from ..run_files import RunFile
from ..shim.connections import MAX_LINE_BYTES, error_line
from ..shim.files import STATUS_FILE_NAME, open_control_socket, write_json
from .replica_status import EngineReplicaStatus

LAST_STATUS_SECONDS = 1.0  # for clients to read the last status


class StatusServer:
    """The status of one replica: its file, for the next agent, and its clients.

    Args:
        run_file: Says where the file and the control socket are.
        status: Is reported.
        agent: The identity of this process.
        handle_command: Called with each line that a client sends; raises `ValueError` for one that
            cannot be understood.
    """

    def __init__(
        self,
        run_file: RunFile,
        status: EngineReplicaStatus,
        agent: Process,
        handle_command: Callable[[bytes], None],
    ) -> None:
        self._run_file = run_file
        self._status = status
        self._agent = agent
        self._handle_command = handle_command
        self._server: asyncio.Server | None = None
        self._changed: dict[asyncio.StreamWriter, asyncio.Event] = {}

    def publish(self) -> None:
        """Write the status down, then send it."""
        with contextlib.suppress(OSError):  # a full disk: clients are sent it all the same
            write_json(str(self._run_file.run_dir / STATUS_FILE_NAME), self._to_json())
        self.send_status()

    def report_problem(self, problem: str | None) -> bool:
        """Report what keeps the engine from doing what is due; whether that is new."""
        is_new = problem != self._status.problem
        self._status.problem = problem
        if is_new:
            self.send_status()
        return is_new

    def report_waiting(self, why: str | None) -> None:
        """Report why a replica that is starting is not ready."""
        if why != self._status.waiting and self._status.life.state is State.STARTING:
            self._status.waiting = why
            self.send_status()

    def _to_json(self) -> StatusLine:
        return {
            "event": "status",
            "replica_id": self._run_file.replica_id,
            "agent": self._agent,
            **self._status.to_json(),
        }

    def _status_line(self) -> bytes:
        return encode_line(self._to_json())

    async def open(self) -> None:
        """Listen; a socket that a killed agent left is replaced.

        Raises:
            OSError: The socket cannot be made.
        """
        control = open_control_socket(self._run_file.socket_path)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=control, limit=MAX_LINE_BYTES
        )

    def send_status(self) -> None:
        """Send every client the status, which has changed."""
        for changed in self._changed.values():
            changed.set()

    async def close(self) -> None:
        """Accept no more, give clients that read time for the last status, and close."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        with contextlib.suppress(OSError):
            os.unlink(self._run_file.socket_path)  # noqa: PTH108  at once
        writers = list(self._changed)
        self._changed.clear()  # ends `_send_statuses`
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_STATUS_SECONDS):
                for writer in writers:
                    writer.write(self._status_line())
                    await writer.drain()
        for writer in writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # closed since it was accepted
            writer.write(self._status_line())
            writer.close()
            return
        changed = self._changed[writer] = asyncio.Event()
        changed.set()
        sending = asyncio.create_task(self._send_statuses(writer, changed))
        try:
            async for line in reader:
                try:
                    self._handle_command(line)
                except ValueError as exc:
                    writer.write(error_line(str(exc)))
        except (OSError, ValueError):  # it broke off; or its line has no end
            pass
        finally:
            self._changed.pop(writer, None)
            sending.cancel()
            writer.close()

    async def _send_statuses(self, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while True:
                await changed.wait()
                if writer not in self._changed:
                    return
                changed.clear()
                writer.write(self._status_line())
                await writer.drain()
