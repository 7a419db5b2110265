# SPDX-License-Identifier: Apache-2.0
"""A shim's clients, and the protocol: JSON objects, one a line. No call blocks.

Shim to client, on connecting and on every change:

    {"event": "status", …}                   a `StatusLine` (`schema/replica.py`)

Client to shim:

    {"op": "start"}                          start the server again; ignored while one runs
    {"op": "stop", "grace_seconds": 5.0}     end everything, report "stopped", exit
    {"op": "drain", "timeout_seconds": 300}  begin no sessions; "stop" when the last one has ended,
                                             or the time is over. A second drain can only shorten
                                             the time
    {"op": "leave", "timeout_seconds": 300}  the same, if others have taken over the address
    {"op": "serve"}                          let a server that is on standby accept connections
    {"op": "listeners"}                      answered {"event": "listeners"} with the descriptors
    anything else                            answered {"event": "error", "message"}

Each status is complete, so a client that reads slowly is sent only the newest one, made when it can
be sent. Replies are queued, up to a limit. At the other end are `client.py` and the daemon. Shims
import this module, so it imports little.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ...system.process.descriptors import rights
from ...system.text.json_lines import LineBuffer, decode_line, encode_line

DEFAULT_GRACE_SECONDS = 5.0
DEFAULT_DRAIN_SECONDS = 300.0
MAX_LINE_BYTES = 64 * 1024
MAX_REPLIES = 64  # unread ones; a client that sends more requests without reading is dropped


def read_operation(line: bytes) -> tuple[object, float]:
    """Return a client's operation, and its grace or time-out; raises `ValueError`."""
    message = decode_line(line)
    key, default = "grace_seconds", DEFAULT_GRACE_SECONDS
    if message.get("op") in ("drain", "leave"):
        key, default = "timeout_seconds", DEFAULT_DRAIN_SECONDS
    try:
        seconds = float(message.get(key, default))
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"{key}: {exc}") from exc
    return message.get("op"), seconds


def error_line(message: str) -> bytes:
    """Return the answer to a line that cannot be understood."""
    return encode_line({"event": "error", "message": message})


class ClientGone(Exception):
    """The client has left, or broken a rule, and is dropped."""


class Connection:
    """One client's connection."""

    def __init__(self, connection: socket.socket, status_line: Callable[[], bytes]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._status_line = status_line
        self._received = LineBuffer(MAX_LINE_BYTES)
        self._replies: list[tuple[bytes, tuple[int, ...]]] = []  # a line or its rest, descriptors
        self.status_is_due = False  # whether the status is sent as soon as the socket takes it

    @property
    def has_unsent(self) -> bool:
        """Return whether something could not be sent yet."""
        return bool(self._replies) or self.status_is_due

    def queue_reply(self, line: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue a reply and descriptors; raises `ClientGone` if too many have not been read."""
        if len(self._replies) >= MAX_REPLIES:
            raise ClientGone("it does not read its replies")
        self._replies.append((line, fds))

    def read_lines(self) -> list[bytes]:
        """Return the whole lines that arrived; raises `ClientGone` at the end or a long line."""
        try:
            data = self.socket.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise ClientGone(str(exc)) from exc
        if not data:
            raise ClientGone("it left")
        lines = self._received.feed(data)
        if self._received.has_overflowed:
            raise ClientGone("its line has no end")
        return lines

    def send(self) -> None:
        """Send as much as the socket takes now; raises `ClientGone` if the client has left."""
        while self.has_unsent:
            if not self._replies:
                self._replies.append((self._status_line(), ()))
                self.status_is_due = False
            line, fds = self._replies[0]
            try:
                sent = self.socket.sendmsg([line], rights(fds))
            except BlockingIOError:
                return
            except OSError as exc:
                raise ClientGone(str(exc)) from exc
            if sent == len(line):
                del self._replies[0]
            else:
                self._replies[0] = line[sent:], ()


class Connections:
    """All clients, and the socket on which they connect, watched by `selector`.

    `answer` is called with a connection and each line from it. It may call `send_status`, which may
    drop the connection that is just being read from.
    """

    def __init__(
        self,
        control: socket.socket,
        selector: selectors.BaseSelector,
        status_line: Callable[[], bytes],
        answer: Callable[[Connection, bytes], None],
    ) -> None:
        self._control = control
        self._selector = selector
        self._status_line = status_line
        self._answer = answer
        self._connected: set[Connection] = set()
        control.setblocking(False)
        selector.register(control, selectors.EVENT_READ, self._on_connect)

    @property
    def have_unsent(self) -> bool:
        """Return whether any client has not been sent everything."""
        return any(client.has_unsent for client in self._connected)

    def send_status(self) -> None:
        """Send the status, which has changed, to all clients."""
        for client in list(self._connected):
            client.status_is_due = True
            self._flush(client)

    def admit_no_more(self) -> None:
        """Stop accepting connections; new clients wait until `drop_all`."""
        self._selector.unregister(self._control)

    def drop_all(self) -> None:
        """Close every connection, and the socket on which clients connect."""
        for client in list(self._connected):
            self._drop(client)
        self._control.close()

    def _on_connect(self) -> None:
        try:
            accepted, _ = self._control.accept()
        except OSError:
            return  # the client has left before it was accepted
        client = Connection(accepted, self._status_line)
        self._connected.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._serve(client))
        client.status_is_due = True
        self._flush(client)

    def _serve(self, client: Connection) -> None:
        if client not in self._connected:
            return  # it was dropped earlier in this round
        try:
            for line in client.read_lines():
                self._answer(client, line)
        except ClientGone:
            self._drop(client)
            return
        self._flush(client)

    def _flush(self, client: Connection) -> None:
        if client not in self._connected:
            return
        try:
            client.send()
        except ClientGone:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.has_unsent else 0)
        key = self._selector.get_key(client.socket)
        if key.events != events:
            self._selector.modify(client.socket, events, key.data)

    def _drop(self, client: Connection) -> None:
        if client in self._connected:
            self._connected.remove(client)
            self._selector.unregister(client.socket)
            client.socket.close()
