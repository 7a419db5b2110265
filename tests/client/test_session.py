# SPDX-License-Identifier: Apache-2.0
"""Our own sessions, at a real WebSocket server that breaks the protocol in each way."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from openenvd.client.errors import SessionError
from openenvd.client.session import Session
from openenvd.system.net.websocket import INTERNAL_ERROR_CLOSE, close_payload


def server(*answers: str | None) -> AbstractContextManager[str]:
    """Give these answers, one to each message; None and "close" close, the first with a reason."""

    def handle(socket: ServerConnection) -> None:
        for answer in answers:
            socket.recv()
            if answer is None:
                socket.close(1011, "the shard was lost")
                return
            if answer == "close":
                socket.close(1012)
                return
            socket.send(answer)
        for _ in socket:
            pass

    return running(handle)


@contextmanager
def running(handle: Callable[[ServerConnection], None], **named: Any) -> Iterator[str]:
    with serve(handle, "127.0.0.1", 0, **named) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def refusing_server(
    message: str = "no licence", code: str = "CAPACITY_REACHED", close: tuple[int, str] = (1000, "")
) -> AbstractContextManager[str]:
    """End every session with an error that nobody has asked for."""

    def handle(socket: ServerConnection) -> None:
        socket.send(error(message, code))
        socket.close(*close)

    return running(handle)


def observation(**data: object) -> str:
    return json.dumps({"type": "observation", "data": data})


def error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_session_is_had_with_standard_streams_closed(closed: str, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from openenvd import Client;"
        " from openenvd.client import Session; Client();"
        " session = Session(sys.argv[1]); result = session.__enter__().reset();"
        " Path(sys.argv[2]).write_text(str(result.observation))"
    )
    out = tmp_path / "seen"
    with server(observation(observation={"x": 1})) as address:
        shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
        done = subprocess.run([*shell, address, out], timeout=60, check=False)
    assert done.returncode == 0
    assert out.read_text() == "{'x': 1}"


def test_an_answer_without_reward_and_end_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # proxies are passed by
    with server(observation(observation={"x": 1})) as address, Session(address) as session:
        result = session.reset(seed=3)
        assert (result.observation, result.reward, result.done) == ({"x": 1}, None, False)
    with server(observation(observation={"x": 1})) as address:
        session = Session(address)
        with session:
            pass
        with session:
            assert session.reset().observation == {"x": 1}


def test_an_error_is_raised_with_its_code_and_the_fields_that_are_wrong() -> None:
    refused = error("no such move", "EXECUTION_ERROR")
    ends = observation(observation={}, done=True)
    with server(refused, ends) as address, Session(address) as session:
        with pytest.raises(SessionError, match="no such move") as caught:
            session.step({})
        assert caught.value.code == "EXECUTION_ERROR"
        assert session.step({}).done  # the session goes on
    data: dict[str, Any] = {
        "message": "Invalid message",
        "errors": [{"loc": ["mesage"], "msg": "unknown field"}],
    }
    refused = json.dumps({"type": "error", "data": data})
    wrong = pytest.raises(SessionError, match=r"Invalid message.*mesage.*unknown field")
    with server(refused) as address, Session(address) as session, wrong:
        session.step({"mesage": "x"})
    data |= {"exception": "ValidationError", "place": "env.py:7, in step"}  # of its observation
    raised = pytest.raises(SessionError, match=r"^ValidationError: \[.*mesage.*\(env.py:7, in step")
    refused = json.dumps({"type": "error", "data": data})
    with server(refused) as address, Session(address) as session, raised:
        session.step({})


def test_the_error_of_an_environment_names_its_class_its_line_and_the_command() -> None:
    origin = {"exception": "KeyError", "place": "/e/env.py:7, in step"}
    data = {"message": "'x'", "code": "EXECUTION_ERROR", **origin}
    answer = json.dumps({"type": "error", "data": data})
    hinted = json.dumps({"type": "error", "data": {**data, "hint": "return an Observation"}})
    with server(answer, hinted) as address, Session(address, name="trial") as session:
        for hint in ("openenv logs trial shows the traceback", "return an Observation"):
            with pytest.raises(SessionError) as caught:
                session.step({})
            assert caught.value.message == "KeyError: 'x' (/e/env.py:7, in step)"
            assert (caught.value.code, caught.value.hint) == ("EXECUTION_ERROR", hint)


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_calls() -> None:
    def handle(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(observation(observation={"at": 1}))
        socket.send(observation(observation={"at": 1}))
        with suppress(ConnectionClosed):
            socket.recv()
            socket.send(observation(observation={"at": 2}))

    with running(handle) as address, Session(address) as session:
        assert session.reset().observation == {"at": 1}
        time.sleep(0.2)  # the second answer arrives
        for _ in range(2):
            with pytest.raises(SessionError, match="a message that answers no call"):
                session.step({})


def test_a_session_says_with_each_call_why_it_has_ended_or_was_closed() -> None:
    with server(None) as address, Session(address, name="trial") as session:
        for _ in range(2):
            with pytest.raises(SessionError, match="the shard was lost") as caught:
                session.reset()
            assert caught.value.hint == "openenv status trial tells what happened"
    with server(error("no such move", "EXECUTION_ERROR")) as address:
        session = Session(address, name="trial")
        with session, pytest.raises(SessionError, match="no such move"):
            session.step({})
        for _ in range(2):
            with pytest.raises(SessionError, match=r"^the session was closed$") as caught:
                session.step({})
            assert (caught.value.code, caught.value.hint) == (None, None)
    answers = server(error("no such move", "EXECUTION_ERROR"), "close")
    with answers as address, Session(address, name="trial") as session:
        with pytest.raises(SessionError, match="no such move"):
            session.step({})
        for _ in range(2):
            with pytest.raises(SessionError, match="ended: closed by the server") as caught:
                session.step({})
            assert (caught.value.code, caught.value.hint) == (
                None,
                "openenv status trial tells what happened",
            )


@pytest.mark.parametrize(
    ("how", "command"), [("was killed for memory", "status"), ("was killed by SIGSEGV", "logs")]
)
def test_the_notice_of_a_crash_is_repeated_whole_with_each_call(how: str, command: str) -> None:
    """The close frame that follows it has the beginning of its text only."""
    text = f"shard 0 {how}: {'limit of 200 MB, ' * 20}start it with more"
    cut = close_payload(INTERNAL_ERROR_CLOSE, text)[2:].decode()
    assert len(cut) < len(text)
    frames = refusing_server(text, "SESSION_ERROR", (INTERNAL_ERROR_CLOSE, cut))
    with frames as address, Session(address, name="trial") as session:
        for _ in range(3):
            with pytest.raises(SessionError) as caught:
                session.reset()
            told = caught.value.message, caught.value.code, caught.value.hint
            hint = f"openenv {command} trial tells what happened"
            assert told == (text, "SESSION_ERROR", hint)


def test_a_session_that_is_not_open_says_how_or_at_which_address_it_is_opened() -> None:
    session = Session("http://127.0.0.1:1")
    with pytest.raises(SessionError, match=r"with env\.connect"):
        session.reset()
    session.close()
    session = Session("http://127.0.0.1:1?token=abcdefghijklmnop")
    with pytest.raises(SessionError, match=r"127\.0\.0\.1:1 .*refused") as caught, session:
        pass
    assert "abcdef" not in str(caught.value)


def test_a_token_is_sent_in_a_header_and_not_in_the_url() -> None:
    seen: list[Request] = []

    def keep(_: ServerConnection, request: Request) -> None:
        seen.append(request)

    token = "?token=abcdefghijklmnop"
    with running(lambda _: None, process_request=keep) as address, Session(address + token):
        pass
    [request] = seen
    assert (request.path, request.headers["Authorization"]) == ("/ws", "Bearer abcdefghijklmnop")


def test_a_refused_handshake_says_what_the_server_said() -> None:
    def refuse(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "all 4 sessions are taken")

    told = pytest.raises(SessionError, match="503: all 4 sessions are taken")
    with running(lambda _: None, process_request=refuse) as address, told, Session(address):
        pass


IN_A_GENERATOR = """
import sys
from openenvd.client.session import Session

def steps():
    with Session(sys.argv[1]) as session:
        while True:
            yield session.step({}).observation

left = steps()
print(next(left))
"""


def test_python_ends_while_a_generator_has_a_session() -> None:
    with server(observation(observation={"n": 1})) as address:
        done = subprocess.run(
            [sys.executable, "-c", IN_A_GENERATOR, address], capture_output=True, timeout=60
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"{'n': 1}\n", b"")
