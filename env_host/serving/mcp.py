# SPDX-License-Identifier: Apache-2.0
"""MCP's `tools/list` and `tools/call` over JSON-RPC, in a `/ws` session, on `/mcp` or by POST.

This is upstream's dialect, which knows no handshake, and has two methods of its own that begin and
end a session over HTTP. Where there is no session, an environment is created for the one request.

On the `/mcp` WebSocket a client has a session of its own, which begins, waits and ends as a session
on `/ws` does (`McpSocket`); only the messages differ.

A POST may arrive at any shard, and is passed to the one that has its session (`Peers`):

    client ──POST /mcp, session_id──▶ shard a ──one end of a new socket pair──▶ inbox of shard b
                                        ▲  └──the same POST, on the other end──▶ b serves it
                                        └──────────── b's answer ◀─────────────┘

The pair's end for a session of another replica goes to its control socket (`ipc/fd_messages.py`).

An HTTP connection is kept alive, and its next request may be for any session. So only the request
is forwarded, as HTTP; to `b`, the socket pair is a connection like any other. A session's id names
its owner (`shard/connections.py`).

    b exits meanwhile     its end of the pair closes: the client gets a JSON-RPC error that says so
    b had exited before   its replacement has another generation, so it answers `Unknown session_id`
    b is busy             the client waits as long as it would if it were connected to b
    the client leaves     the request continues: it may have had effects already
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from ..environment.upstream_types import JsonRpcRequest, RpcCode, rpc_error, takes_tools
from ..errors import BranchRefused, SessionError, UnknownSession
from ..sessions.remote_session import RemoteSession
from ..websocket.handshake import END_OF_HEAD
from . import messages
from .ws_session import SessionSocket

if TYPE_CHECKING:
    from ...system.text.json_lines import Json
    from ..environment.definition import Definition
    from ..environment.instances import Calls
    from ..sessions.session import Session
    from ..sessions.table import SessionTable


CREATE = "openenv/session/create"
CLOSE = "openenv/session/close"
BRANCHING = {f"openenv/session/{kind}": kind for kind in ("branch", "checkpoint", "restore")}
NOT_MCP = "Environment does not support MCP"

Give = Callable[[int], None]  # gives another process a descriptor, and closes it here

_HEAD = (
    b"POST /mcp HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The other shards and replicas, which may answer requests. Needs a running event loop."""

    owner_of: Callable[[str], Give | None]  # to the other process that has a session
    roomier: Callable[[], Awaitable[Give | None]]  # to a shard with room, when this one has none
    token: bytes = b""  # of the environment, if it has one

    async def ask(self, give: Give, request: Json) -> Json:
        """Return another process's answer. Raises `SessionError`: it ended before it answered."""
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                give(theirs.detach())
                body = json.dumps(request).encode()
                writer.writelines([_HEAD % (self.token, len(body)), body])
                return body_of(await reader.read())
            except (OSError, ValueError) as exc:
                text = "The process that has this session ended before it had answered."
                raise SessionError(text) from exc
            finally:
                writer.close()


def body_of(response: bytes) -> Json:
    """Parse the JSON object of a whole HTTP response of status 200; else raises `ValueError`."""
    head, _, body = response.partition(END_OF_HEAD)
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError("not a JSON answer: the status is not 200")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


class RpcFailed(Exception):
    """The request gets a JSON-RPC error."""

    def __init__(self, code: RpcCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False, slots=True)
