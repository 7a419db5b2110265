# SPDX-License-Identifier: Apache-2.0
"""Every message is answered or its connection closed: what nobody expects of a client."""

import asyncio
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from websockets.frames import Opcode

from openenvd.env_host.serving.ws_session import MAX_WAITING, SessionSocket
from openenvd.env_host.websocket.protocol import WebSocketProtocol

from ..conftest import Gate, StartHost
from ..hosts import Host
from ..raw import frame, opened
from ..websocket.test_ws_protocol import AdmissionOnDemand, connected, session_socket_of, table_of

DEEP = "[" * 100_000 + "]" * 100_000
# Text frames that are answered, and after which the session goes on.
ODD = {
    "huge integer": ('{"type":"step","data":{"what":%s}}' % ("7" * 5000), "INVALID_JSON"),
    "deep": (f'{{"type":"step","data":{{"what":{DEEP}}}}}', "INVALID_JSON"),
    "deep, never closed": ('{"type":' * 50_000, "INVALID_JSON"),
    "deep, but JSON": (
        '{"type":"step","data":{"what":%s}}' % ("[" * 500 + "]" * 500),
        "VALIDATION_ERROR",
    ),
    "deep type": ('{"type":%s}' % ("[" * 500 + "]" * 500), "UNKNOWN_TYPE"),
    "half a pair as the type": ('{"type":"half \\ud800"}', "UNKNOWN_TYPE"),
    "half a pair as a key": ('{"type":"step","data":{},"half \\ud800":1}', "VALIDATION_ERROR"),
    "half a pair in an action": (
        '{"type":"step","data":{"half \\ud800":1}}',
        "VALIDATION_ERROR",
    ),
    "no number": ('{"type":NaN}', "UNKNOWN_TYPE"),
    "huge float": ('{"type":"step","data":{"what":1e999}}', "VALIDATION_ERROR"),
    "NUL": ("\0", "INVALID_JSON"),
    "a byte order mark": ('\ufeff{"type":"state"}', "INVALID_JSON"),
    "an exception with half a pair": (
        '{"type":"step","data":{"what":"raise_half_a_pair"}}',
        "EXECUTION_ERROR",
    ),
    "an exception without a text": (
        '{"type":"step","data":{"what":"raise_without_a_text"}}',
        "EXECUTION_ERROR",
    ),
}


@pytest.fixture
def host(serve: StartHost) -> Host:
    return serve()


@pytest.mark.parametrize(("text", "code"), ODD.values(), ids=ODD)
def test_an_odd_message_is_answered_and_the_session_goes_on(
    host: Host, gate: Gate, text: str, code: str
) -> None:
    """Also where it waits behind another, and others wait behind it."""
    with opened(host) as client:
        client.text(text)
        assert client.answer()["data"]["code"] == code
        client.text(json.dumps({"type": "step", "data": {"what": "wait", "gate": gate.name}}))
        for _ in range(3):
            client.text(text)
        client.text('{"type":"state"}')
        gate.reached()
        gate.open()
        answers = [client.answer() for _ in range(5)]
    assert answers[0]["type"] == "observation"
    assert [answer["data"]["code"] for answer in answers[1:4]] == [code] * 3
    assert answers[4]["type"] == "state"


@pytest.mark.parametrize("isolate", [False, True])
def test_an_environments_own_invalid_value_is_told_from_an_invalid_action(
    serve: StartHost, isolate: bool
) -> None:
    """Upstream answers both with the same code and message."""
    host = serve(isolate=isolate)
    with host.open() as client:
        invalid = client.ask("step", {"no": "action"})["data"]
        raised = client.ask("step", {"what": "wrong_field"})["data"]
    assert [each["code"] for each in (invalid, raised)] == ["VALIDATION_ERROR"] * 2
    assert [each["message"] for each in (invalid, raised)] == ["Invalid message"] * 2
    assert not {"exception", "place"} & invalid.keys()
    assert (raised["exception"], raised["errors"][0]["loc"]) == ("ValidationError", ["text"])
    assert re.search(r"/samples.py:\d+, in do_wrong_field$", raised["place"])
    log = host.log.read_text()
    assert "in do_wrong_field" in log
    assert log.count("step failed") == 1


@pytest.mark.parametrize("isolate", [False, True])
def test_the_place_of_what_is_no_observation_is_the_method_that_returned_it(
    serve: StartHost, isolate: bool
) -> None:
    with serve("Dictionary", isolate=isolate).open() as client:
        answer = client.ask("step", {"what": "count"})["data"]
    assert re.search(r"/samples.py:\d+, in Dictionary.step$", answer["place"]), answer
    assert "of type dict: return an Observation" in answer["hint"]


