# SPDX-License-Identifier: Apache-2.0
"""How a connection is answered: `/ws`, HTTP and MCP.

uvicorn_server.py  uvicorn, and the switch to `/ws`    ws_session.py     a session on `/ws`
app.py             which HTTP request goes where       http_routes.py    OpenEnv's HTTP routes
mcp.py             tools over JSON-RPC                 mcp_websocket.py  the same on a WebSocket
mcp_http.py        the same by HTTP                    mcp_lifecycle.py  MCP's handshake and forms
messages.py        `/ws` messages from and to text     serialization.py  observations and states
own_routes.py      the project's own, in one process   middleware.py      its middleware, asked
metrics.py         `GET /metrics`
"""
