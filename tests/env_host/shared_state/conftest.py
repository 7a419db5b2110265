# SPDX-License-Identifier: Apache-2.0
"""A state process of a `Ledger`, and this process as a shard of it."""

import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from openenvd.env_host.shared_state.connection import StateLink, StateProxy, socket_name
from openenvd.env_host.shared_state.process import StateProcess

from ..ledger import LedgerWorld


@pytest.fixture
def state() -> Iterator[StateProcess]:
    """A state process of a `Ledger`, of which nothing is left."""
    process = StateProcess(LedgerWorld)
    process.start()
    yield process
    process.stop()
    assert process.pid is None
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(OSError, match="refused"):
        late.connect(socket_name(process.address))


@pytest.fixture
async def link(state: StateProcess) -> AsyncIterator[StateLink]:
    link = StateLink(state.address)
    await link.current(time.monotonic() + 30)
    yield link
    await link.close()


@pytest.fixture
def world(link: StateLink) -> StateProxy:
    return StateProxy(link)
