# SPDX-License-Identifier: Apache-2.0
"""A host without room, behind a gateway, sends handshakes on to another replica."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from openenvd.schema.protocol import ATTEMPT_HEADER, ATTEMPTS_HEADER, RETRY_HEADER

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host


def attempt(number: str, most: str) -> dict[str, str]:
    return {ATTEMPT_HEADER: number, ATTEMPTS_HEADER: most}


def refusal(host: Host, headers: dict[str, str]) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as caught:
        connect(
            f"ws://127.0.0.1:{host.port}/ws", additional_headers=headers, open_timeout=WAIT_SECONDS
        ).__enter__()
    return caught.value


def refusal_or_none(host: Host) -> InvalidStatus | None:
    try:
        with connect(f"ws://127.0.0.1:{host.port}/ws"):
            return None
    except InvalidStatus as exc:
        return exc


def first_answer(host: Host, headers: dict[str, str]) -> str:
    with connect(f"ws://127.0.0.1:{host.port}/ws", additional_headers=headers) as session:
        with contextlib.suppress(ConnectionClosed):  # it was refused, and says why
            session.send('{"type": "reset"}')
        answer = json.loads(session.recv(WAIT_SECONDS))
    return str(answer["data"].get("code") or answer["type"])


@pytest.mark.parametrize("config", [{}, {"isolate": True}, {"shards": 2}])
def test_a_host_without_room_sends_a_handshake_on_as_long_as_another_may_be_asked(
    start: StartHost, config: dict[str, object]
) -> None:
    sessions = 2
    host = start(max_sessions=sessions, admission_timeout_seconds=0.5, **config)
    host.ready()
    with host.open() as one, host.open() as two:
        assert [each.ask("reset")["type"] for each in (one, two)] == ["observation"] * sessions
        refused = refusal(host, attempt("1", "2")).response
        assert refused.status_code == 503
        assert refused.headers[RETRY_HEADER] == "1"
        for headers in (attempt("2", "2"), attempt("1", "1"), attempt("x", "2"), {}):
            assert first_answer(host, headers) == "CAPACITY_REACHED"
    assert first_answer(host, attempt("1", "2")) == "observation"


def test_a_drained_host_sends_every_handshake_on(start: StartHost, tmp_path: Path) -> None:
    host = start(doors=f"{tmp_path}/")
    host.ready()
    with host.open() as client:
        client.ask("reset")
        host.process.send_signal(signal.SIGUSR1)
        while (refused := refusal_or_none(host)) is None:
            pass  # it has not noticed yet
        assert refused.response.headers[RETRY_HEADER] == "1"
        assert client.ask("step", {})["type"] == "observation"
