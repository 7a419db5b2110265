# SPDX-License-Identifier: Apache-2.0
"""Every WebSocket endpoint of an environment, by the cases of the Autobahn test suite.

There are no others: the daemon has none, and a shared state's socket has frames of its own kind.
All endpoints have one parser, on which a session plays every case. The other endpoints play a tenth
of them, and all in the long form (`-m "long or not long"`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from openenvd.schema.protocol import HostConfig

from ..autobahn import Case, all_cases, converse, good
from ..conftest import ECHO
from ..hosts import Host
from ..raw import HEAD, Raw, frame, opened, raw, upgraded

CASES = dict(all_cases())
A_TENTH = {*random.Random(7).sample(sorted(CASES), len(CASES) // 10)}
CASES_OF_OTHERS = [
    pytest.param(case, id=number, marks=() if number in A_TENTH else pytest.mark.long)
    for number, case in CASES.items()
]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    config = HostConfig("echo", env_class=ECHO, shards=1, http_session_idle_seconds=0)
    yield from running(Host(config, tmp_path_factory.mktemp("shard")))


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    config = HostConfig("echo", env_class=ECHO, isolate=True, max_sessions=32)
    yield from running(Host(config, tmp_path_factory.mktemp("isolated")))


@pytest.fixture(scope="module")
def session_id(shard: Host) -> str:
    return shard.create_session()


def running(host: Host) -> Iterator[Host]:
    try:
        host.ready()
        yield host
        host.until(lambda capacity: capacity["sessions"] <= 1)  # the one that was begun over HTTP
        assert host.stop() == 0, host.log.read_text()
    finally:
        host.close()


def play(connection: AbstractContextManager[Raw], case: Case, *, is_strict: bool = True) -> None:
    with connection as client:
        converse(client, case, is_strict=is_strict)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_session(shard: Host, case: Case) -> None:
    play(opened(shard), case)


@pytest.mark.parametrize("case", CASES_OF_OTHERS)
def test_json_rpc(shard: Host, case: Case) -> None:
    play(opened(shard, "/mcp"), case, is_strict=False)


@pytest.mark.parametrize("case", CASES_OF_OTHERS)
def test_a_session_on_a_connection_that_served_http_before(shard: Host, case: Case) -> None:
    play(upgraded(shard), case)


@pytest.mark.parametrize("case", CASES_OF_OTHERS)
def test_a_session_that_was_begun_over_http(shard: Host, session_id: str, case: Case) -> None:
    play(opened(shard, f"/ws?session_id={session_id}"), case)


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
@pytest.mark.parametrize("case", CASES_OF_OTHERS)
def test_an_isolated_session(isolated: Host, path: str, case: Case) -> None:
    play(opened(isolated, path), case, is_strict=path == "/ws")


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_compression_is_not_agreed_on_and_refused(shard: Host, path: str) -> None:
    """Sections 12 and 13."""
    offer = b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    with raw(shard) as client:
        client.send(HEAD.replace(b"/ws", path.encode()).removesuffix(b"\r\n") + offer)
        head = client.head().lower()
        assert b"101" in head
        assert b"extensions" not in head
        compressed = frame(1, good(), reserved=4)
        converse(client, Case(compressed, closed=1002), is_strict=True)
