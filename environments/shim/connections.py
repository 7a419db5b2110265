# SPDX-License-Identifier: Apache-2.0
"""A shim's clients, and the wire to them: JSON objects, one a line. No call blocks.

Shim to client, on connecting and on every change:

    {"event": "status", …}                   a `StatusLine` (`schema/replica.py`)

Client to shim:

    {"op": "start"}                          start the server again; ignored while one runs
    {"op": "stop", "grace_seconds": 5.0}     end everything, say "stopped", exit
    {"op": "drain", "timeout_seconds": 300}  let the sessions end and begin none, then as "stop";
                                             also when the time is over. A second one can only
                                             shorten it
    {"op": "leave", "timeout_seconds": 300}  the same, and its address is others' from now on
    {"op": "serve"}                          let a server accept that the run file holds back
    {"op": "listeners"}                      answered {"event": "listeners"} with the descriptors
    anything else                            answered {"event": "error", "message"}

A status is whole in itself, so a client that reads slowly is sent the newest one only, made when
it can be sent. Replies are queued, up to a bound. The other end: `client.py`, and the daemon.
Light: a shim imports it.
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
MAX_REPLIES = 64  # unread ones; a client that asks on without reading is dropped


def read_operation(line: bytes) -> tuple[object, float]:
    """Return what a client asks for, and its grace or time-out; `ValueError`: it is no message."""
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
    """The client left, or broke the rules; drop it."""


class Connection:
    """One client's connection."""

    def __init__(self, connection: socket.socket, status_line: Callable[[], bytes]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._status_line = status_line
        self._received = LineBuffer(MAX_LINE_BYTES)
        self._replies: list[tuple[bytes, tuple[int, ...]]] = []  # a line or its rest, descriptors
        self.status_is_due = False  # it is sent as it is when there is room for it

    @property
    def has_unsent(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._replies) or self.status_is_due

    def queue_reply(self, line: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue a reply and descriptors; raises `ClientGone` when too many have not been read."""
        if len(self._replies) >= MAX_REPLIES:
            raise ClientGone("it does not read its replies")
        self._replies.append((line, fds))

    def read_lines(self) -> list[bytes]:
        """Return the whole lines that arrived; `ClientGone` at the end, or for an endless line."""
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
        """Send what the socket takes now; raises `ClientGone` when it has left."""
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

    `answer` is called with a connection and each line that it sent. It may `send_status`, and so
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
        """Whether a client has not been sent everything."""
        return any(client.has_unsent for client in self._connected)

    def send_status(self) -> None:
        """Send the status, which has changed, to every client."""
        for client in list(self._connected):
            client.status_is_due = True
            self._flush(client)

    def admit_no_more(self) -> None:
        """Accept no connection any more; new clients wait until this process has exited."""
        self._selector.unregister(self._control)

    def drop_all(self) -> None:
        """Close every connection."""
        for client in list(self._connected):
            self._drop(client)

    def _on_connect(self) -> None:
        try:
            accepted, _ = self._control.accept()
        except OSError:
            return  # it left before it was let in
        client = Connection(accepted, self._status_line)
        self._connected.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._serve(client))
        client.status_is_due = True
        self._flush(client)

    def _serve(self, client: Connection) -> None:
        if client not in self._connected:
            return  # dropped earlier in this round
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
