# SPDX-License-Identifier: Apache-2.0
"""`ChildConfig`: the configuration of a process that the supervisor starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOME = 0  # the shard that answers the project's own routes (`serving/own_app.py`)


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """A child's place, its bounds, and the descriptors that it inherits."""

    index: int  # its row of the scoreboard
    generation: int
    shards: int
    rows: int  # of the scoreboard
    max_sessions: int
    exclusive: bool  # the class allows one session at a time in a process
    scoreboard_fd: int
    link_fd: int
    inbox_fd: int | None = None  # where others send it connections
    inbox_fds: Sequence[int] = ()  # where it sends connections to others, by index
    isolates: bool = False
    isolated: int = 0  # sessions that have processes of their own already
    connection_fd: int | None = None  # an isolated session's
    state_address: str | None = None  # of the state process, if sessions share a state
    since: int = 0  # when the connection began to wait, on the scoreboard's clock
    partial_messages_bytes: int = 0  # it may keep of unfinished messages; 0: not known
    accepted: list[list[str]] | None = None  # its handshake, by the middleware, with these headers

    @property
    def is_home(self) -> bool:
        """Whether it answers the project's own routes, and runs the project's hooks."""
        return self.index == HOME

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the child keeps."""
        single = (self.scoreboard_fd, self.link_fd, self.inbox_fd, self.connection_fd)
        return (*(fd for fd in single if fd is not None), *self.inbox_fds)