class Mcp:
    """Answers JSON-RPC requests for one environment."""

    _table: SessionTable
    _others: Peers | None = None

    async def answer_text(self, body: bytes) -> bytes:
        """Answer the body of a POST."""
        try:
            data = messages.decode(body.decode())
        except ValueError:
            data = None
        if not isinstance(data, dict):
            return messages.to_json(rpc_error(RpcCode.PARSE_ERROR, "Parse error"))
        return encode_response(await self.answer(data))

    async def answer(self, data: Any, session: Session | None = None) -> dict[str, Any]:
        """Answer one request; never raises for what the request or a tool does."""
        try:
            request = JsonRpcRequest(**data)
        except (ValidationError, TypeError) as exc:
            return rpc_error(RpcCode.INVALID_REQUEST, f"Invalid request: {exc}")
        try:
            if session is None and self._others is not None:
                give, wanted = None, request.params.get("session_id")
                if request.method == CREATE:
                    give = await self._others.roomier()
                elif isinstance(wanted, str):
                    give = self._others.owner_of(wanted)
                if give is not None:  # to the other process that is to answer
                    return await self._others.ask(give, data)
            result = await self._result(request, session)
            return {"jsonrpc": "2.0", "id": request.id, "result": result}
        except RpcFailed as exc:
            return rpc_error(exc.code, str(exc), request.id)
        except (SessionError, BranchRefused) as exc:
            code = {"code": exc.code} if isinstance(exc, BranchRefused) else {}
            return rpc_error(RpcCode.SERVER_ERROR, str(exc), request.id, code | exc.details)
        except Exception as exc:
            extra = {"environment": self._table.definition.name}
            log.warning("MCP %s failed", request.method, exc_info=True, extra=extra)
            return rpc_error(RpcCode.INTERNAL_ERROR, str(exc), request.id)

    async def _result(self, request: JsonRpcRequest, session: Session | None) -> Any:
        match request.method:
            case method if method == CREATE:
                return {"session_id": (session or await self._table.open()).id}
            case method if method == CLOSE:
                return await self._close_session(request.params.get("session_id"), session)
        if session is None and (wanted := request.params.get("session_id")):
            session = self._find(wanted)
        if session is not None:
            is_branching = request.method in BRANCHING
            asking = (self._branch if is_branching else self._ask)(session, request)
            return await self._table.within_limit(session, request.method, asking)
        return await self._table.one_shot(request.method, lambda own: self._ask(own, request))

    async def _close_session(self, target_id: Any, session: Session | None) -> dict[str, Any]:
        if not target_id:
            raise RpcFailed(RpcCode.INVALID_PARAMS, "Invalid params - 'session_id' is required")
        if session is not None and session.id == target_id:
            text = "A session cannot close itself over MCP; close its WebSocket"
            raise RpcFailed(RpcCode.INVALID_REQUEST, text)
        target = self._find(target_id)
        if target.socket is not None:
            target.close_when_detached = True
            return {"session_id": target_id, "closed": False, "closing": True}
        await self._table.close(target)
        return {"session_id": target_id, "closed": True}

    def _find(self, session_id: Any) -> Session:
        code = RpcCode.INVALID_PARAMS
        try:
            session = self._table.find(str(session_id))
            code = RpcCode.INVALID_REQUEST  # while it is being created
            session.check_ready()
        except UnknownSession as exc:
            raise RpcFailed(code, str(exc)) from exc
        return session

    async def _ask(self, session: Session, request: JsonRpcRequest) -> Any:
        session.busy += 1
        try:
            if not isinstance(session, RemoteSession):
                return await ask_tools(self._table.definition, session, request)
            answer = json.loads(await session.ask("mcp", request.model_dump()))
            if answer.get("type") == "error":  # of an exception that ends programs
                raise RpcFailed(RpcCode.INTERNAL_ERROR, answer["data"]["message"])
            if (error := answer.get("error")) is not None:
                raise RpcFailed(error["code"], error["message"])
            return answer["result"]
        finally:
            session.busy -= 1
            session.touch()

    async def _branch(self, session: Session, request: JsonRpcRequest) -> Any:
        if session.busy > (session.call_name == "mcp"):  # by the WebSocket, for this request
            raise RpcFailed(RpcCode.INVALID_REQUEST, "Another call of the session is running")
        data = {key: value for key, value in request.params.items() if key != "session_id"}
        session.busy += 1
        try:
            answer = await self._table.branches.answer(session, BRANCHING[request.method], data)
        except ValidationError as exc:
            raise RpcFailed(RpcCode.INVALID_PARAMS, f"Invalid params: {exc}") from exc
        finally:
            session.busy -= 1
            session.touch()
        return messages.decode(messages.branch_message(answer))["data"]


class ToolSession(Protocol):
    """The part of a session that `ask_tools` needs."""

    env: Any

    @property
    def ready_calls(self) -> Calls:
        """Return how to call the environment."""

    async def call(self, method: Callable[..., Any], is_async: bool, *args: Any) -> Any:
        """Make one call and return its result."""


async def ask_tools(definition: Definition, session: ToolSession, request: JsonRpcRequest) -> Any:
    """List the tools of an environment, or call one; raises `RpcFailed`."""
    match request.method:
        case "tools/list":
            tools = await _list_tools(definition, session)
            dumps = [t.model_dump() if hasattr(t, "model_dump") else dict(t) for t in tools]
            return {"tools": dumps}
        case "tools/call":
            return plain(await _call_tool(definition, session, request.params))
    raise RpcFailed(RpcCode.METHOD_NOT_FOUND, f"Method not found: {request.method}")


