# SPDX-License-Identifier: Apache-2.0
"""The same conversations with upstream's own server and with the env host, frame for frame.

`differences(python, folder)` is what tests call, with a Python that has upstream's package;
`is_older` is for versions before 0.4.0, whose sessions alone are compared.

Each environment of `conformance_project.py` is served three ways: by upstream under uvicorn, by the
env host from the project's app, and by the env host from the bare class. Every conversation is held
with each, and what came back is compared after ids have been named in order of appearance.

What may differ, and why: sentences of error texts that are ours (`OWN_WORDS`), HTTP bodies of
status 500, which upstream leaves blank, and what `_known` names.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed

from openenvd.schema.protocol import HostConfig

from .conformance_project import APPS, write_project
from .hosts import Client, Host, serving, uvicorn_serving

CLASSES = {**{app: f"environment:{name}" for app, name in APPS.items()}, "tools_app": "tools:Tools"}
OWN_WORDS = ("CAPACITY_REACHED", "FACTORY_ERROR", -32000)  # codes whose sentence is ours
UNKNOWN_SESSION = {
    "type": "error",
    "data": {"message": "Unknown session_id: nobody", "code": "SESSION_ERROR"},
}
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

# One frame each, sent as they are on one connection until it closes.
SESSION = (
    '{"type":"reset"}',
    '{"type":"state"}',
    '{"type":"reset","data":{"seed":3,"episode_id":"e1","level":"hard"}}',
    '{"type":"step","data":{"message":"hello"}}',
    '{"type":"step","data":{"message":"ab","times":3}}',
    '{"type":"step","data":{"message":"x","metadata":{"a":1}}}',
    '{"type":"step","data":{"message":"rich"}}',
    '{"type":"step","data":{"message":"opaque"}}',
    '{"type":"step","data":{"message":"hidden"}}',
    '{"type":"step","data":{"message":"raise"}}',
    '{"type":"step","data":{"message":"invalid"}}',
    '{"type":"step","data":{"message":"none"}}',
    '{"type":"step","data":{"message":"true"}}',
    '{"type":"step","data":{"message":"int"}}',
    '{"type":"step","data":{"message":"float"}}',
    '{"type":"step","data":{"message":"end"}}',
    '{"type":"state"}',
    '{"type":"step","data":{"message":1}}',
    '{"type":"step","data":{"message":""}}',
    '{"type":"step","data":{"message":"a","times":0,"loud":true}}',
    '{"type":"step","data":{"type":"list_tools"}}',
    '{"type":"step","data":[1]}',
    '{"type":"step"}',
    '{"type":"step","data":{"message":"a"},"id":7}',
    '{"type":"reset","data":{"seed":13}}',
    '{"type":"reset","data":{"seed":"many"}}',
    '{"type":"reset","data":null}',
    '{"type":"reset","more":1}',
    '{"type":"state","data":{}}',
    '{"type":"nonsense"}',
    '{"type":7}',
    '{"type":["reset"]}',
    '{"data":{}}',
    "{",
    "",
    "not json",
    '{"type":"step","data":{"message":"euro \\u20ac and \\ud83d\\ude00"}}',
    '{"type":"step","data":{"message":"b","times":NaN}}',
    '{"type":"step","data":{"message":"c","times":2,"times":3}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","id":1}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"nothing","id":"a"}}',
    '{"type":"mcp","data":{"method":"tools/list"}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"openenv/session/create","id":2}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"openenv/session/close","id":3}}',
    '{"type":"mcp"}',
    '{"type":"close","data":{}}',
    '{"type":"state"}',
    '{"type":"close"}',
)
NOT_AN_OBJECT = ("[1]",)
# Upstream ends the session at a validation error that it cannot encode: a validator's own
# exception, half a surrogate pair. Ours goes on.
ORIGIN = ("exception", "place", "hint")  # of an exception, in our error frames alone
HARD_TO_ENCODE = (
    '{"type":"step","data":{"message":"SHOUT"}}',
    '{"type":"step","data":{"message":"half \\ud800"}}',
)
TOOLS = (
    '{"type":"reset","data":{"episode_id":"t"}}',
    '{"type":"step","data":{"type":"list_tools"}}',
    '{"type":"step","data":{"type":"call_tool","tool_name":"add","arguments":{"a":1,"b":2}}}',
    '{"type":"step","data":{"type":"call_tool","tool_name":"fail"}}',
    '{"type":"step","data":{"type":"call_tool","tool_name":"nobody"}}',
    '{"type":"step","data":{"type":"call_tool"}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","id":1}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/call","params":{"name":"add","arguments":{"a":1,"b":2}}}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/call","id":3,"params":{"name":"fail"}}}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/call","id":4,"params":{}}}',
    '{"type":"state"}',
    '{"type":"close"}',
)
RPC = (
    '{"jsonrpc":"2.0","method":"tools/list","id":1}',
    '{"jsonrpc":"2.0","method":"tools/call","id":2,"params":{"name":"add","arguments":{"a":1,"b":2}}}',
    '{"jsonrpc":"2.0","method":"tools/call","id":2,"params":{"name":"nobody"}}',
    '{"jsonrpc":"2.0","method":"no/method","id":"x"}',
    '{"jsonrpc":"1.0","method":"tools/list"}',
    "{",
)
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/health", None),
    ("GET", "/metadata", None),
    ("GET", "/schema", None),
    ("GET", "/state", None),
    ("GET", "/reset", None),
    ("POST", "/reset", None),
    ("POST", "/reset", {}),
    ("POST", "/reset", {"seed": 3, "episode_id": "e1", "level": "hard"}),
    ("POST", "/reset", {"seed": -1}),
    ("POST", "/reset", {"seed": 13}),
    ("POST", "/reset", "{"),
    ("POST", "/step", {"action": {"message": "hello", "times": 2}}),
    ("POST", "/step", {"action": {"message": "true"}, "timeout_s": 1.5, "colour": "red"}),
    ("POST", "/step", {"action": {"message": "raise"}}),
    ("POST", "/step", {"action": {"message": ""}}),
    ("POST", "/step", {"action": [1]}),
    ("POST", "/step", {"action": {"message": "a"}, "timeout_s": 0}),
    ("POST", "/step", {}),
    ("POST", "/mcp", '{"jsonrpc":"2.0","method":"tools/list","id":1}'),
    (
        "POST",
        "/mcp",
        '{"jsonrpc":"2.0","method":"openenv/session/close","params":{"session_id":"q"}}',
    ),
    ("POST", "/mcp", '{"jsonrpc":"2.0","method":"tools/list","params":{"session_id":"q"},"id":5}'),
    ("POST", "/mcp", "[]"),
    ("POST", "/mcp", "{"),
    ("GET", "/nowhere", None),
    ("POST", "/health", None),
    ("GET", "/list_environments", None),
)


@dataclass(frozen=True)
class Server:
    """Something that serves, however it was started."""

    port: int
    http: Callable[[str, str, Any], tuple[int, Any]]
    open: Callable[[str], Client]


def differences(python: str, folder: Path, *, is_older: bool = False) -> list[str]:
    """What the env host answers otherwise than upstream does; one line each."""
    write_project(folder)
    found: list[str] = []
    converse = _sessions if is_older else _conversations
    for app, reference in CLASSES.items():
        if is_older and app in ("broken_app", "single_app"):
            continue
        with _upstream(python, folder, app) as server:
            wanted = dict(converse(server, app))
        for way, config in _ways(folder, app, reference):
            with _ours(python, folder, config) as server:
                got = dict(converse(server, app))
            found += [
                f"{app} ({way}) {name}\n  upstream {_short(wanted[name])}\n  ours {_short(answer)}"
                for name, answer in got.items()
                if _text(answer) != _text(wanted[name])
                and not _known(way, name, wanted[name], answer)
            ]
    return found


def _ways(folder: Path, app: str, reference: str) -> Iterator[tuple[str, HostConfig]]:
    # As upstream: one session of a class for one, nobody waits for a slot or has to reset first.
    alike = HostConfig(
        "",
        import_paths=(str(folder),),
        isolate=False,
        admission_timeout_seconds=0,
        reset_first=False,
    )
    yield "project", replace(alike, name=app, app_candidates=(f"{app}:app",))
    if app != "tools_app":  # the class of tools names no action type: only its app does
        yield "class", replace(alike, name="listener", env_class=reference)


def _sessions(server: Server, app: str) -> Iterator[tuple[str, Any]]:
    texts = TOOLS if app == "tools_app" else SESSION
    yield from _conversation(server, "/ws", texts)
    yield from _conversation(server, "/ws", NOT_AN_OBJECT)
    if app != "tools_app":
        yield from _conversation(server, "/ws?session_id=nobody", texts[:3])


def _conversations(server: Server, app: str) -> Iterator[tuple[str, Any]]:
    yield from _conversation(server, "/ws", TOOLS if app == "tools_app" else SESSION)
    yield from _conversation(server, "/ws", NOT_AN_OBJECT)
    for text in HARD_TO_ENCODE:
        yield from _conversation(server, "/ws", (text, '{"type":"state"}'))
    yield from _conversation(server, "/ws?session_id=nobody", SESSION[:1])
    yield from _conversation(server, "/mcp", RPC)
    yield from _attached(server)
    yield from _over_capacity(server, app)
    for method, path, body in REQUESTS:
        status, answer = server.http(method, path, body)
        yield f"{method} {path} {body}", (status, answer if status < 500 else None)


def _conversation(server: Server, path: str, texts: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    names: dict[str, str] = {}
    with server.open(path) as client:
        for number, text in enumerate(texts):
            yield f"{path} {number} {text}", _named(_exchange(client, text), names)


def _exchange(client: Client, text: str) -> Any:
    with suppress(ConnectionClosed):  # what it said before it closed can still be read
        client.connection.send(text)
    return _next(client)


def _next(client: Client) -> Any:
    try:
        return client.receive()
    except ConnectionClosed as exc:
        return _closing(exc)


def _closing(exc: ConnectionClosed) -> str:
    return f"closed {exc.rcvd.code if exc.rcvd else 'without a word'}"


def _attached(server: Server) -> Iterator[tuple[str, Any]]:
    """A session that is begun over HTTP, used over a WebSocket, and closed over HTTP."""
    names: dict[str, str] = {}

    def rpc(method: str, **params: Any) -> Any:
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        return server.http("POST", "/mcp", request)[1]

    created = rpc("openenv/session/create")
    yield "attached create", _named(created, names)
    session = created.get("result", {}).get("session_id")
    if session is None:
        return
    yield "attached tools", _named(rpc("tools/list", session_id=session), names)
    with server.open(f"/ws?session_id={session}") as client:
        yield "attached reset", _named(_exchange(client, '{"type":"reset"}'), names)
        with server.open(f"/ws?session_id={session}") as second:
            yield "attached twice", _named(_next(second), names)
        yield "attached state", _named(_exchange(client, '{"type":"state"}'), names)
    with server.open(f"/ws?session_id={session}") as client:
        yield "attached again", _named(_exchange(client, '{"type":"state"}'), names)
        yield "attached closing", _named(rpc("openenv/session/close", session_id=session), names)
        yield "attached still", _named(_exchange(client, '{"type":"state"}'), names)
        yield "attached close", _named(_exchange(client, '{"type":"close"}'), names)
    yield "attached gone", _named(rpc("tools/list", session_id=session), names)


def _over_capacity(server: Server, app: str) -> Iterator[tuple[str, Any]]:
    if app != "single_app":
        return
    with server.open("/ws") as first:
        yield "capacity first", _exchange(first, '{"type":"reset","data":{"episode_id":"e"}}')
        with server.open("/ws") as second:
            yield "capacity second", _named(_next(second), {})
            yield "capacity second then", _next(second)
        yield "capacity first then", _exchange(first, '{"type":"state"}')
        _exchange(first, '{"type":"close"}')
    with server.open("/ws") as third:
        yield "capacity third", _exchange(third, '{"type":"reset","data":{"episode_id":"f"}}')


def _named(answer: Any, names: dict[str, str]) -> Any:
    """The answer with ids by order of appearance, and without the sentences that are ours."""

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"id-{len(names)}")

    plain = json.loads(UUID.sub(name, json.dumps(answer)))
    if isinstance(plain, dict):
        for error in (plain.get("data"), plain.get("error")):
            if isinstance(error, dict) and error.get("code") in OWN_WORDS:
                error["message"] = "…"
    return plain


def _known(way: str, name: str, wanted: Any, got: Any) -> bool:
    """Whether this difference is meant."""
    if any(text in name for text in HARD_TO_ENCODE):
        return bool(got["data"]["code"] == "VALIDATION_ERROR")
    if name == '/ws 1 {"type":"state"}' and isinstance(wanted, str):
        return bool(got["type"] == "state")
    if way == "class" and name.startswith("/ws?session_id=nobody"):
        # Only an app tells that its version began a new session then, as those before 0.5.0 did.
        return bool(got in ("closed 1000", UNKNOWN_SESSION))
    # Upstream's /mcp does not catch a factory that fails; ours names it.
    return bool(wanted == (500, None)) and name.startswith("POST /mcp")


def _text(value: Any) -> str:
    match value:
        case {
            "type": "error",
            "data": {"code": "EXECUTION_ERROR" | "VALIDATION_ERROR"} as data,
        }:  # ours has more
            upstreams = {name: data[name] for name in data if name not in ORIGIN}
            value = {**value, "data": upstreams}
    return json.dumps(value, sort_keys=True)  # unlike ==, it tells true from 1


def _short(value: Any) -> str:
    return json.dumps(value)[:600]


@contextmanager
def _ours(python: str, folder: Path, config: HostConfig) -> Iterator[Server]:
    with serving(config, folder, python=python) as host:
        yield Server(host.port, host.http, host.open)


@contextmanager
def _upstream(python: str, folder: Path, app: str) -> Iterator[Server]:
    host = object.__new__(Host)
    with uvicorn_serving(app, folder, python) as host.port:
        yield Server(host.port, host.http, host.open)
