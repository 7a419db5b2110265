# SPDX-License-Identifier: Apache-2.0
"""What a shard tells the host of connections that it has not answered."""

from __future__ import annotations

import asyncio
import os

from openenvd.env_host.ipc.fd_messages import Message, Post, close_all, packet_pair, receive
from openenvd.env_host.ipc.scoreboard import Board
from openenvd.env_host.shard.acceptor import Arrival
from openenvd.env_host.shard.connection_registry import Guard
from openenvd.env_host.shard.request_head import Owner

HEAD = b"GET /ws HTTP/1.1\r\n\r\n"


def test_what_another_shard_gave_is_the_hosts_to_give_away_before_it_is_begun_with() -> None:
    """And is told of once, though it waits then, until it is another's."""

    async def told() -> list[Message]:
        ours, theirs = packet_pair()
        with ours, theirs:
            guard = Guard(Post(ours), Owner(0, 1), lambda: None)
            slot = Board.create(1)[0]
            arrival = Arrival(lambda _: None, lambda _: None, slot=slot, data=HEAD, since=7)
            reading, writing = os.pipe()
            guard.adopted(arrival, reading)
            guard.waits(arrival)
            guard.giving(arrival)
            close_all((reading, writing))
            messages = list(iter(lambda: receive(theirs), None))
        close_all([fd for message in messages for fd in message.fds])
        return messages

    first, second = asyncio.run(told())
    assert first.head == {"waits": 1, "since": 7}
    assert first.body == HEAD
    assert len(first.fds) == 1
    assert second.head == {"ended": [1]}