async def _list_tools(definition: Definition, session: ToolSession) -> list[Any]:
    client, server = _mcp_of(session.env)
    if client is None and server is None:
        return list((await _ask_by_step(definition, session, "tools/list")).tools)
    if client:
        return list(await _with_client(session.env, client, client.list_tools))
    return [
        {
            "name": tool.name,
            "description": tool.description or "",
            "inputSchema": tool.parameters or {},
        }
        for tool in (await _server_tools(server)).values()
    ]


async def _call_tool(definition: Definition, session: ToolSession, params: dict[str, Any]) -> Any:
    name, arguments = params.get("name"), params.get("arguments", {})
    if not name:
        raise RpcFailed(RpcCode.INVALID_PARAMS, "Missing 'name' in params")
    client, server = _mcp_of(session.env)
    if client is None and server is None:
        given = {"tool_name": name, "arguments": arguments}
        return await _ask_by_step(definition, session, "tools/call", **given)
    if client:
        call = partial(client.call_tool, name=name, arguments=arguments)
        return await _with_client(session.env, client, call)
    tool = (await _server_tools(server)).get(name)
    if tool is None:
        raise RpcFailed(RpcCode.INVALID_PARAMS, f"Tool not found: {name}")
    result = tool.fn(**arguments)
    return await result if inspect.isawaitable(result) else result


async def _ask_by_step(
    definition: Definition, session: ToolSession, method: str, **arguments: Any
) -> Any:
    """Ask by a step, since the environment takes tools as actions and has no MCP server."""
    types = definition.mcp
    if not takes_tools(types, definition.action_cls):
        raise RpcFailed(RpcCode.INTERNAL_ERROR, NOT_MCP)
    action_type, expected = types.CallToolAction, types.CallToolObservation
    if method == "tools/list":
        action_type, expected = types.ListToolsAction, types.ListToolsObservation
    calls, action = session.ready_calls, action_type(**arguments)
    seen = await session.call(calls.step, calls.signature.step_is_async, action)
    if not isinstance(seen, expected):
        text = f"The step for {method} returned an unexpected {type(seen).__name__}"
        raise RpcFailed(RpcCode.INTERNAL_ERROR, text)
    return seen


def encode_response(response: dict[str, Any]) -> bytes:
    """Write a JSON-RPC response as JSON; an error, where the result has no JSON form."""
    try:
        return messages.to_json(response)
    except ValueError as exc:  # it may be the id: half a surrogate pair
        if "error" not in response:
            text = messages.text_of(exc)
            response = rpc_error(RpcCode.INTERNAL_ERROR, text, response["id"])
        return messages.encode_error(response)


def plain(value: Any) -> Any:
    """Convert `value` to JSON-like data: models are dumped, other objects become attributes."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "__dict__"):
        return {key: plain(item) for key, item in vars(value).items()}
    return str(value)


def _mcp_of(env: Any) -> tuple[Any, Any]:
    return getattr(env, "mcp_client", None), getattr(env, "mcp_server", None)


async def _with_client(env: Any, client: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
    """Call the environment's client, opening its connection if no session holds it."""
    if client.is_connected():
        return await ask()
    factory = getattr(env, "mcp_session", None)
    async with factory() if callable(factory) else client:
        return await ask()


async def _server_tools(server: Any) -> dict[str, Any]:
    """Return a FastMCP server's tools by name; its versions 2 and 3 name the call differently."""
    if hasattr(server, "get_tools"):
        tools = await server.get_tools()
        if isinstance(tools, dict):
            return tools
    return {tool.name: tool for tool in await server.list_tools()}


class McpSocket(SessionSocket):
    """One client on the `/mcp` WebSocket, which speaks JSON-RPC only."""

    path = "/mcp"
    _mcp_message = staticmethod(encode_response)

    def begin(self, wanted: str | None) -> None:
        """Begin a new session, whatever the address names."""
        super().begin(None)

    def _take(self, payload: bytes) -> None:
        try:
            data = messages.decode(payload)
        except UnicodeDecodeError:
            self.fail_text()
        except Exception as exc:
            self.send_text(messages.to_json(rpc_error(RpcCode.PARSE_ERROR, f"Parse error: {exc}")))
        else:
            self._call_mcp(data)

    def _refuse(self, kind: Any, exc: Exception) -> None:
        self._fail(exc)

    def _last_frame(self, exc: BaseException) -> bytes:
        details = exc.details if isinstance(exc, SessionError) else None
        text = messages.text_of(exc)
        return messages.encode_error(rpc_error(RpcCode.SERVER_ERROR, text, data=details or None))