def test_a_host_builds_no_model_before_the_first_malformed_message() -> None:
    """The models would be a tenth of what it imports."""
    code = (
        "from openenvd.env_host.serving.messages import _MODELS, data_of\n"
        "print(any(model.__pydantic_complete__ for model in _MODELS.values()))\n"
        "try: data_of({'type': 'reset', 'data': 1})\n"
        "except ValueError as exc: print(exc.errors()[0]['loc'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == "False\n('data',)\n"


@pytest.mark.parametrize("text", ["7" * 5000, DEEP, "{" * 50_000], ids=["huge", "deep", "open"])
def test_json_rpc_that_cannot_be_read_is_a_parse_error(host: Host, text: str) -> None:
    with opened(host, "/mcp") as client:
        client.text(text)
        client.text('{"jsonrpc":"2.0","method":"nothing","id":"half \\ud800"}')
        client.text('{"jsonrpc":"2.0","method":"nothing","id":1}')
        assert client.answer()["error"]["code"] == -32700
        assert client.answer()["error"]["code"] < 0
        assert client.answer()["id"] == 1
    status, answer = host.http("POST", "/mcp", text)
    assert (status, answer["error"]["code"]) == (200, -32700)


def test_half_a_pair_is_answered_over_http(host: Host) -> None:
    for field in ('"method":"nothing","id":"half \\ud800"', '"method":"half \\ud800","id":1'):
        status, answer = host.http("POST", "/mcp", f'{{"jsonrpc":"2.0",{field}}}')
        assert (status, answer["error"]["code"]) == (200, -32601)
        assert answer["id"] in (1, "half \ud800")
    result = host.http("POST", "/step", {"action": {"what": "raise_half_a_pair"}})
    assert result == (500, {"detail": "RuntimeError: half \ud800"})


@pytest.mark.parametrize("text", ["7" * 5000, DEEP], ids=["huge", "deep"])
@pytest.mark.parametrize("path", ["/reset", "/step"])
def test_a_body_that_cannot_be_read_is_refused(host: Host, path: str, text: str) -> None:
    status, answer = host.http("POST", path, f'{{"action":{text}}}')
    assert status == 422
    assert answer["detail"][0]["type"] == "json_invalid"


async def test_a_client_that_is_not_read_is_not_taken_for_dead() -> None:
    """It has sent more than may wait behind a call: its answer to a ping cannot be seen."""
    session_socket = session_socket_of(table_of(AdmissionOnDemand()))
    _, peer = await connected(session_socket)
    session_socket.begin(None)  # waits for room, which never comes
    peer.sendall(frame(Opcode.TEXT, b"{}") * (MAX_WAITING + 1))
    while not session_socket._is_full:
        await asyncio.sleep(0)
    for _ in range(5):
        session_socket.check_liveness()
    assert not session_socket.transport.is_closing()
    session_socket.transport.abort()
    while session_socket in session_socket._connections:
        await asyncio.sleep(0)
    peer.close()


class Surprised(WebSocketProtocol):
    """Whatever it is told surprises it."""

    def text_received(self, payload: bytes) -> None:
        raise LookupError("nobody expects this")

    def binary_received(self) -> None:
        self._loop.call_soon(self.guarded, self.text_received, b"")

    def client_left(self) -> None:
        pass


@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.BINARY], ids=["at once", "in a callback"])
async def test_a_surprise_closes_the_connection_and_is_logged(
    opcode: Opcode, caplog: pytest.LogCaptureFixture
) -> None:
    ours, peer = await connected(Surprised(asyncio.get_running_loop()))
    peer.settimeout(10)
    peer.sendall(frame(opcode, b"{}"))
    while ours.fileno() >= 0:
        await asyncio.sleep(0.001)
    received = b"".join(iter(lambda: peer.recv(1000), b""))
    assert received[2:4] == (1011).to_bytes(2, "big")
    assert "nobody expects this" in caplog.text
    peer.close()


async def test_a_call_whose_outcome_surprises_us_closes_the_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: Any) -> None:
        raise LookupError("nobody expects this")

    monkeypatch.setattr(SessionSocket, "call_settled", surprise)
    session_socket = session_socket_of(table_of(AdmissionOnDemand(is_open=True)))
    ours, peer = await connected(session_socket)
    session_socket.begin(None)
    while ours.fileno() >= 0:
        await asyncio.sleep(0.001)
    assert peer.recv(1000)[2:4] == (1011).to_bytes(2, "big")
    assert "nobody expects this" in caplog.text
    peer.close()
