# SPDX-License-Identifier: Apache-2.0
"""Several replicas behind one address: whichever accepts a connection, its session is found."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from websockets.sync.client import connect

from .conftest import Machine

SESSIONS = 48  # so many that both replicas accept some, however the kernel wakes them


def test_a_session_that_was_begun_over_http_is_found_in_any_replica(machine: Machine) -> None:
    words = ["launch", "echo", "--replicas", "2", "--json"]
    address = machine.ok(*words).json["environment"]["address"]

    def ask(method: str, **params: str) -> dict[str, Any]:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        request = Request(f"{address}/mcp", body, {"content-type": "application/json"})
        with urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def rpc(method: str, **params: str) -> dict[str, str]:
        answer = ask(method, **params)
        assert "result" in answer, answer
        result: dict[str, str] = answer["result"]
        return result

    sessions = [rpc("openenv/session/create")["session_id"] for _ in range(SESSIONS)]
    assert len({session[-12:-8] for session in sessions}) == 2
    for session in sessions:
        for _ in range(2):
            with connect(f"{address.replace('http', 'ws')}/ws?session_id={session}") as socket:
                socket.send('{"type": "reset"}')
                assert json.loads(socket.recv())["type"] == "observation"
            answer = ask("tools/list", session_id=session)  # echo has no tools
            assert answer["error"]["code"] == -32603, answer  # of an unknown session: -32602
    for session in sessions:
        assert rpc("openenv/session/close", session_id=session)["closed"]
